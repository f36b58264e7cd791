"""The results of the default settings beside the paper's settings: MovieLens, unseen users.

No seed may diverge. Users are evaluated in the usual way. They are also evaluated with few and with many
known ratings: the first ratings of the first half are known, and the second half is predicted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from partwise.algorithms.fed_recon import recon_build
from partwise.algorithms.registry import prepare
from partwise.client.split import Split, Subset
from partwise.config.settings import Config
from partwise.data.store import ClientStore
from partwise.papers.study import own_row, telling_release
from partwise.runs.backends import make_evaluator, make_simulation
from partwise.runs.picture import save_picture
from partwise.runs.resolve import resolve
from partwise.runs.train import OnStatus, Status
from partwise.simulation.evaluator import Evaluator
from partwise.tasks import PAPER, Task
from partwise.types import UserError

TASK, ALL = "movielens", 100_000  # the most ratings of a user; large enough for all of them
KNOWN = (1, 4, 20, 200)  # numbers of known ratings of a user
ROUNDS = 500  # for both, as in the paper; the defaults have more
SETTINGS = {"defaults": None, f"preset {PAPER}": PAPER}
QUICK = {"data.size": "100k", "rounds": 5, "simulation.lanes": 4}


def paper_settings(
    data: str | None, out: Path, seeds: Sequence[int], quick: bool, progress: OnStatus
) -> dict[str, Any]:
    """RMSE, accuracy and time of a round, by settings; RMSE by known ratings, beside the RMSE of the mean
    rating."""
    changes = QUICK if quick else {"rounds": ROUNDS}
    known = KNOWN[:2] if quick else KNOWN
    with telling_release(quick):
        whole = resolve(TASK, data, {**_data(changes), "data.max_examples": ALL})[0]
    rows = []
    for name, preset in SETTINGS.items():
        task, config = resolve(TASK, data, changes, preset)
        shown = lambda status, name=name: progress(status._replace(part=name))
        found = _train(task, config, seeds, whole.test, {k: _rich(whole.test, k) for k in known}, shown)
        rows += [own_row(name, metric, values) for metric, values in found.items()]
    rows += [own_row("mean rating", _known(k), [_of_mean(whole, k)]) for k in known]
    _draw(out / "paper-settings.png", rows, known, quick)
    users = {k: _rich(whole.test, k).num_clients for k in known}
    return {"rows": rows, "users": users}


def _known(ratings: int) -> str:
    """The name of the metric for users with this many known ratings."""
    return f"rmse, {ratings} known"


def _draw(path: Path, rows: Sequence[Mapping[str, Any]], known: Sequence[int], quick: bool) -> None:
    """Draw RMSE against the number of known ratings of a user, with a line for every row of the table."""
    found = {(row["row"], row["metric"]): row for row in rows}
    figure = Figure(figsize=(5.6, 3.8), layout="constrained")
    axes = figure.subplots()
    for name in dict.fromkeys(row["row"] for row in rows):
        values = [found[name, _known(k)] for k in known]
        ours, spread = ([row[part] for row in values] for part in ("ours", "spread"))
        axes.errorbar(known, ours, spread, marker="o", markersize=4, linewidth=1.2, capsize=2, label=name)
    axes.set(xlabel="ratings known of a user", ylabel="RMSE of the others", xscale="log")
    axes.set_xticks(known, list(map(str, known)))
    axes.minorticks_off()
    axes.legend(frameon=False, fontsize=8)
    save_picture(path, figure, quick)


def _data(changes: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in changes.items() if key.startswith("data.")}


def _train(
    task: Task,
    config: Config,
    seeds: Sequence[int],
    test: ClientStore,
    rich: Mapping[int, ClientStore],
    progress: OnStatus,
) -> dict[str, list[float]]:
    """The values of every metric, one for each seed. A training that diverges raises `UserError`."""
    prepared = prepare(task, config)
    simulation = make_simulation(prepared, config)
    evaluate = make_evaluator(prepared, config, test)
    judges = {k: judge(task, config, store, k) for k, store in rich.items()}
    found: dict[str, list[float]] = {}
    for seed in seeds:
        simulation.restart(seed)
        spent = []
        for records in simulation.run(config.rounds):
            spent += [record.seconds for record in records]
            progress(Status(simulation.round, config.rounds, records[-1].loss, None))
        params, told = simulation.state.params, evaluate(simulation.state.params)
        if not told["rmse"] < 10:
            raise UserError(f"seed {seed} has diverged: the RMSE is {told['rmse']}")
        values = {"rmse": told["rmse"], "accuracy %": 100 * told["accuracy"]}
        values |= {_known(k): judged(params)["rmse"] for k, judged in judges.items()}
        for metric, value in (values | {"ms a round": 1e3 * float(np.median(spent))}).items():
            found.setdefault(metric, []).append(value)
    return found


def judge(task: Task, config: Config, store: ClientStore, known: int) -> Evaluator:
    """The evaluation of users with this many known ratings, on the second half of their ratings."""
    prepared = prepare(task, config)
    build = recon_build(task.personal, config, judged=first_of(known))
    return make_evaluator(prepared._replace(evaluation=build), config, store)


def first_of(known: int) -> Split:
    """Support: the first `known` examples of the first half; query: the second half."""
    fewer = lambda half: half * (half < known) + known * (half >= known)
    return Split(
        Subset(lambda n: fewer(n // 2), lambda j, n: j), Subset(lambda n: n - n // 2, lambda j, n: n // 2 + j)
    )


def _rich(test: ClientStore, known: int) -> ClientStore:
    """The users whose first half has at least this many ratings."""
    return test.take(np.flatnonzero(test.counts >= 2 * known))


def _of_mean(task: Task, known: int) -> float:
    """The RMSE of the prediction that is always the mean of the training ratings."""
    mean = task.train.gather(np.arange(task.train.num_clients)).columns["rating"].mean()
    test, query = _rich(task.test, known), first_of(known).query
    asked = [
        test.examples(c)["rating"][query.index(np.arange(query.count(n)), n)]
        for c, n in enumerate(test.counts.tolist())
    ]
    return float(np.sqrt(np.mean((np.concatenate(asked) - mean) ** 2)))
