"""Some rows of a file of arrays, by HTTP Range: where they are, and which requests to make."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from partwise.checkpoint import ArrayLayout, layout
from partwise.types import UserError

FIRST = 4096  # bytes that are asked for first: most headers are shorter


class Piece(NamedTuple):
    """Some bytes of a file."""

    begin: int
    end: int


Ask = Callable[[Iterable[Piece]], tuple[list[bytes], int]]  # pieces -> their bytes, and the size of the file


def read_layout(ask: Ask, longest: int) -> ArrayLayout:
    """Where the arrays of a file are, from its first bytes."""
    (begin,), size = ask([Piece(0, FIRST)])
    header = 8 + int.from_bytes(begin[:8], "little")
    if header > longest:
        raise UserError(f"the file announces a header of {header:,} bytes, and may have {longest:,} at most")
    if header > len(begin) and len(begin) < size:
        (rest,), _ = ask([Piece(len(begin), header)])
        begin += rest
    return layout(begin, size, longest)


def row_pieces(where: ArrayLayout, name: str, rows: np.ndarray | None) -> list[Piece]:
    """Where these rows of an array are; None: all of it, in one piece."""
    place = where.places[name]
    begin, end = where.first + place.begin, where.first + place.end
    if rows is None:
        return [Piece(begin, end)]
    width = (end - begin) // place.shape[0]
    return [Piece(begin + row * width, begin + (row + 1) * width) for row in rows.tolist()]


def merge(pieces: Iterable[Piece], gap: int) -> list[Piece]:
    """Fewer and larger pieces that hold these ones, in order. Neighbours with at most `gap` bytes between them
    become one."""
    merged: list[Piece] = []
    for piece in sorted(each for each in pieces if each.end > each.begin):
        if merged and piece.begin - merged[-1].end <= gap:
            merged[-1] = Piece(merged[-1].begin, max(piece.end, merged[-1].end))
        else:
            merged.append(piece)
    return merged


def cut(
    pieces: Mapping[str, Sequence[Piece]], merged: Sequence[Piece], found: Sequence[bytes]
) -> dict[str, bytes]:
    """The bytes of the pieces of every array, out of the merged pieces."""
    begins = [piece.begin for piece in merged]

    def one(piece: Piece) -> bytes:
        if piece.begin == piece.end:
            return b""
        at = bisect_right(begins, piece.begin) - 1
        return found[at][piece.begin - begins[at] : piece.end - begins[at]]

    return {name: b"".join(map(one, each)) for name, each in pieces.items()}
