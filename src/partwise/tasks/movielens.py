"""MovieLens matrix factorisation. The preset `paper` has the settings of FedRecon's Tables 1 and 3 (section
5.1.1, appendix C.1). The preset `informed` uses what else is known of items and users, and learns how a client
is best rebuilt."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any, Literal

import numpy as np

from partwise.data.loaders import movielens_ratings
from partwise.data.loaders.movielens_movies import MOST_GENRES, NOTHING, NUM_FEATURES, movie_features
from partwise.data.loaders.movielens_users import AGES, GENDERS, NUM_OCCUPATIONS, OCCUPATIONS, with_users
from partwise.data.store import ClientStore
from partwise.model.partition import keyed, local, partition
from partwise.model.roles import Initial
from partwise.tasks import ratings
from partwise.tasks.base import Entry, OwnRows, Setting, Task, fitted, takes_options_of
from partwise.tasks.informed_factorization import informed_factorization
from partwise.tasks.ratings import ratings_task
from partwise.types import Limits, UserError

USERS = {"gender": len(GENDERS), "age": len(AGES), "occupation": NUM_OCCUPATIONS}
# Chosen on the validation users of MovieLens-1M (docs/reproduction_own.md).
INFORMED = {
    **ratings.DEFAULTS,
    "data.dim": 24,
    "data.max_examples": 300,
    "data.movies": True,
    "data.users": True,
    "data.item_pull": 0.1,
    "rounds": 1500,
    "split.kind": "random",
    "update.method": "through",
    "update.rate": 1.0,
    "server.rate": 0.03,
    "server.settings.initial_accumulator": 1e-5,
}
PRESETS = {**ratings.PRESETS, "informed": INFORMED}
MORE = ("signals", "attention", "item_pull", "movies", "users", "cuts")  # options of the informed model


def settings(
    num_items: int,
    num_users: int,
    dim: int = 50,
    initial: Initial = "random",
    biases: bool = False,
    center: float = 0.0,
    spread: float = 1.0,
    pull: float = 0.0,
    signals: bool = False,
    attention: bool = False,
    item_pull: float = 0.0,
    movies: bool = False,
    users: bool = False,
    cuts: str = "",
    features: np.ndarray | None = None,
) -> tuple[Setting, Setting | None]:
    """The settings of `ratings`; or, with more than ratings, one in which users' parameters are local. Without
    `features`, the features of movies are unknown, until those of a trained model take their place."""
    if not (signals or attention or item_pull or movies or users or cuts):
        return ratings.settings(num_items, num_users, dim, initial, biases, center, spread, pull)
    if movies and features is None:
        features = np.full((num_items, MOST_GENRES + 1), NOTHING)
    model = informed_factorization(
        num_items,
        dim,
        center=center,
        spread=spread,
        signals=signals,
        attention=attention,
        item_pull=item_pull,
        item_features=features if movies else None,
        num_item_features=NUM_FEATURES,
        user_features=USERS if users else {},
        cuts=read_cuts(cuts),
    )
    rules = {"user": local(initial), "user_bias": local(initial)}
    rules |= {"item": keyed("item"), "item_bias": keyed("item")}
    rules |= {"item_signal": keyed("item")} if signals else {}
    rules |= {"item_attention": keyed("item")} if attention else {}
    rules |= {"item_features": keyed("item", trained=False)} if movies else {}
    columns = ("item", "rating", *(USERS if users else ()))
    return Setting(model, partition(model, rules), columns, ranks="item", expects="rating"), None


def read_cuts(told: str) -> tuple[float, ...]:
    """Numbers with commas between them."""
    try:
        cuts = tuple(float(each) for each in told.split(",")) if told else ()
    except ValueError:
        cuts = (1.0, 0.0)
    if list(cuts) != sorted(cuts):
        raise UserError(
            f"data.cuts is '{told}'; expected growing numbers with commas between them, as 1.5,2.5,3.5,4.5"
        )
    return cuts


@takes_options_of(ratings_task, but=("name", "defaults"))
def load(
    data: str | None = None,
    *,
    size: Annotated[Literal["1m", "100k"], "the release"] = "1m",
    signals: Annotated[bool, "learn what it says of a user that it rated an item (with through)"] = False,
    attention: Annotated[
        bool, "learn how much a rating of each item counts in a user (with through)"
    ] = False,
    item_pull: Annotated[
        float, "pull of what is an item's own to zero, or to its genres", Limits(0, 1e6)
    ] = 0.0,
    movies: Annotated[bool, "read genres and years of movies, and learn a vector for each"] = False,
    users: Annotated[bool, "read users' gender, age and occupation, and learn a vector for each"] = False,
    cuts: Annotated[
        str, "where accuracy cuts predictions into 1 to 5, as 2.1,2.5,3.5,4.3; none: halves"
    ] = "",
    **options: Any,
) -> Task:
    """Unseen users: 80 % of the users are for training, 10 % for validation, 10 % for the test (4,832 / 604 /
    604 of MovieLens-1M)."""
    more: dict[str, Any] = {"signals": signals, "attention": attention, "item_pull": item_pull}
    more |= {"movies": movies, "users": users, "cuts": cuts}
    store = movielens_ratings.load(data, size)
    features = movie_features(store, data, size) if movies else None
    store = _with_words(with_users(store, data, size), size) if users else store
    task = ratings_task(store, name="movielens", **options)
    task = task._replace(presets={name: fitted(each, task.train) for name, each in PRESETS.items()})
    if not any(more.values()):
        return task
    _check_informed(task)
    known = {**task.options, **more}
    personal, _ = settings(**known, features=features)
    loaded = {**task.loaded, **more}
    return task._replace(personal=personal, stateful=None, options=known, loaded=loaded)


def _check_informed(task: Task) -> None:
    """Raise `UserError` unless users' parameters are local and have biases, and nothing else pulls them."""
    if task.seen or not task.options["biases"]:
        raise UserError(
            f"data.{', '.join(MORE[:-1])} and {MORE[-1]} are for unseen users and a model with biases, not "
            f"data.seen = {task.seen} and data.biases = {task.options['biases']}: leave them out, or leave out the "
            f"others"
        )
    if task.options["pull"]:
        raise UserError(
            f"data.pull = {task.options['pull']} is not of the model with {', '.join(MORE)}: leave it out, or use "
            f"data.item_pull"
        )


def _with_words(store: ClientStore, size: str) -> ClientStore:
    """The store with the official words for users' features, so that a client's own table may have them."""
    works = np.array(OCCUPATIONS) if size == "100k" else np.arange(NUM_OCCUPATIONS)
    words = {"gender": np.array(GENDERS), "age": np.array(AGES), "occupation": works}
    return dataclasses.replace(store, vocabularies={**store.vocabularies, **words})


@takes_options_of(load, but=("seen", *MORE))
def load_seen(data: str | None = None, **options: Any) -> Task:
    """Seen users: each user's ratings are split 80/10/10 by time."""
    task = load(data, seen=True, **options)
    return task._replace(name="movielens-seen", presets=fitted_presets(task))


def fitted_presets(task: Task) -> dict[str, dict[str, Any]]:
    """The presets of seen users."""
    return {name: fitted(each, task.train) for name, each in ratings.PRESETS_SEEN.items()}


MOVIELENS = Entry(
    "MovieLens, unseen users",
    load,
    settings,
    ratings.DEFAULTS,
    PRESETS,
    ratings.EXAMPLE,
    ratings.OWN,
)
SEEN = Entry(
    "MovieLens, seen users",
    load_seen,
    ratings.settings,
    ratings.DEFAULTS_SEEN,
    ratings.PRESETS_SEEN,
    ratings.EXAMPLE,
    OwnRows(
        lambda options: ("time",),
        lambda store, options: ratings.training_rows(store, {**options, "seen": True}),
    ),
)
