"""What will a client take next? Events of clients (purchases, check-ins, plays) without ratings: implicit feedback.

The client's own vector is local, item vectors are keyed by item, the rest is shared. An example is an event with
the items of the events before it. Negatives are drawn on the device, in every step anew, from the rows that the
client holds: all of them, or with `select.item = with_random:500` its own and 500 others.

Hold-outs (`holdout`):

* last: of every client, the last event is for the test, the one before it for validation, the others train;
* time: of every client, the last fifth of its events; of those before them, the last fifth is for validation;
* clients: a tenth of the clients each; they are judged by their last event, and took no part in training.

Judged clients rebuild their own vector from all events before those that are held out. With `seen`, they are judged
by a vector that was trained for them (`fed_per`, `fed_avg`, `central`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np

from partwise.data import holdout as holdouts
from partwise.data.delimited import UTF8
from partwise.data.histories import History, with_histories
from partwise.data.repeats import num_repeats
from partwise.data.store import ClientStore
from partwise.model.partition import keyed, local, partition
from partwise.model.ranking import parse_loss
from partwise.model.recommenders import Shape, sequence_transformer, two_tower
from partwise.model.softmax import NOTHING
from partwise.tasks.base import (
    SEEDS,
    SIZES,
    Entry,
    OwnRows,
    Setting,
    Task,
    check_limits,
    fitted,
    on_accelerator,
    takes_options_of,
)
from partwise.tasks.own_table import ClientColumn, Delimiter, Encoding, ItemColumn, Missing, read_own_table
from partwise.types import Limits, UserError, counted, unknown

MODELS = {"two_tower": two_tower, "transformer": sequence_transformer}
Model = Literal["two_tower", "transformer"]
Holdout = Literal["last", "time", "clients"]
SAMPLED = "sampled:100"  # the loss on a CPU
HELD = 500  # rows of others that a client fetches beside its own, on a CPU
PERCENT = 80  # of a client's events that are before the others (time)
# Where more of the events than this are of items that their client had before, items may be recommended again. Of
# the sets at hand, none of Amazon, MovieLens and Last.fm is one, 3.7 % of Yelp are (a client's own places then are
# its likeliest: hit@10 0.073 with them, 0.010 without), and 76 % of the check-ins of New York.
AGAIN = 0.01
ADAM = {"server.optimizer": "adam", "server.settings.epsilon": 1e-8, "server.settings.b2": 0.999}
# One step of a client on some of its events: the server then sees the gradient of the cohort's events.
STEP = {"update.rate": 1.0, "update.epochs": 1, "update.max_steps": 1, "update.begin": "random"}
CENTRAL = {**ADAM, "rounds": 1500, "server.rate": 0.002, "update.batch_size": 1024, "update.rate": 1.0}
# Tried on the validation events of the check-ins of New York; not searched.
DEFAULTS = {
    "rounds": 2000,
    "cohort.size": 64,
    **STEP,
    **ADAM,
    "update.batch_size": 64,
    "server.rate": 0.002,
    "server.schedule": "cosine",
    "split.kind": "none",
    "evaluation_split.kind": "last",
    "reconstruct.rate": 1.0,
    "reconstruct.epochs": 5,
    "reconstruct.max_steps": 20,
    "reconstruct.batch_size": 16,
    "simulation.evaluate_every": 200,
    "simulation.rounds_per_call": 10,
    "central": {**CENTRAL, "update.max_steps": 1, "simulation.rounds_per_call": 50},
}
EXAMPLE = {"num_items": 4, "num_users": 2, "dim": 2, "length": 2}


def settings(
    num_items: int,
    num_users: int,
    model: Model = "transformer",
    dim: int = 64,
    length: int = 50,
    loss: str = "softmax",
    negatives: str = "uniform",
    again: bool = False,
    dropout: float = 0.2,
    sampled: int = 0,
) -> tuple[Setting, Setting]:
    """Two settings: the client's vector is local in the first, and in a table keyed by user in the second."""
    if model not in MODELS:
        raise unknown("model of events", model, MODELS)
    if negatives not in ("uniform", "popular"):
        raise unknown("way to draw negatives", negatives, ("uniform", "popular"))
    shape = Shape(
        num_items, dim, length, None, parse_loss(loss), negatives == "popular", again, dropout, sampled
    )
    personal, stateful = MODELS[model](shape), MODELS[model](shape._replace(num_users=num_users))
    rules = {"item": keyed("item", whole=True), "item_bias": keyed("item", whole=True, fill=NOTHING)}
    keys, columns = {"item": ("item", "history")}, ("item", "history")
    histories = {"history": History("item", length)}
    return (
        Setting(
            personal,
            partition(personal, {**rules, "user": local("zero")}, keys),
            columns,
            ranks="item",
            histories=histories,
        ),
        Setting(
            stateful,
            partition(stateful, {**rules, "user": keyed("user")}, keys),
            (*columns, "user"),
            ("user",),
            ranks="item",
            histories=histories,
        ),
    )


def events_task(
    store: ClientStore,
    name: str = "events",
    *,
    model: Annotated[
        Model | None, "two_tower (mean of the history), transformer; none: transformer, on a CPU two_tower"
    ] = None,
    dim: Annotated[int, "size of the vectors", Limits(2, 4096)] = 64,
    length: Annotated[int, "items of a history, the last ones", SIZES] = 50,
    loss: Annotated[
        str | None,
        "softmax (all that a client holds), sampled:N or bpr:N; none: softmax, on a CPU sampled:100",
    ] = None,
    negatives: Annotated[Literal["uniform", "popular"], "how negatives are drawn (sampled, bpr)"] = "uniform",
    again: Annotated[
        bool | None, "recommend items of the history again; none: if over 1 % of the events are of such items"
    ] = None,
    dropout: Annotated[float, "share of inputs that a training step leaves out", Limits(0, 0.95)] = 0.2,
    holdout: Annotated[Holdout, "what is held out: last (events), time (last fifth), clients"] = "last",
    sampled: Annotated[
        int, "also tell metrics among so many sampled items, which are biased", Limits(0, 10**6)
    ] = 0,
    max_validation: Annotated[int, "validation clients at most, for quick looks", Limits(1, 10**8)] = 2000,
    seed: Annotated[int, "of the clients for validation", SEEDS] = 42,
    seen: Annotated[bool, "judge clients by a vector trained for them (not fed_recon)"] = False,
    defaults: Mapping[str, Any] | None = None,
) -> Task:
    """A recommender of the next item from a store of events.

    Args:
        store: A store with the column `item` (ids), and perhaps `time`, by which events are then ordered.
        name: The name of the task.
        model: "two_tower" or "transformer"; by default the second, and on a CPU the first.
        dim: The size of the vectors.
        length: How many items of a history are read.
        loss: "softmax", "sampled:N" or "bpr:N"; by default the first, and on a CPU "sampled:100".
        negatives: Draw negatives uniformly, or by popularity as the model has learned it.
        again: Whether items of the history may be recommended again. By default, if more than 1 % of the events
            are of items that the client had before. If not, a held-out event of such an item counts as not found.
        dropout: The share of inputs that a training step leaves out.
        holdout: "last", "time" or "clients".
        sampled: With how many sampled negatives metrics are told too. They are biased.
        max_validation: At most so many clients are used for looks during training. The test uses all.
        seed: The seed for drawing clients.
        seen: Judge clients by a vector that was trained for them. By default they rebuild it.
        defaults: Settings that replace the task's own, as dotted keys.

    Returns:
        The task.
    """
    _check_store(store)
    suited = _suited(model, loss, store.num_keys("item"))
    shape = {"model": suited.model, "dim": dim, "length": length, "loss": suited.loss, "negatives": negatives}
    shape |= {"dropout": dropout, "sampled": sampled}
    loaded = {**shape, "again": again, "holdout": holdout, "max_validation": max_validation}
    loaded |= {"seed": seed, "seen": seen}
    check_limits(events_task, loaded)
    ordered = training_order(store, loaded)
    repeats = num_repeats(ordered, "item")
    loaded["again"] = repeats > AGAIN * ordered.num_examples if again is None else again
    parts = _parts(ordered, holdout, seed, seen)
    train, validation = parts.train, _some(parts.validation, max_validation, seed)
    _check_training(store, train)
    sizes = {"num_items": store.num_keys("item"), "num_users": store.num_clients}
    options = {**sizes, **shape, "again": loaded["again"]}
    personal, stateful = settings(**options)
    usual = {**DEFAULTS, **suited.sparing, **parts.judged, **({"algorithm": "fed_per"} if seen else {})}
    given = fitted(usual | dict(defaults or {}), train)
    task = Task(name, train, validation, parts.test, personal, stateful, options, given, seen)
    return task._replace(
        loaded=loaded, notes=(*suited.notes, *_about_again(again, loaded["again"], repeats, ordered))
    )


class Suited(NamedTuple):
    """What suits the device: the model and its loss, settings that spare work, and notes about them."""

    model: Model
    loss: str
    sparing: Mapping[str, str] = {}
    notes: tuple[str, ...] = ()


def _suited(model: Model | None, loss: str | None, num_items: int) -> Suited:
    """On a CPU a smaller model with sampled negatives, and of a large catalogue only the rows of own items and some
    others."""
    if on_accelerator():
        return Suited(model or "transformer", loss or "softmax")
    told = [] if model else ["the model is two_tower (--set data.model=transformer has attention)"]
    told += [] if loss else [f"its loss is {SAMPLED} (--set data.loss=softmax: all that a client holds)"]
    many = num_items > 4 * HELD
    if many:
        told.append(f"clients fetch their own items and {HELD} others (--set select.item=all: all)")
    notes = (f"On this CPU {', '.join(told)}.",) if told else ()
    sparing = {"select.item": f"with_random:{HELD}"} if many else {}
    return Suited(model or "two_tower", loss or SAMPLED, sparing, notes)


def _about_again(asked: bool | None, again: bool, repeats: int, store: ClientStore) -> tuple[str, ...]:
    """What is said of items that come again, if some do and nobody said whether they may."""
    if asked is not None or not repeats:
        return ()
    share = f"Of items that the client had before: {repeats:,} of {counted(store.num_examples, 'event')}"
    if again:
        return (f"{share}, so items are recommended again (--set data.again=false: not).",)
    return (
        f"{share}, too few (up to {AGAIN:.0%}) to recommend items again (--set data.again=true does). If held out, "
        f"they count as not found.",
    )


def _check_training(store: ClientStore, train: ClientStore) -> None:
    if not train.num_examples:
        raise UserError(
            f"{counted(store.num_examples, 'event')} of {counted(store.num_clients, 'client')} leave none to train "
            f"on: give clients at least 3 events each"
        )


class HeldOut(NamedTuple):
    """Clients for training, validation and test, and how judged clients are split."""

    train: ClientStore
    validation: ClientStore
    test: ClientStore
    judged: Mapping[str, Any]


def _parts(store: ClientStore, holdout: str, seed: int, seen: bool) -> HeldOut:
    if holdout == "clients":
        if seen:
            raise UserError(
                "holdout = clients judges clients that were never seen: leave out seen, or use holdout = last"
            )
        train, validation, test = holdouts.by_client(store, seed=seed)
        return HeldOut(train, validation, test, {})
    if holdout == "last":
        return _last(store, seen)
    if holdout != "time":
        raise unknown("hold-out", holdout, ("last", "time", "clients"))
    if seen:
        train, validation, test = holdouts.by_order(store, (0.64, 0.16, 0.2), by=None)
        return HeldOut(train, validation, test, {})
    before = store.narrow(np.zeros_like(store.counts), (store.counts * PERCENT + 99) // 100)
    train = before.narrow(np.zeros_like(before.counts), (before.counts * PERCENT + 99) // 100)
    return HeldOut(
        train, before, store, {"evaluation_split.kind": "halves", "evaluation_split.percent": PERCENT}
    )


def _last(store: ClientStore, seen: bool) -> HeldOut:
    """Leave the last out. Clients with fewer than three events have none for validation or none to train."""
    none = np.zeros_like(store.counts)
    cut = lambda number: np.maximum(store.counts - number, 0)
    train = store.narrow(none, cut(2))
    if not seen:
        return HeldOut(train, store.narrow(none, cut(1)), store, {})
    one = lambda number: store.narrow(cut(number), np.minimum(np.maximum(store.counts - number + 1, 0), 1))
    return HeldOut(train, one(2), one(1), {})


def _some(store: ClientStore, most: int, seed: int) -> ClientStore:
    """At most so many clients, drawn at random."""
    if store.num_clients <= most:
        return store
    return store.take(np.sort(np.random.default_rng(seed).permutation(store.num_clients)[:most]))


def training_order(store: ClientStore, options: Mapping[str, Any]) -> ClientStore:
    """Events in the order of time, with histories, and a column `user`: the client's number."""
    ordered = store.reorder(by="time") if "time" in store.columns else store.gather()
    length = int(options.get("length", 50))
    ordered = with_histories(
        ordered.select([n for n in ordered.columns if n != "history"]), {"history": History("item", length)}
    )
    if "user" in ordered.columns:
        return ordered
    return ordered.with_columns(
        user=np.repeat(np.arange(ordered.num_clients, dtype=np.int32), ordered.counts)
    )


def _check_store(store: Any) -> None:
    if not isinstance(store, ClientStore):
        raise UserError(
            f"the events are a {type(store).__name__}, and events_task takes a store: read a file with "
            f'read_table("FILE.csv", client="user", columns=["item", "time"], ids=["item"]) first'
        )
    if "item" not in store.vocabularies:
        raise UserError(
            f"the store has the columns {', '.join(store.columns)}, and events need a column of ids named item: "
            f'give it that name with store.rename({{"NAME": "item"}}), and name it in ids=["item"]'
        )


@takes_options_of(events_task, but=("name", "defaults"))
def load(
    data: str | None = None,
    *,
    client: ClientColumn = "user",
    item: ItemColumn = "item",
    time: Annotated[str | None, "a column of times; without it, events are in the order of the table"] = None,
    delimiter: Delimiter = None,
    encoding: Encoding = UTF8,
    missing: Missing = "refuse",
    **options: Any,
) -> Task:
    """A user's own table of events: CSV, Parquet, or a client store. The options name its columns."""
    named = {"client": client, "item": item} | ({"time": time} if time else {})
    return events_task(read_own_table("events", data, named, delimiter, encoding, missing), **options)


def training_rows(store: ClientStore, options: Mapping[str, Any]) -> ClientStore:
    """What `events_task` makes of a training client's own events."""
    ordered, held_out = training_order(store, options), options.get("holdout", "last")
    if held_out == "clients":
        return ordered
    return _parts(ordered, str(held_out), 0, bool(options.get("seen", False))).train


OWN = OwnRows(lambda options: ("time",) if options.get("time") else (), training_rows)
EVENTS = Entry("a table of events", load, settings, DEFAULTS, {}, EXAMPLE, OWN)
