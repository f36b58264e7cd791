"""Every use of randomness has a stream of its own, and a client's hangs on its id alone."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from partwise.randomness import BLOCK, child, client_numbers, client_rng, normals, words
from partwise.simulation.mesh import make_mesh


def test_numbers_of_a_million_clients_differ():
    for ids in (np.arange(10**6), np.array([f"user-{i}" for i in range(10**5)])):
        assert len(np.unique(client_numbers(ids))) == len(ids)


def test_a_number_hangs_on_the_id_as_text():
    """An id is the same client's, whether it was read as a number or as text."""
    names = np.array(["7", "-1", "4294967303"])
    numbers = client_numbers(names)
    assert numbers.dtype == np.uint64
    np.testing.assert_array_equal(client_numbers(np.array([7, -1, 2**32 + 7])), numbers)
    np.testing.assert_array_equal(client_numbers(names.astype("U40")), numbers)
    np.testing.assert_array_equal(client_numbers(names[::-1])[::-1], numbers)
    assert numbers[0] == 0x828F78CECA1750E7  # BLAKE2b: it must never change, or clients become others


def test_all_64_bits_of_a_number_matter():
    rng = jax.random.key(0)
    drawn = {
        jax.random.key_data(client_rng(rng, words(np.uint64(number)))).tobytes()
        for number in (1, 2, 1 << 32, (1 << 32) + 1, 1 << 63)
    }
    assert len(drawn) == 5


def test_children_differ_from_one_another_and_from_what_a_split_gives():
    """`split(key)[i]` is `fold_in(key, i)` with threefry: a small number must not stand for a use."""
    rng = jax.random.key(3)
    split = [jax.random.key_data(key).tobytes() for key in jax.random.split(rng, 64)]
    uses = ("init", "step", "solve", "check", "predict", "local", "phase 0", "phase 1", "phase 2")
    children = [jax.random.key_data(child(rng, use)).tobytes() for use in uses]
    assert len({*split, *children}) == len(split) + len(children)


@pytest.mark.parametrize("shape", [(3,), (BLOCK,), (BLOCK + 1,), (7, 3 * BLOCK // 7)])
def test_normal_numbers_are_the_same_for_any_number_of_devices(shape):
    """Devices share the drawing; every number is that of one device alone, and no block repeats another."""
    rng = jax.random.key(5)
    alone = jax.jit(normals, static_argnums=1)(rng, shape)
    for number in (1, 2):
        mapped = jax.shard_map(
            lambda: normals(rng, shape), mesh=make_mesh(number), in_specs=(), out_specs=P(), check_vma=False
        )
        np.testing.assert_array_equal(jax.jit(mapped)(), alone)
    assert alone.shape == shape
    assert len(np.unique(alone)) > 0.99 * alone.size
    if alone.size > 1000:
        assert abs(float(alone.mean())) < 0.05
        assert abs(float(alone.std()) - 1) < 0.05
