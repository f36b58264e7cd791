"""Tables 2 and 4 and Figures 2, 3 (the language half), 5 and 6 of Federated Reconstruction: next word."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from matplotlib.figure import Figure

from partwise.algorithms.registry import prepare
from partwise.checkpoint import save_json
from partwise.papers.fedrecon import draw_steps, relative_to
from partwise.papers.fedrecon_trainings import BUCKETS, METRIC, RECON, TRAININGS, YOGI, JudgedRow, Training
from partwise.papers.words_desk import Desk
from partwise.runs.document import to_plain
from partwise.runs.picture import INK, QUIET, draw_band, save_picture
from partwise.runs.summary import judged
from partwise.runs.train import OnStatus

SO_FAR = "fedrecon-table2-so-far.json"


def table2(
    data: str | None, out: Path, seeds: Sequence[int], quick: bool, progress: OnStatus
) -> dict[str, Any]:
    """Tables 2 and 4: every row at every vocabulary, with the paper's accuracy. The other accuracies are in
    the JSON."""
    desk, rows = Desk(data, out, seeds, quick, progress), []
    for number in range(len(desk.vocabularies)):
        for training in TRAININGS:
            rows += [_row(desk, training, row, number) for row in training.rows]
            save_json(out / SO_FAR, {"rows": to_plain(rows)})  # for who cannot wait for the rest
    (out / SO_FAR).unlink()
    _draw_table(out / "fedrecon-table2.png", rows, desk.vocabularies, quick)
    return {"rows": rows, "device": jax.devices()[0].device_kind}


def _row(desk: Desk, training: Training, row: JudgedRow, number: int) -> dict[str, Any]:
    vocabulary = desk.vocabularies[number]
    done, task = desk.learn(training, vocabulary), desk.task(vocabulary, training.buckets)
    config = desk.config(task, training).changed(row.changes)
    values = done.percent(row.name)
    names = [name for name in done.tests[row.name][0] if name.startswith("accuracy")]
    return {
        "row": f"{vocabulary:,} words: {row.name}",
        "metric": "accuracy %",
        "paper": None if desk.quick else row.paper[number],
        "ours": float(values.mean()),
        "spread": float(values.std()),
        "seeds": len(values),
        "others": {name: float(done.percent(row.name, name).mean()) for name in names if name != METRIC},
        "rates": dict(done.chosen[row.name]),
        "parameters_sent": done.sent(training.sends_all),
        "coverage": done.coverage,
        "rounds": list(done.judged),
        "judged": judged(task, prepare(task, config), config),
        "seconds": done.seconds,
    }


def _draw_table(
    path: Path, rows: Sequence[Mapping[str, Any]], vocabularies: Sequence[int], quick: bool
) -> None:
    figure = Figure(figsize=(11, 3.9), layout="constrained")
    panels = figure.subplots(1, len(vocabularies), sharey=True)
    for axes, vocabulary in zip(panels, vocabularies, strict=True):
        mark = f"{vocabulary:,} words: "
        here = [row for row in rows if row["row"].startswith(mark)]
        names = [row["row"].removeprefix(mark) for row in here]
        places = np.arange(len(here))[::-1]
        axes.barh(
            places, [row["ours"] for row in here], xerr=[row["spread"] for row in here], color=INK, height=0.6
        )
        paper = [(place, row["paper"]) for place, row in zip(places, here, strict=True) if row["paper"]]
        axes.plot(
            [x for _, x in paper], [y for y, _ in paper], "d", color=QUIET, label="paper (Stack Overflow)"
        )
        axes.set(title=f"{vocabulary:,} words", xlabel="accuracy %")
        axes.set_yticks(places, names, fontsize=7)
    handles, labels = panels[-1].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", frameon=False, fontsize=8)
    save_picture(path, figure, quick)


def figure2(
    data: str | None, out: Path, seeds: Sequence[int], quick: bool, progress: OnStatus
) -> dict[str, Any]:
    """Accuracy of the validation clients against all parameters that were sent, at every vocabulary."""
    desk = Desk(data, out, seeds, quick, progress)
    rows, figure = [], Figure(figsize=(11, 3.4), layout="constrained")
    panels = figure.subplots(1, len(desk.vocabularies))
    for axes, vocabulary in zip(panels, desk.vocabularies, strict=True):
        for training in (YOGI, RECON):
            done = desk.learn(training, vocabulary)
            cohort = desk.config(desk.task(vocabulary, training.buckets), training).cohort.size
            sent = [done.sent(training.sends_all) * cohort * number for number in done.rounds]
            for place, (name, found) in enumerate(done.curves.items()):
                curves = 100 * np.array(found, float)
                look = {} if place else {"linewidth": 3.5, "alpha": 0.4}  # one line may hide another
                draw_band(axes, sent, curves, label=name, **look)
                told = _line(f"{vocabulary:,} words: {name}", "accuracy %", curves[:, -1])
                rows.append(told | {"x": sent, "y": curves.mean(axis=0).tolist()})
        axes.set(title=f"{vocabulary:,} words", xlabel="parameters communicated", ylabel="accuracy %")
    panels[-1].legend(frameon=False, fontsize=7)
    save_picture(out / "fedrecon-figure2.png", figure, quick)
    return {"rows": rows}


def figure3(
    data: str | None, out: Path, seeds: Sequence[int], quick: bool, progress: OnStatus
) -> dict[str, Any]:
    """Figure 3, its language half: accuracy relative to the base, at the smallest vocabulary, for other numbers of
    reconstruction and update steps (in training and evaluation)."""
    desk = Desk(data, out, seeds, quick, progress)
    vocabulary = desk.vocabularies[0]
    base = desk.learn(RECON, vocabulary).percent(RECON.rows[0].name)
    rows = []
    for key, values in desk.protocol.steps.items():
        part = key.split(".")[0]
        more = {f"{part}.epochs": None} if desk.protocol.passes else {}
        for number in values:
            row = JudgedRow(f"k_{part[0]} = {number}")
            training = Training(row.name, "fed_recon", 0, (row,), {key: number, **more})
            relative = relative_to(base.mean(), desk.learn(training, vocabulary).percent(row.name))
            rows.append(_line(row.name, "relative accuracy", relative))
    draw_steps(out / "fedrecon-figure3-words.png", rows, "accuracy relative to the paper's steps", quick)
    return {"rows": rows, "base_accuracy": float(base.mean())}


def _line(row: str, metric: str, values: np.ndarray) -> dict[str, Any]:
    """A row for several seeds, without a number from the paper, which has only a picture."""
    return {
        "row": row,
        "metric": metric,
        "paper": None,
        "ours": float(values.mean()),
        "spread": float(values.std()),
        "seeds": len(values),
    }


def figure5(
    data: str | None, out: Path, seeds: Sequence[int], quick: bool, progress: OnStatus
) -> dict[str, Any]:
    """Training loss by round and vocabulary, mean over seeds and ten rounds."""
    desk = Desk(data, out, seeds, quick, progress)
    figure = Figure(figsize=(5.6, 3.6), layout="constrained")
    axes, rows, shown = figure.subplots(), [], []
    for vocabulary in desk.vocabularies:
        done = desk.learn(RECON, vocabulary)
        width = min(10, len(done.losses[0]))
        smooth = np.array([np.convolve(each, np.ones(width) / width, "valid") for each in done.losses])
        numbers = np.arange(smooth.shape[1]) + width
        draw_band(axes, numbers, smooth, label=f"{vocabulary:,} words ({done.coverage:.0%} of all)")
        curve = {"x": numbers.tolist(), "y": smooth.mean(axis=0).tolist()}
        rows.append(_line(f"{vocabulary:,} words", "training loss", smooth[:, -1]) | curve)
        shown.append(smooth[:, smooth.shape[1] // 20 :].ravel())  # the first steps of Yogi may leap
    axes.set(xlabel="round", ylabel="loss of a word")
    axes.set_ylim(0.98 * np.concatenate(shown).min(), 1.02 * np.concatenate(shown).max())
    axes.legend(frameon=False, fontsize=8)
    save_picture(out / "fedrecon-figure5.png", figure, quick)
    return {"rows": rows}


NUMBERS_OF_BUCKETS = (1, 50, 200, 500)


def figure6(
    data: str | None, out: Path, seeds: Sequence[int], quick: bool, progress: OnStatus
) -> dict[str, Any]:
    """Accuracy by the number of buckets, at every vocabulary."""
    desk = Desk(data, out, seeds, quick, progress)
    figure = Figure(figsize=(5.6, 3.6), layout="constrained")
    axes, rows = figure.subplots(), []
    known = {1: TRAININGS[1], BUCKETS: RECON}
    numbers = (1, 2) if quick else NUMBERS_OF_BUCKETS
    for vocabulary in desk.vocabularies:
        line = []
        for number in numbers:
            name = f"FedRecon ({number} OOV)"
            training = known.get(number, Training(name, "fed_recon", number, (JudgedRow(name),)))
            values = desk.learn(training, vocabulary).percent(training.rows[0].name)
            line.append([number, values.mean(), values.std()])
            rows.append(_line(f"{vocabulary:,} words, {number} OOV", "accuracy %", values))
        x, y, spread = np.array(line).T
        axes.errorbar(x, y, spread, marker="o", markersize=4, capsize=2, label=f"{vocabulary:,} words")
    axes.set(xlabel="buckets of words outside the vocabulary", ylabel="accuracy %", xscale="log")
    axes.set_xticks(numbers, [str(number) for number in numbers], minor=False)
    axes.set_xticks([], minor=True)
    axes.legend(frameon=False, fontsize=8)
    save_picture(out / "fedrecon-figure6.png", figure, quick)
    return {"rows": rows}
