"""Arrays by name as bytes and as files that are either whole or not there.

One format for messages, models, local parts and checkpoints: safetensors, with a small JSON header. A file is
written beside its final name, flushed to the disk and renamed, so that a killed process or a full disk leaves
the previous one intact.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from partwise.types import UserError


def to_bytes(arrays: Mapping[str, Any], header: Mapping[str, Any] | None = None) -> bytes:
    """Arrays and a JSON-able header as bytes."""
    host = {name: np.asarray(array, order="C") for name, array in arrays.items()}
    return save(host, {"partwise": json.dumps(dict(header or {}))})


def from_bytes(data: bytes) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """The inverse of `to_bytes`."""
    try:
        length = int.from_bytes(data[:8], "little")
        metadata = json.loads(data[8 : 8 + length]).get("__metadata__", {})
        return load(data), json.loads(metadata.get("partwise", "{}"))
    except (SafetensorError, ValueError, KeyError, AttributeError) as error:
        raise UserError(f"these {len(data)} bytes are no arrays written by partwise: {error}") from None


def write_file(path: Path, data: bytes, mode: int = 0o666) -> None:
    """Write all of it or nothing."""
    write_atomically(path, lambda file: file.write(data), mode)


def write_atomically(path: Path, write: Callable[[Any], Any], mode: int = 0o666) -> None:
    """Let `write` fill a file, which takes its name only once it is complete and on the disk; `mode` says who may
    read it, from its first byte on."""
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(temporary, "wb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        _sync_folder(path.parent)
    except OSError as error:
        reason = error.strerror or error
        raise UserError(
            f"could not write '{path}': {reason}. What was there before is untouched; "
            f"make room, then go on with --resume (resume=True), or choose another place with --out (out=...)."
        ) from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


def _sync_folder(folder: Path) -> None:
    """Make the renaming itself last."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def save_arrays(
    path: Path, arrays: Mapping[str, Any], header: Mapping[str, Any] | None = None, mode: int = 0o666
) -> None:
    """A safetensors file."""
    write_file(path, to_bytes(arrays, header), mode)


def load_arrays(path: Path) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Arrays and header of a file, with an error that names it."""
    try:
        return from_bytes(Path(path).read_bytes())
    except OSError as error:
        raise UserError(f"could not read '{path}': {error.strerror or error}") from None
    except UserError as error:
        raise UserError(f"'{path}' is damaged or foreign: {error}") from None


def save_tree(path: Path, tree: Any, header: Mapping[str, Any]) -> None:
    """Any pytree of arrays, leaves by number."""
    leaves = jax.tree_util.tree_leaves(tree)
    save_arrays(path, {f"{i:05d}": np.asarray(leaf) for i, leaf in enumerate(leaves)}, header)


def load_tree(path: Path, like: Any) -> tuple[Any, dict[str, Any]]:
    """A tree of the structure and shapes of `like`."""
    arrays, header = load_arrays(path)
    leaves, treedef = jax.tree_util.tree_flatten(like)
    found = [arrays.get(f"{i:05d}") for i in range(len(leaves))]
    if len(arrays) != len(leaves) or any(
        a is None or a.shape != b.shape or a.dtype != b.dtype for a, b in zip(found, leaves, strict=True)
    ):
        raise UserError(f"'{path}' was written by a run with other parameters; start a new run folder")
    return jax.tree_util.tree_unflatten(treedef, found), header
