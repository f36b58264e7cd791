"""Messages between a server and its clients: bytes that say what they belong to, and that are checked before
use.

Every message is safetensors with a small JSON header: the version of this format, the run, the version of the
model, a digest of the model's leaves and roles, and the task. The reader knows which arrays must be in the
message. So it first compares the size of the message with theirs, before it parses anything. Then it checks
every name, type and shape.

    invitation  server -> client    take part in this round: choose your keys
    slices      server -> client    shared and frozen leaves, the slices of its keys, the round's randomness, and
                                    the numbers that the aggregator tells every client, if there are any
    report      client -> server    the client's contribution to the sum, or a note that it is not finite
    metrics     client -> server    the metrics of a client that evaluated the model, as sums

`server.report_form` reads and writes reports.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from partwise.checkpoint import from_bytes, header_of, to_bytes
from partwise.metrics import Sums
from partwise.model.partition import Partition
from partwise.selection.slices import take_keys
from partwise.types import UserError

FORMAT = 1
LARGEST_HEADER = 1 << 20  # bytes
LARGEST_NUMBER = float(np.finfo(np.float32).max)

Shapes = Mapping[str, jax.ShapeDtypeStruct]


class About(NamedTuple):
    """What a message belongs to."""

    run: str = ""
    version: int = 0  # of the model: the number of rounds so far
    task: str = ""  # one client's work in one round
    model: str = ""  # digest of the model's leaves and their roles


class Invitation(NamedTuple):
    """An invitation for one client to take part in a round. The keys that it chooses depend on `seed` and
    `round`."""

    about: About
    client: str
    seed: int
    round: int


class Slices(NamedTuple):
    """What the server sent to a client."""

    about: About
    params: Mapping[str, np.ndarray]  # the server's leaves; keyed ones: the rows of the client's keys
    rng: np.ndarray  # the key data of the round's randomness
    public: Mapping[str, np.float32] = {}  # what the aggregator tells every client, by name


def write_invitation(task: Invitation) -> bytes:
    """An invitation as bytes."""
    return write_message(
        "invitation", task.about, {}, {"client": task.client, "seed": task.seed, "round": task.round}
    )


def read_invitation(data: bytes) -> Invitation:
    """The inverse of `write_invitation`."""
    _, header = _read("invitation", data, {})
    known = _said(header, {"client": "", "seed": 0, "round": 0})
    return Invitation(about_of(header), **known)


def send(
    partition: Partition,
    params: Mapping[str, Any],
    keys: Mapping[str, np.ndarray],
    rng: Any,
    belongs: About | None = None,
    public: Mapping[str, Any] | None = None,
) -> bytes:
    """Write the slices of a client's keys as bytes. Only these rows of a table are read. `rng` is the round's
    randomness, a key of JAX or its key data; `public` are the numbers that every client is told."""
    arrays = {}
    for path, leaf in params.items():
        if path in partition.there:
            continue
        if path in partition.of("keyed"):
            arrays |= encode_rows(partition, path, leaf, keys[partition.roles[path].space])
        else:
            arrays[path] = np.asarray(leaf)
    belongs = belongs or About(model=partition.digest)
    return write_message("slices", belongs, arrays, {"rng": key_data(rng).tolist(), **say_public(public)})


def key_data(rng: Any) -> np.ndarray:
    """The two words of a random key."""
    return rng if isinstance(rng, np.ndarray) else np.asarray(jax.random.key_data(rng))


def encode_rows(partition: Partition, path: str, leaf: Any, keys: np.ndarray) -> dict[str, np.ndarray]:
    """The rows of these keys as they are sent: the parts that the leaf's psi makes of them, by name."""
    parts = partition.roles[path].psi.encode(take_keys(leaf, keys))
    return {f"{path}:{name}": np.asarray(part) for name, part in parts.items()}


def decode_rows(partition: Partition, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The server's leaves from the arrays that were sent, and those that a client has. The inverse of
    `encode_rows`."""
    params: dict[str, np.ndarray] = {}
    for path in partition.server_paths:
        if path in partition.there:
            params[path] = partition.own_constants[path]
            continue
        mark, role = f"{path}:", partition.roles.get(path)
        if path not in partition.of("keyed") or role is None:
            params[path] = arrays[path]
            continue
        parts = {name.removeprefix(mark): a for name, a in arrays.items() if name.startswith(mark)}
        params[path] = np.asarray(role.psi.decode(parts, partition.server_shapes[path].dtype))
    return params


def read_slices(partition: Partition, data: bytes, keys: Mapping[str, np.ndarray]) -> Slices:
    """Read what `send` wrote for these keys. The slices are decoded by their psi."""
    sent = read_encoded(partition, data, {space: len(each) for space, each in keys.items()})
    return sent._replace(params=decode_rows(partition, sent.params))


def read_encoded(partition: Partition, data: bytes, num_keys: Mapping[str, int]) -> Slices:
    """Read what `send` wrote for this many keys. The arrays are as they were sent."""
    arrays, header = _read("slices", data, slices_shapes(partition, num_keys))
    return read_slices_header(partition, header)._replace(params=arrays)


def read_slices_header(partition: Partition, header: Mapping[str, Any]) -> Slices:
    """What the header of a `slices` message says. There are no arrays in the result yet."""
    _check_kind("slices", header)
    belongs = about_of(header)
    check_model_digest(partition, belongs)
    return Slices(belongs, {}, read_rng(header), read_public(header))


def check_model_digest(partition: Partition, belongs: About) -> None:
    """Raise `UserError` if what was sent is of another model."""
    if belongs.model != partition.digest:
        raise UserError(
            "the message is of another model: its leaves or their roles differ from this client's"
        )


def read_rng(header: Mapping[str, Any]) -> np.ndarray:
    """The key data of the round's randomness, as a header says it."""
    found = header.get("rng")
    if not isinstance(found, list) or not all(type(each) is int and 0 <= each < 1 << 32 for each in found):
        raise UserError(f"a message must say its rng as numbers of 32 bits, not {found!r}")
    return np.array(found, np.uint32)


def say_public(public: Mapping[str, Any] | None) -> dict[str, Any]:
    """Numbers of 32 bits as a header says them. If there are none, it does not name them."""
    return {"public": {name: float(np.float32(value)) for name, value in public.items()}} if public else {}


def read_public(header: Mapping[str, Any]) -> dict[str, np.float32]:
    """The inverse of `say_public`."""
    found = header.get("public", {})
    if not isinstance(found, dict) or not all(
        type(each) in (int, float) and abs(each) <= LARGEST_NUMBER for each in found.values()
    ):
        raise UserError(f"what a message says to every client must be finite numbers, not {found!r}")
    return {name: np.float32(value) for name, value in found.items()}


def slices_shapes(partition: Partition, num_keys: Mapping[str, int]) -> dict[str, jax.ShapeDtypeStruct]:
    """The names, shapes and types of the arrays in a `slices` message with this many keys."""
    shapes = {}
    for path, leaf in partition.server_shapes.items():
        if path in partition.of("keyed"):
            shapes |= rows_shapes(partition, path, num_keys[partition.roles[path].space])
        elif path not in partition.there:
            shapes[path] = leaf
    return shapes


def rows_shapes(partition: Partition, path: str, count: int) -> dict[str, jax.ShapeDtypeStruct]:
    """The names, shapes and types of what `encode_rows` makes of this many rows."""
    leaf, psi = partition.server_shapes[path], partition.roles[path].psi
    rows = jax.ShapeDtypeStruct((count, *leaf.shape[1:]), leaf.dtype)
    parts = {"rows": rows} if psi.name == "take" else jax.eval_shape(psi.encode, rows)
    return {f"{path}:{name}": part for name, part in parts.items()}


def write_metrics(belongs: About, sums: Mapping[str, Sums]) -> bytes:
    """Write a client's metrics as bytes: a sum of values and a sum of weights for each."""
    pairs = {name: np.array([each.value, each.weight], np.float32) for name, each in sums.items()}
    return write_message("metrics", belongs, pairs, {})


def read_metrics(data: bytes) -> dict[str, Sums]:
    """The inverse of `write_metrics`."""
    if len(data) > LARGEST_HEADER:
        raise UserError(f"metrics of {len(data):,} bytes are too large: they have {LARGEST_HEADER:,} at most")
    arrays, _ = open_message("metrics", data)
    for name, pair in arrays.items():
        if pair.shape != (2,) or pair.dtype != np.float32 or not np.isfinite(pair).all() or pair[1] < 0:
            raise UserError(
                f"the metric '{name}' must be a finite sum and a weight of at least 0, as float32"
            )
    return {name: Sums(*pair) for name, pair in arrays.items()}


def about(data: bytes) -> About:
    """Read from the header alone what a message belongs to."""
    return about_of(header_of(data, LARGEST_HEADER))


def write_message(kind: str, belongs: About, arrays: Mapping[str, Any], more: Mapping[str, Any]) -> bytes:
    """Arrays and a header as bytes, with what they belong to."""
    return to_bytes(arrays, {"format": FORMAT, "kind": kind, **belongs._asdict(), **more})


def _read(kind: str, data: bytes, shapes: Shapes) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Arrays and header of a message of this kind. It must have exactly these arrays."""
    largest = LARGEST_HEADER + sum(x.size * x.dtype.itemsize for x in shapes.values())
    if len(data) > largest:
        raise UserError(f"a {kind} of {len(data):,} bytes is too large: here it has {largest:,} at most")
    arrays, header = open_message(kind, data)
    check_arrays(kind, arrays, shapes)
    return arrays, header


def open_message(kind: str, data: bytes) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Arrays and header of a message, which must be of this kind. Its size must have been checked before."""
    header = header_of(data, LARGEST_HEADER)
    _check_kind(kind, header)
    return from_bytes(data)[0], header


def _check_kind(kind: str, header: Mapping[str, Any]) -> None:
    if header.get("format") != FORMAT or header.get("kind") != kind:
        raise UserError(
            f"this message must be '{kind}' in format {FORMAT}, and it is '{header.get('kind')}' in format "
            f"{header.get('format')}"
        )


def check_arrays(kind: str, arrays: Mapping[str, Any], shapes: Shapes) -> None:
    """Raise `UserError` unless the arrays of a message have exactly these names, shapes and types."""
    for name in (*arrays, *shapes):
        if name not in arrays or name not in shapes:
            missing = "lacks" if name in shapes else "has no business with"
            raise UserError(f"the {kind} {missing} '{name}'")
        found, wanted = arrays[name], shapes[name]
        if found.shape != wanted.shape or found.dtype != wanted.dtype:
            raise UserError(
                f"'{name}' in the {kind} is {found.dtype} {list(found.shape)}, and must be {wanted.dtype} "
                f"{list(wanted.shape)}"
            )


def about_of(header: Mapping[str, Any]) -> About:
    """What the message belongs to, from its header."""
    return About(**_said(header, About()._asdict()))


def _said(header: Mapping[str, Any], wanted: Mapping[str, Any]) -> dict[str, Any]:
    """These values of a header, which must have the types of the examples in `wanted`."""
    for name, example in wanted.items():
        if type(header.get(name)) is not type(example):
            raise UserError(f"a message must say its {name}, not {header.get(name)!r}")
    return {name: header[name] for name in wanted}
