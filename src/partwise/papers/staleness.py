"""What clients keep goes stale at low participation; what they rebuild does not (FedRecon, section 4,
appendix A).

The data are seen users of MovieLens, with a fixed number of rounds, and with few to many users in a round.
With FedPer and FedRep, a user is evaluated with the vector that it kept from its last round. With FedRecon,
it rebuilds one from its training ratings. It can also do this with FedPer's item vectors. The difference that
then remains is not staleness. LG-FedAvg is the same as FedPer here, because the model has two parts and no
layers. The rate of the update is chosen for every training and number of users by the validation ratings,
with the first seed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.figure import Figure

from partwise.algorithms.entry import Prepared
from partwise.algorithms.registry import configuration, prepare, settings_for
from partwise.config.settings import Config
from partwise.metrics import Sums
from partwise.papers.fedrecon import AUTHORS
from partwise.papers.study import once
from partwise.runs.backends import make_evaluator
from partwise.runs.picture import INK, QUIET, save_picture
from partwise.runs.train import OnStatus, Status
from partwise.server.cohort import recruit
from partwise.simulation.evaluator import Evaluator, KeptOf
from partwise.simulation.loop import Simulation
from partwise.tasks import PAPER, Task, load_task
from partwise.types import UserError

ROUNDS, COHORTS, UPDATE_RATES = 200, (10, 50, 200, 500), (0.05, 0.1, 0.2)
REBUILD_RATE = 0.5  # the rate that fedrecon-table1 chooses
QUICK_ROUNDS, QUICK_COHORTS, QUICK_CLIENTS = 4, (2, 6), 60
AGES = (0, 10, 50, 100)  # rounds since a client took part: 0 to 9, 10 to 49, ...
ALL, SOME = "rmse", "rmse, users who took part"
WARM, GREEN = "#b03a2e", "#3a7d44"


class Method(NamedTuple):
    """A training, and the local part with which a client is then evaluated."""

    name: str
    algorithm: str
    rebuilt: bool
    color: str


METHODS = (
    Method("FedPer", "fed_per", False, WARM),
    Method("FedRep", "fed_rep", False, GREEN),
    Method("FedPer, then rebuilt", "fed_per", True, QUIET),
    Method("FedRecon", "fed_recon", True, INK),
)
# Rates of the local part in training; FedRep diverges at 0.5.
LOCAL_RATES = {"fed_per": {}, "fed_rep": {"reconstruct": 0.1}, "fed_recon": {"reconstruct": REBUILD_RATE}}


class Judged(NamedTuple):
    """Squared errors of every client with the trained items, and the ages of what clients kept."""

    errors: Sums  # [clients]
    ages: np.ndarray  # [clients] rounds since a client took part; -1: never


class StalenessRuns:
    """The task, and programs to train, to rebuild and to evaluate. Each program is made once."""

    def __init__(self, data: str | None, quick: bool, progress: OnStatus):
        self.task = load_task("movielens-seen", data, preset=PAPER)
        self.rounds, self.cohorts, self.rates, self.progress = ROUNDS, COHORTS, UPDATE_RATES, progress
        if quick:
            self.task = _first_clients(self.task, QUICK_CLIENTS)
            self.rounds, self.cohorts, self.rates = QUICK_ROUNDS, QUICK_COHORTS, UPDATE_RATES[:1]
        self.everyone = self.task.train.num_clients
        self._simulations: dict[tuple[str, int], Simulation] = {}
        self._evaluators: dict[str, Evaluator] = {}

    def config(self, algorithm: str, cohort: int, **changes: Any) -> Config:
        """The task's settings for an algorithm."""
        given = settings_for(self.task.defaults, algorithm)
        return configuration(
            self.task.name, given | AUTHORS | {"rounds": self.rounds, "cohort.size": cohort} | changes
        )

    def train(self, algorithm: str, cohort: int, rate: float, seed: int) -> Simulation:
        """Run all rounds. FedRecon trains as for unseen clients, because this makes no difference for it."""
        task = self.task._replace(seen=False) if algorithm == "fed_recon" else self.task
        simulation = self._simulation((algorithm, cohort), task, self.config(algorithm, cohort))
        simulation.restart(seed, LOCAL_RATES[algorithm] | {"update": rate})
        for records in simulation.run(self.rounds):
            part = f"{algorithm}, {cohort} clients a round, rate {rate:g}, seed {seed}"
            self.progress(Status(simulation.round, self.rounds, records[-1].loss, None, part))
        return simulation

    def rebuild(self, params: Mapping[str, Any], seed: int) -> KeptOf:
        """Every client's local part, from its training examples and these parameters alone. This is a round
        of FedRep in which all clients take part for the first time and train nothing else."""
        config = self.config("fed_rep", self.everyone, **{"update.max_steps": 0})
        simulation = self._simulation(("rebuild", self.everyone), self.task, config)
        simulation.restart(seed, {"reconstruct": REBUILD_RATE})
        state, kept = simulation.snapshot()
        simulation.resume((state._replace(params=dict(params)), kept), 0)
        list(simulation.run(1))
        return simulation.kept_of

    def errors(self, split: str, params: Mapping[str, Any], kept: KeptOf) -> Sums:
        """The squared errors of every client on its held-out examples."""
        if split not in self._evaluators:
            config = self.config("fed_rep", self.everyone)
            prepared = prepare(self.task, config)
            self._evaluators[split] = make_evaluator(prepared, config, getattr(self.task, split))
        return self._evaluators[split].sums(params, kept=kept)["rmse"]

    def judge(self, method: Method, simulation: Simulation, split: str) -> Judged:
        """Evaluate the clients of a trained method. Parameters are copied, because the next run replaces
        them."""
        params = {path: np.asarray(leaf) for path, leaf in simulation.state.params.items()}
        kept = self.rebuild(params, simulation.seed) if method.rebuilt else simulation.kept_of
        return Judged(self.errors(split, params, kept), last_seen(simulation))

    def tune(self, method: Method, cohort: int, seed: int) -> float:
        """The rate with the lowest error on the validation examples."""
        if len(self.rates) == 1:
            return self.rates[0]
        found = []
        for rate in self.rates:
            try:
                simulation = self.train(method.algorithm, cohort, rate, seed)
                found.append(rmse(self.judge(method, simulation, "validation").errors))
            except UserError:  # diverged
                found.append(np.inf)
        return self.rates[int(np.argmin(np.where(np.isfinite(found), found, np.inf)))]

    def _simulation(self, name: tuple[str, int], task: Task, config: Config) -> Simulation:
        if name not in self._simulations:
            prepared: Prepared = prepare(task, config)
            self._simulations[name] = Simulation(
                prepared.build, prepared.rates, prepared.store, prepared.recruiting
            )
        return self._simulations[name]


def _first_clients(task: Task, most: int) -> Task:
    some = np.arange(min(most, task.train.num_clients))
    parts = {name: getattr(task, name).gather(some) for name in ("train", "validation", "test")}
    return task._replace(**parts)


def last_seen(simulation: Simulation) -> np.ndarray:
    """Rounds since each client took part (0: in the last one); -1 if it never did."""
    counts, ages = simulation.store.counts, np.full(simulation.store.num_clients, -1)
    for t in range(simulation.round):
        ages[recruit(simulation.recruiting, counts, simulation.seed, t).clients] = simulation.round - 1 - t
    return ages


def rmse(errors: Sums, chosen: np.ndarray | None = None) -> float:
    """The RMSE over all held-out examples of the chosen clients; NaN if there are none."""
    value, weight = (part if chosen is None else part[chosen] for part in errors)
    return float(np.sqrt(value.sum() / weight.sum())) if weight.sum() else float("nan")


def by_age(judged: Judged) -> dict[str, float]:
    """The RMSE of clients by the number of rounds since they took part."""
    groups = {"never": judged.ages < 0}
    for first, after in zip(AGES, (*AGES[1:], np.inf), strict=True):
        word = f"{first} to {after - 1}" if after < np.inf else f"{first} or more"
        groups[word] = (judged.ages >= first) & (judged.ages < after)
    return {word: rmse(judged.errors, group) for word, group in groups.items()}


def staleness(
    data: str | None, out: Path, seeds: Sequence[int], quick: bool, progress: OnStatus
) -> dict[str, Any]:
    """RMSE on held-out ratings by the number of clients in a round: of all users, of the users who took part,
    and by the number of rounds since then."""
    runs, rows = StalenessRuns(data, quick, progress), []
    about = [runs.task, runs.rounds, runs.rates, list(seeds)]
    for cohort in runs.cohorts:
        rows += once(out, [*about, cohort], lambda c=cohort: _rows(runs, c, seeds))
    _draw(out / "staleness.png", rows, runs.everyone, quick)
    return {"rows": rows, "clients": runs.everyone, "rounds": runs.rounds}


def _rows(runs: StalenessRuns, cohort: int, seeds: Sequence[int]) -> list[dict[str, Any]]:
    """Two rows for every method. One training is used for all methods that are evaluated after it."""
    rows = []
    for algorithm in dict.fromkeys(method.algorithm for method in METHODS):
        methods = [method for method in METHODS if method.algorithm == algorithm]
        rate = runs.tune(methods[0], cohort, seeds[0])
        found: dict[str, list[Judged]] = {method.name: [] for method in methods}
        for seed in seeds:
            simulation = runs.train(algorithm, cohort, rate, seed)
            for method in methods:
                found[method.name].append(runs.judge(method, simulation, "test"))
        for name, each in found.items():
            rows += _told(f"{name}, {cohort} a round", each, cohort=cohort, method=name, rate=rate)
    return rows


def _told(row: str, each: Sequence[Judged], **more: Any) -> list[dict[str, Any]]:
    ages = [by_age(judged) for judged in each]
    more |= {
        "took_part": float(np.mean([(judged.ages >= 0).mean() for judged in each])),
        "by_age": {word: _over_seeds(np.mean, [one[word] for one in ages]) for word in ages[0]},
        "by_age_spread": {word: _over_seeds(np.std, [one[word] for one in ages]) for word in ages[0]},
    }
    values = {
        ALL: [rmse(judged.errors) for judged in each],
        SOME: [rmse(judged.errors, judged.ages >= 0) for judged in each],
    }
    return [
        {
            "row": row,
            "metric": metric,
            "paper": None,
            "ours": float(np.mean(found)),
            "spread": float(np.std(found)),
            "seeds": len(found),
            **more,
        }
        for metric, found in values.items()
    ]


def _over_seeds(summary: Callable[[Sequence[float]], Any], values: Sequence[float]) -> float | None:
    """A summary of the seeds that have such clients."""
    there = [value for value in values if np.isfinite(value)]
    return float(summary(there)) if there else None


def _gap(value: float | None) -> float:
    return np.nan if value is None else value


def _draw(path: Path, rows: Sequence[Mapping[str, Any]], everyone: int, quick: bool) -> None:
    """RMSE by clients in a round, for all users and for users who took part; and by age, for the second
    smallest cohort."""
    figure = Figure(figsize=(12, 3.6), layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    cohorts = sorted({row["cohort"] for row in rows})
    words = [word for word in rows[0]["by_age"] if word != "never"]
    for method in METHODS:
        mine = [row for row in rows if row["method"] == method.name]
        look: dict[str, Any] = {"color": method.color, "marker": "o", "markersize": 4, "label": method.name}
        for axes, metric in ((left, ALL), (middle, SOME)):
            chosen = [row for row in mine if row["metric"] == metric]
            axes.errorbar(
                cohorts, [r["ours"] for r in chosen], [r["spread"] for r in chosen], capsize=2, **look
            )
        ages = next(row for row in mine if row["cohort"] == cohorts[1])
        mean, spread = ([_gap(ages[part][word]) for word in words] for part in ("by_age", "by_age_spread"))
        right.errorbar(range(len(words)), mean, spread, capsize=2, **look)
    for axes, title in ((left, "all users"), (middle, "users who took part")):
        axes.set(xscale="log", xlabel=f"users in a round, of {everyone:,}", ylabel="RMSE", title=title)
        axes.set_xticks(cohorts, [str(cohort) for cohort in cohorts])
        axes.minorticks_off()
    right.set_xticks(range(len(words)), words, fontsize=7)
    right.set(xlabel="rounds since a user took part", ylabel="RMSE")
    right.set_title(f"{cohorts[1]} users in a round")
    left.legend(frameon=False, fontsize=8)
    save_picture(path, figure, quick)
