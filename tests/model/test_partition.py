from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from partwise.model.partition import frozen, keyed, local, partition, shared
from partwise.model.spec import Model
from partwise.tree import flatten
from partwise.types import UserError


def model_of(shapes: dict) -> Model:
    """A model that is nothing but a tree of leaves; every value occurs once in a leaf."""

    def init(rng: jax.Array) -> dict:
        make = lambda shape: jnp.asarray(np.arange(1, 1 + np.prod(shape), dtype=np.float32).reshape(shape))
        return jax.tree_util.tree_map(make, shapes, is_leaf=lambda x: isinstance(x, tuple))

    return Model(init, None, None)


PLAIN = model_of({"user": (3,), "item": {"table": (7, 3), "bias": (7,)}, "out": (2, 7, 3), "scale": ()})

names = st.sampled_from(["a", "b", "c", "d", "long name", "0"])
num_keys = 4


@st.composite
def leaves(draw):
    """(shape, role): keyed ones have their key axis anywhere, counted from the front or from the back."""
    shape = draw(st.lists(st.sampled_from([1, 3]), max_size=2))
    kind = draw(st.sampled_from(["shared", "add", "average", "keyed", "local", "zero", "learned", "frozen"]))
    if kind == "keyed":
        axis = draw(st.integers(0, len(shape)))
        shape.insert(axis, num_keys)
        return tuple(shape), keyed("k", axis=axis if draw(st.booleans()) else axis - len(shape))
    twins = {"add": shared(twin="add"), "average": shared(twin="average"), "shared": shared()}
    locals_ = {"local": local(), "zero": local(initial="zero"), "learned": local(initial="learned")}
    return tuple(shape), (twins | locals_ | {"frozen": frozen()})[kind]


trees = st.dictionaries(
    names, st.recursive(leaves(), lambda inner: st.dictionaries(names, inner, min_size=1)), min_size=1
)


@settings(max_examples=25)
@given(trees)
def test_split_and_merge_are_exact_inverses(tree):
    is_leaf = lambda x: isinstance(x, tuple)
    roles = {path: leaf[1] for path, leaf in _paths(tree).items()}
    assume(any(role.kind in ("shared", "keyed") or role.initial == "learned" for role in roles.values()))
    model = model_of(jax.tree_util.tree_map(lambda leaf: leaf[0], tree, is_leaf=is_leaf))
    parts = partition(model, roles)
    params = model.init(None)
    server, own = parts.split(params)
    back = parts.merge(server, own)
    assert jax.tree_util.tree_structure(back) == jax.tree_util.tree_structure(params)
    for path, leaf in flatten(params).items():
        np.testing.assert_array_equal(flatten(back)[path], leaf)
        role = roles[path]
        assert (path in server) == (role.kind != "local")
        assert (path in own) == (role.kind == "local" or role.twin is not None)
        assert ("default/" + path in server) == (role.initial == "learned")
        if role.kind == "keyed":
            assert server[path].shape[0] == num_keys
            np.testing.assert_array_equal(
                np.asarray(server[path])[2], np.take(np.asarray(leaf), 2, axis=role.axis)
            )


def _paths(tree, prefix=""):
    flat = {}
    for name, value in tree.items():
        path = f"{prefix}{name}"
        flat |= _paths(value, path + "/") if isinstance(value, dict) else {path: value}
    return flat


def test_merge_takes_slices_as_well_as_whole_tables():
    parts = partition(PLAIN, {"user": local(), "item/*": keyed("item"), "out": keyed("item", axis=1)})
    server, own = parts.split(PLAIN.init(None))
    rows = jnp.array([5, 1])
    sliced = {path: leaf[rows] if path in parts.of("keyed") else leaf for path, leaf in server.items()}
    merged = parts.merge(sliced, own)
    assert merged["out"].shape == (2, 2, 3)
    np.testing.assert_array_equal(merged["out"], PLAIN.init(None)["out"][:, rows])
    np.testing.assert_array_equal(merged["item"]["bias"], [6, 2])


def test_roles_are_found_by_kind_space_and_number_of_keys():
    parts = partition(PLAIN, {"user": local(), "item/*": keyed("item"), "out": keyed("item", axis=1)})
    assert parts.of("shared") == ("scale",)
    assert parts.of("local", "keyed") == ("item/bias", "item/table", "out", "user")
    assert parts.spaces == {"item": ("item/bias", "item/table", "out")}
    assert parts.num_keys("item") == 7
    assert parts.local_paths == ("user",)
    assert parts.columns == {"item": ("item",)}


def test_a_pattern_reaches_into_subtrees_and_the_rest_is_shared():
    parts = partition(PLAIN, {"item*": frozen()})
    assert parts.of("frozen") == ("item/bias", "item/table")
    assert parts.of("shared") == ("out", "scale", "user")


def test_describe_counts_the_bytes_of_a_client():
    rules = {
        "user": local(initial="learned"),
        "item/*": keyed("item"),
        "out": keyed("item", axis=1),
        "scale": frozen(),
    }
    lines = {line.path: line for line in partition(PLAIN, rules).describe({"item": 2.5})}
    assert [(path, line.bytes_down, line.bytes_up) for path, line in lines.items()] == [
        ("item/bias", 10, 10),  # 2.5 of 7 keys, 4 bytes each
        ("item/table", 30, 30),
        ("out", 60, 60),  # 2.5 keys of 2 x 3 values
        ("scale", 4, 0),
        ("user", 12, 12),  # its learned default travels
    ]
    assert lines["out"].role == "keyed(item, axis=1)"
    assert lines["user"].role == "local(initial=learned)"
    assert lines["out"].shape == (2, 7, 3)
    whole = {line.path: line.bytes_down for line in partition(PLAIN, rules).describe()}
    assert whole == {"item/bias": 28, "item/table": 84, "out": 168, "scale": 4, "user": 12}


def test_a_local_leaf_and_a_twin_cost_what_travels():
    lines = partition(PLAIN, {"user": local(), "out": shared(twin="add")}).describe()
    sizes = {line.path: (line.role, line.bytes_down, line.bytes_up) for line in lines}
    assert sizes["user"] == ("local", 0, 0)
    assert sizes["out"] == ("shared(twin=add)", 168, 168)


@pytest.mark.parametrize("twin", ["add", "average"])
def test_a_twin_starts_where_it_changes_nothing_and_then_counts(twin):
    parts = partition(PLAIN, {"user": shared(twin=twin)})
    server, own = parts.split(PLAIN.init(None))
    np.testing.assert_array_equal(parts.merge(server, own)["user"], [1, 2, 3])
    own = {"user": own["user"] + jnp.array([2.0, 0, 0])}
    moved = parts.merge(server, own)["user"]
    np.testing.assert_array_equal(moved, [3, 2, 3] if twin == "add" else [2, 2, 3])
    assert parts.local_paths == ("user",)


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ({"itm/table": keyed("item")}, r"the rule 'itm/table' matches no parameter \(nearest: item/table"),
        ({"zzz": local()}, r"the rule 'zzz' matches no parameter \(known: item/bias, item/table, out"),
        ({"item": keyed("item")}, r"the rule 'item' matches no parameter .*a pattern such as 'item/\*'"),
        (
            {"item/*": keyed("item"), "*/table": local()},
            r"'item/table' is matched by 2 rules: 'item/\*', '\*/table'",
        ),
        ({"user": "local"}, r"the rule 'user' gives 'local', not a role such as shared\(\)"),
        ({"user": local}, r"the rule 'user' gives <function local.*not a role"),
        (
            {"item/*": keyed("item"), "out": keyed("item")},
            r"key space 'item' cuts leaves of different length, in keys \(item/bias: 7, item/table: 7, out: 2\)",
        ),
        (
            {"out": keyed("item", axis=3)},
            r"'out' has shape \(2, 7, 3\) and no axis 3 to cut by key space 'item'",
        ),
        ({"out": keyed("item", axis=-4)}, r"no axis -4 to cut"),
        ({"scale": keyed("item")}, r"'scale' has shape \(\) and no axis 0"),
        (
            {"*": local()},
            r"nothing of this model is learned together: all of item/bias, .* is local or frozen",
        ),
        ({"*/*": frozen(), "[ous]*": local()}, r"Make at least one of them shared\(\) or keyed"),
    ],
)
def test_rules_that_cannot_be_meant_are_refused(rules, message):
    with pytest.raises(UserError, match=message):
        partition(PLAIN, rules)


def test_columns_of_a_space_that_no_rule_names_are_refused():
    with pytest.raises(UserError, match="columns are given for key space 'word', which no rule names"):
        partition(PLAIN, {"item/*": keyed("item")}, columns={"word": ("w",)})


def test_a_column_in_two_spaces_is_refused():
    """A batch's ids are re-numbered once; they cannot point into the rows of two spaces."""
    rules = {"item/table": keyed("a"), "item/bias": keyed("b")}
    with pytest.raises(UserError, match="x"):
        partition(PLAIN, rules, columns={"a": ("y", "x"), "b": ("x",)})


def test_columns_given_as_one_word_are_that_column():
    assert partition(PLAIN, {"out": keyed("item")}, columns={"item": "movie"}).columns == {"item": ("movie",)}
