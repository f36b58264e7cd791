"""The best items of a catalogue are those that `predict` scores highest, however they are scored."""

from __future__ import annotations

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from partwise.config.settings import Config
from partwise.data.store import ClientStore
from partwise.model.partition import keyed, local, partition
from partwise.model.spec import Model, lookup, squared_error
from partwise.runs import catalogue
from partwise.runs.client_file import ClientFile, Source
from partwise.runs.personal import Personal
from partwise.runs.recommend import best
from partwise.tasks import Setting
from partwise.tasks.clicks import settings as clicks_settings
from partwise.tasks.events import settings as events_settings
from partwise.tasks.ratings import settings
from partwise.types import RunWarning, UserError

ITEMS = 30
IDS = np.array([f"m{i:02d}" for i in range(ITEMS)])
SHAPES = {"item": (), "rating": (), "history": (4,), "user": (), "label": (), "time": ()}


def personal_of(setting: Setting, num_ids: int = ITEMS) -> Personal:
    """A model with random values, in which no two rows are alike."""
    params, _ = setting.partition.split(setting.model.init(jax.random.key(0)))
    keys = jax.random.split(jax.random.key(1), len(params))
    shaken = {
        path: np.asarray(leaf + jax.random.normal(key, leaf.shape))
        for (path, leaf), key in zip(params.items(), keys, strict=True)
    }
    return Personal(Config(), setting, shaken, Source({"item": IDS[:num_ids]}, SHAPES, "user"))


@pytest.fixture(scope="module")
def me() -> Personal:
    return personal_of(settings(ITEMS, 2, 3, initial="learned", biases=True)[0])


@pytest.fixture(scope="module")
def mine() -> dict[str, np.ndarray]:
    return {"user": np.array([1.0, -2.0, 0.5], np.float32), "user_bias": np.float32(0.3)}


def rows(**columns: np.ndarray) -> ClientStore:
    """A store with one client."""
    count = len(next(iter(columns.values())))
    return ClientStore(columns, np.zeros(1, int), np.array([count]), np.array(["ann"]))


def every_item(**others: np.ndarray) -> ClientStore:
    wide = {name: np.repeat(value[None], ITEMS, axis=0) for name, value in others.items()}
    return rows(item=np.arange(ITEMS, dtype=np.int32), **wide)


def in_order(scores: np.ndarray) -> list[tuple[str, float]]:
    order = np.argsort(-scores, kind="stable")
    return list(zip(IDS[order].tolist(), scores[order].tolist(), strict=True))


def test_the_best_are_those_that_predict_scores_highest(me, mine):
    assert me.recommend(mine, k=ITEMS) == in_order(me.predict(mine, every_item()))
    first = me.recommend(mine)
    assert len(first) == 10
    assert [(each.id, each.score) for each in first] == in_order(me.predict(mine, every_item()))[:10]


@pytest.mark.parametrize("chunk", [1, 7, 15, 29])
def test_chunks_of_any_size_make_no_difference(chunk, me, mine, monkeypatch):
    monkeypatch.setattr(catalogue, "CHUNK_IDS", chunk)
    fresh = personal_of(me.setting)
    np.testing.assert_allclose(
        [s for _, s in fresh.recommend(mine, k=30)], [s for _, s in me.recommend(mine, k=30)]
    )
    assert [each.id for each in fresh.recommend(mine, k=30)] == [each.id for each in me.recommend(mine, k=30)]


def test_a_second_client_needs_no_new_program(me, mine, monkeypatch):
    monkeypatch.setattr(catalogue, "CHUNK_IDS", 8)
    fresh = personal_of(me.setting)
    fresh.recommend(mine)
    fresh.recommend({path: 2 * leaf for path, leaf in mine.items()}, k=3, exclude=["m01"])
    assert fresh._catalogue[0]._score_chunk._cache_size() == 1


def test_what_is_excluded_does_not_come(me, mine):
    all_of_them = me.recommend(mine, k=ITEMS)
    out = [each.id for each in all_of_them[:5]]
    keys = np.flatnonzero(np.isin(IDS, out)).astype(np.int32)
    store = rows(item=keys, rating=np.ones(5, np.float32))
    file = ClientFile(store, np.arange(5), {})
    for exclude in (out, set(out), np.array(out), store, file):
        assert me.recommend(mine, k=3, exclude=exclude) == all_of_them[5:8]
    assert me.recommend(mine, k=100, exclude=out) == all_of_them[5:]  # what is left
    assert me.recommend(mine, exclude=IDS.tolist()) == []
    assert me.recommend(mine, exclude=[], k=2) == all_of_them[:2]


def test_a_store_with_keys_of_its_own_is_read_by_its_ids(me, mine):
    """Its first key is another item than the model's first one."""
    names = ["m07", "m29", "m07", "m11"]
    theirs = ClientStore.from_arrays(["ann"] * 4, ids=["item"], item=names, rating=np.ones(4, np.float32))
    same = rows(item=np.array([7, 29, 7, 11], np.int32), rating=np.ones(4, np.float32))
    assert theirs.columns["item"].max() < 3
    np.testing.assert_array_equal(me.predict(mine, theirs), me.predict(mine, same))
    for path, leaf in me.personalize(same).items():
        np.testing.assert_array_equal(me.personalize(theirs)[path], leaf)
    assert me.recommend(mine, k=9, exclude=theirs) == me.recommend(mine, k=9, exclude=names)


def test_a_store_with_ids_that_the_model_does_not_know(me, mine):
    theirs = ClientStore.from_arrays(["ann"] * 2, ids=["item"], item=["m07", "zzz"])
    with pytest.warns(RunWarning, match="1 id to exclude that the model does not know: zzz"):
        assert me.recommend(mine, k=9, exclude=theirs) == me.recommend(mine, k=9, exclude=["m07"])
    with pytest.raises(UserError, match="the examples name item zzz, which the model does not know"):
        me.predict(mine, theirs)


def test_unknown_ids_to_exclude_are_told(me, mine):
    with pytest.warns(RunWarning, match="4 ids to exclude that the model does not know: a, b, c, ..."):
        me.recommend(mine, exclude=["m01", "a", "b", "c", "d"])
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        me.recommend(mine, exclude=["m01"])
    assert not any("exclude" in str(each.message) for each in told)


def test_of_equal_scores_the_first_in_the_catalogue_comes_first():
    scores = np.array([1, 3, 2, 3, 3, 0], np.float32)
    assert best(scores, 3, np.array([], int)).tolist() == [1, 3, 4]
    assert best(scores, 4, np.array([3, 3])).tolist() == [1, 4, 2, 0]
    assert best(scores, 9, np.arange(6)).tolist() == []


@pytest.mark.parametrize("seed", range(5))
def test_the_best_of_many_are_found_without_sorting_all(seed):
    rng = np.random.default_rng(seed)
    scores = rng.integers(-50, 50, 5000 + seed).astype(np.float32)  # many ties
    excluded = rng.choice(len(scores), 700, replace=False)
    left = np.setdiff1d(np.arange(len(scores)), excluded)
    for k in (1, 4, 10, 300):
        expected = left[np.argsort(-scores[left], kind="stable")[:k]]
        np.testing.assert_array_equal(best(scores, k, excluded), expected)


@pytest.mark.parametrize("psi", ["float16", "int8"])
def test_rows_are_scored_as_clients_are_sent_them(psi, mine, me):
    roles = {"user*": local(), "item*": keyed("item", psi=psi)}
    setting = me.setting._replace(partition=partition(me.setting.model, roles))
    other = personal_of(setting)
    found = [each.score for each in other.recommend(mine, k=ITEMS)]
    np.testing.assert_allclose(found, [s for _, s in in_order(other.predict(mine, every_item()))], rtol=1e-5)


def test_a_table_that_all_clients_have(me, mine):
    """The items are not keyed: their ids are a plain column."""
    setting = me.setting._replace(partition=partition(me.setting.model, {"user*": local()}))
    assert setting.partition.spaces == {}
    other = personal_of(setting)
    assert other.recommend(mine, k=ITEMS) == in_order(other.predict(mine, every_item()))


def test_a_candidate_beside_a_history():
    """The deep interest network: the candidate and the history are rows of one table, the user of another."""
    other = personal_of(clicks_settings(3, ITEMS, 4)[0])
    past = np.array([[5, 2, -1, 5], [7, 29, 3, -1]], np.int32)
    given = rows(user=np.array([1, 2], np.int32), history=past)
    expected = other.predict({}, every_item(user=np.int32(2), history=past[1]))
    found = other.recommend({}, k=ITEMS, given=given)  # after the last example
    np.testing.assert_allclose(
        [s for _, s in found], [s for _, s in in_order(expected)], rtol=1e-5, atol=1e-6
    )
    assert [each.id for each in found] == [name for name, _ in in_order(expected)]
    with pytest.raises(
        UserError, match=r"needs more than the ids of 'item'.*--client FILE.*'history'|'user'"
    ):
        other.recommend({})


def next_item(whole: bool = True, ranks: str = "item") -> Setting:
    """Scores of all items after a history, with a local vector."""

    def init(rng):
        return {"item": jax.random.normal(rng, (ITEMS, 3)), "user": jnp.zeros(3)}

    def predict(params, batch, rng):
        return (lookup(params["item"], batch["history"]).sum(axis=1) + params["user"]) @ params["item"].T

    def loss(scores, batch):
        return -jnp.take_along_axis(jax.nn.log_softmax(scores), batch["item"][:, None], axis=1)[:, 0]

    model = Model(init, predict, loss)
    roles = {"item": keyed("item", whole=whole), "user": local("zero")}
    parts = partition(model, roles, columns={"item": ("item", "history")})
    return Setting(model, parts, ("item", "history"), ranks=ranks)


def test_a_model_of_histories_scores_all_items_at_once():
    other = personal_of(next_item())
    part = {"user": np.array([0.3, -1, 2], np.float32)}
    past = np.array([[1, 2, 3, 4], [7, 29, -1, -1]], np.int32)
    scores = other.predict(part, rows(item=np.zeros(2, np.int32), history=past))
    for given in (rows(history=past), rows(item=np.array([3, 8], np.int32), history=past)):
        found = other.recommend(part, k=ITEMS, given=given)
        assert [each.id for each in found] == [name for name, _ in in_order(scores[1])]
        np.testing.assert_allclose([s for _, s in found], [s for _, s in in_order(scores[1])], rtol=1e-5)
    first = other.recommend(part, k=2, given=rows(history=past[:1]))
    assert [each.id for each in first] == [name for name, _ in in_order(scores[0])[:2]]
    with pytest.raises(UserError, match=r"needs more than the ids of 'item'.*given=me.read"):
        other.recommend(part)


def test_what_comes_after_events_with_items_that_are_alike():
    """Equal rows have equal scores, and the first in the catalogue comes first; what was taken does not come."""
    other = personal_of(events_settings(ITEMS, 1, "two_tower", 3, 4)[0])
    for path in ("item", "item_bias"):
        other.params[path] = np.repeat(other.params[path][::3], 3, axis=0)
    part, taken = {"user": np.array([0.3, -1, 2], np.float32)}, [7, 29, 3]
    scores = other.predict(part, rows(item=np.array([*taken, 0], np.int32)))[-1]
    left = [pair for pair in in_order(scores) if pair[0] not in IDS[taken]]
    assert len({score for _, score in left}) == ITEMS // 3
    found = other.recommend(part, k=ITEMS, given=rows(item=np.array(taken, np.int32)))
    assert [each.id for each in found] == [name for name, _ in left]
    np.testing.assert_allclose([each.score for each in found], [score for _, score in left], rtol=1e-5)


def test_a_column_of_numbers_as_outputs_of_keras_are(me, mine):
    deep = me.setting.model._replace(predict=lambda *given: me.setting.model.predict(*given)[:, None])
    other = personal_of(me.setting._replace(model=deep))
    assert other.recommend(mine) == me.recommend(mine)


def test_what_cannot_be_recommended(me, mine):
    for k in (0, -1, 2.5, True):
        with pytest.raises(UserError, match=r"k is .*1 or more"):
            me.recommend(mine, k=k)
    with pytest.raises(UserError, match="the local part is a NoneType: give what `personalize` returned"):
        me.recommend(None)
    for exclude in ("m01", 7, {"m01": 1}):
        with pytest.raises(UserError, match=r"exclude is .*give a list of ids"):
            me.recommend(mine, exclude=exclude)
    with pytest.raises(UserError, match="unknown column 'item'"):
        me.recommend(mine, exclude=rows(rating=np.ones(2, np.float32)))
    with pytest.raises(UserError, match=r"holds keys 0\.\.30"):
        me.recommend(mine, exclude=rows(item=np.array([0, 30], np.int32)))
    with pytest.raises(UserError, match="local part"):
        me.recommend({})
    with pytest.raises(UserError, match="0 examples of 1 client"):
        me.recommend(mine, given=rows(item=np.zeros(0, np.int32)))
    with pytest.raises(UserError, match="not finite"):
        me.recommend({**mine, "user_bias": np.float32(np.nan)})


def test_a_model_that_does_not_say_what_it_ranks(me, mine):
    with pytest.raises(UserError, match=r"ranks='item'.*nothing need be trained again"):
        personal_of(me.setting._replace(ranks="")).recommend(mine)
    with pytest.raises(UserError, match="unknown column that the setting ranks 'movie'"):
        personal_of(me.setting._replace(ranks="movie")).recommend(mine)
    with pytest.raises(UserError, match="'rating', which the setting ranks, has no single ids"):
        personal_of(me.setting._replace(ranks="rating")).recommend(mine)
    with pytest.raises(UserError, match="'history', which the setting ranks, has no single ids"):
        personal_of(next_item(ranks="history")).recommend({"user": np.zeros(3, np.float32)})


def test_outputs_that_are_neither_one_nor_one_for_every_item(me, mine):
    model = me.setting.model
    pairs = model._replace(predict=lambda *given: jnp.stack([model.predict(*given)] * 2, axis=1))
    loss = lambda outputs, batch: squared_error(outputs[:, 0], batch, "rating")
    other = personal_of(me.setting._replace(model=pairs._replace(loss=loss)))
    with pytest.raises(UserError, match=r"shape \(2,\), and the column 'item' has 30 ids"):
        other.recommend(mine)


def test_a_history_from_a_file_that_has_no_items(tmp_path):
    """The ranked column need not be in the client's table."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    other = personal_of(next_item())
    lists = Source({"item": IDS, "history": IDS}, SHAPES, "user", {})
    me = Personal(Config(), other.setting, other.params, lists)
    part = {"user": np.array([0.3, -1, 2], np.float32)}
    pq.write_table(pa.table({"history": [["m01", "m02"], ["m07", "m29"]]}), tmp_path / "past.parquet")
    assert me.columns_in(tmp_path / "past.parquet", but="item") == ("history",)
    file = me.read(tmp_path / "past.parquet", ("history",))
    found = me.recommend(part, k=3, exclude=["m07", "m29"], given=file)
    past = np.array([[-1, -1, 7, 29]], np.int32)
    assert [each.id for each in found] == [
        each.id for each in other.recommend(part, k=3, exclude=["m29", "m07"], given=rows(history=past))
    ]
