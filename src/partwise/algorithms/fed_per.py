"""Personalised learning by clients that keep their local part from round to round: FedPer, LG-FedAvg, FedRep.

All three divide a model into a part that clients share and a part that each keeps, trains and never sends.
Which part is which is the partition's rule, and with that:

* FedPer (Arivazhagan et al., 2019, Algorithm 1): the last layers are local; both parts are trained together,
  `update.by_steps(joint=True)`, on all examples, and the shared one is averaged by numbers of examples.
* LG-FedAvg (Liang et al., 2020, Algorithm 1): the same, with the representation local and the last layers shared.
* FedRep (Collins et al., 2021, Algorithm 1): the head is local and the parts take turns: first `local`, steps on
  the head from where it was, then `update`, steps on the representation with the head frozen.

What clients keep is as old as their last round: the fewer take part in a round, the staler it is, and who never
took part has nothing. Federated Reconstruction keeps nothing for that reason (FedRecon, section 4, appendix A).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import jax.numpy as jnp

from partwise.algorithm import Algorithm, change, choices
from partwise.client.evaluate import evaluate
from partwise.client.fit import Trained
from partwise.client.reconstruct import Reconstruct
from partwise.client.split import everything
from partwise.client.state import Client, Progress, begin, local_values, total_weight, with_deltas
from partwise.client.update import Update
from partwise.model.partition import Partition
from partwise.model.spec import Model
from partwise.randomness import child
from partwise.selection.choose import Choice
from partwise.server.mean import Aggregator, mean
from partwise.server.optimizers import Optimizer
from partwise.server.total import Report
from partwise.types import UserError

BEGAN = (
    "began"  # kept beside the local leaves: 1 after a client's first round, lest zeros be taken for values
)


def fed_per(
    model: Model,
    partition: Partition,
    *,
    update: Update,
    optimizer: Optimizer,
    local: Reconstruct | None = None,
    aggregator: Aggregator | None = None,
    choose: Mapping[str, Choice] | None = None,
    check: Callable[[Client], None] | None = None,
) -> Algorithm:
    """Clients that go on from the local part they kept; initial values before their first round.

    `local` is what they do to it before `update`, which trains it along if it is joint. Evaluation is with the
    part that a client kept, on all its examples.
    """
    _check(partition)

    def train(client: Client, start: Progress) -> Trained:
        if local is not None:
            apart = client._replace(rng=child(client.rng, "local"))  # randomness of its own
            start = local(apart, start, everything)
        return update(client, start, everything)

    def client_update(client: Client) -> Report:
        trained = train(client, resume(client))
        keep = {**local_values(client, trained.progress), BEGAN: jnp.ones(())}
        changed = change(client, with_deltas(client, trained.progress))
        return Report(changed, total_weight(client, everything), trained.loss, keep)

    def personalize(client: Client, start: Progress) -> Progress:
        return start._replace(local=local_values(client, train(client, start).progress))

    keeps = (*partition.local_paths, BEGAN)
    return Algorithm(
        model,
        partition,
        client_update,
        personalize,
        lambda client: evaluate(client, resume(client), everything),
        aggregator or mean(),
        optimizer,
        choices(partition, choose),
        check,
        keeps=keeps,
        judged_with=keeps,
    )


def resume(client: Client) -> Progress:
    """What was received, and the local part that the client kept; initial values if it never took part."""
    fresh = begin(client)
    began = client.kept[BEGAN] > 0
    return fresh._replace(
        local={path: jnp.where(began, client.kept[path], leaf) for path, leaf in fresh.local.items()}
    )


def _check(partition: Partition) -> None:
    if not partition.local_paths:
        raise UserError(
            "clients of FedPer, FedRep and LG-FedAvg keep a local part, and nothing of this model is local. Make a "
            "part of it local(), or use fed_avg."
        )
    if BEGAN in partition.paths:
        raise UserError(
            f"parameter '{BEGAN}': clients keep a number of that name beside their parameters; rename it"
        )
