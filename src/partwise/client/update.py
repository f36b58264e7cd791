"""The client update algorithm U (FedRecon, Algorithm 1): shared and keyed parameters on the query set."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from partwise.client.batches import Batches
from partwise.client.fit import ClientOptimizer, Extra, Trained, fit
from partwise.client.solve import check_quadratic, loss_of, solve
from partwise.client.split import Subset
from partwise.client.state import Client, Group, Progress
from partwise.model.partition import DEFAULT
from partwise.types import UserError

Update = Callable[[Client, Progress, Subset], Trained]
SERVED: tuple[Group, ...] = ("shared", "keyed")


def by_steps(
    schedule: Batches,
    optimizer: ClientOptimizer,
    joint: bool = False,
    extra: Callable[[Client], Extra] | None = None,
) -> Update:
    """k_u gradient steps on the query set.

    Args:
        schedule: Batch size, epochs and steps.
        optimizer: A rate for SGD, or an optax transformation.
        joint: Whether the local part is trained too (FedRecon, appendix D). By default it is frozen.
        extra: client -> a function of the progress, whose result is added to the gradient of the loss.
    """
    schedule.check("update")
    groups: tuple[Group, ...] = (*SERVED, "local") if joint else SERVED
    return lambda client, progress, query: fit(
        client, progress, query, schedule, optimizer, groups, extra(client) if extra else None
    )


def by_solving(pull: Any, batch_size: int = 32) -> Update:
    """The minimum over the shared and keyed parts. They are pulled to what was received, with strength `pull`
    (patent claim 5: the global half of alternating minimisation). The loss that it tells is the one before.

    The mean of clients' minima is not the minimum of their mean loss: where clients differ, training ends beside
    it, the nearer the stronger the pull (docs/concepts.md).
    """

    def procedure(client: Client, progress: Progress, query: Subset) -> Trained:
        _check_defaults(client)
        loss = loss_of(client, progress, query, batch_size)
        return Trained(solve(client, progress, query, SERVED, pull, batch_size), loss)

    return procedure


def check_solvable(client: Client) -> None:
    """Raise `UserError` unless this client's loss is least squares in the shared and keyed parts."""
    _check_defaults(client)
    check_quadratic(client, SERVED)


def _check_defaults(client: Client) -> None:
    if any(path.startswith(DEFAULT) for path in client.received.shared):
        raise UserError(
            "the closed-form update cannot train a learned default along with what multiplies it: "
            "use update.method = steps, or local(initial='zero')"
        )
