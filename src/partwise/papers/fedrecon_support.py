"""What rebuilding gives next-word prediction, on clients with many sentences (FedRecon, section 5.2, and beyond).

The trainings are those of Table 2 at the smallest vocabulary. All test clients are judged on the same last
sentences, after they rebuilt from so many sentences directly before these.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from partwise.data.reading import existing
from partwise.data.store import ClientStore
from partwise.papers.fedrecon_trainings import (
    FINE_RATES,
    FINE_STEPS,
    METRIC,
    RECON,
    YOGI,
    JudgedRow,
    Training,
)
from partwise.papers.study import once
from partwise.papers.words_desk import Desk, Trainer, best_rates, named
from partwise.runs.picture import INK, QUIET, draw_band, save_picture
from partwise.runs.train import OnStatus
from partwise.simulation.evaluator import Evaluator
from partwise.types import UserError

AMONG = "accuracy_among_words"
SKIP = {"reconstruct.method": "skip"}
MANY_STEPS = {"reconstruct.epochs": None, "reconstruct.max_steps": 500}
REBUILT, BEGUN = JudgedRow("rebuilt as in training"), JudgedRow("without rebuilding", SKIP)
WAYS = (  # to rebuild, beyond the paper's; each with its own best rates
    JudgedRow("rebuilt, best rate", {}, {"reconstruct.rate": (0.1, 0.3, 1.0, 3.0, 10.0)}),
    JudgedRow("rebuilt by 500 steps", MANY_STEPS, {"reconstruct.rate": (0.1, 0.3, 1.0, 3.0)}),
    JudgedRow(
        "rebuilt by 500 steps, pulled to zero",
        {**MANY_STEPS, "reconstruct.pull": 1.0},
        {"reconstruct.rate": (0.3, 1.0, 3.0), "reconstruct.pull": (0.01, 0.1, 1.0)},
    ),
    JudgedRow(
        "rebuilt by Adagrad",
        {"reconstruct.optimizer": "adagrad"},
        {"reconstruct.rate": (0.003, 0.01, 0.03, 0.1)},
    ),
    JudgedRow("rebuilt, then all fine-tuned", FINE_STEPS, FINE_RATES),
)
LEARNED = Training(
    "FedRecon, learned default",
    "fed_recon",
    0,
    (JudgedRow("FedRecon (500 OOV, learned default)"),),
    options={"initial": "learned"},
    kept=True,
)
OF_LEARNED = (
    JudgedRow("learned default, rebuilt"),
    JudgedRow("learned default, without rebuilding", SKIP),
    JudgedRow(
        "learned default, rebuilt by 500 steps, pulled to it",
        {**MANY_STEPS, "reconstruct.pull": 1.0},
        {"reconstruct.rate": (0.3, 1.0, 3.0), "reconstruct.pull": (0.01, 0.1, 1.0)},
    ),
)
SHARES = (0.25, 0.5, 1.0)  # of the parameters that are sent by the training that sends fewer


def support(
    data: str | None, out: Path, seeds: Sequence[int], quick: bool, progress: OnStatus
) -> dict[str, Any]:
    """Accuracy by sentences of support, with and without rebuilding; other ways to rebuild; equal bytes."""
    needed = "give blogs or a table of sentences with --data (data=...)"
    if data:
        existing(Path(data).expanduser(), needed)
    desk = Desk(data, out, seeds, quick, progress)
    if not desk.protocol.supports:
        raise UserError(
            f"fedrecon-support needs people with hundreds of sentences each, and {data or 'the usual data'} has "
            f"none: {needed}"
        )
    for training in (RECON, YOGI, LEARNED):  # first, as for Table 2, so that curves have the same rates
        desk.learn(training, desk.vocabularies[0])
    judge = SupportJudge(desk, RECON)
    by_size = {size: (judge.row(REBUILT, size), judge.row(BEGUN, size)) for size in desk.protocol.supports}
    rows = [row for size, pair in by_size.items() for row in (*pair, _gain(size, *pair))]
    most = desk.protocol.supports[-1]
    rows += [judge.row(way, most) for way in WAYS]
    learned = SupportJudge(desk, LEARNED)
    rows += [learned.row(way, most) for way in OF_LEARNED]
    _draw(out / "fedrecon-support.png", by_size, quick)
    clients = {"test_clients": judge.stores(most)[1].num_clients, "judged_sentences": desk.protocol.query}
    return {"rows": rows + _equal_bytes(desk), **clients}


class SupportJudge:
    """Judges the models of one training after they rebuilt from some number of sentences."""

    def __init__(self, desk: Desk, training: Training):
        self.desk, self.training = desk, training
        self.trainer: Trainer = desk.trainer(training, desk.vocabularies[0])
        self._evaluators: dict[str, Evaluator] = {}

    def stores(self, size: int) -> tuple[ClientStore, ClientStore]:
        """Validation and test clients that have enough sentences for every size, with `size` sentences of
        support and those on which they are judged."""
        query, most = self.desk.protocol.query, self.desk.protocol.supports[-1]
        found = []
        for store in (self.trainer.task.validation, self.trainer.task.test):
            kept = store.filter(most + query)
            if not kept.num_clients:
                raise UserError(f"no client has {most + query} sentences to be judged: give more data")
            found.append(kept.narrow(kept.counts - size - query, np.full_like(kept.counts, size + query)))
        return found[0], found[1]

    def row(self, way: JudgedRow, size: int) -> dict[str, Any]:
        """A row as in `reproduce --json`, with the rates that were best for validation clients."""
        split = {"evaluation_split.kind": "last", "evaluation_split.count": self.desk.protocol.query}
        way = way._replace(changes={**way.changes, **split})
        chosen, values, among = None, [], []
        for seed in self.desk.seeds:
            said = (way.name, sorted(way.changes.items()), sorted(way.grid.items()), size, str(chosen))
            what = ("support", *self.trainer.what(seed), *said)
            found = once(self.desk.out, what, lambda s=seed, c=chosen: self._judge(way, size, s, c))
            chosen = found["chosen"]
            values.append(100 * found["test"][METRIC])
            among.append(100 * found["test"][AMONG])
        return _told(f"{size} sentences: {way.name}", values, among) | {"rates": chosen, "size": size}

    def _judge(
        self, way: JudgedRow, size: int, seed: int, chosen: Mapping[str, float] | None
    ) -> dict[str, Any]:
        params, _ = self.trainer.model(seed)
        if way.name not in self._evaluators:
            self._evaluators[way.name] = self.trainer.evaluator(way)
        evaluate = self._evaluators[way.name]
        validation, test = (
            evaluate.of(store.select(self.trainer.task.personal.columns)) for store in self.stores(size)
        )
        if chosen is None:
            chosen = best_rates(validation, params, way, self.desk.quick)
        return {"test": test(params, named(chosen)), "chosen": chosen}


def _told(row: str, values: Sequence[float], among: Sequence[float] = ()) -> dict[str, Any]:
    others = {AMONG: float(np.mean(among)), f"{AMONG}_spread": float(np.std(among))} if among else {}
    return {
        "row": row,
        "metric": "accuracy %",
        "paper": None,
        "ours": float(np.mean(values)),
        "spread": float(np.std(values)),
        "seeds": len(values),
        "others": others,
        "of_seeds": list(values),
        "among_of_seeds": list(among),
    }


def _gain(size: int, rebuilt: Mapping[str, Any], begun: Mapping[str, Any]) -> dict[str, Any]:
    """What rebuilding gives, seed by seed."""
    minus = lambda name: np.subtract(rebuilt[name], begun[name]).tolist()
    told = _told(f"{size} sentences: gain", minus("of_seeds"), minus("among_of_seeds"))
    return told | {"metric": "points", "size": size}


def _equal_bytes(desk: Desk) -> list[dict[str, Any]]:
    """The accuracy of validation clients when as many parameters were sent."""
    curves = {}
    for training in (RECON, YOGI):
        done = desk.learn(training, desk.vocabularies[0])
        task = desk.task(desk.vocabularies[0], training.buckets)
        each = done.sent(training.sends_all) * desk.config(task, training).cohort.size
        for name, found in done.curves.items():
            curves[name] = (np.array(done.rounds, float) * each, 100 * np.array(found, float))
    end = min(sent[-1] for sent, _ in curves.values())
    rows = []
    for share in SHARES:
        for name, (sent, of_seeds) in curves.items():
            values = [float(np.interp(share * end, sent, curve)) for curve in of_seeds]
            told = _told(f"{share * end / 1e9:.3g} billion parameters sent: {name}", values)
            rows.append(told | {"parameters": share * end})
    return rows


def _draw(path: Path, by_size: Mapping[int, Any], quick: bool) -> None:
    """What rebuilding gives by sentences of support, seed by seed; beside it the accuracies, of which it is a
    small part."""
    figure = Figure(figsize=(8, 3.4), layout="constrained")
    gains, values = figure.subplots(1, 2)
    sizes, pairs = list(by_size), list(by_size.values())
    metrics = (("of_seeds", "the paper's metric", INK), ("among_of_seeds", "among words alone", QUIET))
    for key, name, color in metrics:
        of = lambda place, key=key: np.array([pair[place][key] for pair in pairs]).T  # [seeds, sizes]
        rebuilt, begun = of(0), of(1)
        draw_band(gains, sizes, rebuilt - begun, label=name, color=color, marker="o")
        draw_band(values, sizes, rebuilt, label=f"{name}, rebuilt", color=color)
        values.plot(sizes, begun.mean(axis=0), color=color, linestyle="--", label="without rebuilding")
    gains.axhline(0, color=QUIET, linewidth=0.6)
    gains.set(ylabel="points", title="gain of rebuilding")
    values.set(ylabel="accuracy %", title="accuracy")
    for axes in (gains, values):
        axes.set(xlabel="sentences of support", xscale="log")
        axes.set_xticks(sizes, [str(size) for size in sizes])
        axes.set_xticks([], minor=True)
        axes.legend(frameon=False, fontsize=8)
    save_picture(path, figure, quick)
