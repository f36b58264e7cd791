"""Makes the parts of an algorithm that a configuration names."""

from __future__ import annotations

import dataclasses
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np

from partwise.algorithm import whole_model
from partwise.client import reconstruct, split, update
from partwise.client.batches import Batches
from partwise.client.through import Through
from partwise.config.guarded_heat import guarded_heats
from partwise.config.protection import Protection, protection
from partwise.config.schedule_text import read_schedule
from partwise.config.settings import Config, SplitConfig
from partwise.data.heat import Heat
from partwise.data.ragged import offsets, owners, ranks
from partwise.data.store import ClientStore
from partwise.model.columns import masked
from partwise.model.spec import Model, one_per_example
from partwise.optimizers import Optimizer, ServerOptimizer
from partwise.parts.declare import declarations, find, names
from partwise.selection.choose import Choice, parse_choice
from partwise.selection.key_heat import count_heats
from partwise.server import heat_mean, mean
from partwise.server.cohort import Recruiting, parse_sampling
from partwise.server.private_sum import filtered, private
from partwise.server.total import Aggregator
from partwise.tasks.base import Setting
from partwise.types import UserError, unknown

HEATS = (
    "heats"  # where the info of a store has heat that was counted before, because its examples are elsewhere
)


# All values of settings of which some algorithm takes only a part (`needs`).
VALUES: Mapping[str, Iterable[str]] = {
    "update.method": ("steps", "solve", "through"),
    "update.optimizer": names(Optimizer),
    "reconstruct.method": ("steps", "solve", "skip"),
    "split.kind": ("alternate", "random", "halves", "last", "none"),
    "evaluation_split.kind": ("same", "alternate", "random", "halves", "last", "none"),
    "server.mean": ("cohort", "holders", "heat", "seen"),
    "server.weighting": ("examples", "uniform"),
}


def make_choices(setting: Setting, config: Config) -> dict[str, Choice]:
    """Which keys clients ask for: as the configuration says; by default all keys that could matter."""
    known = {space: text for space, text in config.select.items() if space in setting.partition.spaces}
    if len(known) < len(config.select):
        name = next(space for space in config.select if space not in known)
        raise unknown("key space of select", name, setting.partition.spaces)
    return whole_model(setting.partition) | {space: parse_choice(text) for space, text in known.items()}


def make_schedule(config: Config) -> Batches:
    """How long a client trains shared and keyed parts."""
    part = config.update
    one_of("update.begin", part.begin, ("first", "random"))
    return Batches(part.batch_size, part.epochs, part.max_steps, part.begin == "random")


def make_reconstruct(config: Config, rates: Mapping[str, Any]) -> reconstruct.Reconstruct:
    """The reconstruction algorithm R that the configuration names."""
    part = config.reconstruct
    one_of("reconstruct.method", part.method, VALUES["reconstruct.method"])
    if part.method == "solve":
        return reconstruct.by_solving(rates["pull"])
    if part.method == "skip":
        return reconstruct.skip()
    optimizer = make_scheduled(config, rates, "reconstruct")
    schedule = Batches(part.batch_size, part.epochs, part.max_steps)
    return reconstruct.by_steps(schedule, optimizer, rates.get("pull", 0.0))


def make_update(config: Config, rates: Mapping[str, Any]) -> update.Update:
    """The client update algorithm U that the configuration names."""
    part = config.update
    why = "through is a step through the reconstruction of a local part: use fed_recon for it"
    needs(config.algorithm, "update.method", part.method, ("steps", "solve"), why)
    if part.method == "solve":
        return update.by_solving(part.pull)
    optimizer = make_scheduled(config, rates, "update")
    return update.by_steps(make_schedule(config), optimizer, part.joint)


def make_through(config: Config, rates: Mapping[str, Any]) -> Through:
    """The update through a closed-form reconstruction."""
    if config.reconstruct.method != "solve" or config.update.optimizer != "sgd":
        raise UserError(
            f"update.method = through takes one step of SGD through the closed form, not with reconstruct.method = "
            f"{config.reconstruct.method} and update.optimizer = {config.update.optimizer}: use reconstruct.method "
            f"= solve and update.optimizer = sgd, or update.method = steps"
        )
    return Through(rates["pull"], rates["update"])


def make_fine_tune(config: Config, rates: Mapping[str, Any]) -> update.Update | None:
    """What a client does to the shared and keyed parts before it is evaluated; None for nothing."""
    part = config.fine_tune
    optimizer = make_optimizer("fine_tune", part.optimizer, rates["fine_tune"]).on_client()
    if part.max_steps == 0:
        return None
    schedule = Batches(part.batch_size, part.epochs, part.max_steps)
    schedule.check("fine_tune")
    return update.by_steps(schedule, optimizer, part.joint)


def make_split(part: SplitConfig, section: str = "split") -> split.Split:
    """The split function that the configuration names."""
    key, random = f"{section}.kind", ("random",) if section == "split" else ()
    fitting = ("alternate", "halves", "last", "none", *random)
    needs("an evaluation", key, part.kind, fitting, "it has no round whose order it could take")
    if part.kind in ("alternate", "random"):
        return split.alternate(part.batch_size)
    if part.kind == "last":
        return split.last(part.count)
    return split.halves(part.percent) if part.kind == "halves" else split.none()


def make_evaluation_split(config: Config) -> split.Split:
    """How an evaluated client splits its examples."""
    if config.evaluation_split.kind != "same":
        return make_split(config.evaluation_split, "evaluation_split")
    trained = config.split.kind in ("none", "random")
    return make_split(dataclasses.replace(config.split, kind="alternate") if trained else config.split)


def make_optimizer(
    key: str, name: str, rate: Any, schedule: str = "constant", rounds: int = 0, **settings: Any
) -> Optimizer:
    """The optimizer that a setting names, with its schedule for a run of so many rounds."""
    if name not in names(Optimizer):
        raise unknown(f"value of {key}.optimizer", name, names(Optimizer))
    found = find(Optimizer, name)
    known = {n: a for n, a in declarations(found).items() if n not in ("learning_rate", "schedule")}
    for setting in settings:
        if setting not in known:
            raise unknown(f"setting of the optimizer '{name}'", setting, known)
    settings = {n: known[n].read(value, f"{key}.settings.{n}") for n, value in settings.items()}
    factor = read_schedule(f"{key}.schedule", schedule, rounds)
    return found(rate, schedule=factor, **settings)  # pyright: ignore[reportCallIssue, reportReturnType]


def make_scheduled(
    config: Config, rates: Mapping[str, Any], section: Literal["update", "reconstruct"]
) -> Any:
    """A section's client optimizer."""
    part = getattr(config, section)
    return make_optimizer(section, part.optimizer, rates[section], part.schedule, config.rounds).on_client()


def make_server_optimizer(config: Config, rates: Mapping[str, Any]) -> ServerOptimizer:
    """The server's optimizer with its schedule."""
    part = config.server
    made = make_optimizer(
        "server", part.optimizer, rates["server"], part.schedule, config.rounds, **part.settings
    )
    return made.on_server()


def make_aggregator(
    setting: Setting,
    config: Config,
    store: ClientStore | None = None,
    divided: split.Split | None = None,
) -> Aggregator:
    """How the updates of a round are combined. Heat is counted over the training clients in `store`, which are
    `divided` into support and query sets."""
    part, spaces = config.server, tuple(setting.partition.spaces)
    weigh = make_weigh(config)
    one_of("server.mean", part.mean, VALUES["server.mean"])
    if part.mean in ("heat", "seen") and not spaces:
        raise UserError(
            f"server.mean = {part.mean} corrects the means of keyed rows, and the task has none: use cohort"
        )
    promised = protection(config, store.num_clients) if store is not None else None
    if promised and store is not None:
        return _private(setting, config, store, divided, promised)
    if part.mean == "seen":
        return heat_mean.estimated_sub_mean(spaces, weigh, part.cap)
    if part.mean == "heat" and store is not None:
        return heat_mean.sub_mean(counted_heats(setting, config, store, divided), weigh, part.cap)
    return mean.mean(weigh, spaces if part.mean == "holders" else setting.own_spaces)


def _private(
    setting: Setting, config: Config, store: ClientStore, divided: split.Split | None, promised: Protection
) -> Aggregator:
    """The mean whose sums leave by the door only. Factors of heat are applied after the noise."""
    plain = mean.mean(make_weigh(config), setting.own_spaces)
    if config.server.mean == "heat":
        heats = counted_heats(setting, config, store, divided, promised)
        plain = heat_mean.sub_mean(heats, make_weigh(config), config.server.cap)
    aggregator = private(plain, promised.door)
    return filtered(aggregator, tuple(setting.partition.spaces)) if promised.door.rows_share else aggregator


def make_weigh(config: Config) -> mean.Weigh:
    """The weight of a client in a mean."""
    one_of("server.weighting", config.server.weighting, VALUES["server.weighting"])
    return mean.by_examples if config.server.weighting == "examples" else mean.uniform


def counted_heats(
    setting: Setting,
    config: Config,
    store: ClientStore,
    divided: split.Split | None = None,
    promised: Protection | None = None,
) -> dict[str, Heat]:
    """The heat of every key space, counted by clients or by samples, in agreement with the weights of clients; or
    with noise, if clients are promised privacy."""
    for space, choice in make_choices(setting, config).items():
        if choice.name not in ("own", "all"):
            raise UserError(
                f"heat is counted from the keys of clients' examples, and with select.{space} = {choice.name} they "
                f"train others: use server.mean = seen (from the cohorts as they come), holders or cohort"
            )
    if HEATS in store.info:
        return store.info[HEATS]
    weights = round_weights(setting.model, config, store, divided)
    if promised:
        return guarded_heats(setting.partition, config, store, weights, promised, config.seed)
    by = "samples" if config.server.weighting == "examples" else "clients"
    return count_heats(store, setting.partition, by, weights)


def round_weights(
    model: Model, config: Config, store: ClientStore, divided: split.Split | None = None
) -> np.ndarray:
    """What every client of a store weighs in a round if all examples do not count alike: the weight of its query
    set, [C]. It is 0 for those that cannot take part, because they have too few examples (`cohort.min_examples`) or
    nothing in the query set."""
    query, counts = (divided or split.none()).query, store.counts
    weights = query.count(counts) if model.weight is one_per_example else _weighed(model, query, store)
    return np.where(counts >= config.cohort.min_examples, weights, 0)


def _weighed(model: Model, query: split.Subset, store: ClientStore) -> np.ndarray:
    """The weight of every client's query set, for examples with weights of their own."""
    sums: list[np.ndarray] = [np.zeros(0)]
    for part in store.blocks():
        columns = {name: jnp.asarray(x) for name, x in part.columns.items()}
        each = np.asarray(model.weight(masked(columns, jnp.ones(part.counts.sum(), bool))), float)
        used = query.count(part.counts)
        client = owners(used)
        rows = offsets(part.counts)[client] + query.index(ranks(used), part.counts[client])
        sums.append(np.bincount(client, each[rows], len(used)))
    return np.concatenate(sums)


def fewest_examples(config: Config, divided: split.Split) -> int:
    """The smallest number of examples with which a client takes part in a round: enough for `cohort.min_examples`
    and for a query set."""
    return max(config.cohort.min_examples, bisect_left(range(1 << 31), 1, key=divided.query.count))


def make_recruiting(config: Config) -> Recruiting:
    """How the clients of a round are chosen."""
    settings = dataclasses.asdict(config.cohort)
    settings["sampling"] = parse_sampling(config.cohort.sampling)
    return Recruiting(**settings)


def rates_of(config: Config) -> dict[str, float]:
    """The rates, which a compiled program takes as values."""
    rates = {
        "reconstruct": config.reconstruct.rate,
        "update": config.update.rate,
        "server": config.server.rate,
        "fine_tune": config.fine_tune.rate,
    }
    if config.reconstruct.pull > 0 or config.reconstruct.method == "solve":
        rates["pull"] = config.reconstruct.pull
    return rates


def one_of(key: str, value: str, known: Iterable[str]) -> None:
    """Raise `UserError` unless the value of a key is one of the known values."""
    if value not in known:
        raise unknown(f"value of {key}", value, known)


def needs(who: str, key: str, value: str, fitting: tuple[str, ...], why: str) -> None:
    """Raise `UserError` unless the value of a key fits what needs it, such as an algorithm. That a known value does
    not fit is not said to be unknown."""
    one_of(key, value, VALUES[key])
    if value not in fitting:
        raise UserError(f"{who} needs {key} = {' or '.join(fitting)}, not {value}: {why}")
