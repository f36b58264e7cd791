"""Named arrays as bytes and as files, and sealed files of text and JSON. A file is either complete or not
there.

There is one format for messages, models, local parts and checkpoints: safetensors, with a small JSON header.
A file is written beside its final name, flushed to the disk and renamed. So a killed process or a full disk
does not damage the previous file. Files (but not messages) contain a SHA-256 digest of their content. They
are read only if the digest is still right. So a flipped bit or a manual change raises an error, and never
gives another result. Writing a file needs no second copy of its arrays in memory, and reading one needs only
the arrays. Orbax needs a second copy both times (docs/concepts.md, A run's folder).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from safetensors.numpy import save

from partwise.types import UserError

SEAL = "#sha256"  # marks the digest: a key in a JSON document, and a word in the last line of a text
DTYPES = {  # arrays are stored in a file in this order of types
    "U64": "uint64",
    "I64": "int64",
    "F64": "float64",
    "F32": "float32",
    "U32": "uint32",
    "I32": "int32",
    "BF16": ml_dtypes.bfloat16.__name__,  # numpy knows the name from there
    "F16": "float16",
    "U16": "uint16",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
}
ALIGNED = 64  # bytes: where XLA's arrays on a CPU begin
LONGEST_HEADER = 100_000_000  # bytes, as in the safetensors library
LONG_TEXT = 1 << 20  # characters of a JSON document that are not indented
# What reading a header may raise if the file is damaged or has another format.
FAULTS = (ValueError, LookupError, AttributeError, TypeError, OverflowError, RecursionError)
TEMPORARY = re.compile(r"\..+\.\d+\.tmp")


class _Place(NamedTuple):
    """The position of an array in the bytes after the header."""

    begin: int
    end: int
    dtype: np.dtype
    shape: tuple[int, ...]


class ArrayLayout(NamedTuple):
    """Where the arrays of `to_bytes` are."""

    first: int  # the number of bytes before the arrays
    places: Mapping[str, _Place]  # in the order of the bytes; positions count from `first`
    header: dict[str, Any]


def to_bytes(arrays: Mapping[str, Any], header: Mapping[str, Any] | None = None) -> bytes:
    """Arrays and a header (of values for JSON) as bytes."""
    return save(_on_host(arrays), _metadata(header or {}))


def from_bytes(data: bytes) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """The inverse of `to_bytes`."""
    return _unpack(np.frombuffer(bytearray(data), np.uint8))


def _unpack(data: np.ndarray) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Arrays, as views of these bytes, and header."""
    try:
        first = 8 + _header_length(data[:8].tobytes(), data.size)
        places, header = _read_places(data[8:first].tobytes(), data.size - first)
        part = lambda place: data[first + place.begin : first + place.end].view(place.dtype)
        return {name: part(place).reshape(place.shape) for name, place in places.items()}, header
    except FAULTS as error:
        raise UserError(f"these {data.size} bytes are no arrays written by partwise: {error}") from None


def layout(begin: bytes, size: int, longest: int = LONGEST_HEADER) -> ArrayLayout:
    """Where the arrays are in `size` bytes that begin with these, which must include the header. The header must
    not be longer than `longest` bytes."""
    try:
        first = 8 + _header_length(begin[:8], size, longest)
        return ArrayLayout(first, *_read_places(begin[8:first], size - first))
    except FAULTS as error:
        raise UserError(f"these {size} bytes are no arrays written by partwise: {error}") from None


def header_of(data: bytes, longest: int) -> dict[str, Any]:
    """The header of what `to_bytes` wrote. It must not be longer than `longest` bytes. The arrays are not
    read."""
    return layout(data, len(data), longest).header


def _header_length(begin: bytes, size: int, longest: int = LONGEST_HEADER) -> int:
    """The length of the header, from the first eight of `size` bytes. Raises ValueError if it is impossible."""
    length, most = int.from_bytes(begin, "little"), min(size - 8, longest)
    if length > most:
        raise ValueError(f"it announces a header of {length} bytes, where there can be {max(most, 0)}")
    return length


def _read_places(text: bytes, size: int) -> tuple[dict[str, _Place], dict[str, Any]]:
    """The positions of the arrays, which must fill the `size` bytes after the header, and the header's
    content."""

    told = json.loads(text)
    metadata, places, end = told.pop("__metadata__", {}), {}, 0
    for name, each in sorted(told.items(), key=lambda item: item[1]["data_offsets"]):
        begin, dtype, shape = end, np.dtype(DTYPES[each["dtype"]]), tuple(each["shape"])
        natural = all(type(number) is int and number >= 0 for number in (*each["data_offsets"], *shape))
        end = begin + math.prod(shape) * dtype.itemsize
        if not natural or each["data_offsets"] != [begin, end]:
            raise ValueError(f"the array '{name}' cannot lie where its header says")
        places[name] = _Place(begin, end, dtype, shape)
    if end != size:
        raise ValueError(f"its arrays take {end} bytes, and there are {size}")
    return places, dict(json.loads(metadata.get("partwise", "{}")))


def _metadata(header: Mapping[str, Any]) -> dict[str, str]:
    return {"partwise": json.dumps(dict(header))}


def _pack(arrays: Mapping[str, np.ndarray], header: Mapping[str, Any]) -> tuple[bytes, list[np.ndarray]]:
    """The same content as `to_bytes`, without a copy of the arrays: the bytes before them, and the arrays in
    their order."""
    codes, order = {dtype: code for code, dtype in DTYPES.items()}, list(DTYPES.values())
    for name, array in arrays.items():
        if array.dtype.name not in codes:
            raise UserError(f"'{name}' has the type {array.dtype.name}; a file can hold {', '.join(order)}")
    names = sorted(arrays, key=lambda name: (order.index(arrays[name].dtype.name), name))
    told: dict[str, Any] = {"__metadata__": _metadata(header)}
    begin = 0
    for name in names:
        dtype, shape, end = codes[arrays[name].dtype.name], arrays[name].shape, begin + arrays[name].nbytes
        told[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(told, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, [arrays[name] for name in names]


def _on_host(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Arrays on the host in this machine's byte order, without a copy if possible. What has `chunks` stays where it
    is until they are asked for."""
    return {name: array if hasattr(array, "chunks") else _plain(array) for name, array in arrays.items()}


def _plain(array: Any) -> np.ndarray:
    host = np.asarray(array, order="C")
    return host.astype(host.dtype.newbyteorder("="), copy=False)


def _raw(array: Any) -> Iterator[memoryview]:
    """The bytes of an array, not copied; those of an array with `chunks` one chunk after the other."""
    for part in array.chunks() if hasattr(array, "chunks") else [array]:
        yield np.ascontiguousarray(part).reshape(-1).view(np.uint8).data


def digest_of(arrays: Mapping[str, Any], header: Mapping[str, Any]) -> str:
    """A digest of everything in a file of arrays: header, names, types, shapes and values."""
    total = hashlib.sha256(json.dumps(header).encode())
    for name in sorted(arrays):
        array = arrays[name]
        total.update(json.dumps([name, array.dtype.name, array.shape]).encode())
        for part in _raw(array):
            total.update(part)
    return total.hexdigest()


def write_file(path: Path, data: bytes, mode: int = 0o666) -> None:
    """Write a file completely or not at all."""
    write_atomically(path, lambda file: file.write(data), mode)


def write_atomically(path: Path, write: Callable[[Any], Any], mode: int = 0o666) -> None:
    """Let `write` fill a file. It gets its name only when it is complete and on the disk. `mode` sets who may
    read it, from its first byte on. If several threads or processes write it at a time, the last one wins."""
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(temporary, "wb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        to_disk(path.parent)  # the renaming itself
    except OSError as error:
        reason = error.strerror or error
        raise UserError(
            f"could not write '{path}': {reason}. What was there before is untouched; "
            f"make room, or choose another place with --out (out=...); a run goes on with --resume (resume=True)."
        ) from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


def to_disk(path: Path) -> None:
    """Return when a file, or what a folder says of its files, is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def remove_temporary_files(folder: Path) -> None:
    """Remove the temporary files of killed writers. No process may be writing there at the same time."""
    for path in folder.glob(".*.tmp"):
        if TEMPORARY.fullmatch(path.name):
            with contextlib.suppress(OSError):
                path.unlink()


def save_arrays(
    path: Path, arrays: Mapping[str, Any], header: Mapping[str, Any] | None = None, mode: int = 0o666
) -> None:
    """Write a sealed safetensors file. The same arrays and header always give the same bytes. An array may also be
    an object with `shape`, `dtype`, `nbytes` and `chunks()`, which is read twice and never whole."""
    begin, parts = _sealed(arrays, header)

    def write(file: Any) -> None:
        file.write(begin)
        for array in parts:
            for part in _raw(array):
                file.write(part)

    write_atomically(path, write, mode)


def read_along(arrays: Mapping[str, Any], header: Mapping[str, Any]) -> None:
    """Read what `save_arrays` reads, as often and in the same order: for processes that have chunks of what another
    one saves."""
    if any(hasattr(array, "chunks") for array in arrays.values()):
        for array in _sealed(arrays, header)[1]:
            for _ in _raw(array):
                pass


def _sealed(arrays: Mapping[str, Any], header: Mapping[str, Any] | None) -> tuple[bytes, list[Any]]:
    """As `_pack`, with the digest."""
    host, told = _on_host(arrays), dict(header or {})
    return _pack(host, told | {SEAL: digest_of(host, told)})


def load_arrays(path: Path, mapped: bool = False) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Arrays and header of a file. Errors name the file. The arrays are views of one buffer, which stays in
    memory as long as one of them is used. If it is `mapped`, it is the file itself, of which only those parts are
    in memory that are used; the arrays cannot be written, and the file must not be."""
    with _reading(path) as file:
        size = os.fstat(file.fileno()).st_size
        data = np.memmap(file, np.uint8, "r").view(np.ndarray) if mapped and size else _room(file, size)
        arrays, header = _unpack(data if mapped else data[: file.readinto(data)])
        _check_seal(header.pop(SEAL, None), digest_of(arrays, header))
        return arrays, header


def _room(file: Any, size: int) -> np.ndarray:
    """Memory for a file, such that its largest array lies where JAX can use it without a copy."""
    first = 8 + _header_length(file.read(8), size)
    places, _ = _read_places(file.read(first - 8), size - first)
    file.seek(0)
    largest = max(places.values(), key=lambda place: place.end - place.begin, default=None)
    data = np.empty(size + ALIGNED, np.uint8)
    skip = -(data.ctypes.data + first + (largest.begin if largest else 0)) % ALIGNED
    return data[skip : skip + size]


def read_header(path: Path) -> dict[str, Any]:
    """The header of a file of arrays. The arrays are not read, so the digest, which covers them too, is not
    checked. Use it only for information that may be wrong if the file was changed. Use `load_arrays` for the
    arrays."""
    with _reading(path) as file:
        size = os.fstat(file.fileno()).st_size
        length = _header_length(file.read(8), size)
        _, header = _read_places(file.read(length), size - 8 - length)
        if header.pop(SEAL, None) is None:
            raise _unsealed()
        return header


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[Any]:
    """A file to read arrays from. Errors name the file."""
    try:
        with open(path, "rb") as file:
            yield file
    except OSError as error:
        raise _unreadable(path, error) from None
    except FAULTS as error:
        raise UserError(f"'{path}' is damaged or foreign: {error}") from None


def _unreadable(path: Path, error: OSError) -> UserError:
    return UserError(f"could not read '{path}': {error.strerror or error}")


def _unsealed() -> UserError:
    return UserError("it carries no digest, so it was not written by this version of partwise")


def _check_seal(found: Any, expected: str) -> None:
    if found is None:
        raise _unsealed()
    if found != expected:
        raise UserError("what it says does not fit its digest, so it was changed after it was written")


def read_file(path: Path) -> bytes:
    """All bytes of a file. Errors name the file."""
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise _unreadable(path, error) from None


def save_json(path: Path, document: Mapping[str, Any]) -> None:
    """Write a sealed JSON document. It must have only values that JSON can express. A long one, such as the names
    of millions of items, is one line, which takes a third of the memory that indented lines take."""
    text = json.dumps(dict(document), allow_nan=False)
    sealed = {**document, SEAL: hashlib.sha256(text.encode()).hexdigest()}
    indent = 1 if len(text) < LONG_TEXT else None
    write_file(path, (json.dumps(sealed, indent=indent) + "\n").encode())


def load_json(path: Path) -> dict[str, Any]:
    """Read what `save_json` wrote."""
    data = read_file(path)
    try:
        document = json.loads(data)
        if not isinstance(document, dict):
            raise UserError(f"it holds a {type(document).__name__}, not names with values")
        _check_seal(document.pop(SEAL, None), hashlib.sha256(json.dumps(document).encode()).hexdigest())
        return document
    except (ValueError, RecursionError) as error:  # a UserError is a ValueError
        raise UserError(f"'{path}' is damaged or foreign: {error}") from None


def save_text(path: Path, text: str) -> None:
    """Write lines of text, sealed by a comment at the end."""
    write_file(path, f"{text}{SEAL} {hashlib.sha256(text.encode()).hexdigest()}\n".encode())


def load_text(path: Path) -> str:
    """Read what `save_text` wrote."""
    text, sign, seal = read_file(path).rpartition(SEAL.encode() + b" ")
    try:
        _check_seal(seal.decode().strip() if sign else None, hashlib.sha256(text).hexdigest())
        return text.decode()
    except ValueError as error:  # a UserError is one
        raise UserError(f"'{path}' is damaged or foreign: {error}") from None


def save_tree(path: Path, tree: Any, header: Mapping[str, Any]) -> None:
    """Save any pytree of arrays, with its leaves by number. The whole state of the server is saved here and
    loaded by `load_tree`. Leaves with `chunks` are saved chunk by chunk."""
    save_arrays(path, numbered(tree), header)


def numbered(tree: Any) -> dict[str, Any]:
    """The leaves of a tree by the names that `save_tree` gives them."""
    from jax.tree_util import (
        tree_leaves,  # here, so that those who only read a run's files need not wait for it
    )

    return {f"{i:05d}": leaf for i, leaf in enumerate(tree_leaves(tree))}


def load_tree(path: Path, like: Any) -> tuple[Any, dict[str, Any]]:
    """Load a tree that `save_tree` wrote. It has the structure and shapes of `like`. If some leaf of `like` has
    `chunks`, the file is mapped, so that it is never in memory as a whole."""
    from jax.tree_util import tree_structure, tree_unflatten

    leaves = numbered(like)
    arrays, header = load_arrays(path, mapped=any(hasattr(leaf, "chunks") for leaf in leaves.values()))
    fits = lambda a, b: a is not None and a.shape == b.shape and a.dtype == b.dtype
    if len(arrays) != len(leaves) or not all(fits(arrays.get(name), leaf) for name, leaf in leaves.items()):
        raise UserError(f"'{path}' was written by a run with other parameters; start a new run folder")
    return tree_unflatten(tree_structure(like), [arrays[name] for name in leaves]), header
