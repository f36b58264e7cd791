"""Heat counted by the clients: a federated run of one round, whose sum is how many clients hold each key.

FedSubAvg (Ding et al., 2022) corrects the mean of row m by N / n_m. A server that has no data cannot count n_m
(appendix F). Here the server's model is one number for each key, and a client's update is 1 for each key that
its examples name. Everybody takes part once, and nothing is trained. The sum is one like any other: in a
simulation or over a network, plain, masked or by two servers (`privacy.sums`), with or without noise.

With noise, a client counts for at most `privacy.heat_keys` of its keys, drawn at random over all key spaces, and
tells in one more coordinate which share of its keys that is. These shares add up to N_eff, and N_eff / n_m is the
factor (as in `data.heat_gaussian`). Without noise, all keys are counted. A client without examples, or with fewer
than `cohort.min_examples`, has no part in a sum, so it counts neither in n_m nor in N_eff. Set this to the fewest
examples with which a client takes part in the training (`config.parts.fewest_examples`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from partwise.algorithm import Algorithm, choices
from partwise.algorithms.central import PLAIN_SERVER
from partwise.algorithms.entry import AlgorithmEntry, Prepared
from partwise.algorithms.fed_avg import unselected
from partwise.algorithms.registry import training_split
from partwise.client.evaluate import evaluate
from partwise.client.split import everything
from partwise.client.state import Client, begin
from partwise.config.parts import fewest_examples, make_recruiting
from partwise.config.protection import protection
from partwise.config.settings import Config
from partwise.data.heat_gaussian import Counted
from partwise.metrics import Sums
from partwise.model.partition import Partition, Role, keyed, partition
from partwise.model.spec import Batch, Metric, Model, lookup
from partwise.optimizers import Sgd
from partwise.randomness import child
from partwise.server.mean import uniform, weighted
from partwise.server.private_sum import private
from partwise.server.total import Aggregator, Report
from partwise.tasks.base import Setting, Task
from partwise.types import UserError

KEYS, SHARE = "keys", "share"  # the leaves: counts by key space, and N_eff
NAME = "count_heat"


def count_setting(setting: Setting) -> Setting:
    """The setting with numbers of clients in place of parameters: one for each key that examples can name."""
    parts = setting.partition
    counted = {space: parts.columns[space] for space in parts.spaces if parts.columns[space]}
    if not counted:
        raise UserError(
            f"{NAME} counts the keys that clients' examples name, and this task has none: use one with keyed leaves"
        )
    sizes = {space: parts.num_keys(space) * parts.block(space) for space in counted}
    roles: dict[str, Role] = {f"{KEYS}/{space}": keyed(space, block=parts.block(space)) for space in counted}

    def init(rng: jax.Array) -> dict[str, Any]:
        return {KEYS: {space: jnp.zeros(size) for space, size in sizes.items()}, SHARE: jnp.zeros(())}

    model = Model(
        init,
        lambda params, batch, rng: _holders(parts, params[KEYS], batch),
        lambda outputs, batch: jnp.zeros_like(outputs),
        {"holders": Metric(lambda outputs, batch: outputs, higher_is_better=True)},
    )
    return Setting(model, partition(model, roles, counted), setting.columns)


def _holders(parts: Partition, counts: Mapping[str, jax.Array], batch: Batch) -> jax.Array:
    """How many clients hold the keys of each example, in the mean, [B]."""
    total, number = 0.0, 0.0
    for space, table in counts.items():
        for name in parts.columns[space]:
            ids = batch[name].reshape(batch[name].shape[0], -1)
            first = ids // parts.block(space) * parts.block(space)  # which entry of a key has its count
            total += lookup(table, first).sum(1)
            number += (ids >= 0).sum(1)
    return total / jnp.maximum(jnp.asarray(number), 1)


def count_keys(setting: Setting, aggregator: Aggregator, most: int | None = None) -> Algorithm:
    """Count the holders of every key.

    Args:
        setting: As `count_setting` makes it.
        aggregator: Adds up what clients send; `sums()`, or what protects them.
        most: How many of a client's keys are counted at most, over all key spaces; None: all.
    """

    def client_update(client: Client) -> Report:
        marks, share = _counted(client, most)
        block = setting.partition.block
        rows = {f"{KEYS}/{space}": _in_block(each, block(space)) for space, each in marks.items()}
        weight = (client.examples.count > 0).astype(jnp.float32)
        return Report({**rows, SHARE: share}, weight, Sums(jnp.zeros(()), weight))

    return Algorithm(
        model=setting.model,
        partition=setting.partition,
        client=client_update,
        personalize=lambda client, start: start,
        evaluate=lambda client: evaluate(client, begin(client), everything),
        aggregator=aggregator,
        optimizer=Sgd(1.0).on_server(),
        choose=choices(setting.partition),
    )


def sums() -> Aggregator:
    """The sum of all clients, and no mean."""
    return Aggregator(weighted(uniform), lambda parts, total, carried, rng: (dict(total.update), carried))


def _counted(client: Client, most: int | None) -> tuple[dict[str, jax.Array], jax.Array]:
    """Which of the client's keys are counted, by space [capacity], and which share of all its keys they are."""
    keys = client.examples.keys
    real = {space: jnp.arange(each.capacity) < each.count for space, each in keys.items()}
    if most is None:
        return real, jnp.ones(())
    lots = jnp.concatenate([_lots(child(client.rng, space), real[space]) for space in keys])
    rank = jnp.zeros(lots.shape, int).at[jnp.argsort(lots)].set(jnp.arange(len(lots)))
    ends = np.cumsum([each.capacity for each in keys.values()])[:-1]
    drawn = dict(zip(keys, jnp.split(rank < most, ends), strict=True))
    held = sum(each.count for each in keys.values())
    share = jnp.minimum(1.0, most / jnp.maximum(held, 1))
    return {space: mine & drawn[space] for space, mine in real.items()}, share


def _lots(rng: jax.Array, real: jax.Array) -> jax.Array:
    """A random number for each of a client's keys, by its place among them: room for more keys changes none."""
    lot = lambda place: jax.random.uniform(jax.random.fold_in(rng, place))
    return jnp.where(real, jax.vmap(lot)(jnp.arange(len(real))), jnp.inf)


def _in_block(marks: jax.Array, block: int) -> jax.Array:
    """The rows of keys: if several ids share a key, its first entry has the count."""
    rows = marks.astype(jnp.float32)
    return rows if block == 1 else jnp.zeros((len(rows), block)).at[:, 0].set(rows)


def counted_in(params: Mapping[str, Any], parts: Partition, total: int) -> Counted:
    """What a run has counted, from the leaves of its model. `parts` is the partition of `count_setting`."""
    rows = {space: np.asarray(params[f"{KEYS}/{space}"], np.float64) for space in parts.spaces}
    counts = {space: each.reshape(len(each), -1)[:, 0] for space, each in rows.items()}
    return Counted(counts, float(params[SHARE]), total)


# How a configuration makes it


def settle(task: Task, config: Config) -> Config:
    """Everybody takes part once. The clip follows from the keys that are counted, and no keys are asked for."""
    part, everybody = config.privacy, config.deploy.population or task.train.num_clients
    bare = unselected(task, config, COUNT_HEAT).changed(PLAIN_SERVER | ONCE | {"cohort.size": everybody})
    if part.epsilon is None and part.noise is None and part.sums == "plain":
        return bare.changed({"privacy.clip": None})
    if _is_noisy(config):
        return bare.changed({"privacy.clip": math.sqrt(part.heat_keys + 1)})
    # Twice the longest update, so that rounding to whole numbers leaves room and cuts nobody.
    all_keys = sum(count_setting(task.personal).partition.all_keys.values())
    return bare.changed({"privacy.clip": 2 * math.sqrt(all_keys + 1), "privacy.noise": 0.0})


def _is_noisy(config: Config) -> bool:
    return config.privacy.epsilon is not None or bool(config.privacy.noise)


def prepare(task: Task, config: Config) -> Prepared:
    """The count of a task's keys, after `settle`."""
    setting = count_setting(task.personal)
    store = task.train.select(setting.columns)
    promised = protection(config, store.num_clients)
    aggregator = private(sums(), promised.door) if promised else sums()
    most = config.privacy.heat_keys if _is_noisy(config) else None
    build: Callable[[Mapping[str, Any]], Algorithm] = lambda rates: count_keys(setting, aggregator, most)
    return Prepared(build, {}, store, make_recruiting(config), build, setting)


def counting(task: Task, config: Config) -> Config:
    """The configuration of the run that counts heat for a run with this one: it costs `privacy.heat_epsilon`."""
    part = config.privacy
    cost = {
        "privacy.epsilon": None if part.heat_noise else part.heat_epsilon,
        "privacy.noise": part.heat_noise,
        "cohort.min_examples": fewest_examples(config, training_split(config)),
    }
    return settle(task, config.owning({}).changed({"algorithm": NAME, **cost}))


ONCE = {
    "rounds": 1,
    "cohort.sampling": "poisson",  # with the chance 1, so that a client is added or removed, not replaced
    "cohort.over_selection": 1.0,
    "cohort.dropout": 0.0,
    "server.schedule": "constant",
    "server.weighting": "uniform",
    "server.counts": "",
    "serving.way": "broadcast",  # nobody asks for keys
    "privacy.heat": "none",
    "privacy.noise_cohort": 0,
    "privacy.clip_quantile": 0.0,
    "privacy.mechanism": "independent",
    "privacy.rows": "all",
}
UNTRAINED, EVERYBODY, COST = (
    "nothing is trained",
    "everybody is counted, once",
    "privacy.epsilon is what the count costs",
)
COUNT_HEAT = AlgorithmEntry(
    "no training: how many clients hold each key, for server.counts (FedSubAvg, appendix F)",
    prepare,
    {"rounds": 1},
    selects=False,
    settle=settle,
    unread=dict.fromkeys(("update.*", "reconstruct.*", "server.*", "fine_tune.*"), UNTRAINED)
    | dict.fromkeys(("split.*", "evaluation_split.*", "evaluation.*"), UNTRAINED)
    | dict.fromkeys(("rounds", "cohort.[!m]*", "privacy.noise_cohort"), EVERYBODY)
    | dict.fromkeys(("privacy.heat", "privacy.heat_epsilon", "privacy.heat_noise"), COST)
    | dict.fromkeys(
        ("privacy.clip", "privacy.clip_*", "privacy.rows*", "privacy.mechanism", "privacy.buffers"),
        "privacy.heat_keys says what a client can add",
    )
    | {"serving.way": "clients fetch nothing that depends on them"},
)
