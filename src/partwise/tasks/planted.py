"""Ratings generated from a planted truth, so that the best reachable error is known. The task needs no data."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Annotated, Any

import numpy as np

from partwise.client.split import Split, Subset
from partwise.data.checks import check_memory
from partwise.data.generated.planted_ratings import PlantedRatings, open_planted, planted_ratings
from partwise.data.generated.rating_law import oracle
from partwise.data.store import ClientStore, is_store
from partwise.tasks import ratings
from partwise.tasks.base import COUNTS, SEEDS, Entry, OwnRows, Task, takes_options_of
from partwise.tasks.ratings import ratings_task
from partwise.types import Limits, UserError

COMMON = {"update.rate": 0.1, "server.rate": 0.3}
ADAPTIVE = {"update.rate": 0.1, "server.rate": 0.1}
# Chosen on the validation clients. The pull follows from the planted noise and the spread of users.
DEFAULTS = {
    "rounds": 1000,
    "cohort.size": 50,
    "split.kind": "none",
    "reconstruct.method": "solve",
    "reconstruct.pull": 0.5,
    "update.rate": 0.1,
    "update.begin": "random",
    "server.optimizer": "adagrad",
    "server.rate": 0.3,
    "server.schedule": "cosine",
    "server.settings.initial_accumulator": 0.0,
    "server.settings.epsilon": 1e-3,
    "simulation.evaluate_every": 100,
    "fed_adam": ADAPTIVE,
    "fed_yogi": ADAPTIVE,
    "fed_adagrad": {"server.rate": 1.0},
    **dict.fromkeys(("fed_sub_avg", "fed_per", "lg_fed_avg"), COMMON),
    "fed_prox": {"server.rate": 1.0},
    "central": {**ratings.CENTRAL, "server.settings.decay": 0.02, "reconstruct.pull": 0.5},
}


@takes_options_of(ratings_task, but=("name", "order", "defaults"))
def load(
    data: str | None = None,
    *,
    num_clients: Annotated[int, "clients that are generated", COUNTS] = 5000,
    num_items: Annotated[int, "items that they rate", COUNTS] = 500,
    rank: Annotated[int, "size of the true vectors", Limits(1, 4096)] = 8,
    noise: Annotated[float, "standard deviation of a rating around the truth", Limits(0, 1e6)] = 0.5,
    mean_examples: Annotated[float, "ratings of a client, on average", COUNTS] = 60,
    planted_seed: Annotated[int, "what the truth is drawn from", SEEDS] = 0,
    dim: Annotated[int, "size of the learned vectors", Limits(1, 4096)] = 8,
    biases: Annotated[bool, "a mean, and a number for every user and item"] = False,
    normalize: Annotated[bool, "learn ratings in units of their spread around their mean"] = False,
    **options: Any,
) -> Task:
    """Generate ratings in memory, or open `data`, what `planted_ratings(out=...)` wrote."""
    if data and not is_store(data):
        raise UserError(
            f"'{data}' is not a folder of planted ratings (`planted_ratings(out=...)` writes one). The task "
            f"'planted' generates its own data; to train on a table of your own ratings, use the task 'ratings': "
            f"partwise train ratings --data {data}"
        )
    if not data:
        size = 8.0 * num_clients * mean_examples
        check_memory(size, "so many ratings", "lower data.num_clients or data.mean_examples")
    planted = (
        open_planted(data)
        if data
        else planted_ratings(num_clients, num_items, rank, noise, mean_examples, seed=planted_seed)
    )
    order = "as is" if data else "shuffle"
    model = {"dim": dim, "biases": biases, "normalize": normalize}  # by default the model of the truth
    task = ratings_task(planted.store, "planted", order=order, defaults=DEFAULTS, **model, **options)
    return task._replace(best=partial(best_reachable, planted, task.test), presets={})


def best_reachable(planted: PlantedRatings, test: ClientStore, split: Split | None) -> dict[str, float]:
    """The error of a model that knows the true items and rebuilds users in the best way from their support
    set. It is not known for clients that are evaluated without a split."""
    at_most = test.take(np.arange(min(test.num_clients, 2000)))
    if split is None or not sum(split.query.count(n) for n in at_most.counts.tolist()):
        return {}
    found = oracle(planted.truth, at_most, _indices(split.support), _indices(split.query))
    return {"rmse": found["rmse"]}


def _indices(subset: Subset) -> Any:
    return lambda n: subset.index(np.arange(subset.count(n)), n)


def own_rows(store: ClientStore, options: Mapping[str, Any]) -> ClientStore:
    """Rows of a client that was not generated: there is no table whose order and cut could be those of the task, so
    all are for training, as they come, up to `max_examples`."""
    return ratings.training_rows(store, {**options, "order": "as is", "seen": False})


PLANTED = Entry(
    "planted ratings",
    load,
    ratings.settings,
    ratings.DEFAULTS | DEFAULTS,
    example=ratings.EXAMPLE,
    own=OwnRows(prepare=own_rows),
)
