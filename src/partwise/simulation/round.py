"""A compiled round: a cohort in lanes and chunks over the devices, one sum, one server step.

The only place that knows the client axis. Lanes are clients side by side under `vmap`; chunks follow one
another and add to one total, so memory grows with lanes, not with the cohort; devices hold different chunks
and meet in one `psum`. Many rounds run in one compiled call.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from partwise import server, tree
from partwise.aggregation.total import Report, Total, zero_total
from partwise.algorithms.base import Algorithm, Build
from partwise.client.batches import Examples, Keys
from partwise.client.state import Client
from partwise.metrics import Sums
from partwise.selection.slices import Received, receive
from partwise.server import ServerState
from partwise.simulation.mesh import AXIS
from partwise.simulation.stage import Plan, Shelf, Slots


class Outcome(NamedTuple):
    """What a round tells people. Arrays over the slots say what became of each client."""

    clients: jax.Array  # with a weight
    weight: jax.Array
    loss: Sums
    finite: jax.Array  # whether the server's parameters still are
    weights: jax.Array  # [chunks, lanes] per device; 0: empty query set
    broken: jax.Array  # [chunks, lanes]: a non-finite update, dropped


def lane_client(
    algorithm: Algorithm,
    received: Received,
    shelf: Shelf,
    slot: Slots,
    longest: jax.Array,
    rng: jax.Array,
    capacities: Mapping[str, int],
) -> Client:
    """The client of one lane. Its randomness hangs on the round and on its own number, never on its place."""
    keys = {
        space: Keys(rows, slot.key_start[space], slot.key_count[space], capacities[space])
        for space, rows in shelf.keys.items()
    }
    examples = Examples(shelf.columns, shelf.positions, keys, slot.start, slot.count, longest)
    return Client(
        algorithm.model, algorithm.partition, received, examples, jax.random.fold_in(rng, slot.number)
    )


def own_rows(keys: Keys, num_rows: int) -> jax.Array:
    """The table rows of a client's keys, padded with a row that does not exist."""
    position = jnp.arange(keys.capacity)
    rows = keys.rows[jnp.minimum(keys.start + position, keys.rows.shape[0] - 1)]
    return jnp.where(position < keys.count, rows, num_rows)


def _add_lanes(
    algorithm: Algorithm, total: Total, reports: Report, weights: jax.Array, rows: Mapping
) -> Total:
    """`add_report` for all lanes at once."""
    update = {}
    for path, summed in total.update.items():
        change = reports.update[path]
        if path in algorithm.partition.of("keyed"):
            scaled = change * weights.reshape(-1, *[1] * (change.ndim - 1))
            flat = scaled.reshape(-1, *change.shape[2:])
            update[path] = summed.at[rows[algorithm.partition.roles[path].space].ravel()].add(
                flat, mode="drop"
            )
        else:
            update[path] = summed + jnp.tensordot(weights, change, 1)
    return Total(
        update,
        total.weight + weights.sum(),
        total.clients + (weights > 0).sum(),
        Sums(total.loss.value + reports.loss.value.sum(), total.loss.weight + reports.loss.weight.sum()),
    )


def one_round(
    algorithm: Algorithm,
    state: ServerState,
    shelf: Shelf,
    plan: Plan,
    rng: jax.Array,
    capacities: Mapping[str, int],
) -> tuple[ServerState, Outcome]:
    """FedRecon's Algorithm 1, one turn of the server's loop, on this device's share of the cohort."""
    received = receive(algorithm.partition, state.params)
    paths = server.trainable(algorithm.partition, state.params)
    num_rows = {space: received.tables[p[0]].shape[0] for space, p in algorithm.partition.spaces.items()}

    def lane(slot: Slots, longest: jax.Array) -> tuple[Report, jax.Array, jax.Array, dict]:
        client = lane_client(algorithm, received, shelf, slot, longest, rng, capacities)
        report = algorithm.client(client)
        weight = algorithm.aggregator.weigh(report)
        broken = ~tree.all_finite((report.update, weight))
        report = tree.where(broken, jax.tree_util.tree_map(jnp.zeros_like, report), report)
        rows = {space: own_rows(keys, num_rows[space]) for space, keys in client.examples.keys.items()}
        return report, jnp.where(broken, 0, weight), broken, rows

    def chunk(total: Total, share: Plan) -> tuple[Total, tuple[jax.Array, jax.Array]]:
        reports, weights, broken, rows = jax.vmap(lane, in_axes=(0, None))(share.slots, share.longest)
        return _add_lanes(algorithm, total, reports, weights, rows), (weights, broken)

    total, (weights, broken) = jax.lax.scan(chunk, zero_total(state.params, paths), plan)
    total = jax.lax.psum(total, AXIS)
    mean = algorithm.aggregator.decode(total)
    state = server.step(state, algorithm.optimizer, mean, total.weight > 0)
    outcome = Outcome(total.clients, total.weight, total.loss, server.is_finite(state), weights, broken)
    return state, outcome


def compile_rounds(build: Build, mesh: Mesh, capacities: Mapping[str, int], sweep: bool = False) -> Any:
    """A jitted `(rates, state, shelf, plan, rng, first, num_rounds) -> (state, outcomes)`.

    It runs `num_rounds` rounds, from number `first` on, of a plan that may hold more: how many is a value, so
    one program serves every call, and how rounds are cut into calls cannot change a bit of the result.
    With `sweep`, rates, state, plan slots and rng have a leading axis of runs, all computed side by side.
    """

    def rounds(rates, state, shelf, plan, rng, first, num_rounds):
        algorithm = build(rates)

        def turn(state: ServerState, i: jax.Array) -> tuple[ServerState, Outcome]:
            here = jax.tree_util.tree_map(lambda x: x[i], plan)
            return one_round(algorithm, state, shelf, here, jax.random.fold_in(rng, first + i), capacities)

        def body(i: jax.Array, carry: tuple[ServerState, Outcome]) -> tuple[ServerState, Outcome]:
            state, outcome = turn(carry[0], i)
            return state, jax.tree_util.tree_map(lambda all, one: all.at[i].set(one), carry[1], outcome)

        shapes = jax.eval_shape(lambda s: turn(s, jnp.zeros((), jnp.int32))[1], state)
        most = plan.longest.shape[0]
        nothing = jax.tree_util.tree_map(lambda x: jnp.zeros((most, *x.shape), x.dtype), shapes)
        return jax.lax.fori_loop(0, num_rounds, body, (state, nothing))

    def on_device(rates, state, shelf, plan, rng, first, num_rounds):
        squeeze = lambda axis: lambda x: jnp.squeeze(x, axis)  # the device axis, 1 long inside shard_map
        plan = Plan(jax.tree_util.tree_map(squeeze(1 + sweep), plan.slots), jnp.squeeze(plan.longest, 1))
        over_runs: Any = (0, 0, None, (0, None), 0, None, None)
        run = jax.vmap(rounds, in_axes=over_runs) if sweep else rounds
        state, outcome = run(rates, state, shelf, plan, rng, first, num_rounds)
        spread = lambda x: jnp.expand_dims(x, 1 + sweep)
        return state, outcome._replace(weights=spread(outcome.weights), broken=spread(outcome.broken))

    along = P(None, None, AXIS) if sweep else P(None, AXIS)
    everywhere: Any = P()
    plan_spec: Any = Plan(along, P(None, AXIS))  # pyright: ignore[reportArgumentType]
    outcome_spec = Outcome(everywhere, everywhere, everywhere, everywhere, along, along)  # pyright: ignore
    mapped = jax.shard_map(
        on_device,
        mesh=mesh,
        in_specs=(everywhere, everywhere, everywhere, plan_spec, everywhere, everywhere, everywhere),
        out_specs=(everywhere, outcome_spec),
        check_vma=False,
    )
    return jax.jit(mapped, donate_argnums=(1,))
