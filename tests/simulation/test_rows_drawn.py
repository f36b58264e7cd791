"""Rows of a table that are drawn without the others are the rows of the whole table."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from partwise.simulation.rows_drawn import leaf_of, rows_of

RNG = jax.random.key(3)
SIZE = 300
INITS = {
    "normal": lambda rng, shape: 0.3 * jax.random.normal(jax.random.fold_in(rng, 7), shape),
    "uniform": lambda rng, shape: jax.random.uniform(rng, shape, minval=-1, maxval=2),
    "truncated": lambda rng, shape: jax.nn.initializers.truncated_normal(0.1)(
        jax.random.split(rng)[1], shape
    ),
    "fan": lambda rng, shape: jax.nn.initializers.variance_scaling(1.0, "fan_in", "normal")(rng, shape),
    "zeros": lambda rng, shape: jnp.zeros(shape),
    "numbers": lambda rng, shape: jnp.arange(shape[0])[:, None] * jnp.ones(shape),
    "half": lambda rng, shape: jax.random.normal(rng, shape).astype(jnp.bfloat16),
    "beside another": lambda rng, shape: (jax.random.normal(rng, (9, 9)), jax.random.normal(rng, shape))[1],
}


@pytest.mark.parametrize("shape", [(1025, 3), (5000, 64)])
@pytest.mark.parametrize("name", INITS)
def test_rows_are_those_of_the_whole_table(name, shape):
    init = lambda rng: INITS[name](rng, shape)
    whole, rows = np.asarray(init(RNG)), rows_of(init, RNG, SIZE)
    assert rows
    for first in (0, 1, 299, 700, shape[0] - SIZE):
        assert np.asarray(rows(RNG, first)).tobytes() == whole[first : first + SIZE].tobytes()
    other = jax.random.key(4)
    assert np.asarray(rows(other, 5)).tobytes() == np.asarray(init(other))[5 : 5 + SIZE].tobytes()


def test_places_past_32_bits():
    """A number's place in the table has 64 bits. Only few rows of this one fit into memory."""
    shape = (2**26 + 5, 64)
    rows = rows_of(lambda rng: jax.random.bits(rng, shape, "uint32"), RNG, 4)
    assert rows
    place = (2**26 + 1) * 64 + np.arange(4 * 64, dtype=np.uint64)
    words = [(place >> 32).astype(np.uint32), place.astype(np.uint32)]
    drawn = jax.extend.random.threefry_2x32(jax.random.key_data(RNG), jnp.concatenate(words))
    expected = np.bitwise_xor(*np.split(np.asarray(drawn), 2)).reshape(4, 64)
    np.testing.assert_array_equal(rows(RNG, 2**26 + 1), expected)


@pytest.mark.parametrize(
    "init",
    [
        lambda rng: jnp.zeros((2000, 3)).at[5].set(1.0),
        lambda rng: jnp.cumsum(jax.random.normal(rng, (2000, 3)), axis=0),
        lambda rng: jax.random.permutation(rng, 2000),
        lambda rng: jax.random.normal(rng, (50, 3)),  # small
        lambda rng: jax.random.normal(rng, (3, 2000)).T,
        lambda rng: jnp.broadcast_to(jax.random.normal(rng, (2000,)), (2000, 2000)),  # a number by column
    ],
)
@pytest.mark.parametrize("size", [1, 10])
def test_what_cannot_be_drawn_by_rows_is_not(init, size):
    assert rows_of(init, RNG, size) is None


def test_a_leaf_is_made_without_the_others():
    made = []
    seen = lambda: made.append(1)

    def init(rng):
        jax.debug.callback(seen)
        return {"a": jax.random.normal(rng, (4,)), "b": 2 * jax.random.normal(rng, (3, 2))}

    np.testing.assert_array_equal(leaf_of(lambda rng: init(rng)["b"], RNG), init(RNG)["b"])
    jax.effects_barrier()
    assert len(made) == 1  # by the call above, not by `leaf_of`
