"""Heat: counted, added, corrected by; the shape of it."""

import zipfile

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from partwise.data import heat as heats
from partwise.data.heat import Heat, add, coefficients, count_heat, histogram, summarize
from partwise.data.store import ClientStore
from partwise.types import UserError

K = 7


@st.composite
def populations(draw):
    """Clients, some without examples, whose rows have one id in `a` and three in `b`, -1 for none."""
    counts = np.array(draw(st.lists(st.integers(0, 5), min_size=1, max_size=8)))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    a = rng.integers(-1, K, counts.sum()).astype(np.int16)
    b = rng.integers(-1, K, (counts.sum(), 3)).astype(np.int32)
    return ClientStore({"a": a, "b": b}, np.cumsum(counts) - counts, counts, np.arange(len(counts)))


def by_hand(store, by, block=1):
    counts = np.zeros(-(-K // block), int)
    for position in range(store.num_clients):
        rows = store.examples(position)
        held = {int(i) // block for name in ("a", "b") for i in rows[name].ravel() if i >= 0}
        for key in held:
            counts[key] += 1 if by == "clients" else store.counts[position]
    return counts


def count(store, by="clients", **options):
    return count_heat(store, "key", ("a", "b"), **{"num_keys": K, **options}, by=by)


@pytest.mark.parametrize("by", ["clients", "samples"])
@given(store=populations(), ids=st.integers(1, 30))
def test_counting_equals_counting_by_hand_however_blocks_are_cut(by, store, ids):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(heats, "IDS_PER_BLOCK", ids)
        found = count(store, by)
    np.testing.assert_array_equal(found.counts, by_hand(store, by))
    assert found.total == ((store.counts > 0).sum() if by == "clients" else store.num_examples)
    assert (found.space, found.by, found.num_keys) == ("key", by, K)


@pytest.mark.parametrize("by", ["clients", "samples"])
@given(store=populations(), cut=st.integers(0, 8))
def test_adding_new_clients_equals_counting_all_again(by, store, cut):
    old, new = (
        np.arange(min(cut, store.num_clients)),
        np.arange(min(cut, store.num_clients), store.num_clients),
    )
    together = add(count(store.take(old), by), count(store.take(new), by))
    again = count(store, by)
    np.testing.assert_array_equal(together.counts, again.counts)
    assert together.total == again.total


@given(store=populations())
def test_ids_of_a_block_share_a_key(store):
    found = count(store, num_keys=3, block=3)
    np.testing.assert_array_equal(found.counts, by_hand(store, "clients", block=3))


def test_a_store_on_disk_counts_as_in_memory(small, tmp_path):
    from partwise.data.store import open_store

    small.save(tmp_path / "store")
    on_disk = count_heat(open_store(tmp_path / "store"), "item")
    assert on_disk.counts.tolist() == count_heat(small, "item").counts.tolist() == [2, 2, 1, 1]
    assert count_heat(small, "item", by="samples").counts.tolist() == [3, 5, 3, 3]
    assert count_heat(small.take([0, 2]), "item").total == 2


def test_coefficients():
    heat = Heat("item", np.array([10, 4, 1, 0]), 10)
    assert coefficients(heat).dtype == np.float32
    assert coefficients(heat).tolist() == [1, 2.5, 10, 1]  # 1 where nobody holds the key
    assert coefficients(heat, cap=3).tolist() == [1, 2.5, 3, 1]
    assert coefficients(heat, cap=1, num_keys=4).tolist() == [1, 1, 1, 1]
    with pytest.raises(UserError, match="has 4 keys, and the model has 5: count it again"):
        coefficients(heat, num_keys=5)
    for cap in (0.5, float("nan")):
        with pytest.raises(UserError, match=f"cap is {cap}: give at least 1"):
            coefficients(heat, cap=cap)


def test_summary_and_histogram():
    heat = Heat("item", np.array([0, 1, 1, 2, 3, 4, 7, 8, 0]), 9)
    assert [tuple(each) for each in histogram(heat)] == [(1, 1, 2), (2, 3, 2), (4, 7, 2), (8, 15, 1)]
    told = summarize(heat)
    assert (told["keys"], told["keys_held"], told["keys_not_held"], told["keys_with_one"]) == (9, 7, 2, 2)
    assert (told["n_min"], told["n_max"], told["dispersion"], told["percentiles"]["p50"]) == (1, 8, 8, 3)
    assert [tuple(each) for each in histogram(Heat("item", np.array([40, 0]), 50))] == [(32, 63, 1)]
    nobody = summarize(Heat("item", np.zeros(3, int), 5))
    assert (nobody["n_min"], nobody["dispersion"], nobody["percentiles"], nobody["histogram"]) == (
        None,
        None,
        {},
        [],
    )


@given(st.lists(st.integers(1, 2**40), min_size=1, max_size=20))
def test_bins_hold_every_key_once(counts):
    heat = Heat("item", np.array(counts), 2**41, "samples")
    for low, high, keys in histogram(heat):
        assert keys == sum(low <= count <= high for count in counts)
    assert sum(each.keys for each in histogram(heat)) == len(counts)


@pytest.mark.parametrize(
    ("counts", "total", "by", "message"),
    [
        ([1, 3], 2, "clients", "key 1 is held by 3 of 2 clients: more than there are"),
        ([1, -1], 2, "clients", "count of -1"),
        ([1.0, 0.5], 2, "clients", "type float64 .* one whole number per key"),
        ([[1, 2]], 2, "clients", r"shape \(1, 2\)"),
        ([1, 2], 2, "users", "unknown unit of the heat of key space 'item' 'users'"),
        ([1, 2], 2.5, "clients", "total of 2.5: give a whole number of clients"),
    ],
)
def test_heat_that_cannot_be_is_refused(counts, total, by, message):
    with pytest.raises(UserError, match=message):
        Heat("item", np.array(counts), total, by)


def test_mistakes(small):
    with pytest.raises(UserError, match="unknown column 'items'"):
        count_heat(small, "items")
    with pytest.raises(UserError, match="column 'rating' holds values, not keys"):
        count_heat(small, "rating")
    with pytest.raises(UserError, match="column 'rating' holds float32, but keys are whole numbers"):
        count_heat(small, "rating", num_keys=5)
    with pytest.raises(UserError, match=r"holds keys 0..3, but key space 'item' has only 0..2 \(and -1"):
        count_heat(small, "item", num_keys=3)
    with pytest.raises(UserError, match="no column holds the keys of space 'unit'"):
        count_heat(small, "unit", ())
    heat = count_heat(small, "item")
    for other, message in (
        (Heat("user", heat.counts, 3), "space 'item' and 'user'"),
        (Heat("item", heat.counts, 14, "samples"), "by 'clients' and 'samples'"),
        (Heat("item", heat.counts[:3], 3), "numbers of keys 4 and 3"),
    ):
        with pytest.raises(UserError, match=message):
            add(heat, other)


def test_the_authors_coefficients_of_amazon(data_root):
    """Table 1: dispersion 232. The coefficients shipped with the authors' task are ours by samples, 1 for none."""
    path = data_root / "amazon-electronics-fedsubavg" / "amazon_electronics_fedsubavg.zip"
    if not path.exists():
        pytest.skip("the Amazon files of FedSubAvg are needed")
    with zipfile.ZipFile(path) as archive:
        rows = [line.split(b"\t")[1:3] for line in archive.read("amazon_train.tsv").splitlines()]
        shipped = {
            name: np.array(archive.read(f"coefs/{name}_coef.txt").split(), float) for name in ("user", "item")
        }
    user, item = np.array([row for row in rows if row[0].isdigit()]).astype(int).T
    store = ClientStore.from_arrays(user, user=user, item=item)
    assert summarize(count_heat(store, "item", num_keys=len(shipped["item"])))["dispersion"] == 232
    for name, expected in shipped.items():
        found = coefficients(count_heat(store, name, num_keys=len(expected), by="samples"))
        np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_movielens_movies(data_root):
    from partwise.data.loaders import movielens_ratings as movielens

    told = summarize(count_heat(movielens.load(str(data_root)), "item"))
    assert (told["total"], told["keys_held"], told["n_min"], told["n_max"]) == (6040, 3706, 1, 3428)
