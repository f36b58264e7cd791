"""A site with many clients of its own (a hospital, a company), which runs them in compiled lanes.

It is to `Device` what the compiled cohort is to the plain loop. For the clients that were chosen in a round, it
asks for the keys of all of them, receives these slices once, and returns one sum. From a sum, the server does not
learn what a single client contributed. Or it returns one contribution per client, as devices would.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from partwise.algorithm import Build, Done, check_keys_stay
from partwise.data.ragged import pad
from partwise.data.store import ClientStore
from partwise.metrics import to_host
from partwise.server.messages import Slices, read_slices
from partwise.server.total import Contribution, Total
from partwise.simulation.compiled import Summed, compile_each, compile_total
from partwise.simulation.kept import Kept
from partwise.simulation.loop import LANES, fits
from partwise.simulation.mesh import make_mesh
from partwise.simulation.stage import Plan
from partwise.simulation.staging import Staged, Stager
from partwise.types import UserError

KeptByPlace = Mapping[int, Mapping[str, np.ndarray]]  # of those clients that keep something


class SiteAsked(NamedTuple):
    """The keys that some clients of a site ask for together. It keeps this until the slices come."""

    keys: Mapping[str, np.ndarray]  # of any of the clients, sorted
    missed: int  # ids of the clients' examples that are not among their keys
    places: np.ndarray  # the clients' positions in the store
    staged: Staged


class SiteTotal(NamedTuple):
    """The sum of what a site's clients contribute, and what stays at the site."""

    sent: Contribution  # keyed leaves: the rows of `SiteAsked.keys`
    kept: dict[int, dict[str, np.ndarray]]  # by place: what the clients keep now
    broken: tuple[int, ...]  # places of clients whose update was not finite; they are not in the sum


class SiteEach(NamedTuple):
    """What each client of a site contributes, by place, and what stays at the site."""

    sent: dict[int, Contribution]  # keyed leaves: the rows of the client's own keys
    keys: dict[int, dict[str, np.ndarray]]
    kept: dict[int, dict[str, np.ndarray]]


class Site:
    """The clients of a store. Programs are compiled in the first round, and again only if a later round has more
    clients, keys or examples than any before.

    Args:
        build: Makes the algorithm from its rates.
        rates: The rates.
        store: The examples of the site's clients.
        lanes: How many clients run side by side on a device. Memory grows with it.
        num_devices: How many devices to use (default: all).
    """

    def __init__(
        self,
        build: Build,
        rates: Mapping[str, float],
        store: ClientStore,
        *,
        lanes: int | None = None,
        num_devices: int | None = None,
    ):
        self.algorithm, self.store = build(dict(rates)), store
        check_keys_stay(self.algorithm)
        self._rates = {name: jnp.asarray(rate, jnp.float32) for name, rate in rates.items()}
        mesh = make_mesh(num_devices)
        self.lanes = max(min(lanes or LANES, -(-store.num_clients // mesh.size)), 1)
        self._stager = Stager(self.algorithm, store, mesh, fits(store), 0)
        self._total = compile_total(build, mesh, self._stager.rooms)
        self._each = compile_each(build, mesh, self._stager.rooms)

    def ask(self, places: Sequence[int] | np.ndarray, seed: int = 0, round_number: int = 0) -> SiteAsked:
        """Let the clients at these positions of the store choose their keys, each as it would on a device."""
        clients = self._checked(places)
        staged = self._stager.stage([clients], 1, self.lanes, seed, round_number, cut_tables=True)
        partition = self.algorithm.partition
        every = lambda space: np.arange(partition.num_keys(space), dtype=np.int32)
        keys = {s: staged.rows[s][0] if s in staged.rows else every(s) for s in partition.spaces}
        return SiteAsked(keys, int(staged.wanted.missed.sum()), clients, staged)

    def total(
        self,
        message: bytes | Slices,
        asked: SiteAsked,
        kept: KeptByPlace | None = None,
        clients: int | None = None,
    ) -> SiteTotal:
        """Run a round on the clients that asked, and add up what they contribute.

        Args:
            message: The slices of `asked.keys` that the server sent.
            asked: What they asked for.
            kept: What they kept from their last rounds, by place.
            clients: Of how many clients the server expects the sum, if some of them could not be asked (default:
                those that asked).
        """
        room = self._room(asked, kept)
        summed: Summed = to_host(self._total(self._rates, *self._given(message, asked, room)))
        lost = tuple(sorted(self._places(asked)[np.asarray(summed.broken)].tolist()))
        valid = bool(summed.used.any()) or not lost
        sent = self._cut(summed.total, asked, valid, clients or len(asked.places))
        return SiteTotal(sent, self._keep(asked, kept, room, summed.used, summed.keep), lost)

    def each(self, message: bytes | Slices, asked: SiteAsked, kept: KeptByPlace | None = None) -> SiteEach:
        """Like `total`, but with one contribution per client. All are in memory at the same time."""
        room = self._room(asked, kept)
        done: Done = to_host(self._each(self._rates, *self._given(message, asked, room)))
        places, slots = self._places(asked), asked.staged.plan.slots
        sent, keys = {}, {}
        for at in zip(*np.nonzero(places >= 0), strict=True):
            mine = {space: self._keys_at(asked, space, at) for space in slots.key_count}
            one: Contribution = jax.tree_util.tree_map(lambda x, at=at: x[at], done.sent)
            rows = lambda path, leaf, mine=mine: leaf[: len(mine[s])] if (s := self._space(path)) else leaf
            update = {path: rows(path, leaf) for path, leaf in one.update.items()}
            place = int(places[at])
            sent[place], keys[place] = one._replace(update=update), mine
        return SiteEach(sent, keys, self._keep(asked, kept, room, done.counts, done.keep))

    def _checked(self, places: Sequence[int] | np.ndarray) -> np.ndarray:
        clients, most = np.asarray(places), self.store.num_clients
        whole = clients.ndim == 1 and len(clients) > 0 and np.issubdtype(clients.dtype, np.integer)
        if not whole or clients.min() < 0 or clients.max() >= most or len(np.unique(clients)) < len(clients):
            raise UserError(
                f"a site runs some of its clients, each once, by their positions 0 to {most - 1} in the store, "
                f"not {clients.tolist()}"
            )
        return clients

    def _given(
        self, message: bytes | Slices, asked: SiteAsked, room: Kept | None
    ) -> tuple[Any, Any, Plan, Any, Any, np.int32]:
        """Everything that a round needs except the rates."""
        partition, staged = self.algorithm.partition, asked.staged
        slices = message if isinstance(message, Slices) else read_slices(partition, message, asked.keys)
        params = {path: self._padded(path, leaf, asked) for path, leaf in slices.params.items()}
        plan = staged.plan._replace(tables={})
        if room:
            before = room.take(plan.slots.client[0], self._stager.rows_kept())
            slots = plan.slots._replace(kept={path: each[None] for path, each in before.items()})
            plan = plan._replace(slots=slots)
        rng = jax.random.wrap_key_data(jnp.asarray(slices.rng))
        return params, staged.shelf, plan, rng, dict(slices.public), np.int32(slices.about.version)

    def _padded(self, path: str, leaf: np.ndarray, asked: SiteAsked) -> np.ndarray:
        """A leaf of the server, as large as the plan's tables."""
        space, tables = self._space(path), asked.staged.plan.tables
        if space and len(leaf) != len(asked.keys[space]):
            raise UserError(
                f"the slices have {len(leaf)} rows of '{path}', and {len(asked.keys[space])} were asked for"
            )
        return pad(np.asarray(leaf), tables[space].shape[1]) if space in tables else leaf

    def _cut(self, total: Total, asked: SiteAsked, valid: bool, clients: int) -> Contribution:
        """The sum without padding. One client alone sends no `held`: that is its weight in every row."""
        rows = lambda leaf, space: leaf[: len(asked.keys[space])] if space else leaf
        update = {path: rows(leaf, self._space(path)) for path, leaf in total.update.items()}
        held = {space: rows(leaf, space) for space, leaf in total.held.items()} if clients > 1 else {}
        return Contribution(update, total.weight, total.clients, total.loss, jnp.asarray(valid), held)

    def _space(self, path: str) -> str:
        role = self.algorithm.partition.roles.get(path)
        return (role.space or "") if role else ""

    def _places(self, asked: SiteAsked) -> np.ndarray:
        """The slots' clients as positions in the store [devices, chunks, lanes]; -1 means no client."""
        return asked.staged.clients[0]

    def _keys_at(self, asked: SiteAsked, space: str, at: tuple) -> np.ndarray:
        """The keys of the client in one slot."""
        slots, cut = asked.staged.plan.slots, asked.staged.shelf.keys
        if space not in asked.staged.rows:
            return asked.keys[space]
        start, count = slots.key_start[space][0][at], slots.key_count[space][0][at]
        return asked.keys[space][np.asarray(cut[space][start : start + count])]

    # What clients keep

    def _room(self, asked: SiteAsked, kept: KeptByPlace | None) -> Kept | None:
        """What the clients kept, as arrays over the staged population; None if the algorithm keeps nothing."""
        if not self.algorithm.keeps:
            return None
        room, clients = Kept(self.algorithm, asked.staged.population), asked.staged.plan.slots.client[0]
        for place, client in zip(self._places(asked).ravel().tolist(), clients.ravel().tolist(), strict=True):
            if kept and kept.get(place):
                room.give(client, kept[place])
        return room

    def _keep(
        self,
        asked: SiteAsked,
        kept: KeptByPlace | None,
        room: Kept | None,
        used: Any,
        keep: Mapping[str, Any],
    ) -> dict[int, dict[str, np.ndarray]]:
        """What the clients keep now. One that did not take part keeps what it had."""
        if room is None:
            return {}
        places, client = self._places(asked), asked.staged.plan.slots.client[0]
        room.put(np.where(used, client, -1), keep)
        before = {place: dict(kept[place]) for place in asked.places.tolist() if kept and kept.get(place)}
        return before | {
            int(places[at]): room.of(int(client[at])) for at in zip(*np.nonzero(used), strict=True)
        }
