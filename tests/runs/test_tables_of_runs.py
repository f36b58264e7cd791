"""Runs whose tables are spread over the devices or on the host: trained, saved, reopened, resumed as any other."""

from __future__ import annotations

import numpy as np
import pytest

import partwise as pw
from partwise.checkpoint import load_arrays
from partwise.runs.evaluation import evaluate_run
from partwise.runs.folder import Folder
from partwise.types import UserError

ITEMS = 2001
SETTINGS = {
    "data.num_items": ITEMS,
    "data.num_clients": 60,
    "data.mean_examples": 12,
    "data.dim": 4,
    "cohort.size": 6,
    "server.optimizer": "adagrad",
    "simulation.lanes": 3,
    "simulation.rounds_per_call": 2,
    "simulation.evaluate_every": 2,
    "simulation.checkpoint_every": 2,
}
PLACES = ("copies", "shards", "host")


def train(out, place, rounds=4, **more):
    changes = {**SETTINGS, "simulation.tables": place, "rounds": rounds} | more.pop("changes", {})
    return pw.train("planted", out=out, changes=changes, **more)


def arrays_of(path):
    return load_arrays(path)[0]


def assert_same(one, other):
    for file in ("model.safetensors", *(f"checkpoints/{n:08d}.safetensors" for n in (2, 4))):
        found, expected = arrays_of(one / file), arrays_of(other / file)
        assert found.keys() == expected.keys()
        for name, array in found.items():
            assert array.tobytes() == expected[name].tobytes(), (file, name)


@pytest.fixture(scope="module")
def copies(tmp_path_factory):
    out = tmp_path_factory.mktemp("copies") / "run"
    return out, train(out, "copies")


@pytest.mark.parametrize("place", PLACES[1:])
def test_a_folder_is_the_same_wherever_tables_are(tmp_path, copies, place):
    run = train(tmp_path / "run", place)
    assert_same(tmp_path / "run", copies[0])
    assert run.summary["test"] == copies[1].summary["test"]
    for path, leaf in copies[1].params.items():
        np.testing.assert_array_equal(run.params[path], leaf)
    again = evaluate_run(tmp_path / "run")
    assert again["rmse"] == run.summary["test"]["rmse"]


@pytest.mark.parametrize(("first", "then"), [("shards", "host"), ("host", "shards"), ("copies", "shards")])
def test_a_run_goes_on_with_its_tables_elsewhere(tmp_path, copies, first, then):
    out = tmp_path / "run"

    def stop(records):
        if records[-1]["round"] >= 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(out, first, callbacks=[pw.Callback(rounds=stop)])
    assert Folder(out).rounds_done() == 2
    train(out, then, resume=True)
    assert_same(out, copies[0])


def test_the_best_model_of_spread_tables_is_kept(tmp_path):
    kept = {p: train(tmp_path / p, p, changes={"keep.best": "rmse"}) for p in ("copies", "shards")}
    best = [arrays_of(tmp_path / place / "best.safetensors") for place in kept]
    for path, leaf in best[0].items():
        np.testing.assert_array_equal(best[1][path], leaf)


@pytest.mark.parametrize("place", PLACES)
def test_parameters_that_a_callback_asked_for_stay_as_they_were(place):
    begun, seen = [], []
    look = lambda records: seen.append(begun[0].params()["item"])
    run = train(None, place, callbacks=[pw.Callback(begin=begun.append, rounds=look)])
    np.testing.assert_array_equal(seen[-1], run.params["item"])
    assert (seen[0] != seen[-1]).any()


def test_a_checkpoint_is_never_whole_on_the_host(tmp_path, monkeypatch):
    """Chunks are small here, and nobody asks for all of a table at once."""
    from partwise.simulation import spread

    monkeypatch.setattr(spread, "CHUNK_BYTES", 1000)
    whole = []
    monkeypatch.setattr(spread.SpreadTable, "__array__", lambda self, *how: whole.append(self.shape))
    train(tmp_path / "run", "shards", rounds=2)
    assert whole == []
    assert arrays_of(tmp_path / "run" / "model.safetensors")["item"].shape[0] == ITEMS


def test_runs_of_a_sweep_take_turns(tmp_path, copies):
    swept = pw.sweep(
        "planted",
        grid={"cohort.size": [6]},
        out=tmp_path / "sweep",
        changes={k: v for k, v in SETTINGS.items() if k != "cohort.size"}
        | {"rounds": 4, "simulation.tables": "shards"},
    )
    found = next((tmp_path / "sweep").glob("**/model.safetensors"))
    expected = arrays_of(copies[0] / "model.safetensors")
    for path, leaf in arrays_of(found).items():
        np.testing.assert_array_equal(leaf, expected[path])
    assert swept


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"simulation.tables": "disk"}, "unknown place of tables"),
        ({"simulation.tables": "shards", "server.optimizer": "adam"}, "all rows"),
        ({"simulation.tables": "host", "simulation.backend": "plain"}, "simulation.backend = plain"),
    ],
)
def test_a_place_that_is_not_possible_is_told(tmp_path, changes, message):
    with pytest.raises(UserError, match=message):
        pw.train("planted", out=tmp_path / "run", changes={**SETTINGS, "rounds": 2, **changes})
    assert not (tmp_path / "run" / "config.toml").exists()
