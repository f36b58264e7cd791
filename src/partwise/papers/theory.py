"""FedSubAvg's theory with numbers: Example 1 and Figure 2 (section 3), Theorems 1 and 2 (section 4).

Example 1 is run by the library's own simulation and compared with its closed form. The theorems are computed
for the whole logistic regression on MovieLens, at weights of 0, where training starts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure

from partwise.algorithms.fed_avg import fed_avg
from partwise.algorithms.fed_sub_avg import fed_sub_avg
from partwise.client.batches import Batches
from partwise.client.update import by_steps
from partwise.data.heat import count_heat, summarize
from partwise.data.store import ClientStore
from partwise.model.partition import keyed, partition
from partwise.model.spec import Model, lookup
from partwise.optimizers import Sgd
from partwise.papers.conditioning import Conditioning
from partwise.papers.sparse_conditioning import logistic_conditioning
from partwise.runs.picture import INK, QUIET, save_picture
from partwise.runs.train import OnStatus, Status
from partwise.selection.key_heat import count_heats
from partwise.server.cohort import Recruiting
from partwise.server.mean import mean, uniform
from partwise.simulation.loop import Simulation
from partwise.tasks import PAPER, load_task

NUM_CLIENTS, START, RATE, ROUNDS = 100, (4.0, 3.0), 0.05, 40  # Figure 2 has a dispersion of 100
L2 = (0.1, 0.01, 0.001)
CUT, QUICK_CLIENTS = 42, 60  # the seed of the first split into training and test examples is the task's
PAPER_DISPERSION = 4331  # Table 1, MovieLens
WARM = "#b03a2e"


def theory(
    data: str | None, out: Path, seeds: Sequence[int], quick: bool, progress: OnStatus
) -> dict[str, Any]:
    """Example 1 against its closed form, and the condition numbers of the task `movielens-liked` against
    their bounds.

    Only the split into training and test examples is random. So each seed is another split.
    """
    stores = [_parameters(data, CUT + seed, quick) for seed in seeds]
    paths = {name: example1(name == "FedSubAvg", progress) for name in ("FedAvg", "FedSubAvg")}
    found: dict[float, list[Conditioning]] = {}
    for number, l2 in enumerate(L2, 1):
        found[l2] = [logistic_conditioning(*each, l2=l2) for each in stores]
        told = {"condition number": found[l2][0].condition}
        progress(Status(number, len(L2), math.log(2), told, f"Theorems 1 and 2, l2 = {l2:g}"))
    rows = [*_example_rows(paths), *_dispersion_rows(stores), *_theorem_rows(found)]
    _draw(out / "fedsubavg-theory.png", paths, found, quick)
    paths_told = {name: path.tolist() for name, path in paths.items()}
    clients, parameters = stores[0][0].num_clients, stores[0][2]
    return {"rows": rows, "example": paths_told, "clients": clients, "parameters": parameters}


def example1(corrected: bool, progress: OnStatus, rounds: int = ROUNDS) -> np.ndarray:
    """(w_1, w_2) after every round, [rounds + 1, 2]. Only the first client holds w_1; all clients hold w_2."""
    held = np.full((NUM_CLIENTS, 2), -1)
    held[:, 1], held[0, 0] = 1, 0
    client = np.repeat(np.arange(NUM_CLIENTS), 2)
    store = ClientStore.from_arrays(client, w=held[client], xi=np.tile([-1.0, 1.0], NUM_CLIENTS))
    model = Model(
        init=lambda rng: {"w": jnp.array(START)},
        predict=lambda params, batch, rng: lookup(params["w"], batch["w"]),
        loss=lambda w, batch: jnp.where(batch["w"] >= 0, (w - batch["xi"][:, None]) ** 2, 0.0).sum(axis=1),
    )
    roles = partition(model, {"w": keyed("w")})
    heats = count_heats(store, roles)

    def build(rates: Mapping[str, Any]):
        parts = {
            "update": by_steps(Batches(batch_size=2), rates["update"]),
            "optimizer": Sgd(1.0).on_server(),
        }
        if corrected:
            return fed_sub_avg(model, roles, heats=heats, **parts)
        return fed_avg(model, roles, aggregator=mean(uniform), **parts)

    simulation = Simulation(
        build, {"update": RATE}, store, Recruiting(NUM_CLIENTS), lanes=10, rounds_per_call=1
    )
    path = [np.array(START)]
    for records in simulation.run(rounds):
        path.append(np.asarray(simulation.state.params["w"]))
        progress(Status(simulation.round, rounds, records[-1].loss, None, "Example 1"))
    return np.array(path)


def closed_form(name: str) -> np.ndarray:
    """The factors by which a round multiplies w_1 and w_2."""
    first = RATE / NUM_CLIENTS if name == "FedAvg" else RATE
    return np.array([1 - 2 * first, 1 - 2 * RATE])


def _parameters(data: str | None, seed: int, quick: bool) -> tuple[ClientStore, str, int]:
    """The parameters of every training example: its five features, and the bias, which all clients hold."""
    task = load_task("movielens-liked", data, preset=PAPER, seed=seed)
    some = np.arange(min(QUICK_CLIENTS, task.train.num_clients) if quick else task.train.num_clients)
    store, bias = task.train.gather(some), task.options["num_features"]
    features = store.columns["features"]
    ids = np.column_stack([features, np.full(len(features), bias, features.dtype)])
    return store.with_columns(parameter=ids), "parameter", bias + 1


def _row(row: str, metric: str, paper: float | None, values: Sequence[float], **more: Any) -> dict[str, Any]:
    return {
        "row": row,
        "metric": metric,
        "paper": paper,
        "ours": float(np.mean(values)),
        "spread": float(np.std(values)),
        "seeds": len(values),
        **more,
    }


def _example_rows(paths: Mapping[str, np.ndarray]) -> list[dict[str, Any]]:
    """Rows for Example 1. The paper's number is the closed form; ours is the geometric mean over the rounds."""
    rows = []
    for name, path in paths.items():
        measured = (path[-1] / path[0]) ** (1 / (len(path) - 1))
        for i, word in enumerate(("w_1", "w_2")):
            paper = float(closed_form(name)[i])
            rows.append(_row(f"Example 1, {name}: {word}", "factor a round", paper, [measured[i]]))
    return rows


def _dispersion_rows(stores: Sequence[tuple[ClientStore, str, int]]) -> list[dict[str, Any]]:
    whole = [summarize(count_heat(store, column, num_keys=size)) for store, column, size in stores]
    bare = [summarize(count_heat(store, "features", num_keys=size - 1)) for store, _, size in stores]
    return [
        _row("MovieLens, features", "dispersion", PAPER_DISPERSION, [each["dispersion"] for each in bare]),
        _row("MovieLens, parameters", "dispersion", None, [each["dispersion"] for each in whole]),
    ]


def _theorem_rows(found: Mapping[float, Sequence[Conditioning]]) -> list[dict[str, Any]]:
    """Rows for the theorems. The paper's number is its bound for this data."""
    rows = []
    for l2, each in found.items():
        told = {"l2": l2, "theory": [one._asdict() for one in each]}
        bound = lambda name, each=each: float(np.mean([getattr(one, name) for one in each]))
        plain, corrected = [one.condition for one in each], [one.corrected for one in each]
        for name, metric, paper, values in (
            ("H", "condition, Theorem 1: at least", bound("lower"), plain),
            ("H", "condition, Theorem 2: at most k", bound("upper"), plain),
            ("D^½ H D^½", "condition, Theorem 2: at most", bound("corrected_bound"), corrected),
        ):
            rows.append(_row(f"{name}, l2 = {l2:g}", metric, paper, values, **told))
    return rows


def _draw(
    path: Path, paths: Mapping[str, np.ndarray], found: Mapping[float, Sequence[Conditioning]], quick: bool
) -> None:
    """Figure 2 as loss by round, with the closed form as circles; condition numbers by l2 between their
    bounds."""
    figure = Figure(figsize=(9.5, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    for (name, way), color in zip(paths.items(), (QUIET, INK), strict=True):
        rounds = np.arange(len(way))
        expected = np.array(START) * closed_form(name) ** rounds[:, None]
        loss = lambda w: w[:, 0] ** 2 / NUM_CLIENTS + w[:, 1] ** 2  # above the minimum
        left.plot(rounds, loss(way), color=color, label=name)
        left.plot(rounds[::4], loss(expected)[::4], "o", color=WARM, markersize=4, mfc="none")
    left.plot([], [], "o", color=WARM, markersize=4, mfc="none", label="closed form")
    left.set(xlabel="round", ylabel="loss above the least", yscale="log", title="Example 1")
    l2 = list(found)
    mean_of = lambda name: [np.mean([getattr(one, name) for one in found[each]]) for each in l2]
    for name, color, word in (
        ("condition", QUIET, "H (FedAvg)"),
        ("corrected", INK, "D^½ H D^½ (FedSubAvg)"),
    ):
        right.plot(l2, mean_of(name), color=color, marker="o", label=word)
    right.fill_between(
        l2, mean_of("lower"), mean_of("upper"), color=QUIET, alpha=0.15, lw=0, label="bounds of H"
    )
    right.plot(l2, mean_of("corrected_bound"), color=WARM, linestyle=":", label="upper bound of D^½ H D^½")
    right.set(xscale="log", yscale="log", xlabel="l2 of every client", ylabel="condition number")
    right.set_title("Theorems 1 and 2: MovieLens, all features")
    for axes in (left, right):
        axes.legend(frameon=False, fontsize=7)
    save_picture(path, figure, quick)
