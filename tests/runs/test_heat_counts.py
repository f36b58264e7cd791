"""Training with heat that another run has counted: the same model, one ledger, and no counts of something else."""

from __future__ import annotations

import math
import shutil

import numpy as np
import pytest

pytest.importorskip("dp_accounting", reason="the extra `privacy` is not installed")

from partwise.checkpoint import load_arrays, save_arrays
from partwise.config.parts import HEATS
from partwise.config.protection import protection
from partwise.privacy.accounting import default_delta, epsilon, gaussian_noise
from partwise.runs.evaluation import evaluate_run
from partwise.runs.folder import Folder
from partwise.runs.resolve import resolve
from partwise.runs.train import train
from partwise.selection.key_heat import count_heats
from partwise.types import UserError

DATA = {"data.num_clients": 40, "data.num_items": 20, "data.mean_examples": 12, "data.dim": 2}
TAGS = {"data.num_clients": 30, "data.num_words": 60, "data.num_tags": 5, "data.words_per_example": 5}
COUNT = {"algorithm": "count_heat", "simulation.lanes": 4}
TRAIN = {
    "rounds": 2,
    "cohort.size": 6,
    "simulation.lanes": 2,
    "server.weighting": "uniform",
    "server.schedule": "constant",
    "server.mean": "heat",
}
PRIVATE = {**TRAIN, "privacy.clip": 0.5, "cohort.sampling": "poisson"}


@pytest.fixture(scope="module")
def exact(tmp_path_factory):
    """A count without noise."""
    out = tmp_path_factory.mktemp("exact") / "counts"
    train("planted", out=out, changes={**DATA, **COUNT})
    return out


@pytest.fixture(scope="module")
def noisy(tmp_path_factory):
    """A count with noise."""
    out = tmp_path_factory.mktemp("noisy") / "counts"
    return out, train(
        "planted", out=out, changes={**DATA, **COUNT, "privacy.epsilon": 2.0, "privacy.heat_keys": 6}
    )


def check_models(one, other):
    assert set(one.params) == set(other.params)
    for path, leaf in one.params.items():
        np.testing.assert_array_equal(leaf, other.params[path])


@pytest.mark.parametrize("algorithm", ["fed_sub_avg", "fed_recon"])
def test_the_model_is_that_of_a_server_with_all_data(exact, algorithm):
    """With all parameters on the server, users have rows of their own, which nobody counts."""
    changes = {**DATA, **TRAIN, "algorithm": algorithm, "server.cap": 3.0}
    counted = train("planted", changes={**changes, "server.counts": str(exact)})
    check_models(counted, train("planted", changes=changes))
    assert counted.summary["privacy"] is None


def test_secure_sums_without_noise_are_exact_too(tmp_path):
    changes = {**TAGS, **COUNT, "privacy.sums": "two_servers", "privacy.keys": 60}
    train("tags-planted", out=tmp_path / "counts", changes=changes)
    changes = {**TAGS, **TRAIN, "algorithm": "fed_sub_avg"}
    counted = train("tags-planted", changes={**changes, "server.counts": str(tmp_path / "counts")})
    check_models(counted, train("tags-planted", changes=changes))


def test_what_the_count_costs_is_part_of_epsilon(noisy):
    out, counting = noisy
    run = train("planted", changes={**DATA, **PRIVATE, "server.counts": str(out), "privacy.epsilon": 6.0})
    promise, clients = run.summary["privacy"], run.task.train.num_clients
    assert 5.9 < promise["epsilon"] <= 6.0
    updates, heat = promise["ledger"]
    assert heat["what"].startswith("heat")
    assert heat["noise"] == counting.summary["privacy"]["noise"]
    assert heat["epsilon_alone"] == pytest.approx(counting.summary["privacy"]["epsilon"], rel=1e-3)
    assert updates["epsilon_alone"] < 6.0
    assert all("included in epsilon" in record["privacy"]["heat"] for record in run.records)
    rounds = protection(run.config, clients).rounds
    assert promise["epsilon"] == epsilon(rounds, 2, default_delta(clients), (heat["noise"],))


def test_counts_are_those_of_the_clients_with_as_much_noise_as_they_say(noisy):
    out, counting = noisy
    task, config = resolve(
        "planted", None, {**DATA, **PRIVATE, "server.counts": str(out), "privacy.noise": 1.0}
    )
    found = task.train.info[HEATS]["item"]
    sd = protection(counting.config, found.total).door.deviation
    true = count_heats(task.train, task.personal.partition)["item"]
    assert found.total == true.total
    assert found.counts.min() >= math.floor(2 * sd)
    assert sd == pytest.approx(gaussian_noise(2.0, default_delta(found.total)) * math.sqrt(7), rel=0.03)
    assert (config.privacy.heat, config.privacy.heat_noise) == (
        "gaussian",
        counting.summary["privacy"]["noise"],
    )


def test_cohorts_of_one_size_count_the_same_noise_in_their_own_relation(noisy):
    """To replace a client moves the counts by more than to leave it out, so the same noise costs more."""
    out, counting = noisy
    changes = {**DATA, **PRIVATE, "server.counts": str(out), "privacy.noise": 4.0, "cohort.sampling": "fixed"}
    task, config = resolve("planted", None, changes)
    alone = protection(config, task.train.num_clients).ledger.entries(1)[1]["epsilon_alone"]
    assert alone > 1.1 * counting.summary["privacy"]["epsilon"]


def test_two_servers_add_their_noise_twice(noisy, tmp_path):
    changes = {**DATA, **COUNT, "privacy.epsilon": 2.0, "privacy.heat_keys": 6, "privacy.sums": "two_servers"}
    train("planted", out=tmp_path / "counts", changes=changes)
    task, _ = resolve("planted", None, {**DATA, **TRAIN, "server.counts": str(tmp_path / "counts")})
    heat = task.train.info[HEATS]["item"]
    once = protection(noisy[1].config, heat.total).door.deviation
    assert heat.counts.min() >= math.floor(2 * math.sqrt(2) * once)


def test_a_run_goes_on_and_is_judged_without_the_counts(exact, tmp_path):
    """They are in its checkpoints; to judge a model takes none."""
    counts = shutil.copytree(exact, tmp_path / "counts")
    changes = {**DATA, **TRAIN, "server.counts": str(counts)}
    whole = train("planted", changes={**changes, "rounds": 4})
    train("planted", out=tmp_path / "run", changes=changes)
    check_models(train(out=tmp_path / "run", resume=True, rounds=4), whole)
    shutil.rmtree(counts)
    assert evaluate_run(tmp_path / "run") == whole.test
    with pytest.raises(UserError, match="holds no run"):
        train(out=tmp_path / "run", resume=True, rounds=5)


def broken(folder, name):
    (folder / name).write_bytes((folder / name).read_bytes()[:-3] + b"xyz")


def other_run(folder, name="model.safetensors"):
    arrays, header = load_arrays(folder / name)
    save_arrays(folder / name, arrays, {**header, "run": "another"})


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda folder: shutil.rmtree(folder), "holds no run"),
        (lambda folder: (folder / "model.safetensors").unlink(), "has not counted everybody yet"),
        (lambda folder: broken(folder, "model.safetensors"), "damaged|checksum|digest"),
        (lambda folder: broken(folder, "config.toml"), "put the file back"),
        (other_run, "is the model of another run"),
    ],
)
def test_damaged_and_unfinished_counts_are_refused(exact, tmp_path, spoil, words):
    counts = shutil.copytree(exact, tmp_path / "counts")
    spoil(counts)
    with pytest.raises(UserError, match=words):
        resolve("planted", None, {**DATA, **TRAIN, "server.counts": str(counts)})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"data.num_clients": 50}, r"counted 32 clients, and there are 40 .*: count the clients that train"),
        ({"deploy.population": 1000}, "counted 32 clients, and there are 1,000"),
        ({"data.num_items": 21}, "counted 20 keys of 'item', and the task has 21|has other ids"),
        ({"server.weighting": "examples"}, "set server.weighting=uniform"),
        ({"server.mean": "cohort"}, "server.mean = cohort reads no counts"),
        ({"privacy.clip": 1.0, "privacy.noise": 1.0}, "have no noise, so with privacy.clip nothing could"),
        ({"privacy.heat_epsilon": 3.0}, "have noise of their own"),
        ({"privacy.heat_keys": 3}, "have noise of their own"),
    ],
)
def test_counts_that_do_not_fit_are_refused(exact, changes, words):
    with pytest.raises(UserError, match=words):
        resolve("planted", None, {**DATA, **TRAIN, "server.counts": str(exact), **changes})


def test_counts_of_another_task_or_algorithm_are_refused(exact, noisy, tmp_path):
    with pytest.raises(UserError, match="counted keys of task 'planted', and this one is 'tags-planted'"):
        resolve("tags-planted", None, {**TAGS, **TRAIN, "algorithm": "fed_avg", "server.counts": str(exact)})
    train("planted", out=tmp_path / "run", changes={**DATA, "rounds": 1, "cohort.size": 4})
    with pytest.raises(UserError, match="is a run of fed_recon: give the folder of a run of count_heat"):
        resolve("planted", None, {**DATA, **TRAIN, "server.counts": str(tmp_path / "run")})
    changes = {**DATA, **PRIVATE, "privacy.noise": 1.0, "privacy.heat": "response"}
    with pytest.raises(UserError, match="leave one of the two out"):
        resolve("planted", None, {**changes, "server.counts": str(noisy[0])})


def test_other_ids_of_the_same_number_are_refused(exact):
    task, _ = resolve("planted", None, DATA)
    assert Folder(exact).config().cohort.size == task.train.num_clients
    task.train.vocabularies["item"] = np.arange(20)[::-1]  # another order
    with pytest.raises(UserError, match="column 'item' of the data has other ids"):
        resolve(task, None, {**TRAIN, "server.counts": str(exact)})
