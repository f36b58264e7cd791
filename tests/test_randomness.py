"""Every use of randomness has a stream of its own, and a client's hangs on its id alone."""

from __future__ import annotations

import jax
import numpy as np

from partwise.randomness import child, client_numbers, client_rng, words


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
