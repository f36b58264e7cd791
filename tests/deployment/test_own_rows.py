"""What a device trains on, from its own table, is what the simulator trains its client on: the same rows, in the
same order."""

from __future__ import annotations

import csv
import logging

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest

from partwise.algorithms.registry import prepare
from partwise.data.checks import narrow
from partwise.deployment.agent import run_agent
from partwise.deployment.auth import DeviceKey, KeyRow
from partwise.deployment.federation import found_run, open_run
from partwise.deployment.http_link import HttpLink
from partwise.deployment.own_data import as_trained, open_store
from partwise.runs.resolve import resolve
from partwise.simulation.plain import PlainSimulation
from partwise.tasks import find_task
from partwise.types import UserError

HEADER = ("who", "film", "stars", "when")
NAMES = {"data.client": "who", "data.item": "film", "data.rating": "stars", "data.time": "when"}
MOST = 6


def drawn_rows(number=40, seed=3):
    """Ratings of some clients, who have from 1 to 15 of them, mixed."""
    rng = np.random.default_rng(seed)
    owners = rng.permutation(np.repeat(np.arange(number), rng.integers(1, 16, number)))
    some = lambda most: rng.integers(0, most, len(owners)).tolist()
    items, stars, times = some(30), some(5), some(50)
    return [
        (f"c{who}" if who % 2 else str(who), f"film {item}", 1 + star, 10**9 + time)
        for who, item, star, time in zip(owners.tolist(), items, stars, times, strict=True)
    ]


def write(path, rows, header=HEADER):
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([header, *rows])
    return str(path)


def names_for(settings):
    """The names of the columns; that of the times, if some option reads them."""
    timed = settings.get("data.order") == "time" or "data.seen" in settings
    return {key: name for key, name in NAMES.items() if timed or key != "data.time"}


def founded(folder, rows, settings, name="ratings"):
    """A run on a table: its task, its configuration, and what devices are told."""
    named = names_for(settings) | {"cohort.size": 4} | settings
    task, config = resolve(name, write(folder / "all.csv", rows), named)
    found_run(task, config, folder / "run")
    run = open_run(folder / "run")
    run.hub.close()
    return task, config, run.offer


def assert_same_rows(found, place, wanted, position):
    """That a client has the same examples in two stores, column by column."""
    mine, theirs = found.examples(place), wanted.examples(position)
    assert set(mine) == set(theirs)
    for column, values in theirs.items():
        assert narrow(column, mine[column]).dtype == narrow(column, values).dtype
        np.testing.assert_array_equal(mine[column], values)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"data.seed": 7},
        {"data.duplicates": "mean"},
        {"data.order": "time"},
        {"data.order": "as is"},
        {"data.seen": True, "algorithm": "fed_rep"},
        {"data.seen": True, "algorithm": "fed_rep", "data.order": "time"},
    ],
    ids=str,
)
def test_a_clients_examples_are_those_of_the_simulator(tmp_path, settings):
    rows = drawn_rows()
    settings = {"data.max_examples": MOST, **settings}
    task, config, offer = founded(tmp_path, rows, settings)
    wanted = prepare(task, config).store
    assert wanted.counts.max() == MOST
    assert len(rows) > wanted.num_examples
    together = open_store(offer, write(tmp_path / "site.csv", rows))
    places = {str(name): place for place, name in enumerate(together.client_ids.tolist())}
    for position, name in enumerate(wanted.client_ids.astype(str).tolist()):
        assert_same_rows(together, places[name], wanted, position)
        alone = open_store(offer, write(tmp_path / "m.csv", [row for row in rows if row[0] == name]))
        assert_same_rows(alone, 0, wanted, position)


def test_rows_without_a_time_are_cut_by_their_order(tmp_path):
    rows = [row[:3] for row in drawn_rows()]
    data = write(tmp_path / "all.csv", rows, HEADER[:3])
    names = {key: name for key, name in NAMES.items() if key != "data.time"}
    settings = {"data.seen": True, "data.max_examples": MOST, "algorithm": "fed_rep", "cohort.size": 4}
    task, config = resolve("ratings", data, names | settings)
    found_run(task, config, tmp_path / "run")
    run = open_run(tmp_path / "run")
    run.hub.close()
    found, wanted = open_store(run.offer, data), prepare(task, config).store
    assert found.client_ids.astype(str).tolist() == wanted.client_ids.astype(str).tolist()
    for place in range(found.num_clients):
        assert_same_rows(found, place, wanted, place)


def test_the_model_is_the_plain_backends_with_tables_as_they_came(tmp_path, serve):
    """Batches and halves depend on the order of a client's rows."""
    rows = drawn_rows()
    settings = {
        "data.max_examples": MOST,
        "rounds": 2,
        "server.schedule": "constant",
        "split.kind": "alternate",
    }
    settings |= {"split.batch_size": 2, "update.batch_size": 2}
    named = names_for(settings) | {"cohort.size": 4} | settings
    task, config = resolve("ratings", write(tmp_path / "all.csv", rows), named)
    task = task._replace(train=task.train.take(np.argsort(task.train.client_ids.astype(str))))
    prepared = prepare(task, config)
    found_run(task, config, tmp_path / "run")
    hub, offer, _ = open_run(tmp_path / "run", population=task.train.num_clients, fresh=1e6, poll=0.02)
    training = set(task.train.client_ids.astype(str).tolist())
    key = DeviceKey.new()
    hub.keys.enroll(KeyRow(key.device, key.public))
    mine = write(tmp_path / "mine.csv", [row for row in rows if row[0] in training])
    with serve(hub, offer) as url:
        done = list(run_agent(HttpLink(url, key, hold=0.2), mine, tmp_path / "own", most=4))
    assert [each.accepted for each in done] == [True] * 8
    plain = PlainSimulation(
        prepared.build, prepared.rates, prepared.store, prepared.recruiting, seed=config.seed
    )
    list(plain.run(2))
    for path, leaf in plain.state.params.items():
        np.testing.assert_array_equal(np.asarray(hub.state(2).params[path]), np.asarray(leaf))
    hub.close()


def test_a_device_says_how_many_rows_train(tmp_path, caplog):
    rows = drawn_rows()
    *_, offer = founded(tmp_path, rows, {"data.max_examples": MOST})
    mine = [("zoe", f"film {item}", 3, item) for item in range(20)]
    with caplog.at_level(logging.INFO, "partwise.agent"):
        assert open_store(offer, write(tmp_path / "m.csv", mine)).num_examples == MOST
    assert "6 of 20 rows are for training, as the task 'ratings' and its options of [data] say" in caplog.text


def test_whole_numbers_have_the_type_that_they_had_in_training():
    whole, halves = np.array([1, 2]), np.array([0.5, 2.0])
    single, integer = np.dtype(np.float32), np.dtype(np.int32)
    assert as_trained(whole, single).dtype == single
    assert as_trained(np.array([1.0, 2.0]), integer).dtype == integer
    assert as_trained(halves, integer) is halves  # no rating is cut
    assert as_trained(halves, single) is halves
    big = np.array([2**40 + 1])
    assert as_trained(big, single) is big


def test_a_time_is_needed_where_it_orders_rows(tmp_path):
    rows = drawn_rows()
    *_, offer = founded(tmp_path, rows, {"data.order": "time"})
    with pytest.raises(UserError, match="unknown column 'when'"):
        open_store(offer, write(tmp_path / "m.csv", [row[:3] for row in rows], HEADER[:3]))


def test_a_store_has_the_rows_that_train_already(tmp_path):
    task, config, offer = founded(tmp_path, drawn_rows(), {"data.max_examples": MOST})
    wanted = prepare(task, config).store
    wanted.save(tmp_path / "mine")
    found = open_store(offer, f"store:{tmp_path}/mine")
    for place in range(wanted.num_clients):
        assert_same_rows(found, place, wanted, place)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("max_examples = 0", "data.max_examples"),
        ('max_examples = "x"', "cannot be read|data.max_examples"),
        ('order = "nonsense"', "unknown order of examples 'nonsense'"),
        ("order = 3", "unknown order of examples"),
        ("seed = -1", "'seed' must be between 0"),
    ],
)
def test_an_offer_whose_options_make_no_sense_is_refused(tmp_path, wrong, message):
    *_, offer = founded(tmp_path, drawn_rows(), {})
    name = wrong.split(" =")[0]
    lines = [wrong if line.startswith(f"{name} =") else line for line in offer.config.splitlines()]
    start = lines.index("[data]")
    lines = [*lines[: start + 1], wrong, *(line for line in lines[start + 1 :] if line != wrong)]
    with pytest.raises(UserError, match=message):
        open_store(offer._replace(config="\n".join(lines)), f"{tmp_path}/all.csv")


@pytest.mark.parametrize(("task", "part"), [("clicks", "the first part"), ("femnist", "nine tenths")])
def test_tasks_that_train_on_a_part_of_the_rows_say_what_to_give_instead(make_ratings, task, part):
    own = find_task(task).own
    with pytest.raises(UserError, match=rf"'{task}' trains on {part} .* give the training rows as a store"):
        own.prepare(make_ratings([3], 4), {})


TAGS = {"data.num_words": 50, "data.num_tags": 8, "data.mean_examples": 6, "data.words_per_example": 5}
WRITERS = {"data.median": 20, "data.num_classes": 3, "data.network": "2nn"}


def ids_of(vocabulary, keys):
    """The ids of keys, or lists of them."""
    if keys.ndim == 1:
        return vocabulary[keys].tolist()
    return [vocabulary[row[row >= 0]].tolist() for row in keys]


@pytest.mark.parametrize(("name", "settings"), [("tags-planted", TAGS), ("writers", WRITERS)])
def test_tasks_that_cut_by_clients_leave_their_rows_as_they_are(tmp_path, name, settings):
    task, config = resolve(name, None, {"data.num_clients": 40, "cohort.size": 4, **settings})
    found_run(task, config, tmp_path / "run")
    run = open_run(tmp_path / "run")
    run.hub.close()
    wanted = prepare(task, config).store.gather()
    columns = {
        column: ids_of(wanted.vocabularies[column], values)
        if column in wanted.vocabularies
        else values.tolist()
        for column, values in wanted.columns.items()
    }
    owners = np.repeat(wanted.client_ids.astype(str), wanted.counts)
    pyarrow.parquet.write_table(pa.table({"user": owners, **columns}), tmp_path / "m.parquet")
    found = open_store(run.offer, str(tmp_path / "m.parquet"))
    places = {str(client): place for place, client in enumerate(found.client_ids.tolist())}
    for position, client in enumerate(wanted.client_ids.astype(str).tolist()):
        assert_same_rows(found, places[client], wanted, position)


def test_features_of_movies_come_from_no_table(tmp_path, liked_folder):
    task, config = resolve("movielens-liked", str(liked_folder), {"cohort.size": 4})
    found_run(task, config, tmp_path / "run")
    run = open_run(tmp_path / "run")
    run.hub.close()
    with pytest.raises(UserError, match="column 'features' of this model was made of text"):
        open_store(run.offer, write(tmp_path / "m.csv", [("a", 1, 1)], ("user", "features", "liked")))


@pytest.mark.parametrize("name", ["movielens", "movielens-seen"])
def test_movielens_as_its_file_has_it(tmp_path, name, liked_folder):
    settings = {"data.max_examples": 10, "cohort.size": 4}
    task, config = resolve(name, str(liked_folder), settings)
    found_run(task, config, tmp_path / "run")
    run = open_run(tmp_path / "run")
    run.hub.close()
    wanted = prepare(task, config).store
    rows = [line.split("::") for line in (liked_folder / "ratings.dat").read_text().splitlines()]
    found = open_store(run.offer, write(tmp_path / "m.csv", rows, ("user", "item", "rating", "time")))
    places = {str(client): place for place, client in enumerate(found.client_ids.tolist())}
    assert wanted.counts.max() == 10
    for position, client in enumerate(wanted.client_ids.astype(str).tolist()):
        assert_same_rows(found, places[client], wanted, position)
