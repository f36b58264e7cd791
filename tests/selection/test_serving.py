"""What serving slices costs: by hand, as properties, and the same however rounds are run."""

from __future__ import annotations

from itertools import chain

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from partwise.model.partition import frozen, keyed, local, partition, with_psi
from partwise.model.psi import float16, int8
from partwise.model.spec import Metric, Model, squared_error
from partwise.privacy.buckets import make_layout
from partwise.privacy.retrieval import query_sizes
from partwise.selection.choose import own, top
from partwise.selection.serving import (
    Demand,
    Served,
    check_way,
    most_keys,
    num_distinct,
    serve,
    sizes_of,
    total,
)
from partwise.types import UserError

K, UNITS = 10, 4


def parts(psi="take"):
    """10 words of 3 floats and a bias, 4 units of 2 floats, 5 shared floats, 1 frozen, a default of 2."""

    def init(rng: jax.Array) -> dict:
        shapes = {"word": (K, 3), "bias": (K,), "unit": (2, UNITS), "dense": (5,), "scale": (1,), "own": (2,)}
        return {name: jnp.zeros(shape) for name, shape in shapes.items()}

    error = lambda outputs, batch: squared_error(outputs, batch, "y")
    model = Model(init, lambda params, batch, rng: params["dense"], error, {"rmse": Metric(error)})
    rules = {
        "word": keyed("word", psi=psi),
        "bias": keyed("word"),
        "unit": keyed("unit", axis=1, psi=psi),
        "scale": frozen(),
        "own": local(initial="learned"),
    }
    return partition(model, rules, columns={"unit": ()})


def demand(*clients):
    return Demand(len({*chain(*clients)}), np.array([*map(len, clients)], int))


THREE = {"word": demand([0, 1], [1], [1, 2, 9]), "unit": demand([3], [3], [0])}


def test_sizes_are_those_of_the_leaves():
    sizes = sizes_of(parts())
    assert (sizes.fixed, sizes.trained) == (4 * (5 + 1 + 2), 4 * (5 + 2))
    assert sizes.slices == sizes.values == {"word": 16, "unit": 8}
    assert sizes_of(parts("int8")).slices == {"word": 3 + 4 + 4, "unit": 2 + 4}
    assert sizes_of(with_psi(parts(), int8)).slices == {"word": 3 + 4 + 1 + 4, "unit": 2 + 4}
    assert sizes_of(with_psi(parts(), float16)).values == sizes.values


def test_three_clients_by_hand():
    """Words 2, 1, 3 and a unit each: 9 requests, of which words 0, 1, 2, 9 and units 0, 3 are different."""
    served = serve(sizes_of(parts()), 3, THREE)
    whole = 32 + 10 * 16 + 4 * 8
    rows = 6 * 16 + 3 * 8
    update = 3 * 28 + rows
    assert served["broadcast"] == Served(
        clients=3,
        bytes_down=3 * whole,
        most_down=whole,
        bytes_up=update,
        most_up=28 + 3 * 16 + 8,
        requests=9,
        distinct=6,
        from_server=3 * whole,
    )
    assert served["on_demand"] == Served(
        clients=3,
        bytes_down=3 * 32 + rows,
        most_down=32 + 3 * 16 + 8,
        bytes_up=update + 9 * 4,
        most_up=28 + 3 * 16 + 8 + 4 * 4,
        requests=9,
        distinct=6,
        from_server=3 * 32 + rows,
        computed=9,
        cache_hits=3,
        peak=9,
    )
    assert served["pregenerated"] == served["on_demand"]._replace(
        from_server=3 * 32 + 10 * 16 + 4 * 8, from_cdn=rows, computed=14, cache_hits=0, peak=0
    )


def test_private_messages_have_one_size_for_all_clients():
    sizes = sizes_of(parts(), {"word": top(3), "unit": top(2)})
    word, unit = (query_sizes(make_layout(*each, b""), row) for each, row in (((K, 3), 16), ((UNITS, 2), 8)))
    assert (sizes.seeds, sizes.to_both, sizes.answer) == (32, 0, word.answer + unit.answer)
    assert sizes.sealed == 48 + 16 + word.to_second + 16 + unit.to_second
    served = serve(sizes, 3, THREE)
    assert served["private"] == served["pregenerated"]._replace(
        bytes_down=3 * (32 + sizes.answer),
        most_down=32 + sizes.answer,
        bytes_up=served["broadcast"].bytes_up + 3 * (32 + sizes.sealed),
        most_up=served["broadcast"].most_up + 32 + sizes.sealed,
        from_server=3 * (32 + sizes.answer + sizes.sealed) + 10 * 16 + 4 * 8,
        from_cdn=0,
    )
    assert serve(sizes, 0, {})["private"].bytes_down == 0


def test_without_a_bound_private_messages_have_room_for_all_keys():
    bounds = most_keys(parts(), {"word": own(), "unit": top(2)})
    assert bounds == {"word": K, "unit": 2}
    assert most_keys(parts(), {}) == {"word": K, "unit": UNITS}
    fewer, all_keys = (sizes_of(parts(), choices) for choices in ({"word": top(1), "unit": top(1)}, None))
    assert fewer.answer < all_keys.answer


def test_an_encoding_makes_slices_smaller_and_nothing_else():
    plain, encoded = (serve(sizes_of(p), 3, THREE) for p in (parts(), parts("int8")))
    assert encoded["broadcast"] == plain["broadcast"]
    rows = 6 * (3 + 4 + 4) + 3 * (2 + 4)
    assert encoded["on_demand"].bytes_down == 3 * 32 + rows
    assert encoded["on_demand"].bytes_up == plain["on_demand"].bytes_up
    assert encoded["pregenerated"].from_cdn == rows


keys_of = lambda num_keys: st.lists(st.integers(0, num_keys - 1), max_size=6, unique=True)
clients = st.lists(st.tuples(keys_of(K), keys_of(UNITS)), max_size=5)


@given(clients)
def test_whatever_is_asked_for(cohort):
    demands = {"word": demand(*(w for w, _ in cohort)), "unit": demand(*(u for _, u in cohort))}
    sizes = sizes_of(PARTS)
    served = serve(sizes, len(cohort), demands)
    requests = sum(len(words) + len(units) for words, units in cohort)
    whole = sum(4 * int(np.prod(PARTS.shapes[path].shape)) for path in PARTS.paths)
    assert served["broadcast"].bytes_down == len(cohort) * whole
    for each in served.values():
        assert each.distinct <= each.requests == requests
        assert each.bytes_down <= len(cohort) * each.most_down
        assert each.peak <= each.computed
    on_demand, ahead = served["on_demand"], served["pregenerated"]
    assert on_demand.cache_hits == requests - on_demand.distinct
    assert (on_demand.bytes_down, on_demand.bytes_up) == (ahead.bytes_down, ahead.bytes_up)
    assert on_demand.bytes_down <= served["broadcast"].bytes_down
    assert ahead.computed == K + UNITS


PARTS = parts()


def test_rounds_add_up_and_peaks_do_not():
    one, two = serve(sizes_of(PARTS), 3, THREE), serve(sizes_of(PARTS), 0, {})
    both = total([one["on_demand"], two["on_demand"], one["on_demand"]])
    assert (both.clients, both.bytes_down) == (6, 2 * one["on_demand"].bytes_down)
    assert (both.peak, both.most_down) == (9, one["on_demand"].most_down)
    assert total([two["pregenerated"]]).computed == K + UNITS


@pytest.mark.parametrize("num_keys", [20, 10_000])
def test_different_keys_are_counted_at_any_size(num_keys):
    keys = np.random.default_rng(0).integers(0, 20, 30)
    assert num_distinct(keys, num_keys) == len(set(keys.tolist()))
    assert num_distinct(keys[:0], num_keys) == 0


def test_an_unknown_way_is_named():
    assert check_way("broadcast") == "broadcast"
    with pytest.raises(UserError, match=r"serving.way.*'on-demand' \(nearest: on_demand"):
        check_way("on-demand")
