"""A store's folder in an object store: opened by address, and written by copying one from this machine.

Of a store that is opened, only what describes its clients and ids is read. The examples stay where they are
(`remote.RemoteColumn`).
"""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from partwise.data.late_arrow import pa
from partwise.data.object_store import REMEDIES, Place, open_address, patiently, telling
from partwise.data.reading import reading
from partwise.data.remote import RemoteColumn, RemoteFile
from partwise.types import UserError

RECORD = "store.json"
EXAMPLES = "examples.arrow"


def has_record(url: str) -> bool:
    """Whether there is a store at this address."""
    place = open_address(url)
    with telling(place.shown):
        return _has_record(place)


def _has_record(place: Place) -> bool:
    if _found(place.of(RECORD)).is_file:
        return True
    bucket = place.path.split("/")[0]
    if place.shown.startswith("s3://") and not _found(place._replace(path=bucket)).type:
        raise UserError(f"{place.shown}: there is no bucket '{bucket}'. {REMEDIES['NO_SUCH_BUCKET']}")
    return False


def read_record(place: Place) -> Any:
    """What store.json says."""
    about = place.of(RECORD)
    with telling(about.shown):
        if not _has_record(place):
            raise UserError(
                f"{place.shown} is not a partwise store: it has no {RECORD}. Build one from a table (`partwise "
                f"store TABLE --client COLUMN --out {place.shown}`), or check the address"
            )
        data = patiently(lambda: _read(about))
    with reading(about.shown, "build the store again"):
        return json.loads(data.decode("utf-8"))


def read_batch(place: Place, name: str, record: Mapping[str, Any]) -> pa.RecordBatch:
    """A small file of the store, in memory."""
    data = RemoteFile(place.of(name), _size(place, name, record)).read_all()
    batch = pa.ipc.open_file(pa.py_buffer(data)).get_batch(0)
    batch.validate(full=True)
    return batch


def remote_columns(place: Place, record: Mapping[str, Any]) -> dict[str, RemoteColumn]:
    """The columns of a store."""
    file = RemoteFile(place.of(EXAMPLES), size := _size(place, EXAMPLES, record))
    columns = {}
    for name, entry in record["columns"].items():
        shape = (int(record["num_examples"]), *map(int, entry["shape"]))
        columns[name] = RemoteColumn(file, int(entry["offset"]), np.dtype(entry["dtype"]), shape)
        end = columns[name].offset + shape[0] * columns[name].row_bytes
        if columns[name].dtype.kind not in "biuf" or min(columns[name].offset, *shape) < 0 or end > size:
            raise ValueError(f"column '{name}' is not inside {EXAMPLES}")
    return columns


def _size(place: Place, name: str, record: Mapping[str, Any]) -> int:
    if name not in record.get("files", {}):
        raise UserError(
            f"{place.shown} was written by a partwise whose stores are read on one machine only: copy it there, "
            f"open it, and save it again"
        )
    return int(record["files"][name])


@contextlib.contextmanager
def new_remote_folder(url: str) -> Iterator[Path]:
    """A folder of this machine to fill. If the block ends without an error, it is copied to the address, where no
    store may be yet. Its store.json comes last: without it there is no store."""
    place = open_address(url)
    with telling(place.shown):
        if _has_record(place):
            raise UserError(f"{place.shown} already has a store: remove it first, or choose another address")
    with tempfile.TemporaryDirectory(prefix="partwise-store-") as building:
        yield Path(building)
        with telling(place.shown):
            for file in sorted(Path(building).iterdir(), key=lambda file: file.name == RECORD):
                patiently(lambda file=file: _copy(file, place.of(file.name)))


def _copy(file: Path, place: Place) -> None:
    from pyarrow import fs

    fs.copy_files(
        str(file), place.path, source_filesystem=fs.LocalFileSystem(), destination_filesystem=place.system
    )


def _found(place: Place) -> Any:
    return patiently(lambda: place.system.get_file_info(place.path))


def _read(place: Place) -> bytes:
    with place.system.open_input_stream(place.path) as file:
        return file.read()
