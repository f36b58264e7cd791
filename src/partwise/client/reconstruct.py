"""The reconstruction algorithm R (FedRecon, Algorithm 1): local parameters from the support set.

Each function here makes a procedure that changes only the local part. The other parts stay as the client has
them: as received, or, after a pass of alternating minimisation, as that pass left them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from partwise.client.batches import Batches
from partwise.client.fit import ClientOptimizer, fit
from partwise.client.solve import check_quadratic, solve
from partwise.client.split import Subset
from partwise.client.state import Client, Progress, anchor, rebuilding, total_weight
from partwise.types import UserError

Reconstruct = Callable[[Client, Progress, Subset], Progress]


def by_steps(schedule: Batches, optimizer: ClientOptimizer, pull: Any = 0.0) -> Reconstruct:
    """k_r gradient steps (FedRecon, section 4; patent claim 4).

    Args:
        schedule: Batch size, epochs and steps.
        optimizer: A rate for SGD, or an optax transformation.
        pull: If above 0, pull * |l - default|^2 is added to the summed loss of the support set (the patent's
            regularisation). The default is the learned one, or zero.
    """
    schedule.check("reconstruct")
    pulled = not (isinstance(pull, float | int) and pull == 0)

    def procedure(client: Client, progress: Progress, support: Subset) -> Progress:
        count = jnp.maximum(total_weight(client, support), 1)
        target = anchor(client, progress).local

        def pulling(now: Progress) -> dict[str, dict[str, jax.Array]]:
            return {"local": {path: 2 * pull / count * (x - target[path]) for path, x in now.local.items()}}

        more = pulling if pulled else None
        trained = fit(rebuilding(client), progress, support, schedule, optimizer, ("local",), more)
        return trained.progress

    return procedure


def by_solving(pull: Any, batch_size: int = 32) -> Reconstruct:
    """The minimum, for losses that are least squares in the local part (patent: closed form).

    More than 512 numbers are found by conjugate gradients. If examples are fewer than these and the pull is tiny,
    their loss may be a ten-thousandth above the minimum.
    """
    if isinstance(pull, float | int) and pull < 0:
        raise UserError(f"the pull of a closed-form reconstruction must not be negative, not {pull}")
    return lambda client, progress, support: solve(
        rebuilding(client), progress, support, ("local",), pull, batch_size
    )


def check_solvable(client: Client) -> None:
    """Raise `UserError` unless this client's loss is least squares in the local part."""
    check_quadratic(rebuilding(client), ("local",))


def skip() -> Reconstruct:
    """No reconstruction (k_r = 0): local parameters stay at their initial values."""
    return lambda client, progress, support: progress
