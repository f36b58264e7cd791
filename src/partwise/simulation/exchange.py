"""How arrays, decisions and errors go between the processes of a run. With one process, nothing goes anywhere.

All of it is one kind of collective over all devices, so that the connections of the first one serve for the rest.
Everything here must be called by all processes, in the same order, and by their main threads.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import jax
import numpy as np
from jax.flatten_util import ravel_pytree
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from partwise.data.ragged import pad_to_power
from partwise.randomness import AXIS
from partwise.simulation.mesh import everywhere, make_mesh
from partwise.simulation.processes import num_processes, process_index
from partwise.types import UserError

LARGE_BYTES = 1 << 20  # of a leaf that is a message of its own between processes


def own_devices(mesh: Mesh) -> slice:
    """The places of this process's devices in the mesh, which are one after the other."""
    here = [device.process_index == jax.process_index() for device in mesh.devices.flat]
    first = here.index(True)
    return slice(first, first + sum(here))


def put_everywhere(tree: Any, mesh: Mesh) -> Any:
    """Put arrays, the same in all processes, on every device. Those that are there already stay."""
    sharding = everywhere(mesh)
    if num_processes() == 1:
        return jax.device_put(tree, sharding)

    def put(leaf: Any) -> jax.Array:
        if isinstance(leaf, jax.Array) and leaf.sharding == sharding:
            return leaf
        array = np.asarray(leaf)
        return jax.make_array_from_callback(array.shape, sharding, lambda place: array[place])

    return jax.tree_util.tree_map(put, tree)


def put_along(tree: Any, mesh: Mesh, axis: int) -> Any:
    """Put arrays with an axis of this process's own devices on these; together they are those of all devices. In
    one process they are left to the program, which does the same."""
    if num_processes() == 1:
        return tree
    sharding = NamedSharding(mesh, P(*[None] * axis, AXIS))
    put = lambda leaf: jax.make_array_from_process_local_data(sharding, np.asarray(leaf))
    return jax.tree_util.tree_map(put, tree)


def put_own(tree: Any, mesh: Mesh) -> Any:
    """Put arrays of this process on each of its devices. They get a leading axis of all devices."""
    here = own_devices(mesh)
    copies = lambda leaf: np.broadcast_to(leaf, (here.stop - here.start, *leaf.shape))
    return put_along(jax.tree_util.tree_map(copies, tree), mesh, 0)


def to_host(tree: Any) -> Any:
    """The same tree with numpy leaves, those of other processes' devices included."""
    if num_processes() > 1:
        tree = _gathering(make_mesh())(tree)
    return jax.tree_util.tree_map(np.asarray, tree)


@lru_cache(1)
def _gathering(mesh: Mesh) -> Any:
    return jax.jit(lambda tree: tree, out_shardings=everywhere(mesh))


def added_up(tree: Any) -> Any:
    """The sum over all devices, inside `shard_map`: one collective for each type of numbers, which gives the same
    bits as one for each leaf. No leaf changes its type: whole numbers stay exact. Between processes every array of
    a collective is a message of its own, so small leaves are put together. A copy of a large one costs more."""
    if num_processes() == 1:
        return jax.lax.psum(tree, AXIS)
    leaves, structure = jax.tree_util.tree_flatten(tree)
    for dtype in dict.fromkeys(leaf.dtype for leaf in leaves):
        alike = [i for i, leaf in enumerate(leaves) if leaf.dtype == dtype]
        large = [i for i in alike if leaves[i].nbytes >= LARGE_BYTES]
        small = [i for i in alike if i not in large]
        flat, unravel = ravel_pytree([leaves[i] for i in small])
        sums = jax.lax.psum([*(leaves[i] for i in large), *([flat] if small else [])], AXIS)
        unpacked = [*sums[: len(large)], *(unravel(sums[-1]) if small else [])]
        for i, leaf in zip([*large, *small], unpacked, strict=True):
            leaves[i] = leaf
    return jax.tree_util.tree_unflatten(structure, leaves)


def told(mine: bytes) -> list[bytes]:
    """What every process says, in their order."""
    if num_processes() == 1:
        return [mine]
    sizes = _gathered(np.array([len(mine)], np.int32))[:, 0]
    room = pad_to_power(np.zeros(int(sizes.max()), np.uint8))
    room[: len(mine)] = np.frombuffer(mine, np.uint8)
    return [row[:size].tobytes() for row, size in zip(_gathered(room), sizes.tolist(), strict=True)]


def _gathered(mine: np.ndarray) -> np.ndarray:
    """An array of every process [processes, ...]. All must be of one shape."""
    mesh = make_mesh()
    rows = to_host(put_own(mine, mesh))
    owner = [device.process_index for device in mesh.devices.flat]
    return rows[[owner.index(number) for number in range(num_processes())]]


def agreed(value: Any) -> Any:
    """The value of process 0, for all of them. It must be a value for JSON."""
    if num_processes() == 1:
        return value
    return json.loads(told(json.dumps(value if process_index() == 0 else None).encode())[0])


@contextmanager
def agreeing() -> Iterator[None]:
    """A block after which either all processes go on or none: a `UserError` in one is raised in all of them.
    Nothing inside may be collective."""
    if num_processes() == 1:
        yield
        return
    problem: UserError | None = None
    try:
        yield
    except UserError as error:
        problem = error
    problems = [text.decode() for text in told(str(problem or "").encode())]
    for number, text in enumerate(problems):
        if text:
            problem = problem or UserError(f"{text} (process {number} of {len(problems)} says so)")
            problem.everywhere = True
            raise problem
