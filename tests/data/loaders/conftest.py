"""TensorFlow Federated's files, written byte by byte: no code is shared with the readers."""

from __future__ import annotations

import sqlite3
import struct
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

SCHEMA = """
CREATE TABLE examples (split_name TEXT NOT NULL, client_id TEXT NOT NULL, serialized_example_proto BLOB NOT NULL);
CREATE INDEX idx_examples_client_id ON examples (client_id);
CREATE INDEX idx_examples_client_id_split ON examples (split_name, client_id);
CREATE TABLE client_metadata (client_id TEXT NOT NULL, split_name TEXT NOT NULL, num_examples INTEGER NOT NULL);
CREATE INDEX idx_metadata_client_id ON client_metadata (client_id);
"""


def _varint(value: int) -> bytes:
    value %= 2**64  # negative numbers as two's complement
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])


def _field(number: int, content: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(content)) + content


def _feature(value: Any) -> bytes:
    entries = list(value) if isinstance(value, (list, tuple)) else [value]
    if isinstance(entries[0], bytes):
        return _field(1, b"".join(_field(1, entry) for entry in entries))
    if isinstance(entries[0], float):
        return _field(2, _field(1, struct.pack(f"<{len(entries)}f", *entries)))
    return _field(3, _field(1, b"".join(_varint(entry) for entry in entries)))


def _serialise(example: Mapping[str, Any]) -> bytes:
    """A tf.train.Example, numbers packed."""
    entries = [
        _field(1, _field(1, name.encode()) + _field(2, _feature(value))) for name, value in example.items()
    ]
    return _field(1, b"".join(entries))


@pytest.fixture(scope="session")
def serialise() -> Callable[[Mapping[str, Any]], bytes]:
    return _serialise


@pytest.fixture(scope="session")
def write_sqlite() -> Callable[..., Path]:
    """`write(path, {split: {client: [example]}})`, the rows of different clients interleaved."""

    def write(path: Path, data: Mapping[str, Mapping[str, Sequence[Mapping[str, Any]]]]) -> Path:
        connection = sqlite3.connect(path)
        connection.executescript(SCHEMA)
        for split, clients in data.items():
            rows = [(k, client, e) for client, examples in clients.items() for k, e in enumerate(examples)]
            for _, client, example in sorted(rows, key=lambda row: row[0]):
                connection.execute(
                    "INSERT INTO examples VALUES (?, ?, ?)", (split, client, _serialise(example))
                )
            for client, examples in clients.items():
                connection.execute(
                    "INSERT INTO client_metadata VALUES (?, ?, ?)", (client, split, len(examples))
                )
        connection.commit()
        connection.close()
        return path

    return write


@pytest.fixture(scope="session")
def write_hdf5() -> Callable[..., Path]:
    """`write(path, {client: {feature: values}})`."""

    def write(path: Path, clients: Mapping[str, Mapping[str, Any]]) -> Path:
        import h5py

        with h5py.File(path, "w") as file:
            for client, features in clients.items():
                for name, values in features.items():
                    kind = h5py.string_dtype() if isinstance(values[0], (bytes, str)) else None
                    file.create_dataset(f"examples/{client}/{name}", data=values, dtype=kind)
        return path

    return write
