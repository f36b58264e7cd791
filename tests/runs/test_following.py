"""Callbacks, early stopping, the best model and the budget of seconds; resumed runs end as uninterrupted ones."""

import json
import math
import shutil

import jax.numpy as jnp
import numpy as np
import pytest

import partwise as pw
from partwise.checkpoint import load_arrays, read_header, save_json
from partwise.model.spec import Metric
from partwise.runs.evaluation import evaluate_run
from partwise.runs.folder import Folder
from partwise.runs.stopping import Best, WatchedMetric, no_better
from partwise.runs.train import train
from partwise.types import RunWarning, UserError

FOLLOWED = {
    "data.num_clients": 60,
    "rounds": 60,
    "simulation.checkpoint_every": 4,
    "stop.metric": "rmse",
    "stop.patience": 2,
    "keep.best": "over_clients.rmse.p95",
}


class Killed(BaseException):
    pass


@pytest.fixture(scope="module")
def settings(tiny):
    return tiny | FOLLOWED


@pytest.fixture(scope="module")
def stopped(settings, tmp_path_factory):
    """A run that ended before its last round, and its folder."""
    out = tmp_path_factory.mktemp("stopped") / "run"
    return train("planted", out=out, changes=settings), out


def looks_of(run, *words):
    """(round, value) of every evaluation."""
    found = []
    for record in run.records:
        if value := record["evaluation"]:
            for word in words:
                value = value[word]
            found.append((record["round"], value))
    return found


def test_a_run_ends_when_its_metric_gets_no_better(stopped):
    run, out = stopped
    looks = looks_of(run, "rmse")
    assert 3 <= len(looks) < 20
    best = min(looks, key=lambda look: look[1])
    assert looks[-3] == best  # and two evaluations later, patience was at its end
    assert run.summary["rounds"] == looks[-1][0] < 60
    assert run.summary["stopped"].startswith(f"rmse got no better than {best[1]:.6g} after round {best[0]}")
    assert json.loads((out / "summary.json").read_text())["stopped"] == run.summary["stopped"]


def test_the_best_model_is_kept_beside_the_last(stopped):
    run, out = stopped
    number, value = min(looks_of(run, "over_clients", "rmse", "p95"), key=lambda look: look[1])
    told = run.summary["best_model"]
    assert (told["round"], told["value"], told["metric"]) == (number, value, "over_clients.rmse.p95")
    looks = looks_of(run, "loss")
    number_of_loss, lowest = min(looks, key=lambda look: look[1])
    kept = {"metric": "loss", "best": lowest, "round": number_of_loss, "end": looks[-1][1]}
    assert run.summary["validation"] == kept
    assert read_header(out / "best.safetensors")["round"] == number
    personal = pw.Personal.open(out, model="best")
    for path, leaf in run.best.params.items():
        np.testing.assert_array_equal(personal.params[path], leaf)
    assert evaluate_run(out, model="best")["rmse"] == pytest.approx(told["test"]["rmse"], rel=1e-6)
    assert evaluate_run(out)["rmse"] == pytest.approx(run.test["rmse"], rel=1e-6)
    with pytest.raises(UserError, match="the model must be last or best, not 'first'"):
        evaluate_run(out, model="first")


@pytest.mark.parametrize("at", [5, 11])
def test_killed_and_resumed_it_stops_and_keeps_the_same(stopped, settings, tmp_path, at):
    whole, expected = stopped

    def kill(status):
        if status.round >= at and status.evaluation is None:
            raise Killed

    with pytest.raises(Killed):
        train("planted", out=tmp_path / "run", progress=kill, changes=settings)
    resumed = train(out=tmp_path / "run", resume=True)
    assert (resumed.summary["rounds"], resumed.summary["stopped"]) == (
        whole.summary["rounds"],
        whole.summary["stopped"],
    )
    assert resumed.summary["best_model"] == whole.summary["best_model"]
    for name in ("model.safetensors", "best.safetensors"):
        assert (tmp_path / "run" / name).read_bytes() == (expected / name).read_bytes()


def test_a_better_model_after_the_last_checkpoint_does_not_replace_what_it_may_fall_back_to(
    settings, tmp_path
):
    """Killed after a better model than the checkpoint's was written, and ended at the checkpoint."""
    changes = settings | {"stop.metric": "", "keep.best": "loss", "rounds": 12}
    changes |= {"simulation.checkpoint_every": 5, "simulation.evaluate_every": 1, "stop.patience": 5}

    def kill(status):
        if status.round == 9 and status.evaluation:
            raise Killed

    with pytest.raises(Killed):
        train("planted", out=tmp_path / "run", progress=kill, changes=changes)
    assert Folder(tmp_path / "run").rounds_done() == 5
    ended = train(out=tmp_path / "run", resume=True, rounds=5)
    number, value = min(looks_of(ended, "loss"), key=lambda look: look[1])
    assert number <= 5
    assert (ended.summary["best_model"]["round"], ended.summary["best_model"]["value"]) == (number, value)
    assert read_header(tmp_path / "run" / "best.safetensors")["round"] == number


def test_a_metric_that_never_has_a_value_keeps_no_model_and_says_so(settings, tmp_path):
    task = pw.load_task("planted", num_clients=60)
    model = task.personal.model
    odd = Metric(lambda predictions, batch: jnp.full(batch["rating"].shape, jnp.nan))
    setting = task.personal._replace(model=model._replace(metrics={**model.metrics, "odd": odd}))
    changes = {key: value for key, value in settings.items() if not key.startswith(("data.", "stop."))}
    changes |= {"rounds": 4, "keep.best": "odd", "simulation.evaluate_every": 2}
    told = (
        r"keep.best = odd kept no model: odd of the validation clients was no finite number in 2 evaluations"
    )
    with pytest.warns(RunWarning, match=told):
        run = train(task._replace(personal=setting), out=tmp_path / "run", changes=changes)
    assert run.summary["best_model"] is None


def test_resumed_with_more_patience_it_goes_on(stopped, tmp_path):
    run, out = stopped
    folder = shutil.copytree(out, tmp_path / "run")
    again = train(out=folder, resume=True)
    assert (again.summary["rounds"], again.summary["stopped"]) == (
        run.summary["rounds"],
        run.summary["stopped"],
    )
    longer = train(out=folder, resume=True, stop__patience=50)
    assert (longer.summary["rounds"], longer.summary["stopped"]) == (60, None)
    with pytest.raises(UserError, match=r"keep.best was over_clients.rmse.p95 and is rmse"):
        train(out=folder, resume=True, keep__best="rmse")


def test_a_model_of_a_run_that_goes_on_is_not_taken_for_its_last(stopped, tmp_path):
    folder = shutil.copytree(stopped[1], tmp_path / "run")

    def kill(status):
        raise Killed

    with pytest.raises(Killed):
        train(out=folder, resume=True, stop__patience=50, progress=kill)
    with pytest.raises(UserError, match="has not ended"):
        pw.Personal.open(folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"stop.metric": "mse"},
            r"stop.metric = mse is no metric of this task: use one of rmse, accuracy, loss",
        ),
        ({"keep.best": "over_clients.rmse"}, "keep.best = over_clients.rmse is no metric"),
        ({"stop.metric": "", "stop.patience": 3}, "stop.patience = 3 would have no effect"),
        ({"simulation.evaluate_every": 0}, "evaluated at its end alone"),
        ({"stop.patience": 0}, "'stop.patience' must be between 1"),
        ({"stop.seconds": "soon"}, "'stop.seconds' must be a number or none"),
    ],
)
def test_what_cannot_be_followed_is_refused_and_leaves_nothing(settings, tmp_path, changes, message):
    with pytest.raises(UserError, match=message):
        train("planted", out=tmp_path / "run", changes=settings | changes)
    assert not (tmp_path / "run" / "config.toml").exists()


def record(number, value):
    return {"round": number, "evaluation": {"auc": value, "over_clients": {"auc": {"mean": value}}}}


def test_direction_difference_and_values_that_are_none():
    best = Best(WatchedMetric("over_clients.auc.mean", -1.0), difference=0.1)
    looks = [best.look(record(i, value)) for i, value in enumerate((None, 0.5, math.nan, 0.55, 0.65), 1)]
    assert looks == [False, True, False, False, True]
    assert (best.value, best.round, best.since) == (0.65, 5, 0)
    stop = no_better(WatchedMetric("auc", -1.0), patience=2)
    assert stop.rounds([record(1, None)]) is None
    assert stop.rounds([record(2, None)]) == "auc got no better in 2 evaluations (stop.patience)"


def test_a_budget_of_seconds_ends_a_run_and_counts_what_was_taken_before(tiny, tmp_path):
    given = tiny | {"rounds": 10**6, "stop.seconds": 0.001}
    run = train("planted", out=tmp_path / "run", changes=given)
    assert run.summary["stopped"] == "its 0.001 seconds are over (stop.seconds)"
    assert run.summary["rounds"] == 2  # one compiled call
    assert evaluate_run(tmp_path / "run")["clients"] > 0  # it is a finished run
    save_json(tmp_path / "run" / "clock.json", {"seconds": 1000.0})
    again = train(out=tmp_path / "run", resume=True, stop__seconds=999)
    assert (again.summary["rounds"], again.summary["stopped"]) == (
        2,
        "its 999 seconds are over (stop.seconds)",
    )
    longer = train(out=tmp_path / "run", resume=True, stop__seconds=100_000, rounds=4)
    assert (longer.summary["rounds"], longer.summary["stopped"]) == (4, None)


def test_a_callback_sees_every_round_once_and_may_end_the_run(tiny, tmp_path):
    seen, begun, ended = [], [], []

    def rounds(records):
        seen.extend(each["round"] for each in records)
        return "enough" if seen[-1] >= 4 else None

    callback = pw.Callback(begun.append, rounds, ended.append)
    run = train("planted", out=tmp_path / "run", callbacks=[callback], changes=tiny)
    assert (seen, run.summary["stopped"]) == ([1, 2, 3, 4], "enough")
    assert (begun[0].round, begun[0].folder) == (0, tmp_path / "run")
    assert begun[0].params().keys() == run.params.keys()
    assert ended == [run.summary]
    seen.clear()
    all_of_them = pw.Callback(rounds=lambda records: seen.extend(each["round"] for each in records))
    assert train(out=tmp_path / "run", resume=True, callbacks=[all_of_them]).summary["rounds"] == 6
    assert seen == [1, 2, 3, 4, 5, 6]
    with pytest.raises(UserError, match="a callback is a Callback, not a function"):
        train("planted", callbacks=[rounds], changes=tiny)


def test_a_run_without_a_folder_keeps_its_best_model_in_memory(settings, stopped):
    run = train("planted", changes=settings)
    assert run.summary["best_model"] == stopped[0].summary["best_model"]
    for path, leaf in stopped[0].best.params.items():
        np.testing.assert_array_equal(run.best.params[path], leaf)
    assert run.best.personal.params.keys() == run.personal.params.keys()


def test_a_run_that_kept_none_says_so(tiny_run):
    with pytest.raises(
        UserError, match=r"kept no best model: use its last one, or train with --set keep.best"
    ):
        pw.Personal.open(tiny_run, model="best")


def test_a_folder_of_an_earlier_version_opens_and_goes_on(copied):
    """Without the settings that came later, and with the digest that was made without them."""
    from partwise.checkpoint import save_text

    old = [
        line
        for line in (copied / "config.toml").read_text().splitlines()
        if not line.startswith(("#", "[stop]", "[keep]", "metric =", "difference =", "seconds =", "best ="))
    ]
    text, section = [], ""
    for line in old:
        section = line if line.startswith("[") else section
        if line.startswith("schedule =") and section in ("[update]", "[reconstruct]"):
            continue
        if line.startswith("patience = 5"):
            continue
        text.append(line)
    save_text(copied / "config.toml", "\n".join(text) + "\n")
    assert Folder(copied).config().stop.metric == ""
    assert train(out=copied, resume=True, rounds=8).summary["rounds"] == 8


def test_the_warning_of_a_rising_loss_names_the_remedies(tiny):
    from partwise.runs.summary import past_its_best
    from partwise.runs.tally import Tally

    tally, zero = (
        Tally(),
        dict.fromkeys(("clients", "empty", "too_small", "dropped", "bytes_down", "bytes_up"), 0),
    )
    for number, loss in enumerate((3.0, 2.0, 1.0, 2.0, 3.0), 1):
        look = {
            "round": number,
            "seconds": 0,
            "train": {"loss": 1.0},
            "broken": [],
            "evaluation": {"loss": loss},
        }
        tally.add(zero | look)
    assert "--set stop.metric=loss), keep its best model (--set keep.best=loss)" in past_its_best(tally)


def test_best_files_hold_the_server_s_leaves(stopped):
    arrays, header = load_arrays(stopped[1] / "best.safetensors")
    assert arrays.keys() == stopped[0].params.keys()
    assert header["run"] == Folder(stopped[1]).run


def test_no_warning_is_given_of_a_run_that_stops_itself(settings, recwarn):
    train("planted", changes=settings | {"rounds": 30})
    assert not [each for each in recwarn if issubclass(each.category, RunWarning)]


def test_what_a_callback_returns_is_a_reason_in_words(tiny):
    with pytest.raises(UserError, match=r"returned True: return a text, which ends the run"):
        train("planted", callbacks=[pw.Callback(rounds=lambda records: True)], changes=tiny)  # pyright: ignore
