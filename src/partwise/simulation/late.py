"""Compiled rounds whose clients begin with older versions of the model (FedBuff; Nguyen et al., 2022).

A ring holds the last versions of what clients train: version v is in place v modulo the ring's depth. A lane reads
the version that its client began with: shared leaves by its place, rows of tables at its place in one long table.
The rest is an ordinary round, of the same functions: an update that is s versions old is multiplied by a factor and
added to the same sum. A client's randomness, its keys and the round of its rates are those of the version that it
began with, as over a network.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from partwise.algorithm import Algorithm, Build, Done, contribute
from partwise.client.state import Client
from partwise.programs import jit_program
from partwise.randomness import client_rng
from partwise.server.step import ServerState, put_rows, take_rows, trainable
from partwise.server.total import PUBLIC
from partwise.simulation.compiled import (
    Chunk,
    Outcome,
    Shared,
    _nothing_yet,
    lane_client,
    one_round,
    over_lanes,
)
from partwise.simulation.mesh import AXIS
from partwise.simulation.stage import Plan, Slots


class Ring(NamedTuple):
    """The last versions [depth, ...] of tables and of what else clients train, and of what all clients are told."""

    params: Mapping[str, Any]
    public: Mapping[str, Any]


def _remembered(algorithm: Algorithm, state: ServerState) -> Ring:
    """What the ring holds of a state."""
    sent = {*trainable(algorithm.partition, state.params), *algorithm.partition.of("keyed")}
    params = {path: leaf for path, leaf in state.params.items() if path in sent}
    return Ring(params, dict(state.aggregator.get(PUBLIC, {})))


def ring_bytes(algorithm: Algorithm, state: ServerState, depth: int) -> int:
    """The memory that a ring needs, on every device."""
    return depth * sum(leaf.nbytes for leaf in jax.tree_util.tree_leaves(_remembered(algorithm, state)))


def new_ring(algorithm: Algorithm, state: ServerState, depth: int) -> Ring:
    """A ring that holds version 0 alone."""
    fill = lambda leaf: jnp.zeros((depth, *leaf.shape), leaf.dtype).at[0].set(leaf)
    return jax.tree_util.tree_map(fill, _remembered(algorithm, state))


class LateRound(NamedTuple):
    """A version that is being made.

    number:  of the current version
    ring:    the last versions
    factors: [depth] of an update, by its age
    tables:  space -> rows of the whole table, if the plan's keys number those of a cut one
    rng:     the run's randomness
    """

    number: Any
    ring: Ring
    factors: Any
    tables: Mapping[str, Any]
    rng: Any


def _late_client(algorithm: Algorithm, shared: Shared, now: LateRound, slot: Slots, longest: Any) -> Client:
    """The client of one lane, with what it was sent when it began."""
    client, partition = lane_client(algorithm, shared, slot, longest), algorithm.partition
    place = slot.version % len(now.factors)
    tables, keys = {}, dict(client.examples.keys)
    for space, paths in partition.spaces.items():
        each = keys[space].rows is None  # the client has all rows, and a table of its own
        num_keys = partition.num_keys(space)
        for path in paths:
            ring = now.ring.params[path]
            tables[path] = ring[place] if each else ring.reshape(-1, *ring.shape[2:])
        if not each:
            keys[space] = keys[space]._replace(whole=now.tables.get(space), shift=place * num_keys)
    return client._replace(
        received=client.received._replace(
            shared={path: now.ring.params[path][place] for path in client.received.shared}, tables=tables
        ),
        examples=client.examples._replace(keys=keys),
        rng=client_rng(jax.random.fold_in(now.rng, slot.version), slot.number),
        public={name: each[place] for name, each in now.ring.public.items()},
        round=slot.version,
    )


def _late_lanes(now: LateRound, algorithm: Algorithm, shared: Shared, share: Chunk) -> Done:
    """Run the clients of a chunk side by side. What they send is multiplied by the factor of their age."""

    def lane(slot: Slots, longest: Any) -> Done:
        done = contribute(algorithm, _late_client(algorithm, shared, now, slot, longest))
        factor = now.factors[now.number - slot.version]
        update = {path: leaf * factor for path, leaf in done.sent.update.items()}
        return done._replace(sent=done.sent._replace(update=update))

    return over_lanes(lane, share.slots, share.longest)


def compile_late(build: Build, mesh: Mesh, rooms: Sequence[Mapping[str, int]], factors: np.ndarray) -> Any:
    """A jitted function `(rates, state, ring, shelf, plan, rng, first, num_rounds) -> (state, ring, outcomes)`, as
    `compile_rounds` makes one. `factors` [depth] are those of updates by their age."""

    def rounds(rates, state, ring, shelf, plan, rng, first, num_rounds):
        algorithm = build(rates)

        def turn(state: ServerState, ring: Ring, i: jax.Array) -> tuple[ServerState, Outcome]:
            here = jax.tree_util.tree_map(lambda x: x[i], plan)
            number = first.astype(jnp.int32) + i
            late = partial(_late_lanes, LateRound(number, ring, jnp.asarray(factors), here.tables, rng))
            share = (shelf, here, jax.random.fold_in(rng, first + i), rooms, number, late)
            if not plan.tables:
                return one_round(algorithm, state, *share)
            cut = take_rows(algorithm.partition, algorithm.optimizer, state, here.tables)
            cut, outcome = one_round(algorithm, cut, *share)
            return put_rows(algorithm.partition, algorithm.optimizer, state, here.tables, cut), outcome

        def body(i: jax.Array, carry: tuple[ServerState, Ring, Outcome]) -> tuple[ServerState, Ring, Outcome]:
            state, outcome = turn(carry[0], carry[1], i)
            place = (first.astype(jnp.int32) + i + 1) % len(factors)
            put = lambda all, one, at: all.at[at].set(one)
            ring = jax.tree_util.tree_map(partial(put, at=place), carry[1], _remembered(algorithm, state))
            return state, ring, jax.tree_util.tree_map(partial(put, at=i), carry[2], outcome)

        return jax.lax.fori_loop(0, num_rounds, body, (state, ring, _nothing_yet(plan)))

    def on_device(rates, state, ring, shelf, plan, rng, first, num_rounds):
        mine = jax.tree_util.tree_map(lambda x: jnp.squeeze(x, 1), plan._replace(tables={}))
        state, ring, seen = rounds(
            rates, state, ring, shelf, mine._replace(tables=plan.tables), rng, first, num_rounds
        )
        used, broken, norm = jax.tree_util.tree_map(lambda x: x[:, None], (seen.used, seen.broken, seen.norm))
        return state, ring, seen._replace(used=used, broken=broken, norm=norm)

    everywhere: Any = P()
    along: Any = P(None, AXIS)
    plan_spec: Any = Plan(along, along, along, everywhere, along)
    outcome: Any = Outcome._make([everywhere] * 4 + [along] * 3 + [everywhere])
    mapped = jax.shard_map(
        on_device,
        mesh=mesh,
        in_specs=(
            everywhere,
            everywhere,
            everywhere,
            everywhere,
            plan_spec,
            everywhere,
            everywhere,
            everywhere,
        ),
        out_specs=(everywhere, everywhere, outcome),
        check_vma=False,
    )
    return jit_program(mapped, donate_argnums=(1, 2))
