"""Ratings as somebody finds them who says nothing: any scale, few ratings or many, one only, all the same."""

from __future__ import annotations

import dataclasses
import warnings
from functools import partial

import jax
import numpy as np
import pytest

from partwise.data.store import ClientStore
from partwise.runs.evaluation import evaluate_run
from partwise.runs.personal import Personal
from partwise.runs.train import train
from partwise.tasks import find_task, load_task
from partwise.tasks.matrix_factorization import matrix_factorization
from partwise.tasks.ratings import ratings_task, training_rows
from partwise.types import RunWarning, UserError

NUM_ITEMS = 12
QUICK = {"rounds": 60, "simulation.lanes": 4, "simulation.evaluate_every": 0}


def made(change=lambda rating: rating, counts=(1, 2, 4, 8, 12) * 8) -> ClientStore:
    """Users who like the items of one half more, and items that are good or bad; `change` is of all ratings."""
    rng = np.random.default_rng(0)
    good, taste = rng.normal(0, 0.5, NUM_ITEMS), np.where(np.arange(len(counts)) % 2, 0.6, -0.6)
    client = np.repeat(np.arange(len(counts)), counts)
    item = np.concatenate([rng.permutation(NUM_ITEMS)[:n] for n in counts])
    rating = 3 + good[item] + taste[client] * np.where(item < NUM_ITEMS // 2, 1, -1)
    rating = rating + rng.normal(0, 0.1, len(item))
    columns = {"item": item.astype(np.int32), "rating": change(rating).astype(np.float32)}
    return ClientStore.from_arrays(client, ids=("item",), **columns)


def trained(store, out=None, **options):
    return train(ratings_task(store, **options), out=out, changes=QUICK)


@pytest.fixture(scope="module")
def run():
    return trained(made())


@pytest.mark.parametrize(("scale", "shift"), [(25.0, -25.0), (5.0, -15.0), (0.01, 1000.0)], ids=str)
def test_no_scale_is_special(run, scale, shift):
    """0 to 100, -10 to 10, or hardly different: what is learned is the same."""
    other = trained(made(lambda rating: scale * rating + shift))
    assert other.test["rmse"] == pytest.approx(scale * run.test["rmse"], rel=0.03)
    assert other.test["loss"] == pytest.approx(run.test["loss"], rel=0.05)


def test_it_is_learned(run):
    """Better than the mean rating, for those who gave two ratings and for those who gave twelve."""
    everyone = run.task.test.gather(np.arange(run.task.test.num_clients)).columns["rating"]
    assert run.test["rmse"] < 0.7 * everyone.std()


def test_a_new_client_gets_something_like_its_own_ratings(run):
    """For the very items that it rated."""
    position = int(np.flatnonzero(run.task.test.counts >= 4)[0])
    mine = run.task.test.cap(4).gather(np.array([position])).select(("item", "rating"))
    local = run.personal.personalize(mine)
    told, given = run.personal.predict(local, mine), mine.columns["rating"]
    assert np.abs(told - given).max() < 0.7
    one = mine.cap(1).gather(np.array([0]))
    told = run.personal.predict(run.personal.personalize(one), mine)
    assert np.abs(told - given).mean() < 1.0


def test_ratings_that_are_all_the_same():
    run = trained(made(lambda rating: np.full_like(rating, 7.0)))
    assert run.task.options["spread"] == 1.0
    assert run.test["rmse"] < 0.05


def test_users_with_one_rating_only():
    """Nobody has a query set, so nobody can be judged; but they can be learned from, and personalise."""
    run = trained(made(counts=(1,) * 40))
    assert run.summary["broken"] == 0
    assert all(record["clients"] for record in run.records)
    mine = run.task.test.gather(np.array([0])).select(("item", "rating"))
    told = run.personal.predict(run.personal.personalize(mine), mine)
    assert np.isfinite(told).all()
    assert abs(told[0] - 3) < 2


def test_mean_and_spread_are_of_training_ratings_alone():
    task = ratings_task(made())
    ratings = task.train.gather(np.arange(task.train.num_clients)).columns["rating"].astype(float)
    assert task.options["center"] == pytest.approx(ratings.mean(), rel=1e-6)
    assert task.options["spread"] == pytest.approx(ratings.std(), rel=1e-6)
    assert ratings_task(made(), normalize=False).options["spread"] == 1.0


def test_a_trained_model_is_used_without_its_data(tmp_path):
    """A few hundred rows of CSV, on a scale of its own: train, personalise offline, evaluate again."""
    store, rows = made(lambda rating: 20 * rating), ["user,item,rating"]
    for c in range(store.num_clients):
        mine = store.examples(c)
        rows += [f"u{c},i{i},{r}" for i, r in zip(mine["item"], mine["rating"], strict=True)]
    (tmp_path / "table.csv").write_text("\n".join(rows) + "\n")
    run = train("ratings", data=str(tmp_path / "table.csv"), out=tmp_path / "run", changes=QUICK)
    (tmp_path / "mine.csv").write_text("\n".join([rows[0], *rows[-4:]]) + "\n")
    me = Personal.open(tmp_path / "run")
    mine = me.read(tmp_path / "mine.csv", ("item", "rating"))
    told = me.predict(me.personalize(mine.examples), mine.examples)
    assert np.abs(told - mine.examples.columns["rating"]).mean() < 10  # of 60
    assert evaluate_run(tmp_path / "run")["rmse"] == pytest.approx(run.test["rmse"], rel=1e-6)


def test_seen_users_have_an_algorithm_that_can_judge_them(liked_folder):
    run = train("movielens-seen", data=str(liked_folder), changes=QUICK | {"rounds": 2})
    assert run.config.algorithm == "fed_rep"
    assert np.isfinite(run.test["rmse"])


def test_a_preset_cannot_change_a_task_that_is_made():
    with pytest.raises(UserError, match=r"data.dim = 50 cannot change a Task object"):
        train(ratings_task(made()), preset="paper")
    paper = {"dim": 50, "initial": "random", "biases": False, "normalize": False, "max_examples": 300}
    made_for_it = ratings_task(made(), **paper)
    run = train(made_for_it, preset="paper", changes={"rounds": 1, "cohort.size": 16})
    assert (run.config.reconstruct.method, run.config.server.optimizer) == ("steps", "sgd")


@pytest.mark.parametrize("name", ["movielens", "movielens-seen", "movielens-liked"])
def test_options_that_were_resolved_are_recorded(name, liked_folder):
    task = load_task(name, str(liked_folder))
    again = load_task(name, **{"data" if k == "path" else k: v for k, v in task.loaded.items()})
    assert again.options == task.options


@pytest.mark.parametrize(
    ("options", "first", "second", "column"),
    [
        ({"client": "item"}, "client", "item", "item"),
        ({"item": "user"}, "client", "item", "user"),
        ({"time": "rating", "order": "time"}, "rating", "time", "rating"),
        ({"rating": "user"}, "client", "rating", "user"),
    ],
)
def test_two_options_cannot_name_one_column(tmp_path, options, first, second, column):
    (tmp_path / "t.csv").write_text("user,item,rating\n1,2,3\n")
    with pytest.raises(UserError, match=f"data.{first} and data.{second} both name the column '{column}'"):
        load_task("ratings", str(tmp_path / "t.csv"), **options)


def test_dialects_of_tables_are_options_of_the_task(tmp_path):
    lines = [f"{user};caffè {user % 3};{user % 5}" for user in range(20)]
    (tmp_path / "t.csv").write_bytes("\n".join(["user;item;rating", *lines]).encode("latin-1"))
    with pytest.raises(UserError, match=r"delimiter=';' .of the task 'ratings': --set \"data.delimiter=;\""):
        load_task("ratings", str(tmp_path / "t.csv"))
    with pytest.raises(UserError, match=r"text in UTF-8.*--set data.encoding=latin-1"):
        load_task("ratings", str(tmp_path / "t.csv"), delimiter=";")
    task = load_task("ratings", str(tmp_path / "t.csv"), delimiter=";", encoding="latin-1")
    assert task.train.vocabularies["item"].tolist() == ["caffè 0", "caffè 1", "caffè 2"]
    assert (task.loaded["delimiter"], task.loaded["encoding"]) == (";", "latin-1")


ONE_CLIENT = ["u,1,3", "u,2,4", "u,3,5"]


@pytest.mark.parametrize(
    ("lines", "options", "says"),
    [
        (ONE_CLIENT, {}, r"ratings of 1 client, and 80 % .*give those of at least 6.*--set data.seen=true"),
        (["u,1,3", "v,2,4"], {"seen": True}, r"of 2 ratings of 2 clients none is left to train on"),
    ],
)
def test_too_few_clients_are_counted(tmp_path, lines, options, says):
    (tmp_path / "t.csv").write_text("\n".join(["user,item,rating", *lines]))
    with pytest.raises(UserError, match=says):
        load_task("ratings", str(tmp_path / "t.csv"), **options)


def test_two_clients_are_enough(tmp_path):
    (tmp_path / "t.csv").write_text("\n".join(["user,item,rating", *ONE_CLIENT, "v,1,2"]))
    task = load_task("ratings", str(tmp_path / "t.csv"))
    assert [part.num_clients for part in (task.train, task.validation, task.test)] == [1, 0, 1]


@pytest.mark.parametrize(
    ("header", "says"),
    [
        (
            "userId,movieId,rating",
            r"t.csv: unknown column 'user' \(nearest: userId\).*--set data.client=userId --set data.item=NAME "
            r'\(in Python, client="userId", item="NAME"\)',
        ),
        (
            "u1,7,3",
            r"unknown column 'user' \(known: 3, 7, u1\); the first line of the file must name its columns",
        ),
    ],
)
def test_a_table_with_other_names_says_how_to_name_them(tmp_path, header, says):
    (tmp_path / "t.csv").write_text("\n".join([header, *ONE_CLIENT]))
    with pytest.raises(UserError, match=says):
        load_task("ratings", str(tmp_path / "t.csv"))


def test_what_is_no_store_of_ratings_is_refused():
    with pytest.raises(UserError, match=r"the ratings are a str, .*read a file with read_table"):
        ratings_task("ratings.csv")  # pyright: ignore[reportArgumentType]
    with pytest.raises(UserError, match=r"unknown column 'item' .*store.rename\(\{\"NAME\": \"item\"\}\)"):
        ratings_task(made().rename({"item": "film"}))


def test_a_task_is_told_in_a_line():
    told = repr(ratings_task(made(), dim=3))
    assert told.startswith("Task(ratings, clients 32, 4, 4: item[12, 3] keyed, ")
    assert len(told) < 200


@pytest.mark.parametrize(
    ("order", "remedy"),
    [("as is", r"in an order other than 'as is'"), ("shuffle", r"\(stateful=Setting\(...\)\)")],
)
def test_a_task_without_a_setting_on_the_server_says_how_to_get_one(order, remedy):
    task = ratings_task(made(), order=order)._replace(stateful=None)
    with pytest.raises(
        UserError, match=rf"has local parameters \(user, user_bias\) and no setting .*{remedy}"
    ):
        train(task, algorithm="fed_avg")


def with_copies(store, share, seed=1, change=0.0):
    """The same table with copies of some rows behind the others, perhaps with other ratings."""
    rng = np.random.default_rng(seed)
    packed, owner = store.gather(), np.repeat(np.arange(store.num_clients), store.counts)
    copied = rng.permutation(packed.num_examples)[: int(share * packed.num_examples)]
    rows = np.append(np.arange(packed.num_examples), copied)
    rating = packed.columns["rating"][rows]
    rating[packed.num_examples :] += change
    item = packed.vocabularies["item"][packed.columns["item"][rows]]
    return ClientStore.from_arrays(
        packed.client_ids[owner[rows]], ids=("item",), item=item, rating=rating.astype(np.float32)
    )


@pytest.mark.parametrize("duplicates", ["last", "mean"])
@pytest.mark.parametrize("seen", [False, True])
def test_copies_of_rows_change_nothing(duplicates, seen):
    """Copies of 30 % of the rows give the very same training, validation and test examples."""
    plain = ratings_task(made(), seen=seen)
    with pytest.warns(
        RunWarning, match=r"64 rows of an item that the client rated before, as client \d+: item"
    ):
        copied = ratings_task(with_copies(made(), 0.3), duplicates=duplicates, seen=seen)
    for part in ("train", "validation", "test"):
        one, other = getattr(plain, part).gather(), getattr(copied, part).gather()
        np.testing.assert_array_equal(one.counts, other.counts)
        for name, values in one.columns.items():
            np.testing.assert_array_equal(values, other.columns[name], err_msg=name)
    assert dict(plain.options) == dict(copied.options)


def test_copies_that_stay_as_they_are_are_told():
    plain, copied = made(), with_copies(made(), 0.3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ratings_task(plain, order="as is")
    with pytest.warns(
        RunWarning, match=r"64 rows \(of \d+ clients looked at\).* stay, so an item may be both given and"
    ):
        task = ratings_task(copied, order="as is")
    parts = (task.train, task.validation, task.test)
    assert sum(part.num_examples for part in parts) == copied.num_examples
    with pytest.raises(UserError, match=r"data\.duplicates = mean would have no effect.*data\.order=shuffle"):
        ratings_task(copied, order="as is", duplicates="mean")


def test_of_other_ratings_of_an_item_the_last_or_the_mean_is_used():
    """By a loop over a dictionary, by the order of rows and by time."""
    rng = np.random.default_rng(3)
    user, item = rng.integers(0, 20, 300), rng.integers(0, 9, 300)
    rating, time = rng.integers(1, 6, 300).astype(np.float32), rng.permutation(300)
    store = ClientStore.from_arrays(user, ids=("item",), item=item, rating=rating, time=time)
    for order in ("shuffle", "time"):
        given: dict[tuple[int, int], list[float]] = {}
        for row in range(300) if order == "shuffle" else np.argsort(time):
            given.setdefault((int(user[row]), int(item[row])), []).append(float(rating[row]))
        for kept, of in (("last", lambda each: each[-1]), ("mean", np.mean)):
            with pytest.warns(RunWarning, match="of an item that the client rated before"):
                task = ratings_task(store, order=order, duplicates=kept)
            found = {}
            for part in (task.train, task.validation, task.test):
                for place, client in enumerate(part.client_ids.tolist()):
                    mine = part.examples(place)
                    ids = store.vocabularies["item"][mine["item"]].tolist()
                    found |= {(client, id): r for id, r in zip(ids, mine["rating"].tolist(), strict=True)}
            assert found == {pair: pytest.approx(of(each)) for pair, each in given.items()}


@pytest.mark.parametrize("options", [{"order": "time"}, {"seen": True}])
def test_a_client_s_own_file_uses_the_latest_rating_where_training_did(options, tmp_path):
    """Wherever it is in the file."""
    rng = np.random.default_rng(1)
    lines = [
        f"{user},{item},{rng.integers(1, 6)},{rng.integers(1000)}"
        for user in range(12)
        for item in rng.permutation(9)[:6]
    ]
    (tmp_path / "all.csv").write_text("\n".join(["user,item,rating,when", *lines]))
    changes = {**QUICK, "data.time": "when", **{f"data.{name}": value for name, value in options.items()}}
    me = train("ratings", data=tmp_path / "all.csv", changes=changes).personal
    once, twice = tmp_path / "once.csv", tmp_path / "twice.csv"
    once.write_text("item,rating,when\n3,5,30\n5,2,20\n7,3,40\n")
    twice.write_text("item,rating,when\n3,5,30\n5,2,20\n3,1,10\n7,3,40\n")
    first = me.personalize(me.read(once, ("item", "rating")))
    with pytest.warns(RunWarning, match="1 row of an item that the client rated before"):
        second = me.personalize(me.read(twice, ("item", "rating")))
    for path, leaf in first.items():
        np.testing.assert_array_equal(leaf, second[path])
    assert len(me.predict(first, me.read(twice, ("item", "rating")))) == 4


def test_a_client_s_own_file_and_a_device_s_table_are_read_as_in_training(run, tmp_path):
    """Copies and earlier ratings in it change nothing, neither in the local part nor in the rows that train."""
    once, twice = tmp_path / "once.csv", tmp_path / "twice.csv"
    once.write_text("item,rating\n3,4\n5,2\n7,3\n")
    twice.write_text("item,rating\n3,1\n5,2\n3,4\n7,3\n7,3\n")
    me = run.personal
    first = me.personalize(me.read(once, ("item", "rating")))
    with pytest.warns(RunWarning, match="2 rows of an item that the client rated before"):
        second = me.personalize(me.read(twice, ("item", "rating")))
    for path, leaf in first.items():
        np.testing.assert_array_equal(leaf, second[path])
    rows = [
        training_rows(me.read(file, ("item", "rating")).examples, run.task.loaded).columns
        for file in (once, twice)
    ]
    for name, values in rows[0].items():
        np.testing.assert_array_equal(values, rows[1][name])


def test_a_rating_far_from_all_others_is_named():
    store = made()
    packed = store.gather()
    columns = {**packed.columns, "rating": packed.columns["rating"].copy()}
    ratings_task(dataclasses.replace(packed, columns=columns))  # says nothing
    columns["rating"][5] = 9999
    where = f"client {packed.client_ids[np.searchsorted(np.cumsum(packed.counts), 5, side='right')]}, item "
    where += str(packed.vocabularies["item"][columns["item"][5]])
    with pytest.warns(RunWarning, match=rf"1 rating far from nearly all others, .*: 9999 \({where}\)"):
        ratings_task(dataclasses.replace(packed, columns=columns))


def test_a_column_of_times_that_no_option_reads_is_refused(tmp_path):
    (tmp_path / "r.csv").write_text(
        "user,item,rating,when\n" + "".join(f"{k % 20},i{k},1,{k}\n" for k in range(60))
    )
    load = lambda **options: load_task("ratings", str(tmp_path / "r.csv"), time="when", **options)
    with pytest.raises(UserError, match=r"data.time = when would have no effect: with data.order = shuffle"):
        load()
    assert load(order="time").train.num_examples == 48
    assert load(seen=True).test.num_examples == 20


def test_a_model_of_ratings_says_that_its_lists_are_of_expected_ratings(run):
    mine = run.task.test.gather([0]).select(("item", "rating"))
    with pytest.warns(
        RunWarning, match=r"highest expected ratings.* train the task 'events' on the same table"
    ):
        run.personal.recommend(run.personal.personalize(mine))
    for name in ("ratings", "planted", "movielens", "events"):
        setting = find_task(name).settings(**find_task(name).example)[0]
        assert setting.ranks == "item"
        assert setting.expects == ("rating" if "rating" in setting.columns else "")


@pytest.mark.parametrize("seen", [False, True])
def test_what_pulls_a_rating_is_the_squares_of_its_user_and_item(seen):
    """In the model with one user, and in the one with a table of them; metrics do not see it."""
    make = partial(matrix_factorization, 5, 3, 4 if seen else None, biases=True)
    free, pulled = make(), make(pull=0.5)
    params = {name: 1.0 + leaf for name, leaf in free.init(jax.random.key(0)).items()}
    batch = {"item": np.array([0, 4, 4]), "user": np.array([1, 3, 1]), "rating": np.array([1.0, 2.0, 5.0])}
    added = pulled.train_loss(params, batch, None) - free.train_loss(params, batch, None)
    for row, found in enumerate(added):
        user, item = (batch[name][row] for name in ("user", "item"))
        own = [params[name][user] if seen else params[name] for name in ("user", "user_bias")]
        numbers = np.concatenate(
            [np.ravel(x) for x in (*own, params["item"][item], params["item_bias"][item])]
        )
        np.testing.assert_allclose(found, 0.5 * (numbers**2).sum(), rtol=1e-5)
    outputs = [each.predict(params, batch, None) for each in (free, pulled)]
    np.testing.assert_array_equal(*outputs)


@pytest.mark.parametrize(
    ("options", "pull"), [({}, 0.0), ({"seen": True}, 0.05), ({"seen": True, "pull": 0.3}, 0.3)]
)
def test_seen_users_are_pulled_unless_it_is_said_otherwise(options, pull):
    task = load_task("planted", num_clients=40, num_items=20, mean_examples=12, **options)
    assert task.options["pull"] == task.loaded["pull"] == pull
