"""Runs in which clients do not count: some are told, all are an error, and a refused run leaves nothing."""

import dataclasses
import math

import jax.numpy as jnp
import numpy as np
import pytest

from partwise.data.text.corpus import Corpus, Text
from partwise.data.text.sentences import TokenIds, split_sentence_stores
from partwise.model.partition import local, partition
from partwise.model.spec import Model
from partwise.runs.sanity import check_going, left_out
from partwise.runs.summary import not_finite, past_its_best
from partwise.runs.tally import Tally
from partwise.runs.train import train
from partwise.tasks import Setting, Task, load_task
from partwise.types import UserError

SMALL = {
    "data.num_clients": 40,
    "data.num_items": 20,
    "data.mean_examples": 12,
    "data.dim": 2,
    "cohort.size": 4,
    "rounds": 2,
    "simulation.lanes": 2,
}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"cohort.size": 33}, r"only 32 training clients. Use --cohort 32 or fewer"),
        ({"cohort.over_selection": 100}, r"x cohort.over_selection 100.*Lower cohort.over_selection"),
        ({"cohort.min_examples": 100000}, r"nobody can take part: cohort.min_examples is 100000"),
        (
            {"cohort.sampling": "poisson", "cohort.over_selection": 2},
            r"cohort.over_selection must be 1, not 2",
        ),
        ({"cohort.sampling": "poisson:3"}, r"cohort.sampling = poisson:3 cuts cohorts below cohort.size = 4"),
        (
            {"cohort.sampling": "poisonous"},
            r"unknown value of cohort.sampling 'poisonous' \(nearest: poisson\)",
        ),
        (
            {"cohort.sampling": "poisson", "cohort.size": 1, "seed": 3},
            r"no client counted in 2 rounds, .*: nobody was drawn. To mend it, raise cohort.size",
        ),
        ({"algorithm": "fed_avgg"}, "unknown algorithm"),
        ({"simulation.backend": "fast"}, "compiled, plain or eager"),
        (
            {"update.rate": 1e30},
            r"no client counted in 2 rounds.* 8 updates that were not finite.*lower update",
        ),
    ],
)
def test_a_refused_run_leaves_no_folder(tmp_path, changes, says):
    with pytest.raises(UserError, match=says):
        train("planted", out=tmp_path / "run", changes=SMALL | changes)
    assert not (tmp_path / "run").exists()


def test_a_refused_run_leaves_what_was_in_the_folder(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match="no client counted"):
        train("planted", out=tmp_path, changes=SMALL | {"update.rate": 1e30})
    assert [file.name for file in tmp_path.iterdir()] == ["notes.txt"]


def tallied(*clients_and_reasons):
    """Rounds in which so many clients counted, and others did not."""
    tally, nothing = Tally(), dict.fromkeys(("empty", "too_small", "dropped", "bytes_down", "bytes_up"), 0)
    for number, (clients, reasons) in enumerate(clients_and_reasons, 1):
        line = {"round": number, "seconds": 0.1, "train": {"loss": 1.0}, "evaluation": None, "broken": []}
        tally.add(line | nothing | {"clients": clients} | reasons)
    return tally


def test_a_run_is_given_up_early_but_not_at_once():
    none = (0, {"empty": 3})
    check_going(tallied(*[none] * 19), 20, 1000)
    with pytest.raises(UserError, match=r"in 20 rounds.*60 clients without query examples.*split.kind=none"):
        check_going(tallied(*[none] * 20), 20, 1000)
    with pytest.raises(UserError, match="in 5 rounds"):
        check_going(tallied(*[none] * 5), 20, 5)
    check_going(tallied(*[none] * 25, (1, {})), 20, 1000)


def test_in_one_place_a_failed_round_is_repeated_once():
    """It begins again with the same parameters and the same examples."""
    broken = {key: value for key, value in SMALL.items() if key != "cohort.size"}
    broken |= {"algorithm": "central", "rounds": 20, "update.rate": 1e30, "update.max_steps": None}
    broken |= {"simulation.rounds_per_call": 1}
    with pytest.raises(UserError, match=r"no client counted in 2 rounds.* not finite.*lower update.rate"):
        train("planted", changes=broken)
    with pytest.raises(UserError, match="in 20 rounds"):
        train("planted", changes=broken | {"simulation.patience": 0})


def test_what_was_left_out_is_in_the_summary():
    assert left_out(tallied((1, {"broken": ["a", "b"]}), (0, {"dropped": 2, "broken": ["c"]}))) == {
        "broken": 3,
        "empty": 0,
        "too_small": 0,
        "dropped": 2,
    }
    summary = train("planted", changes=SMALL | {"cohort.over_selection": 2, "cohort.dropout": 0.5}).summary
    assert summary["dropped"] > 0
    assert (summary["broken"], summary["not_finite"], summary["fewer"]) == (0, [], {})


def test_fewer_than_asked_for_is_in_the_summary():
    """As of a vocabulary that is larger than the data."""
    task = load_task(
        "planted", **{key.removeprefix("data."): n for key, n in SMALL.items() if "data." in key}
    )
    asked = task._replace(loaded={**task.loaded, "num_items": 30})
    settings = {key: value for key, value in SMALL.items() if "data." not in key}
    assert train(asked, changes=settings).summary["fewer"] == {"num_items": (30, 20)}


def test_the_split_of_an_evaluation_is_told():
    """Training without a split is tested as with alternate batches, and says so."""
    found = [
        train("planted", changes=SMALL | more).test
        for more in ({}, {"evaluation_split.kind": "alternate"}, {"evaluation_split.kind": "halves"})
    ]
    assert [each["judged"]["split"].split(",")[0] for each in found] == ["alternate", "alternate", "halves"]
    assert "split.kind = none is of training alone" in found[0]["judged"]["split"]
    assert found[0]["rmse"] == found[1]["rmse"] != found[2]["rmse"]


BY_STEPS = {"algorithm": "fed_avg", "update.max_steps": 1, "update.batch_size": 3, "rounds": 30}


@pytest.mark.parametrize("begin", ["first", "random"])
def test_examples_that_are_said_to_be_left_out_are_not_read(begin):
    """Other ratings of theirs give the same model, and other ratings of any other example another one."""
    task = load_task("planted", num_clients=10, num_items=20, mean_examples=12, dim=2, max_examples=11)
    changes = {**BY_STEPS, "update.begin": begin, "cohort.size": 4, "simulation.lanes": 2}
    usual = train(task, changes=changes)
    counts, there = task.train.counts, usual.summary["examples"]
    place = np.concatenate([np.arange(count) for count in counts])
    uncapped = load_task("planted", num_clients=10, num_items=20, mean_examples=12, dim=2).train.num_examples
    left = (place >= 3) & (begin == "first")
    assert there["there"] == uncapped
    assert there["used"] == len(place) - left.sum()
    assert sum(there["left_out"].values()) == uncapped - there["used"]
    packed = task.train.gather()
    for read in (left, ~left & (place == place.max()), place == 0):
        ratings = packed.columns["rating"] + 1.0 * read
        columns = {**packed.columns, "rating": ratings}
        other = train(task._replace(train=dataclasses.replace(packed, columns=columns)), changes=changes)
        same = all(np.array_equal(leaf, other.params[path]) for path, leaf in usual.params.items())
        assert same == (not (read & ~left).any())


def speak(client, sentences):
    return Text(client, 0, "speech", "", sentences, ())


@pytest.mark.parametrize("backend", ["compiled", "plain"])
def test_clients_of_a_single_sentence_have_no_query(backend):
    """By halves the one sentence goes to support: the client weighs nothing, and is counted."""
    texts = [
        speak(f"c{k}", ("the cat sat",) if k % 2 else ("the cat", "a cat sat", "sat")) for k in range(20)
    ]
    parts = split_sentence_stores(Corpus.of(texts), num_words=99, num_buckets=2, length=3)
    assert parts[0].num_keys("tokens") == TokenIds(4, 2).num_ids  # all words that there are
    init = lambda rng: {"shared": jnp.zeros(9), "own": jnp.zeros(9)}
    predict = lambda params, batch, rng: (params["shared"] + params["own"])[batch["tokens"]]
    model = Model(init, predict, lambda outputs, batch: ((outputs - 1.0) ** 2).mean(axis=-1))
    task = Task("said", *parts, Setting(model, partition(model, {"own": local("zero")}), ("tokens",)))
    everyone = {"cohort.size": parts[0].num_clients, "rounds": 2, "split.kind": "halves"}
    run = train(task, changes=everyone | {"simulation.backend": backend, "simulation.lanes": 2})
    single = int((parts[0].counts == 1).sum())
    assert 0 < single < parts[0].num_clients
    for record in run.records:
        assert (record["empty"], record["clients"]) == (single, parts[0].num_clients - single)
        assert math.isfinite(record["train"]["loss"])
    assert run.summary["empty"] == 2 * single
    assert run.test["clients_without_examples"] == (parts[2].counts == 1).sum()
    assert run.test["clients"] == (parts[2].counts > 1).sum()
    with pytest.raises(UserError, match=r"clients without query examples.*split.kind=none"):
        train(
            task._replace(train=parts[0].take(parts[0].counts == 1)),
            changes=everyone | {"cohort.size": single},
        )


def test_metrics_that_are_not_finite_are_named():
    spread = lambda mean: {"clients": 2, "mean": mean}
    metrics = {"rmse": math.nan, "accuracy": 0.5, "loss": 1.0, "clients": 2}
    metrics["over_clients"] = {"rmse": spread(math.nan), "accuracy": spread(0.5), "loss": spread(math.inf)}
    assert not_finite(metrics) == ["rmse", "loss"]
    assert not_finite(metrics | {"clients": 0}) == []


def evaluated(losses):
    """A tally of rounds that were all evaluated."""
    tally = Tally()
    for number, loss in enumerate(losses, 1):
        numbers = dict.fromkeys(("clients", "empty", "too_small", "dropped", "bytes_down", "bytes_up"), 1)
        known = {"round": number, "seconds": 1.0, "train": {"loss": 1.0}, "broken": []}
        tally.add({**numbers, **known, "evaluation": {"loss": loss}})
    return tally


@pytest.mark.parametrize(
    ("losses", "says"),
    [
        ([5, 3, 2, 3, 4], "lowest after round 3 (2) and is 4 after round 5"),
        ([5, 4, 3, 2, 1], ""),
        ([5, 3, 2, 2.05, 2.09], ""),
        ([1, 2, 3], ""),
        ([5, 3, 2, 3, None], ""),
        ([5, 3, 2, 3, math.nan], ""),
        ([-5, -6, -7, -6, -5], "lowest after round 3 (-7)"),
    ],
)
def test_a_run_past_its_best_says_so(losses, says):
    found = past_its_best(evaluated(losses))
    assert says in found
    assert bool(found) == bool(says)
