"""Does a user like a movie? Logistic regression on MovieLens (Federated Submodel Averaging, section 5.1).

A rating of 4 or 5 is positive. Features are one-hot: gender, age, movie, gender x movie, age x movie. Each
feature has its own weight, and all weights are keyed by feature. The number of clients that hold a feature is
between one (a movie that one user rated) and 4,331 (the male users). This is the paper's heat dispersion of
this data set.
"""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax

from partwise.data import holdout
from partwise.data.loaders import movielens_ratings
from partwise.data.loaders.movielens_users import AGES, GENDERS, with_users
from partwise.data.store import ClientStore
from partwise.model.partition import keyed, partition
from partwise.model.spec import Batch, Metric, Model, auc, lookup
from partwise.tasks.base import PAPER, SEEDS, SUBMODEL_DEFAULTS, Entry, Setting, Task, fitted

LIKED_STARS = 4  # the lowest rating that is positive
DEFAULTS = {**SUBMODEL_DEFAULTS, "cohort.size": 50}
PRESETS = {PAPER: DEFAULTS}
EXAMPLE = {"num_features": 2}


def sparse_logistic_regression(num_features: int) -> Model:
    """A weight for every feature, and a bias; outputs are logits."""

    def init(rng: jax.Array) -> dict[str, jax.Array]:
        return {"weights": jnp.zeros(num_features), "bias": jnp.zeros(())}

    def predict(params: Any, batch: Batch, rng: jax.Array) -> jax.Array:
        return lookup(params["weights"], batch["features"]).sum(axis=-1) + params["bias"]

    def losses(logits: jax.Array, batch: Batch) -> jax.Array:
        return optax.sigmoid_binary_cross_entropy(logits, batch["liked"])

    def right(logits: jax.Array, batch: Batch) -> jax.Array:
        return ((logits > 0) == (batch["liked"] > 0)) * 1.0

    return Model(
        init, predict, losses, {"auc": auc("liked"), "accuracy": Metric(right, higher_is_better=True)}
    )


def settings(num_features: int) -> tuple[Setting, Setting]:
    """One setting, used for both, because nothing is local."""
    model = sparse_logistic_regression(num_features)
    parts = partition(model, {"weights": keyed("feature")}, columns={"feature": ("features",)})
    setting = Setting(model, parts, ("features", "liked"))
    return setting, setting


def load(
    data: str | None = None,
    *,
    size: Annotated[Literal["1m", "100k"], "the release"] = "1m",
    seed: Annotated[int, "of the cut into training, validation and test examples", SEEDS] = 42,
) -> Task:
    """Seen users. A random 80 % of each user's ratings are for training. The paper tests on the other 20 %.
    Here half of them are for validation, so that nothing is chosen by looking at the test examples."""
    store = with_features(with_users(movielens_ratings.load(data, size), data, size))
    train, validation, test = holdout.by_example(store.select(("features", "liked")), seed=seed)
    options = {"num_features": store.num_keys("features")}
    personal, stateful = settings(**options)
    presets = {name: fitted(each, train) for name, each in PRESETS.items()}
    given = fitted(DEFAULTS, train)
    task = Task("movielens-liked", train, validation, test, personal, stateful, options, given, seen=True)
    return task._replace(presets=presets)


def with_features(store: ClientStore) -> ClientStore:
    """Columns `features`, the five feature ids of an example, and `liked`, 0 or 1."""
    movie, gender, age = (store.columns[name].astype(np.int64) for name in ("item", "gender", "age"))
    movies = store.vocabularies["item"].tolist()
    names, features = [], []
    for keys, words in (
        (gender, [f"gender={g}" for g in GENDERS]),
        (age, [f"age={a}" for a in AGES]),
        (movie, [f"movie={m}" for m in movies]),
        (gender * len(movies) + movie, [f"gender={g} movie={m}" for g in GENDERS for m in movies]),
        (age * len(movies) + movie, [f"age={a} movie={m}" for a in AGES for m in movies]),
    ):
        features.append(len(names) + keys)
        names += words
    liked = (store.columns["rating"] >= LIKED_STARS).astype(np.float32)
    wide = store.with_columns(features=np.stack(features, axis=1).astype(np.int32), liked=liked)
    return dataclasses.replace(wide, vocabularies={**wide.vocabularies, "features": np.array(names)})


LIKED = Entry("movies that are liked", load, settings, DEFAULTS, PRESETS, EXAMPLE)
