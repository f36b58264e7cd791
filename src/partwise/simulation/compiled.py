"""A compiled round: a cohort in lanes and chunks over the devices, one sum, one server step.

This is the only place that knows the client axis. Lanes are clients that run side by side under `vmap`.
Chunks run one after another and add to one total, so memory grows with the lanes, not with the cohort. Each
device works on its own chunks, and one `psum` adds their totals. Many rounds run in one compiled call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from partwise.algorithm import Algorithm, Build, Done, contribute
from partwise.client.batches import Examples
from partwise.client.state import Client
from partwise.metrics import Sums
from partwise.model.partition import Partition
from partwise.programs import jit_program
from partwise.randomness import client_rng
from partwise.selection.choose import Choice
from partwise.selection.slices import Keys, Received, own_rows, receive
from partwise.server.round import finish
from partwise.server.step import ServerState, is_finite
from partwise.server.total import PUBLIC, Contribution, Total, zero_total
from partwise.simulation.exchange import added_up
from partwise.simulation.mesh import AXIS, RUNS
from partwise.simulation.spread import WHOLE, Rowwise
from partwise.simulation.stage import KEY_BLOCK, Plan, Shelf, Slots


class Outcome(NamedTuple):
    """The result of a round, for records. Arrays over the slots say what happened to each client."""

    clients: jax.Array  # number of clients with a weight above 0
    weight: jax.Array
    loss: Sums
    finite: jax.Array  # whether the server's parameters are still finite, and what its optimizer keeps
    used: jax.Array  # [chunks, lanes] per device: the client took part with a weight above 0
    broken: jax.Array  # [chunks, lanes]: the update was not finite and was dropped
    norm: jax.Array  # [chunks, lanes]: of the client's update
    keep: Mapping[str, jax.Array]  # [chunks, lanes, ...]: what the clients keep until their next round


class Chunk(NamedTuple):
    """The part of a plan for one chunk of lanes."""

    slots: Slots
    longest: jax.Array
    most_keys: Mapping[str, jax.Array]


class Lanes(NamedTuple):
    """What the clients of a chunk returned. Leaves have a leading lane axis, except the arrays of the shelf
    and `most_keys`."""

    sent: Contribution
    keys: Mapping[str, Keys]
    most_keys: Mapping[str, jax.Array]  # one number for all lanes


class Shared(NamedTuple):
    """What the lanes of a chunk have in common."""

    received: Received
    shelf: Shelf
    rng: jax.Array  # the round's randomness
    capacities: Mapping[str, int]  # room for keys, by space
    choose: Mapping[str, Choice]
    public: Mapping[str, Any] = {}  # what the aggregator tells every client
    round: Any = None  # its number; None for an evaluation


def lane_client(algorithm: Algorithm, shared: Shared, slot: Slots, longest: jax.Array) -> Client:
    """The client of one lane. `longest` is the size of the largest client in the chunk. The client's
    randomness depends on the round and on its own number, never on its lane."""
    shelf = shared.shelf
    examples = Examples(
        columns=shelf.columns,
        positions=shelf.positions,
        keys=lane_keys(shared, slot),
        start=slot.start,
        count=slot.count,
        longest=longest,
    )
    return Client(
        model=algorithm.model,
        partition=algorithm.partition,
        received=shared.received,
        examples=examples,
        rng=client_rng(shared.rng, slot.number),
        kept=slot.kept,
        public=shared.public,
        round=shared.round,
    )


def over_lanes(lane: Callable[..., Any], slots: Slots, *same: Any) -> Any:
    """Apply a function of one slot to all lanes. A single lane is not batched, so that XLA uses plain matrix
    products."""
    if slots.client.shape[0] > 1:
        return jax.vmap(lane, in_axes=(0, *[None] * len(same)))(slots, *same)
    one = lane(jax.tree_util.tree_map(lambda x: x[0], slots), *same)
    return jax.tree_util.tree_map(lambda x: x[None], one)


def lane_keys(shared: Shared, slot: Slots) -> dict[str, Keys]:
    """The keys of one lane (or of all lanes, if the slots have a lane axis)."""
    return {
        space: Keys(
            rows=None if choice.name == "all" else shared.shelf.keys[space],
            start=slot.key_start[space],
            count=slot.key_count[space],
            capacity=shared.capacities[space],
            place=shared.shelf.places.get(space),
            place_start=slot.place_start.get(space, 0),
            complete=choice.complete,
        )
        for space, choice in shared.choose.items()
    }


def _add_lanes(total: Total, lanes: Lanes, partition: Partition) -> Total:
    """`add` for all lanes at once, without the contributions that are not valid."""
    sent = lanes.sent

    def plus(summed: jax.Array, parts: jax.Array) -> jax.Array:
        valid = sent.valid.reshape(-1, *[1] * (parts.ndim - 1))
        return summed + jnp.sum(jnp.where(valid, parts, 0), axis=0, dtype=summed.dtype)

    update = {}
    for path, summed in total.update.items():
        if path in partition.of("keyed"):
            update[path] = _scatter_lanes(summed, lanes, partition.roles[path].space, sent.update[path])
        else:
            update[path] = plus(summed, sent.update[path])
    held = {
        space: _scatter_lanes(summed, lanes, space, _on_keys(sent.weight, lanes.keys[space]))
        for space, summed in total.held.items()
    }
    loss = Sums(*map(plus, total.loss, sent.loss))
    return Total(update, held, plus(total.weight, sent.weight), plus(total.clients, sent.clients), loss)


def _on_keys(weights: jax.Array, keys: Keys) -> jax.Array:
    return jnp.broadcast_to(weights[:, None], (weights.shape[0], keys.capacity))


def _scatter_lanes(summed: jax.Array, lanes: Lanes, space: str, change: jax.Array) -> jax.Array:
    """Add every lane's rows [lanes, capacity, ...] to the table, block by block up to the largest number of
    keys of a lane. Rows of a lane that is not valid are ignored."""
    keys = lanes.keys[space]
    count = jnp.where(lanes.sent.valid, keys.count, 0)
    size = keys.capacity if keys.capacity % KEY_BLOCK else KEY_BLOCK
    rows_of = jax.vmap(
        lambda start, count, first: own_rows(
            keys._replace(start=start, count=count), first, size, len(summed)
        ),
        in_axes=(0, 0, None),
    )

    def block(i: jax.Array, summed: jax.Array) -> jax.Array:
        part = jax.lax.dynamic_slice_in_dim(change, i * size, size, axis=1)
        rows = rows_of(keys.start, count, i * size)
        return summed.at[rows.ravel()].add(part.reshape(-1, *change.shape[2:]), mode="drop")

    if size == keys.capacity:
        return block(jnp.zeros((), jnp.int32), summed)
    return jax.lax.fori_loop(0, -(-lanes.most_keys[space] // size), block, summed)


class Summed(NamedTuple):
    """What the clients of a round did: their sum over all devices, and per slot of this device what happened."""

    total: Total
    used: jax.Array  # [chunks, lanes], as in `Outcome`
    broken: jax.Array
    norm: jax.Array
    keep: Mapping[str, jax.Array]


def cohort_total(
    algorithm: Algorithm,
    params: Mapping[str, jax.Array],
    shelf: Shelf,
    plan: Plan,
    rng: jax.Array,
    rooms: Sequence[Mapping[str, int]],
    public: Mapping[str, Any] | None = None,
    round_number: Any = None,
    run_lanes: Callable[..., Done] | None = None,
) -> Summed:
    """Run this device's part of a cohort, and add up what all devices' clients contribute.

    `rooms` are capacities by key space, the largest first. Each chunk works with the room that `plan.ends`
    gives it, in which its clients' keys fit. `public` is what the aggregator tells every client. `run_lanes` runs
    the clients of a chunk, if not all of them begin with `params`.
    """
    received = receive(algorithm.partition, params)

    def chunk(room: Mapping[str, int], i: jax.Array, carry: tuple) -> tuple:
        total, seen = carry
        share = jax.tree_util.tree_map(lambda x: x[i], Chunk(plan.slots, plan.longest, plan.most_keys))
        shared = Shared(received, shelf, rng, room, algorithm.choose, public or {}, round_number)
        done = (run_lanes or _run_lanes)(algorithm, shared, share)
        lanes = Lanes(done.sent, lane_keys(shared, share.slots), share.most_keys)
        now = (done.counts, ~done.sent.valid & (share.slots.count > 0), done.norm, done.keep)
        seen = jax.tree_util.tree_map(lambda all, one: all.at[i].set(one), seen, now)
        return _add_lanes(total, lanes, algorithm.partition), seen

    nobody = zero_total(algorithm.aggregator, algorithm.partition, params)
    no = jnp.zeros(plan.slots.count.shape, bool)
    norms = jnp.zeros(plan.slots.count.shape)
    carry, begin = (nobody, (no, no, norms, dict(plan.slots.kept))), jnp.int32(0)
    for number, room in enumerate(rooms):
        carry = jax.lax.fori_loop(begin, plan.ends[number], partial(chunk, room), carry)
        begin = plan.ends[number]
    total, (used, broken, norm, keep) = carry
    return Summed(added_up(total), used, broken, norm, keep)


def _run_lanes(algorithm: Algorithm, shared: Shared, share: Chunk) -> Done:
    """Run the clients of a chunk side by side. Leaves of the result have a leading lane axis."""

    def lane(slot: Slots, longest: jax.Array) -> Done:
        return contribute(algorithm, lane_client(algorithm, shared, slot, longest))

    return over_lanes(lane, share.slots, share.longest)


def one_round(
    algorithm: Algorithm,
    state: ServerState,
    shelf: Shelf,
    plan: Plan,
    rng: jax.Array,
    rooms: Sequence[Mapping[str, int]],
    round_number: Any = None,
    run_lanes: Callable[..., Done] | None = None,
) -> tuple[ServerState, Outcome]:
    """FedRecon's Algorithm 1, one iteration of the server's loop, on this device's part of the cohort. `rooms` and
    `run_lanes` are as in `cohort_total`."""
    public = state.aggregator.get(PUBLIC)
    cohort = cohort_total(algorithm, state.params, shelf, plan, rng, rooms, public, round_number, run_lanes)
    state, total = finish(algorithm, state, cohort.total, rng)
    return state, Outcome(total.clients, total.weight, total.loss, is_finite(state), *cohort[1:])


def _nothing_yet(plan: Plan) -> Outcome:
    """Empty arrays for the outcomes of all rounds of a plan. `eval_shape` could find their shapes, but it
    would trace the round a second time."""
    number = jnp.zeros(plan.longest.shape[0])
    slots = jnp.zeros(plan.slots.count.shape, bool)
    keep = {path: jnp.zeros_like(kept) for path, kept in plan.slots.kept.items()}
    return Outcome(
        clients=number,
        weight=number,
        loss=Sums(number, number),
        finite=number.astype(bool),
        used=slots,
        broken=slots,
        norm=jnp.zeros(plan.slots.count.shape),
        keep=keep,
    )


def compile_rounds(
    build: Build,
    mesh: Mesh,
    rooms: Sequence[Mapping[str, int]],
    sweep: bool = False,
    apart: bool = False,
    tables: Rowwise = WHOLE,
) -> Any:
    """A jitted function `(rates, state, shelf, plan, rng, first, num_rounds) -> (state, outcomes)`.

    It runs `num_rounds` rounds, starting with number `first`. The plan may hold more rounds. The number of
    rounds is a value, so one program is used for every call. How rounds are divided into calls does not
    change any bit of the result.

    With `sweep`, rates, state, plan slots and rng have a leading axis of runs. All runs are computed side by
    side. The mesh then has an axis of runs too, over which they are spread. With `apart`, each device has a shelf
    of its own, and the shelf a leading axis of devices. `tables` says where the state's tables are.
    """

    def rounds(rates, state, shelf, plan, rng, first, num_rounds):
        algorithm = build(rates)

        def turn(state: ServerState, i: jax.Array) -> tuple[ServerState, Outcome]:
            here = jax.tree_util.tree_map(lambda x: x[i], plan)
            share = (shelf, here, jax.random.fold_in(rng, first + i), rooms, first.astype(jnp.int32) + i)
            if not plan.tables:
                return one_round(algorithm, state, *share)
            cut = tables.take(algorithm.partition, algorithm.optimizer, state, here.tables)
            cut, outcome = one_round(algorithm, cut, *share)
            return tables.put(algorithm.partition, algorithm.optimizer, state, here.tables, cut), outcome

        def body(i: jax.Array, carry: tuple[ServerState, Outcome]) -> tuple[ServerState, Outcome]:
            state, outcome = turn(carry[0], i)
            return state, jax.tree_util.tree_map(lambda all, one: all.at[i].set(one), carry[1], outcome)

        return jax.lax.fori_loop(0, num_rounds, body, (state, _nothing_yet(plan)))

    def on_device(rates, state, shelf, plan, rng, first, num_rounds):
        squeeze = lambda axis: lambda x: jnp.squeeze(x, axis)  # the device axis, 1 long inside shard_map
        slots = jax.tree_util.tree_map(squeeze(1 + sweep), plan.slots)
        longest, most_keys, ends = jax.tree_util.tree_map(
            squeeze(1), (plan.longest, plan.most_keys, plan.ends)
        )
        plan = Plan(slots, longest, most_keys, plan.tables, ends)
        shelf = jax.tree_util.tree_map(squeeze(0), shelf) if apart else shelf
        over_runs: Any = (0, 0, None, Plan(0, None, None, None, None), 0, None, None)  # pyright: ignore[reportArgumentType]
        run = jax.vmap(rounds, in_axes=over_runs) if sweep else rounds
        state, outcome = run(rates, state, shelf, plan, rng, first, num_rounds)
        spread = lambda x: jnp.expand_dims(x, 1 + sweep)
        return state, Outcome(*outcome[:4], *jax.tree_util.tree_map(spread, outcome[4:]))

    along = P(RUNS, None, AXIS) if sweep else P(None, AXIS)
    everywhere: Any = P()
    own: Any = P(RUNS) if sweep else P()  # what each run has of its own
    state_spec: Any = own if sweep else tables.spec
    plan_spec: Any = Plan(along, P(None, AXIS), P(None, AXIS), everywhere, P(None, AXIS))  # pyright: ignore[reportArgumentType]
    outcome_spec: Any = Outcome._make([own] * 4 + [along] * 4)
    mapped = jax.shard_map(
        on_device,
        mesh=mesh,
        in_specs=(own, state_spec, P(AXIS) if apart else everywhere, plan_spec, own, everywhere, everywhere),
        out_specs=(state_spec, outcome_spec),
        check_vma=False,
    )
    return jit_program(mapped, donate_argnums=(1,))


def compile_total(build: Build, mesh: Mesh, rooms: Sequence[Mapping[str, int]]) -> Any:
    """A jitted function `(rates, params, shelf, plan, rng, public, number) -> Summed`, for a plan of one round: the
    sum of its clients without a server's step. `rng` and `number` are the round's, and `public` is what every
    client is told. Tables in `params` have the rows that the plan's keys number. What happened to each client has a
    leading device axis."""

    def on_device(rates, params, shelf, plan, rng, public, number):
        summed = cohort_total(build(rates), params, shelf, _here(plan), rng, rooms, public, number)
        return summed.total, *jax.tree_util.tree_map(lambda x: x[None], summed[1:])

    out: Any = Summed._make([P(), *[P(AXIS)] * 4])
    return _on_mesh(lambda *given: Summed(*on_device(*given)), mesh, out)


def compile_each(build: Build, mesh: Mesh, rooms: Sequence[Mapping[str, int]]) -> Any:
    """Like `compile_total`, but nothing is added up: `... -> Done`, with axes [devices, chunks, lanes]. Memory
    grows with the cohort."""

    def on_device(rates, params, shelf, plan, rng, public, number):
        algorithm, here = build(rates), _here(plan)
        received = receive(algorithm.partition, params)
        shared = Shared(received, shelf, rng, rooms[0], algorithm.choose, public, number)
        chunks = Chunk(here.slots, here.longest, here.most_keys)
        done = jax.lax.map(partial(_run_lanes, algorithm, shared), chunks)
        return jax.tree_util.tree_map(lambda x: x[None], done)

    return _on_mesh(on_device, mesh, P(AXIS))


def _here(plan: Plan) -> Plan:
    """This device's part of a plan of one round, inside `shard_map`."""
    return jax.tree_util.tree_map(lambda x: x[0, 0], plan._replace(tables={}))


def _on_mesh(on_device: Callable[..., Any], mesh: Mesh, out: Any) -> Any:
    """Compile `(rates, params, shelf, plan, rng, public, number)` over the devices, which share the clients."""
    everywhere, along = P(), P(None, AXIS)
    plan: Any = Plan(along, along, along, {}, along)  # pyright: ignore[reportArgumentType]
    mapped = jax.shard_map(
        on_device,
        mesh=mesh,
        in_specs=(everywhere, everywhere, everywhere, plan, everywhere, everywhere, everywhere),
        out_specs=out,
        check_vma=False,
    )
    return jit_program(mapped)
