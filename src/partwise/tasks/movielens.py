"""MovieLens matrix factorisation. The preset `paper` has the settings of FedRecon's Tables 1 and 3 (section
5.1.1, appendix C.1)."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from partwise.data.loaders import movielens_ratings
from partwise.tasks import ratings
from partwise.tasks.base import Entry, OwnRows, Task, takes_options_of
from partwise.tasks.ratings import ratings_task


@takes_options_of(ratings_task, but=("name", "defaults"))
def load(
    data: str | None = None, *, size: Annotated[Literal["1m", "100k"], "the release"] = "1m", **options: Any
) -> Task:
    """Unseen users: 80 % of the users are for training, 10 % for validation, 10 % for the test (4,832 / 604 /
    604 of MovieLens-1M)."""
    return ratings_task(movielens_ratings.load(data, size), name="movielens", **options)


@takes_options_of(load, but=("seen",))
def load_seen(data: str | None = None, **options: Any) -> Task:
    """Seen users: each user's ratings are split 80/10/10 by time."""
    return load(data, seen=True, **options)._replace(name="movielens-seen")


MOVIELENS = Entry(
    "MovieLens, unseen users",
    load,
    ratings.settings,
    ratings.DEFAULTS,
    ratings.PRESETS,
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
