"""The primitive: eq. 4 and 5, and section 3.3's identities."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from partwise.model import psi
from partwise.model.partition import keyed, partition
from partwise.model.spec import Model
from partwise.selection import select as s
from partwise.types import UserError

X = jnp.arange(12.0).reshape(4, 3)


def test_slices_come_in_the_clients_order_and_may_repeat():
    np.testing.assert_array_equal(s.select(X, [2, 0, 2], s.take()), X[jnp.array([2, 0, 2])])
    np.testing.assert_array_equal(s.select(X, [2, 1], s.take(axis=1)), X[:, jnp.array([2, 1])].T)


def test_clients_may_have_no_keys():
    assert s.select(X, [], s.take()).shape == (0, 3)
    np.testing.assert_array_equal(s.deselect(jnp.zeros((0, 3)), [], 4), np.zeros((4, 3)))


@settings(deadline=None, max_examples=30)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=8))
def test_deselect_is_the_transpose_of_select(keys):
    """<select(x), y> = <x, deselect(y)>, and every slice of distinct keys comes back in its place."""
    y = jnp.arange(3.0 * len(keys)).reshape(-1, 3)
    there, back = s.select(X, keys, s.take()), s.deselect(y, keys, 4)
    assert float(jnp.vdot(there, y)) == pytest.approx(float(jnp.vdot(X, back)))
    distinct = sorted(set(keys))
    again = s.deselect(s.select(X, distinct, s.take()), distinct, 4)
    np.testing.assert_array_equal(again[jnp.array(distinct)], X[jnp.array(distinct)])
    assert float(jnp.abs(jnp.delete(again, jnp.array(distinct), axis=0)).sum()) == 0


def test_a_broadcast_is_a_select_of_any_one_key():
    np.testing.assert_array_equal(s.select(X, [0], s.whole())[0], X)


def test_a_select_and_a_broadcast_merge():
    rows, bias = s.select((X, jnp.ones(2)), [3, 1], s.with_broadcast(s.take()))
    np.testing.assert_array_equal(rows, X[jnp.array([3, 1])])
    np.testing.assert_array_equal(bias, np.ones((2, 2)))


def test_two_selects_merge():
    y = jnp.arange(5.0)
    pairs = jnp.array([[3, 4], [1, 0]])
    first, second = jnp.transpose(pairs)
    rows, values = jax.vmap(lambda k: s.both(s.take(), s.take())((X, y), k))(pairs)
    np.testing.assert_array_equal(rows, s.select(X, first, s.take()))
    np.testing.assert_array_equal(values, s.select(y, second, s.take()))


def test_a_bucket_is_its_members():
    np.testing.assert_array_equal(s.select(X, [1], s.bucketed(s.take(), 2))[0], X[2:4])


@pytest.mark.parametrize("how", psi.PSIS.values(), ids=psi.PSIS)
@settings(deadline=None, max_examples=50)
@given(st.lists(st.floats(-1e4, 1e4, width=32), min_size=3, max_size=3), st.sampled_from([0.0, 1e-6, 1.0]))
@example([0.0, 0.0, 1.1754944e-38], 1.0)
def test_what_arrives_is_within_the_bound(how, values, scale):
    rows = jnp.array([values, [0.0, 0.0, 0.0]]) * scale
    arrived = s.select(rows, [0, 1], s.encoded(s.take(), how))
    assert bool(jnp.all(jnp.abs(arrived - rows) <= how.bound(rows)[:, None] * 1.001))
    assert arrived.dtype == rows.dtype


def test_encodings_are_smaller():
    assert [p.row_bytes((64,), jnp.float32) for p in (psi.take, psi.float16, psi.int8)] == [256, 128, 68]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ([4], r"keys 4\.\.4 are out of range: there are 0\.\.3"),
        ([-1], "out of range"),
        ([0.5], "whole numbers"),
    ],
)
def test_bad_keys_are_refused(keys, message):
    with pytest.raises(UserError, match=message):
        s.select(X, keys, s.take(), num_keys=4)


def test_the_psi_of_a_key_space_cuts_all_its_leaves():
    """A row of the embedding, a column of the output, an entry of the bias, and a block of what comes after."""
    start = {
        "embedding": jnp.arange(8.0).reshape(4, 2),
        "out": jnp.arange(12.0).reshape(3, 4),
        "bias": jnp.arange(4.0),
        "next": jnp.arange(24.0).reshape(12, 2),
        "mixed": jnp.arange(12.0),
    }
    parts = partition(
        Model(lambda rng: start, None, None),  # pyright: ignore[reportArgumentType]
        {
            "embedding": keyed("word"),
            "out": keyed("word", axis=1),
            "bias": keyed("word"),
            "next": keyed("word", block=3),
            "mixed": keyed("word", block=3, interleaved=True),
        },
        columns={"word": ()},
    )
    server, _ = parts.split(start)
    rows = s.select(server, [2, 0], s.keyed_leaves(parts, "word"))
    got = parts.merge(rows, {})
    keys = np.array([2, 0])
    np.testing.assert_array_equal(got["embedding"], start["embedding"][keys])
    np.testing.assert_array_equal(got["out"], start["out"][:, keys])
    np.testing.assert_array_equal(got["bias"], start["bias"][keys])
    np.testing.assert_array_equal(got["next"], start["next"][np.array([6, 7, 8, 0, 1, 2])])
    np.testing.assert_array_equal(got["mixed"], start["mixed"][np.array([2, 0, 6, 4, 10, 8])])
    np.testing.assert_array_equal(parts.merge(server, {})["mixed"], start["mixed"])
