"""A run that goes on: only with the run that is there, and never to fewer rounds than it has."""

import warnings

import jax
import numpy as np
import pytest

from partwise.algorithms.registry import prepare
from partwise.checkpoint import load_arrays
from partwise.config.settings import Config
from partwise.runs.backends import make_simulation
from partwise.runs.client_file import source_of
from partwise.runs.evaluation import evaluate_run
from partwise.runs.folder import Folder
from partwise.runs.resolve import _check_same, resolve
from partwise.runs.train import train
from partwise.simulation import stage
from partwise.simulation.staging import Stager
from partwise.tasks import load_task
from partwise.types import RunWarning, UserError

SMALL = {
    "data.num_clients": 40,
    "data.num_items": 20,
    "data.mean_examples": 12,
    "data.dim": 2,
    "cohort.size": 4,
    "rounds": 4,
    "simulation.rounds_per_call": 2,
    "simulation.checkpoint_every": 2,
    "simulation.lanes": 2,
    "server.schedule": "constant",
}
CARRIED = {
    "rounds": 6,
    "cohort.size": 6,
    "simulation.checkpoint_every": 2,
    "simulation.rounds_per_call": 1,
    "simulation.lanes": 3,
}


@pytest.fixture
def folder(tmp_path):
    train("planted", out=tmp_path / "run", changes=SMALL)
    return Folder(tmp_path / "run")


class Killed(BaseException):
    pass


@pytest.mark.parametrize(
    ("task", "setting", "shape", "times"),
    [
        (
            "movielens-liked",
            {"algorithm": "scaffold"},
            (24,),
            1,
        ),  # a control variate of the bias for each client
        # weights, and holders, of 209 features
        ("movielens-liked", {"algorithm": "fed_avg", "server.mean": "seen"}, (209,), 2),
        ("movielens-seen", {"algorithm": "fed_rep", "data.dim": 3}, (24, 3), 1),  # a vector of each client
    ],
)
def test_what_is_carried_between_rounds_survives_a_kill(liked_folder, tmp_path, task, setting, shape, times):
    """What clients keep, or the aggregator counts: resumed, it ends in every bit as if it had not been killed."""
    given = {"data": str(liked_folder), "changes": {**CARRIED, **setting}}
    whole = train(task, out=tmp_path / "whole", **given)

    def kill(status):
        if status.round == 5:
            raise Killed

    with pytest.raises(Killed):
        train(task, out=tmp_path / "killed", progress=kill, **given)
    assert Folder(tmp_path / "killed").rounds_done() == 4
    resumed = train(out=tmp_path / "killed", resume=True)
    losses = [[record["train"]["loss"] for record in run.records] for run in (whole, resumed)]
    assert losses[0] == losses[1]
    assert whole.test == resumed.test
    last = [tmp_path / name / "checkpoints" / "00000006.safetensors" for name in ("whole", "killed")]
    (expected, _), (found, _) = map(load_arrays, last)
    assert expected.keys() == found.keys()
    assert [array.any() for array in found.values() if array.shape == shape] == [True] * times
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array, err_msg=name)


@pytest.mark.parametrize("backend", ["compiled", "plain"])
@pytest.mark.slow
def test_cohorts_of_varying_size_go_on_in_the_middle(tmp_path, backend):
    """Two clients on average, and nobody in the third round, which is evaluated."""
    varying = {"cohort.size": 2, "cohort.sampling": "poisson:4", "seed": 130, "simulation.backend": backend}
    given = SMALL | varying | {"rounds": 6, "simulation.evaluate_every": 3}
    whole = train("planted", out=tmp_path / "whole", changes=given)
    train("planted", out=tmp_path / "half", changes=given | {"rounds": 2})
    with warnings.catch_warnings():
        warnings.simplefilter("error", RunWarning)  # such as of a picture that cannot be drawn
        resumed = train(out=tmp_path / "half", resume=True, rounds=6)
    clients = [record["clients"] for record in whole.records]
    assert clients == [record["clients"] for record in resumed.records] == [2, 4, 0, 1, 4, 1]
    assert [record["spare"] for record in whole.records] == [0, 1, 0, 0, 0, 0]
    assert whole.test == resumed.test
    models = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "half")]
    assert models[0] == models[1]


def test_fewer_rounds_than_are_done_are_refused(folder):
    before = (folder.path / "summary.json").read_bytes()
    with pytest.raises(UserError, match="already has 4 rounds; it cannot go on to 3"):
        train(out=folder.path, resume=True, rounds=3)
    assert folder.config().rounds == 4
    assert (folder.path / "summary.json").read_bytes() == before


def test_killed_in_an_extension_it_goes_on_to_the_new_number(folder):
    def kill(status):
        raise Killed

    with pytest.raises(Killed):
        train(out=folder.path, resume=True, rounds=8, progress=kill)
    assert folder.config().rounds == 8
    with pytest.raises(UserError, match="has not ended"):
        evaluate_run(folder.path)
    assert train(out=folder.path, resume=True).summary["rounds"] == 8
    assert [record["round"] for record in folder.records()] == list(range(1, 9))


def test_a_run_that_is_not_there_is_not_begun(tmp_path):
    with pytest.raises(UserError, match=r"holds no run to go on with.*leave out --resume \(resume=True\)"):
        train("planted", out=tmp_path / "nope", resume=True, changes=SMALL)
    with pytest.raises(UserError, match=r"--out DIR \(in Python, out="):
        train("planted", resume=True)
    assert not (tmp_path / "nope").exists()


def test_another_task_is_refused(tmp_path):
    task = load_task("planted", num_clients=40, num_items=20, mean_examples=12, dim=2)
    Folder(tmp_path).start(
        train(task, rounds=1, simulation__lanes=2, cohort__size=4).config, {}, source_of(task.train), {}
    )
    for other in ("movielens", task._replace(name="other")):
        with pytest.raises(UserError, match=r"is of task 'planted', not '(movielens|other)'"):
            train(other, out=tmp_path, resume=True)
    with pytest.raises(UserError, match="the task is 'planted', but the settings say 'movielens'"):
        train("planted", changes={"task": "movielens"})


def test_an_option_that_is_new_since_the_run_began_is_no_change_if_it_is_off(folder):
    """As if an older version had written the run. Its own files are sealed, so the configurations are made here."""
    before = Config(data={"dim": 2})
    _check_same(folder, before, Config(data={"dim": 2, "attention": False, "item_pull": 0.0, "cuts": ""}))
    for data in ({"dim": 2, "attention": True}, {"dim": 0}):
        with pytest.raises(UserError, match=r"keeps its configuration, and in .* data.\w+ was .* and is"):
            _check_same(folder, before, Config(data=data))


def test_a_task_object_says_how_it_was_loaded():
    task = load_task("planted", num_clients=40, num_items=20, mean_examples=12, dim=2)
    given = {"num_clients": 40, "num_items": 20, "mean_examples": 12, "dim": 2}
    assert task.loaded.items() >= given.items()
    assert (task.loaded["initial"], task.loaded["biases"]) == ("learned", False)  # and what was not said
    with pytest.raises(UserError, match=r"data.dim = 3 cannot change a Task object"):
        train(task, data__dim=3)


@pytest.mark.slow  # with XLA's optimizations: without, all numbers of an array are rounded in one way
@pytest.mark.parametrize("tables", ["copies", "host"])
def test_a_simulation_that_goes_on_has_the_same_bits_whatever_it_saw_before(tables):
    """Of 40,000 items, the table is cut to those of a round. How long it is depends on the rounds before."""
    changes = {
        "cohort.size": 100,
        "cohort.sampling": "poisson",
        "simulation.lanes": 8,
        "data.num_items": 40_000,
    }
    changes |= {"rounds": 30, "simulation.rounds_per_call": 2, "simulation.tables": tables}
    task, config = resolve("planted", None, changes)
    new = lambda: make_simulation(prepare(task, config), config, 8)

    def trained(simulation, rounds):
        for _ in simulation.run(rounds):
            pass
        return jax.tree.map(np.array, simulation.snapshot())

    begun = new()
    before, capacity = trained(begun, 20), begun.capacity
    whole = trained(begun, 10)
    assert any(name.endswith("item") for name in capacity)
    for seeds in ((), (1,), (2, 3)):
        simulation = new()
        for seed in seeds:
            simulation.restart(seed)
            trained(simulation, 12)
        simulation.restart(0)
        simulation.resume(jax.tree.map(np.copy, before), 20, capacity)
        jax.tree.map(np.testing.assert_array_equal, trained(simulation, 10), whole)


def test_a_checkpoint_knows_how_long_arrays_were(tmp_path, monkeypatch):
    """The arrays of a run that goes on are as long as if it had never stopped."""
    seen, settle = [], Stager.settle

    def settling(stager, *given):
        seen.append(settle(stager, *given).capacity)
        return settle(stager, *given)

    monkeypatch.setattr(Stager, "settle", settling)
    changes = {"cohort.size": 20, "simulation.lanes": 8, "data.num_items": 20_000, "rounds": 8}
    changes |= {
        "simulation.rounds_per_call": 2,
        "simulation.checkpoint_every": 4,
        "simulation.evaluate_every": 0,
    }
    train("planted", out=tmp_path / "whole", changes=changes)
    last = seen[-1]

    def kill(status):
        if status.round > 4:
            raise Killed

    with pytest.raises(Killed):
        train("planted", out=tmp_path / "run", changes=changes, progress=kill)
    grown = stage.grown
    unknown = lambda rooms, name, size: grown(rooms, name, size if name in rooms else 10**5)
    monkeypatch.setattr(stage, "grown", unknown)  # what the checkpoint does not tell is far too long
    train(out=tmp_path / "run", resume=True)
    assert seen[-1] == last
    assert "rows item" in last
    assert 1000 < last["rows item"] < 2000
