"""MovieLens-1M and 100k: a client is a user; columns `item` (key), `rating`, `time`, in the file's order."""

from __future__ import annotations

import dataclasses
import hashlib
import io
import zipfile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.csv

from partwise.data.loaders.locate import data_root, first_of
from partwise.data.loaders.packed import open_member
from partwise.data.ragged import owners
from partwise.data.reading import reading
from partwise.data.store import ClientStore, group_rows
from partwise.types import UserError, unknown


class Release(NamedTuple):
    """What GroupLens published."""

    name: str
    file: str
    separator: bytes
    zip_md5: str
    users: int
    items: int
    ratings: int
    users_file: str
    users_separator: bytes
    users_fields: tuple[str, ...]
    movies_file: str
    movies_separator: bytes


RELEASES = {
    "1m": Release(
        *("ml-1m", "ratings.dat", b"::", "c4d9eecfca2ab87c1945afe126590906", 6040, 3706, 1_000_209),
        *("users.dat", b"::", ("user", "gender", "age", "occupation", "zip")),
        *("movies.dat", b"::"),
    ),
    "100k": Release(
        *("ml-100k", "u.data", b"\t", "0e33842e24a9c977be4e0107933c0723", 943, 1682, 100_000),
        *("u.user", b"|", ("user", "age", "gender", "occupation", "zip")),
        *("u.item", b"|"),
    ),
}
TABLES = (".csv", ".csv.gz", ".tsv", ".tsv.gz", ".parquet")  # never a release that is read here
FIELDS = ("user", "item", "rating", "time")
TYPES = {"user": pa.int64(), "item": pa.int64(), "rating": pa.float32(), "time": pa.int64()}


def load(path: str | Path | None = None, size: str = "1m") -> ClientStore:
    """Read the official zip, its unpacked folder, the ratings file, or a folder that has one of them.

    Without a path, the environment variable PARTWISE_DATA says where to look.
    """
    release = find_release(size)
    source = locate(path, release)
    with reading(source, "is it whole? Download it again"):
        text, where, info = _read(source, release)
        table = _parse(text, release, where)
        _check_ratings(table, text, where)
        store = group_rows(table.pop("user"), table, ("item",), info)
        _check_pairs(store, text, release, where)
    counts = {"users": store.num_clients, "items": store.num_keys("item"), "ratings": store.num_examples}
    published = tuple(counts.values()) == (release.users, release.items, release.ratings)
    return dataclasses.replace(store, info={**store.info, **counts, "published_counts": published})


def find_release(size: str) -> Release:
    """The release with this name."""
    if size not in RELEASES:
        raise unknown("MovieLens size", size, RELEASES)
    return RELEASES[size]


def locate(path: str | Path | None, release: Release) -> Path:
    """The path of the zip or of the ratings file."""
    download = f"https://files.grouplens.org/datasets/movielens/{release.name}.zip"
    how = f"download {download} and pass its path"
    expected = f"give the path of {release.name}.zip ({download}) or its folder"
    root = data_root(path, release.name, how, expected)
    if root.name.lower().endswith(TABLES):
        raise UserError(
            f"{root} is a table, and this task reads {release.name}.zip of GroupLens: {expected}, or train on a "
            f"table of your own with `partwise train ratings --data {root}`"
        )
    folder = f"movielens-{release.name.removeprefix('ml-')}"
    names = [release.file, f"{release.name}/{release.file}", f"{release.name}.zip"]
    names += [f"{folder}/{name}" for name in names]
    return first_of(root, names, release.name, f"; download {download} into it")


def _read(source: Path, release: Release) -> tuple[bytes, str, dict[str, Any]]:
    """The ratings file's bytes, its name for messages, and what is known of its origin."""
    data = source.read_bytes()
    info: dict[str, Any] = {"source": f"MovieLens {release.name}", "file": str(source)}
    where = str(source)
    if source.suffix == ".zip" or data[:2] == b"PK":
        md5 = hashlib.md5(data, usedforsecurity=False).hexdigest()
        info |= {"zip_md5": md5, "official_zip": md5 == release.zip_md5}
        data, where = unzip(data, source, release.file, release)
    return data, where, info | {"sha256": hashlib.sha256(data).hexdigest()}


def unzip(data: bytes, source: Path, file: str, release: Release) -> tuple[bytes, str]:
    """A file of the zip whose bytes are given, and its name for messages."""
    with reading(source, "is it whole? Download it again"), zipfile.ZipFile(io.BytesIO(data)) as archive:
        names = archive.namelist()
        member = next((name for name in names if Path(name).name == file), None)
        if member is None:
            raise UserError(f"{source} holds no {file}, but {', '.join(names[:12])}: give {release.name}.zip")
        with open_member(archive, member, source, len(data)) as opened:
            return opened.read(), f"{source}/{member}"


def _parse(text: bytes, release: Release, where: str) -> dict[str, np.ndarray]:
    if not text.strip():
        raise UserError(f"{where} is empty: expected lines of {_expected(release)}")
    if not text.endswith(b"\n"):
        last = text.count(b"\n") + 1
        raise bad_line(where, last, text[text.rfind(b"\n") + 1 :], "a line end (the file may be truncated)")
    try:
        table = pyarrow.csv.read_csv(
            pa.BufferReader(text.replace(release.separator, b"\t")),
            read_options=pyarrow.csv.ReadOptions(column_names=list(FIELDS), use_threads=True),
            parse_options=pyarrow.csv.ParseOptions(
                delimiter="\t", quote_char=False, ignore_empty_lines=False
            ),
            convert_options=pyarrow.csv.ConvertOptions(column_types=TYPES, null_values=[]),
        )
    except pa.ArrowInvalid as error:
        raise _find_bad_line(text, release, where, str(error)) from error
    return {name: table[name].to_numpy() for name in FIELDS}


def _check_ratings(table: dict[str, np.ndarray], text: bytes, where: str) -> None:
    rating = table["rating"]
    outside = np.flatnonzero(~((rating >= 0.5) & (rating <= 5)))  # NaN is outside too
    if len(outside):
        index = int(outside[0])
        raise bad_line(where, index + 1, text.split(b"\n", index + 1)[index], "a rating from 0.5 to 5")


def _check_pairs(store: ClientStore, text: bytes, release: Release, where: str) -> None:
    """Raise `UserError` if a user rates an item twice."""
    pairs = owners(store.counts) * store.num_keys("item") + store.columns["item"]
    if np.all(np.diff(np.sort(pairs))):
        return
    seen: dict[tuple[bytes, ...], int] = {}
    for number, line in enumerate(text.split(b"\n")[:-1], start=1):
        first = seen.setdefault(tuple(line.split(release.separator)[:2]), number)
        if first != number:
            raise bad_line(
                where, number, line, f"one rating per user and item (line {first} has the same two)"
            )


def _find_bad_line(text: bytes, release: Release, where: str, reason: str) -> UserError:
    """Read line by line to find the first bad line. Returns the error that names it."""
    for number, line in enumerate(text.split(b"\n")[:-1], start=1):
        fields = line.rstrip(b"\r").split(release.separator)
        try:
            if len(fields) != 4:
                raise ValueError
            _ = int(fields[0]), int(fields[1]), float(fields[2]), int(fields[3])
        except ValueError:
            return bad_line(where, number, line, _expected(release))
    return UserError(f"{where} cannot be read ({reason}): expected lines of {_expected(release)}")


def _expected(release: Release) -> str:
    between = "a tab" if release.separator == b"\t" else release.separator.decode()
    return f"user, item, rating and time, all numbers, with {between} between them"


def bad_line(where: str, number: int, line: bytes, expected: str) -> UserError:
    """Return the error for a bad line."""
    shown = line[:80].decode("latin-1").rstrip("\r")
    return UserError(
        f"{where}, line {number}: {shown!r}; expected {expected}. Download the file again or mend it"
    )
