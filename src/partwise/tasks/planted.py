"""Ratings generated from a planted truth, so that the best reachable error is known. Needs no data."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import numpy as np

from partwise.client.split import Split, Subset, alternate
from partwise.data.generate import PlantedRatings, open_planted, planted_ratings
from partwise.data.planted import oracle
from partwise.data.store import ClientStore
from partwise.model.partition import Initial
from partwise.tasks.base import Task, takes_options_of
from partwise.tasks.ratings import ratings_task

# Chosen on the validation clients. The pull is what the planted noise and spread of users suggest.
DEFAULTS = {
    "rounds": 1000,
    "cohort.size": 50,
    "split.kind": "none",
    "reconstruct.method": "solve",
    "reconstruct.pull": 0.5,
    "update.rate": 0.1,
    "server.optimizer": "adagrad",
    "server.rate": 0.3,
    "server.schedule": "cosine",
    "simulation.evaluate_every": 100,
}


@takes_options_of(ratings_task, but=("name", "order", "defaults"))
def load(
    data: str | None = None,
    *,
    num_clients: Annotated[int, "clients that are generated"] = 5000,
    num_items: Annotated[int, "items that they rate"] = 500,
    rank: Annotated[int, "size of the true vectors"] = 8,
    noise: Annotated[float, "standard deviation of a rating around the truth"] = 0.5,
    mean_examples: Annotated[float, "ratings of a client, on average"] = 60,
    planted_seed: Annotated[int, "what the truth is drawn from"] = 0,
    dim: Annotated[int, "size of the learned vectors"] = 8,
    initial: Annotated[Initial, "where local parameters start"] = "learned",
    **options: Any,
) -> Task:
    """Generate in memory; or open `data`, a folder written before by `planted_ratings(out=...)`."""
    planted = (
        open_planted(Path(data))
        if data
        else planted_ratings(num_clients, num_items, rank, noise, mean_examples, seed=planted_seed)
    )
    order = "as is" if data else "shuffle"
    task = ratings_task(
        planted.store,
        "planted",
        dim=dim,
        initial=initial,
        order=order,
        defaults=DEFAULTS,
        **options,
    )
    return task._replace(best=best_reachable(planted, task.test, alternate(5)))


def best_reachable(planted: PlantedRatings, test: ClientStore, split: Split) -> dict[str, float]:
    """The error of somebody who knows the true items and rebuilds users as well as can be."""
    at_most = test.take(np.arange(min(test.num_clients, 2000)))
    return {"rmse": oracle(planted.truth, at_most, _indices(split.support), _indices(split.query))["rmse"]}


def _indices(subset: Subset) -> Any:
    return lambda n: subset.index(np.arange(subset.count(n)), n)
