"""SCAFFOLD (Karimireddy et al., 2020), Algorithm 1 with option II: control variates against the drift of
clients.

The server keeps c and every client keeps c_i. Both have the shapes of the parameters and start at zero. A
client takes steps y <- y - rate (g(y) - c_i + c). After K steps, c_i+ = c_i - c + (x - y) / (K rate), which is the
mean of its gradients. A round whose rate is 0 (the end of a schedule) shows no gradients, so c_i stays. A client
sends both changes, and the server adds |S| / N times the mean change of c_i to c. Each part of c has the role
of the parameter it belongs to. So for a keyed leaf, a client is sent and keeps the rows of its own keys.
Twice as many bytes are sent as in Federated Averaging, and clients must come back with what they kept.

`historical` is for models too large for this (FedSubAvg, section 5.1): the server alone does something
similar.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, cast

import jax
import jax.numpy as jnp
import optax

from partwise import tree
from partwise.algorithm import Algorithm, change
from partwise.algorithms.entry import AlgorithmEntry, Prepared
from partwise.algorithms.fed_avg import UNREAD, fed_avg, prepare_averaging, prepare_stateful, unselected
from partwise.client.batches import Batches
from partwise.client.fit import Extra
from partwise.client.split import everything
from partwise.client.state import Client, begin, received_slices, total_weight, with_deltas
from partwise.client.update import by_steps
from partwise.config.judged import server_side
from partwise.config.parts import make_schedule, make_scheduled, make_server_optimizer, needs, one_of
from partwise.config.settings import Config, Own
from partwise.model.partition import Partition
from partwise.model.partition import partition as make_partition
from partwise.model.spec import Model
from partwise.optimizers import ServerOptimizer
from partwise.selection.choose import Choice
from partwise.server.mean import mean, uniform
from partwise.server.total import Aggregator, Carried, Report, Total
from partwise.tasks.base import Task
from partwise.types import UserError

CONTROL = "control"
WHERE = "scaffold.control"


def scaffold(
    model: Model,
    partition: Partition,
    *,
    schedule: Batches,
    rate: Any,
    num_clients: int,
    optimizer: ServerOptimizer,
    choose: Mapping[str, Choice] | None = None,
) -> Algorithm:
    """SCAFFOLD with SGD on the clients, all with the same weight. `num_clients` is N, the whole population; `rate`
    may be a function of the round, and 0 in some rounds."""
    if isinstance(rate, float | int) and rate == 0:
        raise UserError(
            "SCAFFOLD finds its control variates by dividing what clients changed by their rate, and update.rate "
            "is 0: give a rate above 0, or use fed_avg"
        )
    model, partition, paths = with_control(model, partition)
    of = {path: f"{CONTROL}/{path}" for path in paths}

    def client_update(client: Client) -> Report:
        kept, received = client.kept, _received(client, tuple(of.values()))
        drift = {path: received[control] - kept[control] for path, control in of.items()}
        update = by_steps(schedule, rate, extra=lambda client: _constant(client, drift))
        trained = update(client, begin(client), everything)
        changes = change(client, with_deltas(client, trained.progress))
        steps = schedule.num_steps(client.examples.count)
        now: Any = rate(client.round) if callable(rate) else rate
        # Divided: a product and a sum may become one operation, rounded once, in one program and not in another.
        length = steps * jnp.asarray(now, jnp.float32)
        moved = {
            control: jnp.where(
                length > 0, -received[control] - changes[path] / jnp.where(length > 0, length, 1), 0
            )  # c_i+ - c_i
            for path, control in of.items()
        }
        keep = {c: (kept[c] + moved[c]).astype(kept[c].dtype) for c in of.values()}
        return Report({**changes, **moved}, total_weight(client, everything), trained.loss, keep)

    plain = fed_avg(
        model,
        partition,
        update=by_steps(schedule, rate),
        optimizer=_plain_for_control(optimizer),
        aggregator=_mean(num_clients),
        choose=choose,
    )
    return plain._replace(client=client_update, keeps=tuple(of.values()))


def historical(optimizer: ServerOptimizer, cohort: int, num_clients: int) -> ServerOptimizer:
    """The server's step with a weighted mean of all updates so far: h <- (1 - K/N) h + (K/N) mean, divided by
    the sum of its weights. Each round replaces the share of clients that took part. So h is about the mean of
    every client's last update, which is what the control variates represent. A row that no client sent
    continues to move.

    FedSubAvg says only "weighted averaging the historical updates"; its appendix D.2 is not at hand.
    """
    decay = max(1 - cohort / num_clients, 0.0)
    mean_so_far = optax.ema(decay, debias=True)
    return ServerOptimizer(optax.chain(mean_so_far, optimizer.transform), rows="all")


def with_control(model: Model, partition: Partition) -> tuple[Model, Partition, list[str]]:
    """The model with c beside every leaf that clients train, in the same role, the new partition, and the
    paths of these leaves."""
    paths = [path for path in partition.of("shared", "keyed") if path in partition.trained_paths]

    def init(rng: jax.Array) -> Any:
        params = model.init(rng)
        if not isinstance(params, dict) or CONTROL in params:
            raise UserError(
                f"SCAFFOLD puts its control variates beside the parameters: init must return a dict without "
                f"'{CONTROL}', not {sorted(params) if isinstance(params, dict) else type(params).__name__}"
            )
        flat = tree.flatten(params)
        return {**params, CONTROL: {path: jnp.zeros_like(flat[path]) for path in paths}}

    bare = lambda params: {name: part for name, part in params.items() if name != CONTROL}
    wrapped = model._replace(
        init=init,
        predict=lambda params, batch, rng: model.predict(bare(params), batch, rng),
        train_loss=model.train_loss
        and (lambda params, batch, rng, loss=model.train_loss: loss(bare(params), batch, rng)),
        rebuild_loss=model.rebuild_loss
        and (lambda params, batch, rng, loss=model.rebuild_loss: loss(bare(params), batch, rng)),
    )
    roles = {path: dataclasses.replace(partition.roles[path], fill=0.0) for path in paths}
    rules = dict(partition.roles) | {f"{CONTROL}/{path}": role for path, role in roles.items()}
    return wrapped, make_partition(wrapped, rules, partition.columns), paths


def _received(client: Client, paths: tuple[str, ...]) -> dict[str, jax.Array]:
    """The client's part of these leaves, as received."""
    shared = {path: client.received.shared[path] for path in paths if path in client.received.shared}
    return shared | received_slices(client, [path for path in paths if path not in shared])


def _constant(client: Client, drift: Mapping[str, jax.Array]) -> Extra:
    by_group = {
        "shared": {path: x for path, x in drift.items() if path in client.received.shared},
        "keyed": {path: x for path, x in drift.items() if path in client.received.tables},
    }
    return lambda now: by_group


def _mean(num_clients: int) -> Aggregator:
    """The mean over the cohort; for control variates, |S| / N times the mean."""
    plain = mean(uniform)

    def decode(
        partition: Partition, total: Total, carried: Carried, rng: jax.Array
    ) -> tuple[dict[str, jax.Array], Carried]:
        means, carried = plain.decode(partition, total, carried, rng)
        share = total.clients / num_clients
        return {path: x * share if _is_control(path) else x for path, x in means.items()}, carried

    return plain._replace(decode=decode)


def _is_control(path: str) -> bool:
    return path.startswith(f"{CONTROL}/")


def _plain_for_control(optimizer: ServerOptimizer) -> ServerOptimizer:
    """The server's optimizer for the model; for the control variates, c <- c + mean change."""

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        changes, state = optimizer.transform.update(updates, state, params)
        control = {path: -x for path, x in updates.items() if _is_control(path)}
        return {**cast(dict, changes), **control}, state

    return optimizer._replace(transform=optax.GradientTransformation(optimizer.transform.init, update))


# How a configuration makes it


def prepare(task: Task, config: Config) -> Prepared:
    """SCAFFOLD for a task. Control variates are on the clients (only with plain SGD), or only on the server."""
    where = config.own[WHERE]
    one_of(WHERE, where, ("clients", "server"))
    config = unselected(task, config, SCAFFOLD)
    if where == "server":
        size, everyone = config.cohort.size, task.train.num_clients
        averaged = lambda *given, optimizer, **more: fed_avg(
            *given, optimizer=historical(optimizer, size, everyone), **more
        )
        return prepare_averaging(task, config, averaged)
    of_steps = f"clients make their control variates of plain gradient steps ({WHERE} = server takes others)"
    of_means = f"control variates go with the plain mean of the cohort ({WHERE} = server takes others)"
    needs(config.algorithm, "update.method", config.update.method, ("steps",), of_steps)
    needs(config.algorithm, "update.optimizer", config.update.optimizer, ("sgd",), of_steps)
    needs(config.algorithm, "server.mean", config.server.mean, ("cohort",), of_means)
    needs(config.algorithm, "server.weighting", config.server.weighting, ("uniform",), of_means)
    own = server_side(task).own_spaces
    if own:
        raise UserError(
            f"SCAFFOLD's clients replace their own gradient by the mean of all {task.train.num_clients:,}. Of rows "
            f"that one client alone has (key space {', '.join(own)}) that is nearly nothing: they would not be "
            f"learned. Use {WHERE} = server, or fed_avg"
        )
    return prepare_stateful(
        task,
        config,
        lambda setting, store: (
            lambda rates: scaffold(
                setting.model,
                setting.partition,
                schedule=make_schedule(config),
                rate=make_scheduled(config, rates, "update"),
                num_clients=store.num_clients,
                optimizer=make_server_optimizer(config, rates),
            )
        ),
    )


SCAFFOLD = AlgorithmEntry(
    "SCAFFOLD: control variates against client drift (Karimireddy et al., 2020)",
    prepare,
    {"server.weighting": "uniform"},
    own={
        WHERE: Own("clients", "who has control variates: every client its own (clients), or the server one")
    },
    trains="stateful",
    selects=False,
    unread=UNREAD,
)
