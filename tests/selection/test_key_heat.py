"""The heat of a model's key spaces, and its file."""

import jax.numpy as jnp
import numpy as np
import pytest

from partwise.checkpoint import save_arrays
from partwise.data.heat import Heat
from partwise.model.partition import keyed, partition
from partwise.model.spec import Model
from partwise.selection.key_heat import count_heats, load_heats, save_heats
from partwise.selection.keys import own_keys
from partwise.types import UserError


@pytest.fixture(scope="module")
def parts():
    """Three words share a key of `word`, which two columns name; nobody names keys of `unit`."""
    model = Model(
        lambda rng: {"words": jnp.zeros((6, 2)), "items": jnp.zeros(9), "units": jnp.zeros(4)}, None, None
    )
    rules = {"words": keyed("word", block=3), "items": keyed("item"), "units": keyed("unit")}
    return partition(model, rules, columns={"word": ("title", "tokens"), "unit": ()})


def test_heat_counts_the_keys_that_clients_ask_for(parts, make_store):
    rng = np.random.default_rng(0)
    counts = rng.integers(0, 4, 30)
    total = int(counts.sum())
    tokens = rng.integers(-1, 6, (total, 2))
    store = make_store(counts, title=rng.integers(0, 6, total), tokens=tokens, item=rng.integers(0, 9, total))
    heats = count_heats(store, parts)
    assert list(heats) == ["item", "word"]
    for space, own in own_keys(store, parts)[0].items():
        if space in heats:
            expected = np.bincount(own.keys, minlength=parts.num_keys(space))
            np.testing.assert_array_equal(heats[space].counts, expected)
    assert heats["item"].total == (counts > 0).sum()
    assert count_heats(store, parts, "samples")["word"].total == total


def test_a_file_brings_heat_back(tmp_path):
    heats = {"item": Heat("item", np.array([3, 0, 1]), 4), "user": Heat("user", np.array([9]), 9, "samples")}
    save_heats(tmp_path / "heat.safetensors", heats)
    loaded = load_heats(tmp_path / "heat.safetensors")
    assert list(loaded) == ["item", "user"]
    for space, heat in heats.items():
        found = loaded[space]
        np.testing.assert_array_equal(found.counts, heat.counts)
        assert (found.space, found.by, found.total) == (space, heat.by, heat.total)


def test_wrong_files(tmp_path):
    path = tmp_path / "heat.safetensors"
    with pytest.raises(UserError, match=r"could not read '.*heat.safetensors': No such file"):
        load_heats(path)
    path.write_bytes(b"no heat at all")
    with pytest.raises(UserError, match="damaged or foreign"):
        load_heats(path)
    save_arrays(path, {"item": np.zeros((3, 2))}, {"round": 3})
    with pytest.raises(
        UserError, match=r"is no file of heat \(it holds item\): give one that `partwise heat"
    ):
        load_heats(path)
    for counts, about, message in (
        ({}, {"by": "clients", "total": 4}, "damaged .KeyError"),
        ({"item": np.array([5])}, {"by": "clients", "total": 4}, "held by 5 of 4"),
        ({"item": np.array([5])}, {"by": "clients"}, "damaged .TypeError"),
    ):
        save_arrays(path, counts, {"format": "partwise-heat", "spaces": {"item": about}})
        with pytest.raises(UserError, match=message):
            load_heats(path)
