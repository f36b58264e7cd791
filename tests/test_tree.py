from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from partwise import tree
from partwise.types import nearest, unknown


def test_flatten_names_leaves_by_their_path():
    nested = {"item": {"table": 1, "bias": 2}, "layers": [3, {"w": 4}]}
    assert tree.flatten(nested) == {"item/bias": 2, "item/table": 1, "layers/0": 3, "layers/1/w": 4}


def test_unflatten_is_the_inverse_of_flatten():
    nested = {"b": [1, 2, {"c": 3}], "a": (4, {"x": 5})}
    flat = tree.flatten(nested)
    assert tree.unflatten(jax.tree_util.tree_structure(nested), tuple(flat), flat) == nested


def test_num_bytes_counts_a_scalar_as_one_value():
    assert tree.num_bytes((), jnp.float32) == 4
    assert tree.num_bytes((3, 5), jnp.bfloat16) == 30
    assert tree.num_bytes((3, 0), jnp.float32) == 0


def test_all_finite_sees_one_bad_value_anywhere():
    assert tree.all_finite({})
    assert tree.all_finite({"a": jnp.ones(3), "b": jnp.zeros(())})
    for bad in (jnp.nan, jnp.inf, -jnp.inf):
        assert not tree.all_finite({"a": jnp.ones(3), "b": jnp.array([0, bad])})


def test_where_takes_whole_trees():
    yes, no = {"a": jnp.ones(2), "b": jnp.ones(())}, {"a": jnp.zeros(2), "b": jnp.full((), jnp.nan)}
    chosen = tree.where(jnp.asarray(True), yes, no)
    np.testing.assert_array_equal(chosen["a"], [1, 1])
    assert chosen["b"] == 1
    assert np.isnan(tree.where(jnp.asarray(False), yes, no)["b"])


def test_nearest_offers_close_names_or_all_if_few():
    assert nearest("adagrat", ["sgd", "adagrad", "yogi"]) == "nearest: adagrad"
    assert nearest("zzz", ["b", "a"]) == "known: a, b"
    assert nearest("zzz", []) == "there are none"
    assert str(unknown("task", "movilens", ["movielens"])) == "unknown task 'movilens' (nearest: movielens)"
