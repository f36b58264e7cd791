from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from partwise.client.split import STRIDES, Subset, alternate, everything, halves, in_other_order, last, none
from partwise.types import UserError


def members(subset: Subset, n: int) -> list[int]:
    return [int(subset.index(j, n)) for j in range(int(subset.count(n)))]


@pytest.mark.parametrize("batch_size", [1, 2, 3, 5, 16, 60])
def test_alternate_deals_batches_in_turn(batch_size):
    for n in range(51):
        batches = [list(range(n))[i : i + batch_size] for i in range(0, n, batch_size)]
        assert members(alternate(batch_size).support, n) == [j for batch in batches[0::2] for j in batch]
        assert members(alternate(batch_size).query, n) == [j for batch in batches[1::2] for j in batch]


@pytest.mark.parametrize("percent", [1, 30, 50, 80, 99])
def test_halves_cuts_once(percent):
    for n in range(51):
        cut = -(-n * percent // 100)
        assert members(halves(percent).support, n) == list(range(cut))
        assert members(halves(percent).query, n) == list(range(cut, n))


def test_none_uses_everything_twice():
    for n in range(51):
        assert members(none().support, n) == members(none().query, n) == list(range(n))


@pytest.mark.parametrize("split", [alternate(3), halves(30), none()], ids=["alternate", "halves", "none"])
def test_a_split_is_the_same_inside_jit(split):
    """Numbers of a lane are traced values; Python's are the twin."""
    n = np.arange(20)
    for subset in split:
        counts = jax.jit(subset.count)(jnp.asarray(n))
        assert counts.tolist() == [int(subset.count(int(k))) for k in n]
        index = jax.jit(lambda j, subset=subset: subset.index(j, 19))(jnp.arange(int(subset.count(19))))
        assert index.tolist() == members(subset, 19)


def test_everything_is_the_identity():
    assert members(everything, 4) == [0, 1, 2, 3]


def test_splits_that_make_no_sense_are_refused():
    with pytest.raises(UserError, match="alternate: the batch size must be at least 1, not 0"):
        alternate(0)
    for percent in (0, 100, -5):
        with pytest.raises(UserError, match=f"between 1 and 99 percent, not {percent}"):
            halves(percent)


def test_last_examples_are_query_and_all_before_them_support():
    for count in (1, 3):
        for n in range(8):
            support, query = members(last(count).support, n), members(last(count).query, n)
            assert support + query == list(range(n))
            assert len(query) == min(n, count)
    with pytest.raises(UserError, match="at least 1"):
        last(0)


@pytest.mark.parametrize("n", [0, 1, 2, 3, 10, 11, 10_007, 20_014, 50_000])
@pytest.mark.parametrize("stride", STRIDES[::7])
def test_another_order_has_every_example_once(n, stride):
    split = in_other_order(alternate(5), stride, first=n // 3)
    found = [subset.index(np.arange(subset.count(n)), n) for subset in split]
    assert [len(part) for part in found] == [subset.count(n) for subset in alternate(5)]
    np.testing.assert_array_equal(np.sort(np.concatenate(found)), np.arange(n))
