"""Sequences of items, a line per user: the user's id and the ids of its items in the order of time, with blanks
between. This is the format of SASRec's and S3-Rec's data (`Beauty.txt`, `Yelp.txt`), here also in a zip.

Column: `item` (key). A client is a user; its rows are in the order of the line.
"""

from __future__ import annotations

import zipfile
from pathlib import Path

import numpy as np

from partwise.data.loaders.locate import data_root, first_of
from partwise.data.loaders.packed import open_packed
from partwise.data.ragged import offsets
from partwise.data.reading import is_there, reading
from partwise.data.store import ClientStore
from partwise.types import UserError

FOLDER = "sequences"
HOW = (
    "give a file with a line per user (its id, then its items in order), a zip of such files, or their folder"
)
MOST_ID = 2**31 - 1


def load(path: str | Path | None, name: str) -> ClientStore:
    """Read `NAME.txt`, from a file, a folder or a zip. Without a path, PARTWISE_DATA says where to look."""
    file = f"{name}.txt"
    root = data_root(path, f"sequences '{name}'", HOW, HOW)
    packed = sorted(
        str(each.relative_to(root))
        for folder in (root, root / FOLDER)
        if folder.is_dir()
        for each in folder.glob("*sequences*.zip")
    )
    source = first_of(root, [file, f"{FOLDER}/{file}", *packed], file, f"; {HOW}")
    choose = lambda names: next((each for each in names if each.split("/")[-1] == file), None)
    with reading(source), open_packed(source, choose, file) as stream:
        return parse(stream.read(), f"{source}", name)


def name_in(path: str | Path | None, asked: str | None, usual: str) -> str:
    """The name of the sequences: what was asked for, that of `path` if it is one file, or the usual one. Raise
    `UserError` if another name was asked for than that of the file."""
    own = own_name(path)
    if own is not None and asked not in (None, own):
        raise UserError(
            f"data.file = {asked} would have no effect: it picks one of the files of a folder or zip, and {path} "
            f"is one file. Give --set data.file={own} with it (in Python, file={own!r}), or the folder"
        )
    return asked or own or usual


def own_name(path: str | Path | None) -> str | None:
    """The name of the sequences, if `path` is one file. None for a zip or a folder, which may hold several."""
    source = Path(path).expanduser() if path else None
    if source is None or not is_there(source) or zipfile.is_zipfile(source):
        return None
    return source.name.removesuffix(".gz").removesuffix(".txt")


def parse(text: bytes, where: str, name: str) -> ClientStore:
    """Read the lines of a file."""
    lines = text.split(b"\n")
    while lines and not lines[-1].strip():
        lines.pop()
    if not lines:
        raise UserError(f"{where} is empty: {HOW}")
    rows = [_numbers(line, number, where) for number, line in enumerate(lines, 1)]
    users = np.array([row[0] for row in rows], np.int64)
    known, lines_of = np.unique(users, return_counts=True)
    if len(known) < len(users):
        twice = known[lines_of > 1]
        raise UserError(
            f"{where}: user {twice[0]} has two lines; expected one line per user: join them in order"
        )
    counts = np.array([len(row) - 1 for row in rows], np.int64)
    vocabulary, item = np.unique(np.concatenate([row[1:] for row in rows]), return_inverse=True)
    info = {"source": f"sequences {name}", "file": where, "users": len(users), "items": len(vocabulary)}
    return ClientStore(
        {"item": item.astype(np.int32)}, offsets(counts), counts, users, {"item": vocabulary}, info
    )


def _numbers(line: bytes, number: int, where: str) -> np.ndarray:
    words = line.split()
    if len(words) >= 2 and all(word.isdigit() and len(word) < 11 for word in words):
        found = np.array(words, np.int64)
        if found.max() <= MOST_ID:
            return found
    shown = line[:60].decode("latin-1").rstrip("\r")
    raise UserError(
        f"{where}, line {number}: {shown!r}; expected whole numbers with blanks between them, a user and at least "
        f"one item. Mend or remove the line"
    )
