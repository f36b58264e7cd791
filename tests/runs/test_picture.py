"""The learning curve of short, long, unjudged and broken runs."""

from __future__ import annotations

import math
import warnings

import pytest
from matplotlib.figure import Figure

import partwise.runs.picture as pictures


def record(number, loss, rmse=None, judged=True):
    evaluation = {"rmse": rmse, "loss": 1.0, "clients": 7, "over_clients": {"rmse": {}, "loss": {}}}
    return {"round": number, "train": {"loss": loss}, "evaluation": evaluation if judged else None}


def told(test=0.6, best=None):
    test = {"rmse": test, "loss": 0.2, "clients": 7, "over_clients": {"rmse": {}, "loss": {}}}
    return {"test": test, "best": best or {}, "algorithm": "fed_recon", "task": "planted", "seed": 0}


@pytest.fixture
def draw(monkeypatch, tmp_path) -> object:
    """The two panels of a picture that is drawn without a warning."""
    kept: list[Figure] = []
    save = pictures.save_picture

    def keep(path, figure, quick=False):
        kept.append(figure)
        save(path, figure, quick)

    monkeypatch.setattr(pictures, "save_picture", keep)

    def run(records, summary):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            pictures.learning_curve(tmp_path / "curve.png", records, summary)
        assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
        return kept[-1].axes

    return run


@pytest.mark.parametrize("rounds", [1, 2, 5, 20, 39, 1000])
def test_rounds_are_whole_numbers_and_all_of_them_are_in_the_picture(draw, rounds):
    records = [record(r, 1 / r, 0.7, judged=r % 10 == 0 or r == rounds) for r in range(1, rounds + 1)]
    for axes in draw(records, told(best={"rmse": 0.5})):
        low, high = axes.get_xlim()
        ticks = [tick for tick in axes.get_xticks() if low <= tick <= high]
        assert all(tick == int(tick) for tick in ticks)
        assert low < 1 <= rounds < high
        assert len(ticks) >= min(rounds, 3)
    if rounds <= 5:
        assert ticks == list(range(1, rounds + 1))


def test_axes_say_what_is_trained_and_what_is_judged(draw):
    left, right = draw([record(1, 2.0, 0.9), record(2, 1.0, 0.8)], told())
    assert (left.get_ylabel(), right.get_ylabel()) == ("training loss", "validation rmse")
    assert left.lines[0].get_marker() == "o"  # of a single round there is no line


@pytest.mark.parametrize(
    ("losses", "scale"),
    [([1e3, 1.0], "log"), ([2.0, 1.9], "linear"), ([1e3, 0.0], "linear"), ([5.0, -3.0], "linear")],
)
def test_a_logarithmic_axis_only_where_losses_have_logarithms(draw, losses, scale):
    left, _ = draw([record(i + 1, loss, 0.9) for i, loss in enumerate(losses)], told())
    assert left.get_yscale() == scale


def test_what_has_no_value_is_said(draw):
    records = [record(1, math.nan, None), record(2, math.inf, math.nan)]
    left, right = draw(records, told(test=None))
    assert [text.get_text() for text in left.texts] == ["no training loss that is a finite number"]
    assert [text.get_text() for text in right.texts] == ["rmse has no value that is a finite number"]
    assert right.get_legend() is None


def test_without_looks_at_validation_clients_the_test_clients_are_there(draw):
    _, right = draw([record(1, 1.0, judged=False)], told())
    assert [text.get_text() for text in right.get_legend().get_texts()] == ["test clients, at the end"]


def test_a_model_without_metrics_is_judged_by_its_loss(draw):
    only = {"loss": 0.5, "clients": 7, "over_clients": {"loss": {}}}
    records = [{"round": 1, "train": {"loss": 1.0}, "evaluation": only}]
    _, right = draw(records, told() | {"test": only})
    assert right.get_ylabel() == "validation loss"
