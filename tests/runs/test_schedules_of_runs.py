"""Runs whose rates follow a schedule: the same in all backends, after a resume, and as rates set by hand."""

import numpy as np
import pytest

from partwise.algorithms.registry import prepare
from partwise.runs.backends import make_simulation
from partwise.runs.resolve import resolve
from partwise.runs.train import train
from partwise.types import UserError

STEPS = {"reconstruct.method": "steps", "update.method": "steps", "rounds": 4}
HALVES = {"update.schedule": "exponential:0.5", "reconstruct.schedule": "exponential:0.25"}


@pytest.fixture
def small(tiny):
    return tiny | STEPS


def params_of(run):
    return {path: np.asarray(leaf) for path, leaf in run.params.items()}


def test_a_schedule_is_a_sequence_of_runs_with_other_rates(small):
    """By hand: every round with rates of its own, from the state that the round before left."""
    task, config = resolve("planted", None, small | HALVES)
    prepared = prepare(task, config)
    simulation = make_simulation(prepared, config)
    list(simulation.run(4))
    plain = config.changed({"update.schedule": "constant", "reconstruct.schedule": "constant"})
    by_hand = make_simulation(prepare(task, plain), plain)
    for number in range(4):
        rates = {"update": config.update.rate * 0.5**number}
        rates["reconstruct"] = config.reconstruct.rate * 0.25**number
        state = by_hand.snapshot()
        by_hand.restart(config.seed, rates)
        by_hand.resume(state, number)
        list(by_hand.run(1))
    for path, leaf in simulation.state.params.items():
        np.testing.assert_array_equal(leaf, by_hand.state.params[path], err_msg=path)
    programs = simulation._rounds._cache_size()
    list(simulation.run(2))
    assert simulation._rounds._cache_size() == programs  # another round needs no other program


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_the_plain_loop_has_the_same_rates(small, optimizer):
    given = small | HALVES | {"update.optimizer": optimizer, "reconstruct.optimizer": optimizer, "rounds": 3}
    compiled = train("planted", changes=given)
    plain = train("planted", changes=given | {"simulation.backend": "plain"})
    for path, leaf in params_of(compiled).items():
        np.testing.assert_allclose(plain.params[path], leaf, rtol=2e-4, atol=1e-6, err_msg=path)
    constant = train("planted", changes={k: v for k, v in given.items() if k not in HALVES})
    assert not np.allclose(constant.params["item"], compiled.params["item"], rtol=1e-3)


def test_a_schedule_of_ones_is_a_constant_rate_in_every_bit(small):
    """The server's rate, and those of clients."""
    ones = dict.fromkeys(("server.schedule", "update.schedule", "reconstruct.schedule"), lambda number: 1.0)
    constant, with_ones = (train("planted", changes=small | each) for each in ({}, ones))
    assert with_ones.config.update.schedule == "values:1.0,1.0,1.0,1.0"
    for path, leaf in params_of(constant).items():
        np.testing.assert_array_equal(with_ones.params[path], leaf, err_msg=path)


def test_a_resumed_run_goes_on_in_its_schedule(small, tmp_path):
    given = small | {"rounds": 6, "update.schedule": lambda number: 1 / (1 + number)}
    given |= {"server.schedule": "warmup_cosine:2"}
    whole = train("planted", out=tmp_path / "whole", changes=given)

    def kill(status):
        if status.round == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train("planted", out=tmp_path / "killed", progress=kill, changes=given)
    resumed = train(out=tmp_path / "killed", resume=True)
    for path, leaf in params_of(whole).items():
        np.testing.assert_array_equal(resumed.params[path], leaf, err_msg=path)
    with pytest.raises(UserError, match=r"changes over its 6 rounds \(server.schedule, update.schedule\)"):
        train(out=tmp_path / "killed", resume=True, rounds=8)


def test_a_schedule_that_nothing_reads_is_refused(small):
    with pytest.raises(
        UserError, match=r"update.schedule = linear would have no effect: update.method = solve"
    ):
        train("planted", changes=small | {"update.schedule": "linear", "update.method": "solve"})
    with pytest.raises(UserError, match=r"unknown value of update.schedule 'nope'"):
        train("planted", changes=small | {"update.schedule": "nope"})


def test_evaluated_clients_rebuild_with_the_rate_itself(small):
    """A schedule is of training: at the end, the rate that fell to almost nothing still rebuilds local parts."""
    given = small | {"update.rate": 0.0, "server.schedule": "constant"}
    fallen = train("planted", changes=given | {"reconstruct.schedule": "exponential:0.001"})
    assert fallen.test == train("planted", changes=given).test


def test_scaffold_divides_by_the_rate_of_the_round(liked_folder):
    """Its control variates are updates divided by the rate, so both follow the schedule; the plain loop agrees."""
    given = {"algorithm": "scaffold", "rounds": 3, "cohort.size": 6, "simulation.lanes": 3}
    given |= {"update.schedule": "exponential:0.5"}
    compiled, plain = (
        train("movielens-liked", data=str(liked_folder), changes=given | {"simulation.backend": backend})
        for backend in ("compiled", "plain")
    )
    assert any(path.startswith("control/") and np.any(leaf) for path, leaf in compiled.params.items())
    for path, leaf in params_of(compiled).items():
        np.testing.assert_allclose(plain.params[path], leaf, rtol=1e-3, atol=1e-5, err_msg=path)
