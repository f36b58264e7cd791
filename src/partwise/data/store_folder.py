"""A store's folder on disk: `examples.arrow`, `clients.arrow`, `vocabularies.arrow`, `store.json`.

`examples.arrow` is one record batch, so that every column is one memory-mapped array without a copy. A folder
is written beside its final place and renamed at the end. So it is either complete or not there. `store.json` says
where in the file each column is, so that the rows of some clients can be read from an object store by range.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from partwise.data.ids import join_ids
from partwise.data.late_arrow import pa
from partwise.data.object_store import is_address, open_address
from partwise.data.ragged import offsets
from partwise.data.reading import existing, reading, regular
from partwise.data.remote_folder import (
    EXAMPLES,
    RECORD,
    new_remote_folder,
    read_batch,
    read_record,
    remote_columns,
)
from partwise.data.spool import Layout, Spool
from partwise.types import UserError

FORMAT = "partwise-store"
VERSION = 1
CLIENTS, VOCABULARIES = "clients.arrow", "vocabularies.arrow"
WHOLE = "the store is not whole; remove the folder and build it again"
DAMAGED = "it is damaged; remove the folder and build it again"


class Block(NamedTuple):
    """The rows of some clients, already grouped: client k of the block owns the next `counts[k]` rows."""

    client_ids: np.ndarray
    counts: np.ndarray
    columns: Mapping[str, np.ndarray]


@contextlib.contextmanager
def new_folder(path: str | Path) -> Iterator[Path]:
    """A folder to fill. It gets its name `path`, or the address, only if the block ends without an error."""
    if is_address(path):
        with new_remote_folder(str(path)) as building:
            yield building
        return
    path = Path(path)
    try:
        if path.exists():
            raise UserError(f"{path} already exists: remove it first, or choose another folder")
        path.parent.mkdir(parents=True, exist_ok=True)
        building = Path(tempfile.mkdtemp(prefix=f".{path.name}.", suffix=".partial", dir=path.parent))
    except OSError as error:
        raise UserError(
            f"cannot write {path}: {error.strerror}; choose a folder that can be written"
        ) from error
    try:
        yield building
        building.chmod(0o755)  # mkdtemp lets only its owner in
        building.rename(path)
    except BaseException:
        shutil.rmtree(building, ignore_errors=True)
        raise


def write_folder(
    path: str | Path, blocks: Iterable[Block], vocabularies: Mapping[str, np.ndarray], info: Mapping[str, Any]
) -> None:
    """Write blocks of clients in their order. Only one block and the client ids are held in memory."""
    with new_folder(path) as folder, contextlib.closing(Spool(folder)) as spool:
        client_ids, counts = [], []
        for block in blocks:
            client_ids.append(block.client_ids)
            counts.append(block.counts)
            spool.append(block.columns)
        places = allocate_examples(folder, spool.layouts, spool.num_rows)
        for name, place in places.items():
            spool.copy(name, folder / EXAMPLES, place)
        spool.discard()
        finish(folder, join_ids(client_ids), np.concatenate(counts), spool.layouts, vocabularies, info)


def allocate_examples(folder: Path, layouts: Mapping[str, Layout], num_rows: int) -> dict[str, int]:
    """Write `examples.arrow` full of zeros. Returns the byte at which each column starts in the file."""
    if num_rows == 0 or not layouts:
        raise UserError("there are no rows to store: give at least one client with one example")
    arrays = [_arrow(np.zeros((num_rows, *layout.shape), layout.dtype)) for layout in layouts.values()]
    batch = pa.record_batch(arrays, names=list(layouts))
    with pa.ipc.new_file(str(folder / EXAMPLES), batch.schema) as writer:
        writer.write_batch(batch)
    return _places(folder / EXAMPLES)


def _places(examples: Path) -> dict[str, int]:
    """The byte at which each column starts in the file."""
    with pa.memory_map(str(examples)) as source:
        begin = source.read_buffer().address
        stored = pa.ipc.open_file(source).get_batch(0)
        return {name: stored.column(name).buffers()[-1].address - begin for name in stored.schema.names}


def finish(
    folder: Path,
    client_ids: np.ndarray,
    counts: np.ndarray,
    layouts: Mapping[str, Layout],
    vocabularies: Mapping[str, np.ndarray],
    info: Mapping[str, Any],
) -> None:
    """Write everything of a store except its examples."""
    _write_batch(folder / CLIENTS, {"client": _arrow(client_ids), "count": _arrow(counts)})
    lists = {
        name: pa.LargeListArray.from_arrays([0, len(ids)], _arrow(ids)) for name, ids in vocabularies.items()
    }
    _write_batch(folder / VOCABULARIES, lists)
    places = _places(folder / EXAMPLES)
    columns = {
        name: {"dtype": layout.dtype.str, "shape": layout.shape, "offset": places[name]}
        for name, layout in layouts.items()
    }
    record = {"format": FORMAT, "version": VERSION, "columns": columns, "info": dict(info)}
    record |= {"num_clients": len(client_ids), "num_examples": int(counts.sum())}
    record["files"] = {name: (folder / name).stat().st_size for name in (EXAMPLES, CLIENTS, VOCABULARIES)}
    try:
        text = json.dumps(record, indent=1, default=lambda value: value.item())
    except (TypeError, ValueError, AttributeError) as error:
        raise UserError(
            f"info must hold only what JSON can say (text, numbers, lists, dicts): {error}"
        ) from error
    (folder / RECORD).write_text(text)


def read_folder(path: str | Path) -> dict[str, Any]:
    """The fields of a `ClientStore`. The columns are memory-mapped, or stay in an object store."""
    if is_address(path):
        return _read_address(str(path))
    path = existing(path, "check the path, or build a store with build_store or save")
    record = _checked_record(path, _read_record(path))
    with reading(f"the store {path}", DAMAGED):
        batch = _map_batch(path / EXAMPLES)
        if batch.num_rows != record["num_examples"]:
            raise ValueError("its files disagree in length")
        columns = {name: _column(batch.column(name), entry) for name, entry in record["columns"].items()}
        return _fields(record, columns, _read_batch(path / CLIENTS), _read_batch(path / VOCABULARIES))


def _read_address(url: str) -> dict[str, Any]:
    place = open_address(url)
    record = _checked_record(place.shown, read_record(place))
    with reading(f"the store {place.shown}", DAMAGED):
        small = [read_batch(place, name, record) for name in (CLIENTS, VOCABULARIES)]
        return _fields(record, remote_columns(place, record), *small)


def _fields(
    record: Mapping[str, Any],
    columns: Mapping[str, Any],
    clients: pa.RecordBatch,
    vocabularies: pa.RecordBatch,
) -> dict[str, Any]:
    counts = clients.column("count").cast(pa.int64()).to_numpy()
    if (int(counts.sum()), len(counts)) != (record["num_examples"], record["num_clients"]):
        raise ValueError("its files disagree in length")
    return {
        "columns": columns,
        "starts": offsets(counts),
        "counts": counts,
        "client_ids": _numpy(clients.column("client")),
        "vocabularies": {
            name: _numpy(vocabularies.column(name)[0].values) for name in vocabularies.schema.names
        },
        "info": dict(record["info"]),
    }


def _read_record(path: Path) -> Any:
    if not (path / RECORD).is_file():
        held = (
            ", ".join(sorted(p.name for p in path.iterdir())[:8]) if path.is_dir() else "a file, not a folder"
        )
        raise UserError(f"{path} is not a partwise store: it has no {RECORD} ({held or 'empty'})")
    with reading(path / RECORD, "build the store again"):
        return json.loads((path / RECORD).read_text(encoding="utf-8"))


def _checked_record(path: object, record: Any) -> dict[str, Any]:
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        raise UserError(f"{path} is not a partwise store: {RECORD} does not say format '{FORMAT}'")
    if record.get("version") != VERSION:
        raise UserError(
            f"{path} has store version {record.get('version')}, this partwise reads version {VERSION}: "
            "use the partwise that wrote it, or build the store again"
        )
    return record


def _arrow(values: np.ndarray) -> pa.Array:
    if values.dtype.kind == "b":  # Arrow packs booleans into bits, which no numpy view can read
        values = values.view(np.uint8)
    flat = pa.array(np.ascontiguousarray(values).reshape(-1))
    width = int(np.prod(values.shape[1:], dtype=np.int64))
    return flat if values.ndim == 1 else pa.FixedSizeListArray.from_arrays(flat, width)


def _column(array: pa.Array, entry: Mapping[str, Any]) -> np.ndarray:
    dtype = np.dtype(entry["dtype"])
    flat = array.flatten() if pa.types.is_fixed_size_list(array.type) else array
    if dtype.kind not in "biuf" or not (pa.types.is_integer(flat.type) or pa.types.is_floating(flat.type)):
        raise ValueError(f"a column of {array.type} cannot be read as {dtype}")
    return flat.to_numpy(zero_copy_only=True).view(dtype).reshape(len(array), *entry["shape"])


def _numpy(array: pa.Array) -> np.ndarray:
    if array.null_count or not (pa.types.is_int64(array.type) or pa.types.is_string(array.type)):
        raise ValueError(f"ids are {array.type} with {array.null_count} missing")
    return array.to_numpy() if pa.types.is_int64(array.type) else np.array(array.to_pylist(), dtype=str)


def _write_batch(path: Path, columns: Mapping[str, pa.Array]) -> None:
    batch = pa.record_batch(list(columns.values()), names=list(columns))
    with pa.ipc.new_file(str(path), batch.schema) as writer:
        writer.write_batch(batch)


def _read_batch(path: Path) -> pa.RecordBatch:
    with pa.OSFile(str(regular(path, WHOLE))) as source:
        batch = pa.ipc.open_file(source).get_batch(0)
    batch.validate(full=True)
    return batch


def _map_batch(path: Path) -> pa.RecordBatch:
    """A memory-mapped batch. To read numbers safely, it is enough to check their count, not each of them."""
    with pa.memory_map(str(regular(path, WHOLE))) as source:
        batch = pa.ipc.open_file(source).get_batch(0)
    batch.validate()
    return batch
