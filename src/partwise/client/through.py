"""An update that sees the reconstruction: one gradient step on shared and keyed parts, through the closed form.

FedRecon's update holds the rebuilt local part x fixed. But x depends on what was received, g: it is where the
gradient of the support set's loss s, and of the pull, is zero. By the implicit function theorem the gradient of
the query set's loss q is

    dq/dg = d_g q - d_g (v . d_x s),   v = H^-1 d_x q,   H = d_xx s + 2 pull,

with v held fixed. So the support set may have a loss of its own (`Model.rebuild_loss`), and what is in it is
learned by how well the rebuilt part predicts other examples.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from partwise.client.batches import Batches, Drawn, over_batches
from partwise.client.fit import Trained, add_rows
from partwise.client.solve import curvature, raveled, solve_positive
from partwise.client.split import Subset
from partwise.client.state import (
    Client,
    Progress,
    batch_loss,
    get_parts,
    put_parts,
    read,
    rebuilding,
    with_deltas,
)
from partwise.client.update import SERVED, Update
from partwise.metrics import Sums, add_sums, zero_sums
from partwise.randomness import child
from partwise.selection.slices import BatchRows
from partwise.types import UserError

BATCH = 32


class Through(NamedTuple):
    """One step of SGD on the mean loss of the query set, through a closed-form reconstruction.

    Attributes:
        pull: The pull of the reconstruction.
        rate: The learning rate.
        batch_size: Examples in memory at the same time. It does not change the result.
    """

    pull: Any
    rate: Any
    batch_size: int = BATCH

    def given(self, support: Subset) -> Update:
        """The update of a client whose local part was rebuilt from this support set."""
        return _through(support, *self)


def _through(support: Subset, pull: Any, rate: Any, batch_size: int) -> Update:
    schedule = Batches(batch_size)

    def procedure(client: Client, progress: Progress, query: Subset) -> Trained:
        progress, own = with_deltas(client, progress), rebuilding(client)
        x, rebuild = raveled(progress, ("local",))
        if x.size == 0:
            raise UserError(
                "update.method = through needs a local part, and here nothing is local: use steps"
            )

        def of_query(parts: dict, x: jax.Array, need: BatchRows) -> tuple[jax.Array, Sums]:
            sums = _loss(client, progress, parts, rebuild(x)["local"], need)
            return sums.value, sums

        def of_support(parts: dict, need: BatchRows) -> jax.Array:
            loss = lambda x: _loss(own, progress, parts, rebuild(x)["local"], need).value
            return jax.jvp(loss, (x,), (v,))[1]

        def over_query(i: jax.Array, drawn: Drawn, carry: Any) -> Any:
            total, along, loss = carry
            parts, need = _parts(client, progress, drawn)
            (found, of_x), here = jax.grad(of_query, (0, 1), has_aux=True)(parts, x, need)
            return _added(client, total, found, need, 1.0), along + of_x, add_sums(loss, here)

        def over_support(i: jax.Array, drawn: Drawn, total: Any) -> Any:
            parts, need = _parts(client, progress, drawn)
            return _added(client, total, jax.grad(of_support)(parts, need), need, -1.0)

        zero = jax.tree_util.tree_map(jnp.zeros_like, get_parts(progress, SERVED))
        start = (zero, jnp.zeros_like(x), zero_sums())
        total, along, loss = over_batches(over_query, start, client.examples, query, schedule)
        v = solve_positive(curvature(own, progress, support, pull, batch_size), along)
        total = over_batches(over_support, total, client.examples, support, schedule)
        step = rate / jnp.maximum(loss.weight, 1)
        moved = jax.tree_util.tree_map(
            lambda p, g: (p - step * g).astype(p.dtype), get_parts(progress, SERVED), total
        )
        return Trained(put_parts(progress, moved), loss)

    return procedure


def _parts(client: Client, progress: Progress, drawn: Drawn) -> tuple[dict[str, Any], BatchRows]:
    """The shared parts, and the keyed rows of a batch; and the batch."""
    rows, need = read(client, progress, drawn)
    return get_parts(progress._replace(keyed=rows), SERVED), need


def _loss(client: Client, progress: Progress, parts: dict, local: Any, need: BatchRows) -> Sums:
    """The loss of a batch, as sums."""
    here = put_parts(progress, {**parts, "local": local})
    return batch_loss(client, here, parts["keyed"], need.batch, need.mask, child(client.rng, "through"))[1]


def _added(client: Client, total: Any, found: Any, need: BatchRows, sign: float) -> dict[str, Any]:
    """The total with a batch's gradients. An empty batch has none."""
    found = jax.tree_util.tree_map(lambda g: jnp.where(need.mask.any(), sign * g, 0), found)
    shared = jax.tree_util.tree_map(jnp.add, total["shared"], found["shared"])
    return {"shared": shared, "keyed": add_rows(client, total["keyed"], found["keyed"], need)}
