"""Learning on real data, against the papers' figures. Slow: run with `-m slow`."""

import os

import pytest

from partwise.runs.train import train

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not os.environ.get("PARTWISE_DATA"), reason="PARTWISE_DATA is not set"),
]


def test_fed_recon_learns_movielens_as_in_table_1():
    run = train("movielens", rounds=500)
    assert run.test["rmse"] < 0.907 * 1.02
    assert run.test["accuracy"] > 0.433 - 0.01


def test_closed_form_with_our_options_is_better_than_the_papers_best():
    options = {"data.dim": 10, "data.biases": True, "data.initial": "learned", "split.kind": "none"}
    options |= {"reconstruct.method": "solve", "reconstruct.pull": 1.0, "update.rate": 0.1}
    options |= {
        "server.optimizer": "adagrad",
        "server.rate": 0.3,
        "server.schedule": "cosine",
        "server.settings.initial_accumulator": 0.1,
        "server.settings.epsilon": 1e-7,
        "rounds": 1500,
    }
    run = train("movielens", changes=options)
    assert run.test["rmse"] < 0.883
    assert run.test["accuracy"] > 0.441


def test_fed_avg_learns_seen_users():
    run = train("movielens-seen", preset="paper", algorithm="fed_avg", rounds=500)
    assert run.test["rmse"] < 0.939 * 1.02
    assert run.test["accuracy"] > 0.415 - 0.01


def test_the_default_task_comes_close_to_the_planted_optimum():
    run = train("planted")
    assert run.test["rmse"] < 1.05 * run.summary["best"]["rmse"]
