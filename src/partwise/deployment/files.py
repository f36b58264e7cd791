"""A place for immutable files: a folder (behind nginx, say) or an S3 bucket.

A file's name is the digest of its bytes and a suffix. So the same bytes always have the same name, writing them
twice is harmless, and a reader who knows the name can check what it got. A file that is there is not written
again.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

from partwise.checkpoint import to_disk
from partwise.data.object_store import REMEDIES, open_system, telling
from partwise.types import UserError

DIGITS = 32  # hexadecimal digits of SHA-256 in a name
NAME = re.compile(rf"[0-9a-f]{{{DIGITS}}}\.(safetensors|json|index)")
BATCH = 1024  # files that are written together
WORKERS = 16  # requests to a bucket, or files on their way to the disk, at a time
LISTED = 32  # for more files than this, the bucket's names are listed, and not asked for one by one
ABANDONED = 3600  # seconds after which a file that nobody completed is one that nobody will
HEADERS = {"Content-Type": "application/octet-stream", "Cache-Control": "public, max-age=31536000, immutable"}


class FilePlace(Protocol):
    """Where immutable files are."""

    def put(self, data: bytes, suffix: str) -> str:
        """Write a file, if it is not there yet. Returns its name."""
        ...

    def put_many(self, files: Iterable[bytes], suffix: str) -> list[str]:
        """Write many files, taken from the iterable in batches. Returns their names, in order."""
        ...

    def read(self, name: str) -> bytes:
        """A file's bytes. Raises `UserError` if it is not there, or damaged."""
        ...

    def names(self) -> set[str]:
        """The names of all files."""
        ...

    def delete(self, names: Iterable[str]) -> None:
        """Remove files. Those that are not there are passed over."""
        ...


def name_of(data: bytes, suffix: str) -> str:
    """The name of a file with these bytes: `name_of(data, "json")`."""
    return f"{hashlib.sha256(data).hexdigest()[:DIGITS]}.{suffix}"


def fits(name: str, data: bytes) -> bool:
    """Whether these are the bytes of the file with this name."""
    return hashlib.sha256(data).hexdigest()[:DIGITS] == name[:DIGITS]


def check_name(name: Any) -> str:
    """A file's name, or `UserError`. Nothing else becomes a path or a part of a URL."""
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise UserError(
            f"{name!r} is no name of a file: it must be 32 hexadecimal digits and .safetensors, .json or .index"
        )
    return name


def open_place(where: str | Path) -> FilePlace:
    """The place that is meant: a folder, or `s3://BUCKET/PREFIX?region=...&endpoint_override=HOST:PORT&scheme=http`
    with the options of pyarrow's S3 file system. The keys of a bucket come from where pyarrow looks for them (the
    environment, the files of the AWS command line, the machine's role). The bucket must be there."""
    if str(where).startswith("s3://"):
        return BucketPlace(str(where))
    if "://" in str(where):
        raise UserError(f"files go to a folder or to s3://BUCKET/PREFIX, not to '{where}'")
    return FolderPlace(Path(where))


def remove_abandoned(folder: Path) -> None:
    """Remove what killed processes did not complete. Others may be writing in the folder."""
    for path in folder.glob(".*.tmp"):
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > ABANDONED:
                path.unlink()


class FolderPlace:
    """Files in a folder. They get their names only when they are complete and on the disk."""

    def __init__(self, folder: Path):
        self.folder = Path(folder)
        with telling(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            remove_abandoned(self.folder)

    def put(self, data: bytes, suffix: str) -> str:
        """As `FilePlace.put`."""
        return self.put_many([data], suffix)[0]

    def put_many(self, files: Iterable[bytes], suffix: str) -> list[str]:
        """As `FilePlace.put_many`."""
        names = []
        with telling(self.folder):
            for batch in _batches(files):
                named = [(name_of(data, suffix), data) for data in batch]
                self._write({name: data for name, data in named if not self._is_there(name, len(data))})
                names += [name for name, _ in named]
        return names

    def read(self, name: str) -> bytes:
        """As `FilePlace.read`."""
        with telling(self.folder):
            return _sound(name, (self.folder / check_name(name)).read_bytes())

    def names(self) -> set[str]:
        """As `FilePlace.names`."""
        with telling(self.folder):
            return {name for name in os.listdir(self.folder) if NAME.fullmatch(name)}

    def delete(self, names: Iterable[str]) -> None:
        """As `FilePlace.delete`."""
        with telling(self.folder):
            for name in map(check_name, names):
                (self.folder / name).unlink(missing_ok=True)

    def _is_there(self, name: str, size: int) -> bool:
        try:
            return os.stat(self.folder / name).st_size == size
        except FileNotFoundError:
            return False

    def _write(self, files: dict[str, bytes]) -> None:
        """All beside their names first, then to the disk, many at a time (the disk does them together), then
        renamed."""
        writer = f"{os.getpid()}.{threading.get_ident()}"
        beside = {name: self.folder / f".{name}.{writer}.tmp" for name in files}
        try:
            for name, data in files.items():
                beside[name].write_bytes(data)
            with ThreadPoolExecutor(WORKERS) as workers:
                list(workers.map(to_disk, beside.values()))
            for name in files:
                os.replace(beside[name], self.folder / name)
            to_disk(self.folder)
        finally:
            for path in beside.values():
                path.unlink(missing_ok=True)


class BucketPlace:
    """Files in an S3 bucket, under a prefix."""

    def __init__(self, url: str):
        from pyarrow import fs

        bucket = url.removeprefix("s3://").split("?")[0].split("/")[0]
        self._shown = url.split("?")[0]
        with telling(self._shown):
            self._system, self._prefix = open_system(url)
            if self._system.get_file_info(bucket).type == fs.FileType.NotFound:
                raise UserError(f"there is no bucket '{bucket}'. {REMEDIES['NO_SUCH_BUCKET']}")

    def put(self, data: bytes, suffix: str) -> str:
        """As `FilePlace.put`."""
        return self.put_many([data], suffix)[0]

    def put_many(self, files: Iterable[bytes], suffix: str) -> list[str]:
        """As `FilePlace.put_many`."""
        names = []
        with telling(self._shown), ThreadPoolExecutor(WORKERS) as workers:
            for batch in _batches(files):
                named = [(name_of(data, suffix), data) for data in batch]
                there = self._there([name for name, _ in named])
                new = {name: data for name, data in named if name not in there}
                list(workers.map(self._write, new, new.values()))
                names += [name for name, _ in named]
        return names

    def read(self, name: str) -> bytes:
        """As `FilePlace.read`."""
        with telling(self._shown), self._system.open_input_stream(self._path(name)) as file:
            return _sound(name, file.read())

    def names(self) -> set[str]:
        """As `FilePlace.names`."""
        from pyarrow import fs

        with telling(self._shown):
            found = self._system.get_file_info(fs.FileSelector(self._prefix, allow_not_found=True))
        return {info.base_name for info in found if NAME.fullmatch(info.base_name)}

    def delete(self, names: Iterable[str]) -> None:
        """As `FilePlace.delete`."""
        with telling(self._shown), ThreadPoolExecutor(WORKERS) as workers:
            list(workers.map(self._remove, [self._path(name) for name in names]))

    def _path(self, name: str) -> str:
        return f"{self._prefix}/{check_name(name)}"

    def _there(self, names: list[str]) -> set[str]:
        if len(names) > LISTED:
            return self.names()
        found = self._system.get_file_info([self._path(name) for name in names])
        return {info.base_name for info in found if info.is_file}

    def _write(self, name: str, data: bytes) -> None:
        with self._system.open_output_stream(self._path(name), metadata=HEADERS) as file:
            file.write(data)

    def _remove(self, path: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._system.delete_file(path)


def _batches(files: Iterable[bytes]) -> Iterator[list[bytes]]:
    return iter(partial(lambda rest: list(islice(rest, BATCH)), iter(files)), [])


def _sound(name: str, data: bytes) -> bytes:
    if not fits(name, data):
        raise UserError(f"'{name}' is damaged: its bytes do not fit its name. Delete it and write it again")
    return data
