"""TensorFlow Federated's distributed files, one client after the other, without TensorFlow.

SQLite (`stackoverflow.sqlite`, `emnist_all.sqlite`, also packed as `.lzma`): the table `examples(split_name,
client_id, serialized_example_proto)`, in which each blob is a `tf.train.Example`, and the table
`client_metadata(client_id, split_name, num_examples)`. HDF5 (`fed_emnist_train.h5`,
`stackoverflow_held_out.h5`): one split per file, with a data set `examples/<client id>/<feature>` that has
one entry per example.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import lzma
import shutil
import sqlite3
import tempfile
from collections.abc import Iterator, Mapping, Sequence, Sized
from pathlib import Path
from types import ModuleType
from typing import IO, Any, cast

import numpy as np

from partwise.data.loaders.example_proto import Decoder, import_tff
from partwise.data.loaders.hdf5_heap import check_heaps
from partwise.data.reading import check_growth, limited, reading, regular
from partwise.types import UserError, nearest, unknown

Features = dict[str, list | np.ndarray]

SQLITE, HDF5 = b"SQLite format 3\0", b"\x89HDF\r\n\x1a\n"
PACKED = (".lzma", ".xz")
SUFFIXES = (".sqlite", ".sqlite.lzma", ".h5", ".hdf5")
TABLES = {
    "examples": ("split_name", "client_id", "serialized_example_proto"),
    "client_metadata": ("client_id", "split_name", "num_examples"),
}
COPY_BYTES = 1 << 22
DOWNLOAD = "it is damaged or truncated; download it again"


def read_clients(
    path: str | Path, split: str | None = None, features: Sequence[str] | None = None
) -> Iterator[tuple[str, Features]]:
    """Each client's id and examples, {feature: one entry per example in stored order}. Only one client is in
    memory at a time.

    Clients are sorted by id. Texts are a list of bytes. Numbers are an array, int64 or float32: [n] if every
    example has one value, [n, d] if all have d values; otherwise a list of arrays. `features` are the
    features to read (default: all). `split` may be left out if the file has only one. HDF5 files have no
    split names.
    """
    path = Path(path)
    kind = _kind(path)
    if kind == HDF5:
        if split is not None:
            raise UserError(
                f"{path} is HDF5, which holds one split and does not name it: give the file of the split "
                f"'{split}' (..._{split}.h5), without split="
            )
        return _read_hdf5(path, features)
    return _read_sqlite(path, split, features)


def is_hdf5(path: Path) -> bool:
    """Whether a path has a suffix of the older files, which have one split each."""
    return path.suffix in (".h5", ".hdf5")


def sibling(path: Path, part: str, parts: Sequence[str]) -> Path:
    """The file beside an HDF5 file that is named after another of these parts."""
    stem = next((path.stem.removesuffix(f"_{p}") for p in parts if path.stem.endswith(f"_{p}")), path.stem)
    file = path.with_name(f"{stem}_{part}{path.suffix}")
    if not file.is_file():
        names = " and ".join(f"{stem}_{each}{path.suffix}" for each in parts)
        raise UserError(f"{file} does not exist: keep the files {names} together")
    return file


def splits(path: str | Path) -> list[str]:
    """The names of an SQLite file's splits, sorted."""
    with _database(Path(path)) as connection:
        return _splits(connection)


@contextlib.contextmanager
def unpacked(path: str | Path) -> Iterator[Path]:
    """The file itself, or for a `.lzma` file a temporary copy that is removed afterwards."""
    path = Path(path)
    if path.suffix not in PACKED:
        yield path
        return
    with tempfile.TemporaryDirectory(prefix="partwise-") as folder:
        target = Path(folder) / path.stem
        with reading(path, DOWNLOAD):
            _unpack(path, target)
        yield target


def _unpack(path: Path, target: Path) -> None:
    try:
        packed = regular(path, "give the .lzma file as it was downloaded").stat().st_size
        with limited(cast(IO[bytes], lzma.open(path)), packed, path) as source, target.open("wb") as sink:
            shutil.copyfileobj(source, sink, COPY_BYTES)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        written = target.stat().st_size if target.exists() else 0
        raise UserError(
            f"{path} does not fit into {target.parent} once unpacked (no room after {written:,} bytes): set "
            "TMPDIR to a folder with more room, or unpack the file yourself with `unlzma` and give that"
        ) from error


def _kind(path: Path) -> bytes:
    """SQLITE or HDF5, by the file's first bytes. A packed file is taken as SQLite until it is unpacked."""
    regular(path, "give a .sqlite, .sqlite.lzma or .h5 file of TensorFlow Federated")
    if path.suffix in PACKED:
        return SQLITE
    with reading(path), path.open("rb") as file:
        return _recognise(file.read(16), path)


def _recognise(begin: bytes, path: Path) -> bytes:
    for kind in (SQLITE, HDF5):
        if begin.startswith(kind):
            return kind
    raise UserError(
        f"{path} is neither an SQLite nor an HDF5 file (it begins with {begin!r}): "
        "give a .sqlite, .sqlite.lzma or .h5 file of TensorFlow Federated, or download it again"
    )


@contextlib.contextmanager
def _database(path: Path) -> Iterator[sqlite3.Connection]:
    """An open database with the right tables. Errors of SQLite name `path`."""
    with unpacked(path) as file:
        with file.open("rb") as opened:
            if _recognise(opened.read(16), path) != SQLITE:
                raise UserError(f"{path} holds HDF5, which has no names of splits and must not be packed")
        address = f"{file.absolute().as_uri()}?mode=ro"
        with reading(path, DOWNLOAD), contextlib.closing(sqlite3.connect(address, uri=True)) as connection:
            _check_tables(connection, path)
            yield connection


def _check_tables(connection: sqlite3.Connection, path: Path) -> None:
    there = [name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
    for table, needed in TABLES.items():
        if table not in there:
            raise UserError(
                f"{path} has no table '{table}' ({nearest(table, there)}): is it from TensorFlow Federated?"
            )
        columns = [row[1] for row in connection.execute(f"PRAGMA table_info({table})")]
        for column in needed:
            if column not in columns:
                raise UserError(
                    f"{path}, table '{table}' has no column '{column}' ({nearest(column, columns)}): "
                    f"expected {', '.join(needed)}"
                )


def _splits(connection: sqlite3.Connection) -> list[str]:
    query = "SELECT DISTINCT split_name FROM client_metadata ORDER BY split_name"
    return [str(name) for (name,) in connection.execute(query)]


def _choose(split: str | None, there: list[str], path: Path) -> str:
    if split is None and len(there) == 1:
        return there[0]
    names = ", ".join(there) or "none"
    if split is None:
        raise UserError(f"{path} has {len(there)} splits ({names}): name one of them with split=")
    if split not in there:
        raise UserError(f"{path} has no split '{split}': it has {names}")
    return split


def _read_sqlite(
    path: Path, split: str | None, features: Sequence[str] | None
) -> Iterator[tuple[str, Features]]:
    decoder = Decoder()
    with _database(path) as connection:
        split = _choose(split, _splits(connection), path)
        query = "SELECT client_id, num_examples FROM client_metadata WHERE split_name = ?"
        promised = {_text(client, path): count for client, count in connection.execute(query, (split,))}
        query = (  # TFF's index on (split_name, client_id) has this order already
            "SELECT client_id, serialized_example_proto FROM examples "
            "WHERE split_name = ? ORDER BY client_id, rowid"
        )
        rows = connection.execute(query, (split,))
        for client, mine in itertools.groupby(rows, key=lambda row: row[0]):
            client = _text(client, path)
            blobs = [blob for _, blob in mine]
            _check_count(path, split, client, len(blobs), promised.pop(client, 0))
            yield client, decoder.decode(blobs, features, f"{path}, split '{split}', client {client}")
        for client, count in promised.items():
            _check_count(path, split, client, 0, count)


def _check_count(path: Path, split: str, client: str, found: int, promised: int) -> None:
    if found != promised:
        raise UserError(
            f"{path}, split '{split}', client {client}: {found} examples, but client_metadata says {promised}; "
            "the file is not whole, download it again"
        )


def _text(client: Any, path: Path) -> str:
    try:
        return client.decode() if isinstance(client, bytes) else str(client)
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: the client id {client!r} is not UTF-8; download the file again") from error


def _read_hdf5(path: Path, features: Sequence[str] | None) -> Iterator[tuple[str, Features]]:
    h5py = import_tff("h5py")
    with reading(path, DOWNLOAD):
        check_heaps(path)
    with reading(path, DOWNLOAD), h5py.File(path, "r") as file:
        if not isinstance(file.get("examples"), h5py.Group):
            raise UserError(
                f"{path} has no group 'examples' (known: {', '.join(file) or 'none'}): "
                "is it from TensorFlow Federated?"
            )
        size = path.stat().st_size
        for client, group in file["examples"].items():
            yield client, _read_group(h5py, group, features, f"{path}, client {client}", size)


def _read_group(
    h5py: ModuleType, group: Any, features: Sequence[str] | None, where: str, size: int
) -> Features:
    if not isinstance(group, h5py.Group):
        raise UserError(f"{where}: a data set, where a group with a data set per feature was expected")
    names = list(group) if features is None else features
    for name in names:
        if not isinstance(group.get(name), h5py.Dataset) or not group[name].shape:
            known = [other for other in group if other != name]
            raise UserError(f"{where}: {unknown('feature', name, known)}")
        check_growth(f"{where}, {name}", group[name].nbytes, size)
    columns = {name: _values(group[name][()]) for name in names}
    _check_lengths(columns, where)
    return columns


def _values(stored: np.ndarray) -> list | np.ndarray:
    if stored.dtype.kind in "OS":
        return stored.tolist()
    return stored.astype(np.float32 if stored.dtype.kind == "f" else np.int64)


def _check_lengths(columns: Mapping[str, Sized], where: str) -> None:
    lengths = {name: len(values) for name, values in columns.items()}
    if len(set(lengths.values())) > 1:
        raise UserError(f"{where}: features of different lengths {lengths}; download the file again")
