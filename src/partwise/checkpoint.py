"""Arrays by name as bytes and as files that are either whole or not there, and sealed files of text and JSON.

One format for messages, models, local parts and checkpoints: safetensors, with a small JSON header. A file is
written beside its final name, flushed to the disk and renamed, so that a killed process or a full disk leaves
the previous one intact. Files (messages do not) carry a SHA-256 of what they say, and are read only if it is
still so: a flipped bit or a change by hand is an error, never another result.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, deserialize
from safetensors.numpy import save

from partwise.types import UserError

SEAL = "#sha256"  # the key of a JSON document, and the word of a text's last line, under which its digest is
DTYPES = {"BOOL": "bool", "BF16": "bfloat16"}
DTYPES |= {f"F{bits}": f"float{bits}" for bits in (16, 32, 64)}
DTYPES |= {
    f"{kind[0].upper()}{bits}": f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)
}
TEMPORARY = re.compile(r"\..+\.\d+\.tmp")


def to_bytes(arrays: Mapping[str, Any], header: Mapping[str, Any] | None = None) -> bytes:
    """Arrays and a JSON-able header as bytes."""
    return save(_on_host(arrays), {"partwise": json.dumps(dict(header or {}))})


def from_bytes(data: bytes) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """The inverse of `to_bytes`."""
    try:
        length = int.from_bytes(data[:8], "little")
        metadata = json.loads(data[8 : 8 + length]).get("__metadata__", {})
        return _arrays(data), dict(json.loads(metadata.get("partwise", "{}")))
    except (SafetensorError, ValueError, LookupError, AttributeError, TypeError, OverflowError) as error:
        raise UserError(f"these {len(data)} bytes are no arrays written by partwise: {error}") from None


def header_of(data: bytes, largest: int) -> dict[str, Any]:
    """The header alone, which must not take more than so many bytes."""
    length = int.from_bytes(data[:8], "little")
    if length > largest:
        raise UserError(f"a header of {length:,} bytes is too large: {largest:,} at most")
    try:
        return dict(json.loads(json.loads(data[8 : 8 + length])["__metadata__"]["partwise"]))
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise UserError(f"these {len(data)} bytes are no arrays written by partwise: {error}") from None


def _arrays(data: bytes) -> dict[str, np.ndarray]:
    """Those of 16-bit brain floats too, which numpy alone does not know."""
    return {
        name: np.frombuffer(part["data"], jnp.dtype(DTYPES[part["dtype"]])).reshape(part["shape"])
        for name, part in deserialize(data)
    }


def _on_host(arrays: Mapping[str, Any]) -> dict[str, np.ndarray]:
    return {name: np.asarray(array, order="C") for name, array in arrays.items()}


def digest_of(arrays: Mapping[str, Any], header: Mapping[str, Any]) -> str:
    """Of all that a file of arrays says: header, names, types, shapes and values."""
    total = hashlib.sha256(json.dumps(header).encode())
    for name in sorted(arrays):
        array = arrays[name]
        total.update(json.dumps([name, array.dtype.name, array.shape]).encode())
        total.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return total.hexdigest()


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
            f"make room, or choose another place with --out (out=...); a run goes on with --resume (resume=True)."
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


def remove_temporary_files(folder: Path) -> None:
    """Those that killed writers left; nobody may be writing there now."""
    for path in folder.glob(".*.tmp"):
        if TEMPORARY.fullmatch(path.name):
            with contextlib.suppress(OSError):
                path.unlink()


def save_arrays(
    path: Path, arrays: Mapping[str, Any], header: Mapping[str, Any] | None = None, mode: int = 0o666
) -> None:
    """A sealed safetensors file; the same arrays and header always give the same bytes."""
    host, told = _on_host(arrays), dict(header or {})
    write_file(path, to_bytes(host, told | {SEAL: digest_of(host, told)}), mode)


def load_arrays(path: Path) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Arrays and header of a file, with an error that names it."""
    data = read_file(path)
    try:
        arrays, header = from_bytes(data)
        _check_seal(header.pop(SEAL, None), digest_of(arrays, header))
        return arrays, header
    except UserError as error:
        raise UserError(f"'{path}' is damaged or foreign: {error}") from None


def _check_seal(found: Any, expected: str) -> None:
    if found is None:
        raise UserError("it carries no digest, so it was not written by this version of partwise")
    if found != expected:
        raise UserError("what it says does not fit its digest, so it was changed after it was written")


def read_file(path: Path) -> bytes:
    """All of it, with an error that names it."""
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise UserError(f"could not read '{path}': {error.strerror or error}") from None


def save_json(path: Path, document: Mapping[str, Any]) -> None:
    """A sealed JSON document; it must hold only what JSON can say."""
    sealed = {**document, SEAL: hashlib.sha256(json.dumps(dict(document)).encode()).hexdigest()}
    write_file(path, (json.dumps(sealed, indent=1, allow_nan=False) + "\n").encode())


def load_json(path: Path) -> dict[str, Any]:
    """What `save_json` wrote there."""
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
    """Lines of text, sealed by a comment at their end."""
    write_file(path, f"{text}{SEAL} {hashlib.sha256(text.encode()).hexdigest()}\n".encode())


def load_text(path: Path) -> str:
    """What `save_text` wrote there."""
    text, sign, seal = read_file(path).rpartition(SEAL.encode() + b" ")
    try:
        _check_seal(seal.decode().strip() if sign else None, hashlib.sha256(text).hexdigest())
        return text.decode()
    except ValueError as error:  # a UserError is one
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
