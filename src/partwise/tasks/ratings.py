"""Ratings of items by clients, from any table: a user's vector is local, the item matrix is keyed by item."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping
from functools import partial
from typing import Annotated, Any, Literal, get_args

import numpy as np

from partwise.data import holdout
from partwise.data.delimited import UTF8
from partwise.data.repeats import Kept, OneEach, num_repeats, one_each, tell_repeats
from partwise.data.store import ClientStore
from partwise.model.partition import keyed, local, partition
from partwise.model.roles import Initial
from partwise.tasks.base import (
    COUNTS,
    PAPER,
    SEEDS,
    WHOLE,
    Entry,
    OwnRows,
    Setting,
    Task,
    check_limits,
    fitted,
    keyword_options,
    takes_options_of,
)
from partwise.tasks.matrix_factorization import matrix_factorization
from partwise.tasks.own_table import ClientColumn, Delimiter, Encoding, ItemColumn, Missing, read_own_table
from partwise.types import Limits, RunWarning, UserError, counted, unknown

MOST_PULL, PULLING = 0.05, 4000  # of seen users: the more ratings, the less often the rounds repeat them
PARTS = 200  # of the ratings in one place: a batch is one of them
# A step of Adam on every batch. The pull of unseen users and the decay do what ridges do in alternating least
# squares, and reach its RMSE.
CENTRAL = {
    "rounds": 2000,
    "update.max_steps": 1,
    "update.rate": 1.0,
    "update.batch_size": 4000,  # or a part of the ratings
    "server.optimizer": "adam",
    "server.rate": 0.03,
    "server.schedule": "cosine",
    "server.settings.epsilon": 1e-8,
    "server.settings.b2": 0.999,
    "server.settings.decay": 0.3,
    "reconstruct.pull": 3.0,
    "simulation.rounds_per_call": 50,
}
PLAIN = {"server.optimizer": "sgd", "server.rate": 1.0, "server.schedule": "constant", "update.rate": 0.1}
SLOWER = {"server.rate": 0.1}  # own vectors that are seldom trained must keep up with the items
PLAIN_SEEN = {**PLAIN, "server.rate": 2.0, "server.schedule": "cosine"}
STEPS_SEEN, ADAPTIVE = {"update.rate": 0.1, "server.rate": 1.0}, {"update.rate": 0.03, "server.rate": 0.01}
ADAPTIVE_SEEN = {"update.rate": 0.1, "server.rate": 0.01}
# Chosen on the validation users of MovieLens (docs/reproduction_own.md). Ratings are in units of their own spread,
# so that rates and pull suit any scale. Users are solved in closed form towards a learned default, which works for
# one rating and for a thousand.
DEFAULTS = {
    "rounds": 1000,
    "cohort.size": 100,
    "split.kind": "none",
    "reconstruct.method": "solve",
    "reconstruct.pull": 1.0,
    "update.rate": 0.2,
    "update.begin": "random",  # otherwise a client's ratings after the 250th never train the items
    "server.optimizer": "adagrad",
    "server.rate": 0.3,
    "server.schedule": "cosine",
    "server.settings.initial_accumulator": 0.1,
    "server.settings.epsilon": 1e-7,
    **dict.fromkeys(("fed_avg", "fed_select", "scaffold"), PLAIN),  # control variates need a plain server
    **dict.fromkeys(("fed_per", "lg_fed_avg"), SLOWER),
    **dict.fromkeys(("fed_adam", "fed_yogi"), ADAPTIVE),
    "fed_adagrad": {"server.rate": 0.3},
    "fed_sub_avg": {"update.rate": 0.1, "server.rate": 0.1},
    "fed_prox": {},  # the rates above do for it, and for fed_rep
    "fed_rep": {},
    "central": CENTRAL,
}
EPOCHS = {"rounds": 20, "update.rate": 1.0, "update.batch_size": 300, "simulation.evaluate_every": 1}
# The authors' values for MovieLens (FedRecon, appendix C.1, and the README of their code).
PAPER_SETTINGS = {
    "data.dim": 50,
    "data.initial": "random",
    "data.biases": False,
    "data.normalize": False,
    "data.pull": 0.0,
    "data.max_examples": 300,
    "rounds": 500,
    "cohort.size": 100,
    "split.kind": "alternate",
    "split.batch_size": 5,
    "reconstruct.rate": 0.1,
    "reconstruct.epochs": 5,
    "reconstruct.max_steps": 50,
    "reconstruct.batch_size": 5,
    "update.rate": 0.5,
    "update.epochs": 1,
    "update.max_steps": 50,
    "update.batch_size": 5,
    "server.optimizer": "sgd",
    "server.rate": 1.0,
    # With the authors' 1.0 popular items overshoot, and one seed of twenty diverges; 0.5 is in their grid too.
    "fed_recon": {"server.rate": 0.5},
    **{name: {"update.rate": 0.1} for name in ("fed_avg", "fed_per", "lg_fed_avg", "fed_rep")},
    "central": EPOCHS,
}
PRESETS = {PAPER: PAPER_SETTINGS}
# Seen users have parameters that were trained for them; fed_recon keeps none.
DEFAULTS_SEEN = {
    **DEFAULTS,
    "algorithm": "fed_rep",
    **dict.fromkeys(("fed_avg", "fed_select"), PLAIN_SEEN),
    **dict.fromkeys(("fed_per", "lg_fed_avg", "fed_prox"), STEPS_SEEN),
    **dict.fromkeys(("fed_adam", "fed_yogi"), ADAPTIVE_SEEN),
    "central": {**CENTRAL, "server.settings.decay": 0.2},
}
PRESETS_SEEN = {PAPER: {**PAPER_SETTINGS, "algorithm": "fed_avg"}}
EXAMPLE = {"num_items": 2, "num_users": 2, "dim": 1}
NEARLY, FAR = (
    0.05,
    5,
)  # the range without the highest and lowest of this share, and how many of its widths are far
TOLD = 3  # ratings that a sentence names
LOOKED_AT = 1_000  # clients whose items are compared if rows are used as they are
SAMPLE = 10_000  # the most clients whose ratings are used for the mean and the spread


def settings(
    num_items: int,
    num_users: int,
    dim: int = 50,
    initial: Initial = "random",
    biases: bool = False,
    center: float = 0.0,
    spread: float = 1.0,
    pull: float = 0.0,
) -> tuple[Setting, Setting]:
    """Two settings: users' parameters are local in the first, and in tables keyed by user in the second.
    Items are keyed in both."""
    units = {"center": center, "spread": spread, "pull": pull}
    make = partial(matrix_factorization, num_items, dim, biases=biases, **units)
    personal, stateful = make(), make(num_users=num_users)
    columns = ("item", "rating")
    return (
        Setting(
            personal,
            partition(personal, {"user*": local(initial), "item*": keyed("item")}),
            columns,
            ranks="item",
            expects="rating",
        ),
        Setting(
            stateful,
            partition(stateful, {"user*": keyed("user"), "item*": keyed("item")}),
            (*columns, "user"),
            own_spaces=("user",),
            ranks="item",
            expects="rating",
        ),
    )


def ratings_task(
    store: ClientStore,
    name: str = "ratings",
    *,
    dim: Annotated[int, "size of the vectors", Limits(1, 4096)] = 10,
    initial: Annotated[Initial, "where local parameters start"] = "learned",
    biases: Annotated[bool, "a mean, and a number for every user and item"] = True,
    normalize: Annotated[bool, "learn ratings in units of their spread around their mean"] = True,
    pull: Annotated[
        float | None,
        "pull of user and item to zero in every rating; none: 0, or what suits seen users",
        Limits(0, 1e6),
    ] = None,
    max_examples: Annotated[int, "examples of a client that are kept", COUNTS] = 1000,
    order: Annotated[Literal["shuffle", "time", "as is"], "order of a client's examples"] = "shuffle",
    seed: Annotated[int, "of the shuffle and of the cut into train, validation and test", SEEDS] = 42,
    seen: Annotated[bool, "test on other examples of training clients (not fed_recon)"] = False,
    duplicates: Annotated[Kept, "of several ratings of an item by a client: last, or mean"] = "last",
    defaults: Mapping[str, Any] | None = None,
) -> Task:
    """A recommender from a store of ratings: user vectors are local, the item matrix is keyed by item.

    Args:
        store: A store with the columns `item` (ids), `rating` and perhaps `time`.
        name: The name of the task.
        dim: The size of the vectors.
        initial: The initial values of the local parameters: "learned", "random" or "zero".
        biases: Whether there is a mean, and a number for every user and item.
        normalize: Learn ratings in units of their spread around their mean. Mean and spread are those of the
            training ratings (two sums over clients) and part of the model. The model's outputs are in the
            units of the given ratings.
        pull: Added to the loss of a rating that trains: this, times the squares of its user's and its item's
            numbers. By default 0 for unseen clients, whose users are pulled by `reconstruct.pull`, and 4,000
            divided by the number of ratings (at most 0.05) with `seen`.
        max_examples: Only the first `max_examples` of every client are kept (with `seen`, only in training).
        order: The order of a client's examples: "shuffle", "time", or "as is" (which copies nothing, for a
            store larger than memory).
        seed: The seed of the shuffle and of the split into train, validation and test.
        seen: By default, clients are split 80/10/10 into train, validation and test, so that test clients are
            unseen. With `seen`, each client's examples are split instead, by time if there is a time.
        duplicates: What stands for several ratings of one item by one client: the "last" (by time, if rows are
            ordered by it), or the "mean". So no item is both given and predicted. With order "as is" rows
            stay, and a warning says so.
        defaults: Settings that replace the task's own, as dotted keys.

    Returns:
        The task.
    """
    loaded = {"dim": dim, "initial": initial, "biases": biases, "normalize": normalize, "pull": pull}
    loaded |= {"max_examples": max_examples, "order": order, "seed": seed, "seen": seen}
    loaded |= {"duplicates": duplicates}
    check_limits(ratings_task, loaded)
    _check_store(store)
    found = _one_rating_each(store, loaded)
    store = found.store
    repeated = tell_repeats(found, duplicates) or _left_as_is(store, order)
    for told in filter(None, (repeated, _far_away(store, order))):
        warnings.warn(told, RunWarning, stacklevel=2)
    ordered = _in_order(store, order, seed)
    if seen:
        whole, validation, test = _by_order(ordered)
        whole = _in_order(whole, order, seed)
    else:
        whole, *others = holdout.by_client(ordered, seed=seed)
        validation, test = (part.cap(max_examples) for part in others)
    train = whole.cap(max_examples)
    train = dataclasses.replace(train, info={**train.info, WHOLE: whole.num_examples})
    _check_training(store, train, seen)
    if pull is None:
        pull = round(min(MOST_PULL, PULLING / train.num_examples), 4) if seen else 0.0
    loaded["pull"] = pull
    sizes = {"num_items": store.num_keys("item"), "num_users": store.num_clients}
    options = {**sizes, "dim": dim, "initial": initial, "biases": biases, "pull": pull}
    options |= _units(train) if normalize else {"center": 0.0, "spread": 1.0}
    personal, stateful = settings(**options)
    server_side = stateful if "user" in train.columns else None
    known = (DEFAULTS_SEEN, PRESETS_SEEN) if seen else (DEFAULTS, PRESETS)
    given = _in_parts(fitted(known[0] | dict(defaults or {}), train), train)
    presets = {preset: fitted(each, train) for preset, each in known[1].items()}
    task = Task(name, train, validation, test, personal, server_side, options, given, seen)
    return task._replace(loaded=loaded, presets=presets)


def _in_parts(settings: Mapping[str, Any], train: ClientStore) -> dict[str, Any]:
    """Settings in which a batch in one place is a part of the ratings, unless its size was chosen."""
    central = settings["central"]
    if central.get("update.batch_size") != CENTRAL["update.batch_size"]:
        return dict(settings)
    size = max(train.num_examples // PARTS, 1)
    return {**settings, "central": {**central, "update.batch_size": size}}


def _check_store(store: Any) -> None:
    """Raise `UserError` unless this is a store with the columns `item` and `rating`."""
    if not isinstance(store, ClientStore):
        raise UserError(
            f"the ratings are a {type(store).__name__}, and ratings_task takes a store: read a file with "
            f'read_table("FILE.csv", client="user", columns=["item", "rating"], ids=["item"]) first'
        )
    for column in ("item", "rating"):
        if column not in store.columns:
            raise UserError(
                f"{unknown('column', column, store.columns)}: a table of ratings has item and rating. Give them "
                f'these names with store.rename({{"NAME": "{column}"}})'
            )


def _one_rating_each(store: ClientStore, options: Mapping[str, Any]) -> OneEach:
    """The clients with one rating for each of their items; as they are if their rows are not to be copied."""
    kept = options["duplicates"]
    if kept not in get_args(Kept):
        raise unknown("value of data.duplicates", kept, get_args(Kept))
    if options["order"] == "as is":
        if kept != "last":
            raise UserError(
                f"data.duplicates = {kept} would have no effect: with data.order = as is, rows are used as they "
                f"are. Leave it out, or set data.order=shuffle"
            )
        return OneEach(store, 0, None)
    timed = "time" in store.columns and (options["order"] == "time" or options["seen"])
    return one_each(store, "item", "rating", kept, "time" if timed else None)


def _left_as_is(store: ClientStore, order: str) -> str:
    """A sentence about items that clients rated more than once, if rows are used as they are; empty if some clients
    have none. A store that is far away is not read for this."""
    if order != "as is" or store.remote:
        return ""
    some = np.unique(np.linspace(0, store.num_clients - 1, min(LOOKED_AT, store.num_clients)).astype(int))
    found = num_repeats(store.select(("item",)).gather(some), "item")
    if not found:
        return ""
    return (
        f"{counted(found, 'row')} (of {counted(len(some), 'client')} looked at) of an item that the client rated "
        f"before. With data.order = as is they stay, so an item may be both given and predicted: remove them, or "
        f"set data.order=shuffle"
    )


def _far_away(store: ClientStore, order: str) -> str:
    """A sentence about ratings that are far outside the range of nearly all others; empty if there are none."""
    if order == "as is":
        return ""
    packed = store if store.packed() else store.gather()
    ratings = packed.columns["rating"].astype(np.float64)
    low = np.quantile(ratings, NEARLY, method="higher")
    high = np.quantile(ratings, 1 - NEARLY, method="lower")
    room = FAR * (abs(high - low) or abs(high) or 1)
    far = np.flatnonzero((ratings < low - room) | (ratings > high + room))
    if not len(far):
        return ""
    owner = np.searchsorted(np.cumsum(packed.counts), far[:TOLD], side="right")
    items = packed.vocabularies["item"][packed.columns["item"][far[:TOLD]]]
    rows = zip(ratings[far[:TOLD]], packed.client_ids[owner], items, strict=True)
    shown = ", ".join(f"{rating:g} (client {client}, item {item})" for rating, client, item in rows)
    return (
        f"{counted(len(far), 'rating')} far from nearly all others, which are from {low:g} to {high:g}: {shown}"
        f"{', ...' if len(far) > TOLD else ''}. Mend or remove them if they are mistakes; give logarithms if the "
        f"ratings are counts"
    )


def _check_training(store: ClientStore, train: ClientStore, seen: bool) -> None:
    """Raise `UserError` if nothing is left to train on."""
    if train.num_examples:
        return
    if seen:
        raise UserError(
            f"of {counted(store.num_examples, 'rating')} of {counted(store.num_clients, 'client')} none is left to "
            f"train on, because 80 % of each client's ratings train, 10 % validate and 10 % test: give clients at "
            f"least 2 ratings, better 10"
        )
    raise UserError(
        f"there are ratings of {counted(store.num_clients, 'client')}, and 80 % of the clients train, 10 % "
        f"validate and 10 % test: give those of at least 6 (2 do for training and test alone), or test on other "
        f"ratings of the training clients with --set data.seen=true (in Python, seen=True)"
    )


def _units(train: ClientStore) -> dict[str, float]:
    """The mean and the spread of the training ratings. If all ratings are the same, the spread is 1."""
    some = np.unique(np.linspace(0, train.num_clients - 1, min(SAMPLE, train.num_clients)).astype(int))
    ratings = train.select(("rating",)).gather(some).columns["rating"].astype(np.float64)
    spread = float(ratings.std())
    return {
        "center": float(ratings.mean()),
        "spread": spread if spread > 1e-6 * np.abs(ratings).max() else 1.0,
    }


def _in_order(store: ClientStore, order: str, seed: int) -> ClientStore:
    """Clients' examples in the requested order. A copied store also gets a column `user`, the client's
    number, which is the key in tables keyed by user."""
    if order == "as is":
        return store
    if order not in ("shuffle", "time"):
        raise unknown("order of examples", order, ("shuffle", "time", "as is"))
    if order == "time" and "time" not in store.columns:
        raise UserError("order 'time' needs a column 'time', and this table has none; use order 'shuffle'")
    copied = store.reorder(by="time") if order == "time" else store.reorder(seed=seed)
    if "user" in copied.columns:
        return copied
    return copied.with_columns(user=np.repeat(np.arange(copied.num_clients, dtype=np.int32), copied.counts))


def _by_order(store: ClientStore) -> tuple[ClientStore, ...]:
    """Each client's examples cut into training, validation and test, by time if there is a time."""
    return holdout.by_order(store, by="time" if "time" in store.columns else None)


def training_rows(store: ClientStore, options: Mapping[str, Any]) -> ClientStore:
    """What `ratings_task` makes of training clients, with these of its options."""
    known = keyword_options(ratings_task)
    names = ("order", "seed", "max_examples", "seen", "duplicates")
    used = {name: options.get(name, known[name].default) for name in names}
    check_limits(ratings_task, used)
    ordered = _in_order(_one_rating_each(store, used).store, used["order"], used["seed"])
    if used["seen"]:
        ordered = _in_order(_by_order(ordered)[0], used["order"], used["seed"])
    return ordered.cap(used["max_examples"])


def _more_columns(options: Mapping[str, Any]) -> tuple[str, ...]:
    return ("time",) if options.get("order") == "time" or options.get("seen") else ()


OWN = OwnRows(_more_columns, training_rows)


@takes_options_of(ratings_task, but=("name", "defaults"))
def load(
    data: str | None = None,
    *,
    client: ClientColumn = "user",
    item: ItemColumn = "item",
    rating: Annotated[str, "the column of ratings"] = "rating",
    time: Annotated[str | None, "a column of times, if there is one"] = None,
    delimiter: Delimiter = None,
    encoding: Encoding = UTF8,
    missing: Missing = "refuse",
    **options: Any,
) -> Task:
    """A user's own table: CSV, Parquet, or a client store written by partwise. The options name its columns."""
    ordered = options.get("order", "shuffle")
    if time and ordered != "time" and not options.get("seen"):
        raise UserError(
            f"data.time = {time} would have no effect: with data.order = {ordered} and data.seen = false, no time "
            f"is read. Leave it out, or set data.order=time or data.seen=true (in Python, order='time', seen=True)"
        )
    named = {"client": client, "item": item, "rating": rating} | ({"time": time} if time else {})
    return ratings_task(read_own_table("ratings", data, named, delimiter, encoding, missing), **options)


RATINGS = Entry("a table of ratings", load, settings, DEFAULTS, PRESETS, EXAMPLE, OWN)
