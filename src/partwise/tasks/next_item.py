"""Next items on public data: Amazon reviews and Yelp as sequences, check-ins of New York, artists on Last.fm; and
generated events, which need no data. All are `events` with suitable settings."""

from __future__ import annotations

from typing import Annotated, Any

from partwise.data.generated.planted_events import planted_events
from partwise.data.loaders import check_ins, listening_counts, sequences
from partwise.tasks.base import COUNTS, SEEDS, Entry, Task, refuse_data, takes_options_of
from partwise.tasks.events import DEFAULTS, EXAMPLE, OWN, events_task, settings
from partwise.types import Limits

# Clients have few events, so cohorts are larger, and an own vector that fits these events well says little of the
# next one: it takes a few small steps. Chosen by the validation events of Beauty, of few values.
REVIEWS = {
    **DEFAULTS,
    "rounds": 3000,
    "cohort.size": 256,
    "update.batch_size": 32,
    "server.rate": 0.004,
    "reconstruct.rate": 0.1,
    "reconstruct.max_steps": 3,
    "simulation.evaluate_every": 300,
    "fed_per": {"update.rate": 0.1},  # of the own vector: the server's Adam does not see the size of updates
    "central": {**DEFAULTS["central"], "rounds": 6000, "server.rate": 0.001},
}
PLANTED_DEFAULTS = {**DEFAULTS, "rounds": 400, "cohort.size": 100, "server.rate": 0.01}
OPTIONS = ("name", "defaults", "length")


@takes_options_of(events_task, but=(*OPTIONS, "dropout"))
def load_sequences(
    data: str | None = None,
    *,
    file: Annotated[
        str | None,
        "which file of a folder or zip: Beauty (if none is said), Toys_and_Games, Yelp or another",
    ] = None,
    length: Annotated[int, "items of a history, the last ones", Limits(1, 65_536)] = 20,
    dropout: Annotated[float, "share of inputs that a training step leaves out", Limits(0, 0.95)] = 0.5,
    **options: Any,
) -> Task:
    """`NAME.txt` of SASRec or S3-Rec: a line per user with its items in order. `data` may be one such file."""
    name = sequences.name_in(data, file, "Beauty")
    given: Any = {"length": length, "dropout": dropout, "defaults": REVIEWS, **options}
    return events_task(sequences.load(data, name), "next-item", **given)


@takes_options_of(events_task, but=OPTIONS)
def load_check_ins(
    data: str | None = None,
    *,
    length: Annotated[int, "places of a history, the last ones", Limits(1, 65_536)] = 50,
    **options: Any,
) -> Task:
    """Foursquare check-ins of New York: places that users visit next. They visit many again."""
    return events_task(check_ins.load(data), "check-ins", length=length, **options)


@takes_options_of(events_task, but=(*OPTIONS, "model", "holdout"))
def load_listening(
    data: str | None = None,
    *,
    model: Annotated[str, "two_tower (mean of the history) or transformer (attention over it)"] = "two_tower",
    length: Annotated[int, "artists of a history, the last ones", Limits(1, 65_536)] = 50,
    holdout: Annotated[str, "what is held out: time (the last fifth of a shuffle), last, clients"] = "time",
    seed: Annotated[int, "of the shuffle, and of the clients for validation", SEEDS] = 42,
    **options: Any,
) -> Task:
    """Artists that users of Last.fm listen to. There are no times: each user's artists are shuffled."""
    store = listening_counts.load(data).select(["item"]).reorder(seed=seed)
    given: Any = {"model": model, "holdout": holdout, "length": length, "seed": seed, **options}
    return events_task(store, "listening", **given)


@takes_options_of(events_task, but=OPTIONS)
def load_planted(
    data: str | None = None,
    *,
    num_clients: Annotated[int, "clients", COUNTS] = 2000,
    num_items: Annotated[int, "items", COUNTS] = 500,
    num_groups: Annotated[int, "groups of items; each client has a favourite one", COUNTS] = 10,
    mean_events: Annotated[float, "events of a client", Limits(1, 10**6)] = 20,
    length: Annotated[int, "items of a history, the last ones", Limits(1, 65_536)] = 10,
    generator_seed: Annotated[int, "of the generated events", SEEDS] = 0,
    **options: Any,
) -> Task:
    """Generated events: the next item follows from the last one, or from the client's own taste."""
    refuse_data("events-planted", data)
    store = planted_events(num_clients, num_items, num_groups, mean_events, seed=generator_seed)
    given: Any = {"dim": 32, **options}
    return events_task(store, "events-planted", length=length, defaults=PLANTED_DEFAULTS, **given)


SEQUENCES = Entry("sequences", load_sequences, settings, REVIEWS, {}, EXAMPLE, OWN)
CHECK_INS = Entry("check-ins", load_check_ins, settings, DEFAULTS, {}, EXAMPLE, OWN)
LISTENING = Entry("listening", load_listening, settings, DEFAULTS, {}, EXAMPLE, OWN)
PLANTED = Entry("planted events", load_planted, settings, PLANTED_DEFAULTS, {}, EXAMPLE, OWN)
