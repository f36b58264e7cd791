"""A run that goes wrong says so: it stops, or its results are refused, and never exits as if all were well."""

from __future__ import annotations

import json
import math
import sys
from importlib import metadata

import jax.numpy as jnp
import numpy as np
import pytest

from partwise.checkpoint import load_arrays, save_arrays
from partwise.cli import main
from partwise.data import planted_ratings
from partwise.model.partition import local, partition
from partwise.model.spec import Metric, Model, Pooled
from partwise.runs.compare import compare
from partwise.runs.evaluation import evaluate_run
from partwise.runs.folder import Folder
from partwise.runs.personal import Personal
from partwise.runs.run_view import read_run
from partwise.runs.train import train
from partwise.tasks import Setting, Task
from partwise.types import RunWarning, UserError

EXPLODES = {"reconstruct.method": "steps", "reconstruct.rate": 1.0, "update.rate": 8.0, "rounds": 60}


@pytest.fixture(scope="module")
def exploding(tiny):
    return tiny | EXPLODES | {"server.optimizer": "sgd", "server.rate": 1.0}


def test_a_training_that_explodes_stops_and_what_was_recorded_stays(exploding, tmp_path):
    out = tmp_path / "run"
    says = r"has diverged since round (\d+) .*of clients .*stopped after round \d+.*lower rates.*patience=0"
    with pytest.raises(UserError, match=says) as error:
        train("planted", out=out, changes=exploding | {"simulation.patience": 5})
    since = int(error.value.args[0].split("since round ")[1].split()[0])
    records = Folder(out).records()
    assert since + 4 <= len(records) <= since + 20
    assert records[since - 1]["broken"] or not records[since - 1]["train"]["loss"] < 1000
    assert read_run(out).state == "failed"
    assert read_run(out).failed == str(error.value)
    assert compare(out).rows[0]["unfinished"] == {str(out): f"failed ({error.value})"}
    with pytest.raises(UserError, match="has no model: the training has diverged since"):
        evaluate_run(out)
    with pytest.raises(UserError, match="has diverged since"):  # it goes on to the same end
        train(out=out, resume=True)
    assert main(["train", "--resume", "--out", str(out), "--quiet"]) == 2
    train(out=out, resume=True, simulation__patience=0)
    assert (read_run(out).state, read_run(out).failed) == ("finished", "")


def test_the_advice_names_rates_that_are_read(tiny):
    """Closed-form reconstruction has no rate."""
    changes = tiny | {"update.rate": 1e30, "reconstruct.method": "solve"}
    with pytest.raises(UserError, match=r"lower update\.rate or server\.rate\.$"):
        train("planted", changes=changes)
    with pytest.raises(UserError, match=r"lower update\.rate or reconstruct\.rate or server\.rate\.$"):
        train("planted", changes=changes | {"reconstruct.method": "steps"})


def test_patience_can_be_endless(exploding, tmp_path):
    done = train("planted", changes=exploding | {"simulation.patience": 0})
    assert len(done.records) == 60
    assert done.summary["broken"] > 100


def test_test_metrics_that_are_not_finite_are_no_success(tiny, tmp_path, capsys):
    """Clients are judged after tuning that goes wrong; everything is saved, and the exit code says so."""
    out = tmp_path / "run"
    changes = tiny | {"fine_tune.max_steps": 50, "fine_tune.rate": 1e30}
    arguments = [word for key, value in changes.items() for word in ("--set", f"{key}={value}")]
    assert main(["train", "planted", *arguments, "--out", str(out), "--json", "--quiet"]) == 2
    told = capsys.readouterr()
    assert "rmse" in json.loads(told.out)["not_finite"]
    assert "warning: rmse, " in " ".join(told.err.split())
    assert (out / "model.safetensors").exists()
    assert Folder(out).summary()["rounds"] == 6
    assert main(["evaluate", str(out)]) == 2
    assert "rmse, loss of the test clients is not a finite number" in " ".join(
        capsys.readouterr().out.split()
    )


def spoiled(folder):
    arrays, header = load_arrays(folder / "model.safetensors")
    arrays = {path: array.copy() for path, array in arrays.items()}
    arrays["item"][3, 1] = np.nan
    save_arrays(folder / "model.safetensors", arrays, header)


def test_a_model_that_is_not_finite_is_refused_by_its_leaf(copied, tmp_path, capsys):
    spoiled(copied)
    says = "1 of the 24 values of 'item' are not finite.*train again with lower rates"
    with pytest.raises(UserError, match=says):
        Personal.open(copied)
    with pytest.raises(UserError, match=says):
        evaluate_run(copied)
    assert main(["evaluate", str(copied)]) == 2
    (tmp_path / "mine.csv").write_text("item,rating\n1,3\n")
    client = ["--client", str(tmp_path / "mine.csv")]
    assert main(["personalize", str(copied), *client, "--out", str(tmp_path / "local")]) == 2
    assert not (tmp_path / "local").exists()
    assert capsys.readouterr().err.count("'item' are not finite") == 2


def test_personal_results_that_are_not_finite_are_refused(tiny_run, monkeypatch):
    personal = Personal.open(tiny_run)
    examples = planted_ratings(num_clients=2, num_items=12, mean_examples=10).store.take([0])
    part = personal.personalize(examples)
    assert np.isfinite(personal.predict(part, examples)).all()
    with pytest.raises(UserError, match=r"what was predicted cannot be used: .*'outputs' are not finite"):
        personal.predict({path: np.full_like(leaf, np.nan) for path, leaf in part.items()}, examples)
    broken = {path: np.full_like(leaf, np.inf) for path, leaf in part.items()}
    monkeypatch.setattr(personal.device, "personalize", lambda *_, **__: broken)
    with pytest.raises(UserError, match="the local part that was rebuilt cannot be used"):
        personal.personalize(examples)


def one_number(metrics=None, **more):
    """A model of one shared and one local number, on generated ratings."""
    store = planted_ratings(num_clients=12, num_items=12, mean_examples=10, seed=3).store
    error = lambda outputs, batch: (outputs - batch["rating"]) ** 2
    init = lambda rng: {"shared": jnp.zeros(1), "own": jnp.zeros(1)}
    predict = lambda params, batch, rng: jnp.broadcast_to(
        params["shared"] + params["own"], batch["rating"].shape
    )
    model = Model(init, predict, error, metrics or {"error": Metric(error)}, **more)
    parts = (store.take(np.arange(8)), store.take([8, 9]), store.take([10, 11]))
    return Task("one", *parts, Setting(model, partition(model, {"own": local("zero")}), ("rating",)))


def run(task, **changes):
    return train(task, rounds=1, cohort__size=4, simulation__lanes=2, update__rate=0.1, **changes)


def _of_ones(store):
    return store.gather().with_columns(rating=np.ones(store.num_examples, np.float32))


def test_a_test_metric_that_is_not_finite_is_a_warning_in_python():
    """It is fine on the validation clients."""
    task = one_number({"inverse": Metric(lambda outputs, batch: 1 / (batch["rating"] - 1))})
    with pytest.warns(RunWarning, match="inverse of the test clients is not a finite number"):
        done = run(task._replace(test=_of_ones(task.test)))
    assert done.summary["not_finite"] == ["inverse"]
    assert math.isinf(done.test["inverse"])


@pytest.mark.parametrize("backend", ["compiled", "plain"])
@pytest.mark.parametrize(
    ("metric", "what"),
    [
        (Metric(lambda outputs, batch: jnp.mean(outputs - batch["rating"])), r"values .*shape \(\)"),
        (Metric(lambda outputs, batch: (outputs - batch["rating"])[:, None]), r"values .*shape \(\d+, 1\)"),
        (
            Metric(lambda outputs, batch: outputs, weight=lambda batch: jnp.asarray(1.0)),
            r"weights .*shape \(\)",
        ),
        (Pooled(lambda o, batch: o.mean(), lambda batch: batch["rating"], lambda s, label: 0.0), "scores"),
    ],
    ids=["mean", "column", "weight", "pooled"],
)
def test_a_metric_that_is_not_one_number_for_every_example_is_refused(metric, what, backend):
    with pytest.raises(UserError, match=f"the {what}.*(expected|examples)") as error:
        run(one_number({"mine": metric}), simulation__backend=backend)
    assert "metric 'mine'" in str(error.value)


def twice(batch):
    return jnp.full(batch["rating"].shape, 2.0)


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ({}, "examples"),
        ({"weight": twice}, "twice"),
        ({"weight": lambda batch: twice(batch)}, "by the model's own weight"),
    ],
)
def test_what_weighs_is_told_as_it_is(more, told):
    assert run(one_number(**more)).test["judged"]["weights"] == told


@pytest.mark.parametrize("failing", ["drawing", "importing"])
def test_trimmings_that_fail_are_a_warning(tiny, tmp_path, monkeypatch, failing):
    """A picture that cannot be drawn or matplotlib that is missing; versions where nothing is installed."""

    def missing(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    if failing == "importing":
        monkeypatch.setitem(sys.modules, "partwise.runs.picture", None)
    else:
        monkeypatch.setattr("partwise.runs.picture.learning_curve", lambda *_: 1 / 0)
    with pytest.warns(RunWarning, match=r"is saved, but its curve\.png could not be drawn"):
        done = train("planted", out=tmp_path / "run", changes=tiny)
    summary = Folder(tmp_path / "run").summary()
    assert summary["test"]["rmse"] == pytest.approx(done.test["rmse"])
    assert summary["versions"]["jax"] == "unknown"
    assert summary["versions"]["partwise"]


def test_the_model_is_saved_before_anything_else_can_fail(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr("partwise.runs.train.summarize_run", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        train("planted", out=tmp_path / "run", changes=tiny)
    assert set(Folder(tmp_path / "run").model()) == {"item", "default/user"}
