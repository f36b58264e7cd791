"""Runs that promise privacy: what they say, what they hide, when they end, and what is refused."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("dp_accounting", reason="the extra `privacy` is not installed")

from partwise.cli import main
from partwise.deployment.federation import found_run
from partwise.papers.rate_search import search_rates
from partwise.privacy.accounting import Rounds, default_delta, epsilon
from partwise.runs.folder import Folder
from partwise.runs.resolve import resolve
from partwise.runs.run_view import read_run
from partwise.runs.train import RunWarning, train
from partwise.types import UserError

SMALL = {
    "data.num_clients": 200,
    "data.num_items": 30,
    "data.mean_examples": 12,
    "data.dim": 2,
    "cohort.size": 20,
    "cohort.sampling": "poisson",
    "rounds": 6,
    "simulation.evaluate_every": 3,
    "simulation.checkpoint_every": 2,
    "simulation.lanes": 4,
    "server.weighting": "uniform",
    "server.schedule": "constant",
}
PRIVATE = {**SMALL, "privacy.clip": 0.5, "privacy.noise": 1.0}
HIDDEN = ("examples", "bytes_down", "bytes_up", "missed", "empty", "dropped", "too_small", "spare")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    out = tmp_path_factory.mktemp("private") / "run"
    return train("planted", out=out, changes=PRIVATE), Folder(out)


def test_epsilon_is_in_every_record_and_in_the_summary(run):
    done, folder = run
    clients = done.task.train.num_clients
    rounds, delta = Rounds(1.0, 20, clients, "poisson"), default_delta(clients)
    records = folder.records()
    told = [record["privacy"]["epsilon"] for record in records]
    for number, record in enumerate(records, 1):
        assert record["privacy"]["epsilon"] >= epsilon(rounds, number, delta)
        assert not record["privacy"]["simulated"]
    assert told[2] == epsilon(rounds, 3, delta)  # evaluated: exactly
    assert told[5] == epsilon(rounds, 6, delta) == folder.summary()["privacy"]["epsilon"]
    promise = folder.summary()["privacy"]
    assert promise["unit"] == "all data of a client, in all rounds"
    assert promise["relation"] == "one client added or removed"


def test_what_rounds_do_not_tell_neither_summary_nor_page_tells(run):
    """A 0 would say that all updates were used."""
    _, folder = run
    for name in ("empty", "dropped", "too_small"):
        untold = {record[name] for record in folder.records()}
        assert untold == {folder.summary()[name]} == {read_run(folder.path).series.counts[name]} == {None}
    assert folder.summary()["broken"] is None
    assert read_run(folder.path).series.counts["broken"] is None


def test_nothing_else_of_a_round_is_told(run):
    _, folder = run
    for record in folder.records():
        assert [record[name] for name in HIDDEN] == [None] * len(HIDDEN)
        assert record["broken"] == []
        assert "serving" not in record
    assert folder.summary()["bytes_down_per_client"] is None


def test_it_goes_on_bit_for_bit(run, tmp_path):
    done, _ = run
    train("planted", out=tmp_path / "run", changes={**PRIVATE, "rounds": 3})
    resumed = train(out=tmp_path / "run", resume=True, rounds=6)
    for path, leaf in done.params.items():
        assert (resumed.params[path] == leaf).all()
    assert Folder(tmp_path / "run").records()[-1]["privacy"] == done.records[-1]["privacy"]


def test_the_budget_ends_the_run(tmp_path):
    spent = train("planted", changes={**PRIVATE, "rounds": 2}).summary["privacy"]["epsilon"]
    with pytest.warns(RunWarning, match="ends the run after 2 of 6 rounds"):
        done = train("planted", out=tmp_path / "run", changes={**PRIVATE, "privacy.epsilon": spent + 1e-6})
    assert done.summary["rounds"] == 2
    assert done.summary["privacy"]["epsilon"] == pytest.approx(spent)
    with pytest.warns(RunWarning, match="ends the run after 2 of 9"):
        again = train(out=tmp_path / "run", resume=True, rounds=9)
    assert again.summary["rounds"] == 2
    with pytest.raises(UserError, match="one round costs more"):
        train("planted", changes={**PRIVATE, "privacy.epsilon": 0.01})


def test_the_noise_is_found_from_the_budget():
    done = train("planted", changes={**SMALL, "privacy.clip": 0.5, "privacy.epsilon": 4.0})
    assert 3.9 < done.summary["privacy"]["epsilon"] <= 4.0
    assert done.summary["rounds"] == 6


def test_the_noise_of_a_larger_cohort_is_called_a_simulation(capsys, tmp_path):
    changes = {**PRIVATE, "privacy.noise_cohort": 100}
    given = [text for key, value in changes.items() for text in ("--set", f"{key}={value}")]
    assert main(["train", "planted", "--out", str(tmp_path / "run"), *given]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "SIMULATED, nobody is protected" in said
    folder = Folder(tmp_path / "run")
    assert all(record["privacy"]["simulated"] for record in folder.records())
    assert folder.summary()["privacy"]["simulated"]
    clients = json.loads((tmp_path / "run" / "start.json").read_text())
    assert clients  # the folder is whole


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"privacy.noise": None}, "neither privacy.noise nor privacy.epsilon"),
        ({"privacy.clip": None}, "privacy needs a clip"),
        ({"server.weighting": "examples"}, "server.weighting=uniform"),
        ({"server.mean": "seen"}, "server.mean=cohort"),
        ({"server.mean": "holders"}, "server.mean=cohort"),
        ({"server.mean": "heat"}, "server.mean=heat with privacy.heat=gaussian"),
        ({"privacy.heat": "gaussian"}, "would have no effect"),
        ({"privacy.heat": "exact", "server.mean": "heat"}, "value of privacy.heat"),
        ({"privacy.mechanism": "blt"}, "cohort.sampling=apart:ROUNDS"),
        ({"cohort.sampling": "apart:60"}, "clients that a cohort is drawn from"),
        ({"privacy.clip": None, "privacy.noise": None, "privacy.heat": "response"}, "privacy needs a clip"),
        ({"server.optimizer": "lazy_adam"}, "use adam"),
        ({"algorithm": "fed_avg"}, "holders of rows"),
        ({"algorithm": "scaffold"}, "own gradient by the mean"),
        ({"privacy.noise_cohort": 10**6}, "privacy.noise_cohort"),
        ({"privacy.noise_cohort": 3}, "privacy.noise_cohort"),
        (
            {"cohort.sampling": "fixed", "cohort.min_examples": 2, "cohort.over_selection": 1.5},
            "leave one of them out",
        ),
    ],
)
def test_what_would_leave_by_another_way_is_refused(changes, words):
    with pytest.raises(UserError, match=words):
        train("planted", changes={**PRIVATE, **changes})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"privacy.clip_quantile": 0.5, "privacy.sums": "masked"}, "leave out privacy.clip_quantile"),
        ({"privacy.rows": "filtered", "privacy.sums": "masked"}, "leave out privacy.clip_quantile and"),
        ({"privacy.noise_cohort": 40}, "nobody would be protected"),
        ({"serving.way": "private"}, "needs two servers"),
        ({"deploy.precision": "int8"}, "longer than privacy.clip"),
        ({"deploy.held_out": 0.1, "privacy.sums": "masked"}, "would report their metrics one by one"),
        ({"deploy.buffer": 4, "deploy.concurrency": 8}, "deploy.buffer must be 0"),
        ({"privacy.mechanism": "blt"}, "cohort.sampling=apart:ROUNDS"),
    ],
)
def test_what_a_network_cannot_keep_is_refused(tmp_path, changes, words):
    task, config = resolve("planted", None, {**PRIVATE, **changes})
    with pytest.raises(UserError, match=words):
        found_run(task, config, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_search_counts_all_its_trials():
    task, config = resolve("planted", None, {**PRIVATE, "rounds": 3})
    grid, clients = [{"server.rate": 1.0}, {"server.rate": 0.5}], task.train.num_clients
    trials = search_rates(task, config, grid, [0, 1])
    rounds, delta = Rounds(1.0, 20, clients, "poisson"), default_delta(clients)
    for trial in trials:
        assert trial.privacy["epsilon"] == epsilon(rounds, 12, delta)
        assert "4 trials" in trial.privacy["ledger"][0]["what"]
    with pytest.raises(UserError, match="4 trials of 3 rounds cost more"):
        search_rates(task, config.changed({"privacy.epsilon": 0.1}), grid, [0, 1])
    budget = config.changed({"privacy.epsilon": 4.0, "privacy.noise": None})
    assert 3.9 < search_rates(task, budget, grid[:1], [0, 1])[0].privacy["epsilon"] <= 4.0


def test_control_variates_keep_no_promise():
    data = {"data.num_clients": 40, "data.num_words": 100, "data.num_tags": 5, "data.mean_examples": 6}
    privacy = {"privacy.clip": 1.0, "privacy.noise": 1.0, "server.weighting": "uniform"}
    changes = {**data, **privacy, "cohort.size": 5, "rounds": 2, "algorithm": "scaffold"}
    changes |= {"scaffold.control": "clients", "server.optimizer": "adam"}
    with pytest.raises(UserError, match="scaffold tells the server more than a noisy sum"):
        train("tags-planted", changes=changes)


HEATED = {**SMALL, "server.mean": "heat", "privacy.clip": 0.5, "privacy.epsilon": 4.0, "privacy.heat_keys": 5}


def test_heat_is_part_of_the_budget():
    done = train("planted", changes={**HEATED, "privacy.heat": "gaussian", "privacy.heat_epsilon": 1.0})
    promise = done.summary["privacy"]
    assert 3.9 < promise["epsilon"] <= 4.0
    updates, heat = promise["ledger"]
    assert heat["epsilon_alone"] == pytest.approx(1.0, rel=0.01)
    assert 3 < updates["epsilon_alone"] < 4
    assert all("per client" in record["privacy"]["heat"] for record in done.records)
    again = train("planted", changes={**HEATED, "privacy.heat": "gaussian", "privacy.heat_epsilon": 1.0})
    for path, leaf in done.params.items():
        assert (again.params[path] == leaf).all()


def test_fed_sub_avg_keeps_the_promise():
    changes = {
        **HEATED,
        "algorithm": "fed_sub_avg",
        "rounds": 2,
        "server.cap": 5.0,
        "privacy.heat": "gaussian",
    }
    done = train("planted", changes=changes)
    promise = done.summary["privacy"]
    assert 3.8 < promise["epsilon"] <= 4.0
    assert [entry["what"].split(":")[0] for entry in promise["ledger"]] == ["sums of 2 rounds", "heat"]
    with pytest.raises(UserError, match=r"privacy.heat=gaussian"):
        train("planted", changes={**changes, "privacy.heat": "none"})


def test_flipped_bits_protect_keys_and_every_output_says_so():
    done = train("planted", changes={**HEATED, "rounds": 2, "privacy.heat": "response"})
    promise = done.summary["privacy"]
    assert len(promise["ledger"]) == 1
    assert "per key, not per client" in promise["not_covered"]
    assert all("per key, not per client" in record["privacy"]["heat"] for record in done.records)


APART = {
    **SMALL,
    "cohort.size": 5,
    "cohort.sampling": "apart:20",
    "rounds": 30,
    "simulation.evaluate_every": 0,
}


@pytest.mark.slow
def test_correlated_noise_goes_on_bit_for_bit(tmp_path):
    changes = {**APART, "privacy.clip": 0.5, "privacy.epsilon": 4.0, "privacy.mechanism": "blt"}
    changes["simulation.checkpoint_every"] = 15
    done = train("planted", out=tmp_path / "whole", changes=changes)
    promise = done.summary["privacy"]
    assert 3.9 < promise["epsilon"] <= 4.0
    assert promise["relation"] == "one client's contributions left out"

    def kill(status):
        if status.round > 15:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train("planted", out=tmp_path / "cut", changes=changes, progress=kill)
    resumed = train(out=tmp_path / "cut", resume=True)
    for path, leaf in done.params.items():
        assert (resumed.params[path] == leaf).all()
    with pytest.raises(UserError, match="made for 30 rounds"):
        train(out=tmp_path / "cut", resume=True, rounds=40)
