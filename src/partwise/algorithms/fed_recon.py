"""Federated Reconstruction (Singhal et al., 2021), Algorithm 1, and its variants as values of its arguments."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from partwise.algorithm import Algorithm, change, choices
from partwise.client.evaluate import evaluate
from partwise.client.fit import Trained
from partwise.client.reconstruct import Reconstruct
from partwise.client.split import Split, everything
from partwise.client.state import Client, Progress, begin, total_weight, with_deltas
from partwise.client.update import Update
from partwise.metrics import Measured, zero_sums
from partwise.model.partition import Partition
from partwise.model.spec import Model
from partwise.randomness import child
from partwise.selection.choose import Choice
from partwise.server.mean import Aggregator, mean
from partwise.server.optimizers import Optimizer
from partwise.server.total import Report


def fed_recon(
    model: Model,
    partition: Partition,
    *,
    split: Split,
    reconstruct: Reconstruct,
    update: Update,
    optimizer: Optimizer,
    aggregator: Aggregator | None = None,
    passes: int = 1,
    evaluation_split: Split | None = None,
    choose: Mapping[str, Choice] | None = None,
    check: Callable[[Client], None] | None = None,
    fine_tune: Update | None = None,
) -> Algorithm:
    """S, R, U and the server step.

    passes > 1 repeats R and U on the client, each from where the other ended: alternating minimisation
    (patent claim 5). Evaluation is RECONEVAL: R on the support set, metrics on the query set of
    `evaluation_split` (default: `split`); with `fine_tune`, after steps on shared and keyed parts too, on the
    support set again (section 5.2, FedRecon + Finetune).
    """
    evaluated = evaluation_split or split

    def client_update(client: Client) -> Report:
        trained = Trained(begin(client), zero_sums())
        for number in range(passes):
            here = _phase(client, 2 * number)
            progress = reconstruct(here, trained.progress, split.support)  # l_i <- R(D_s, L, g)
            trained = update(_phase(client, 2 * number + 1), progress, split.query)  # g_i <- U(D_q, l_i, g)
        weight = total_weight(client, split.query)  # n_i <- |D_q|
        return Report(change(client, with_deltas(client, trained.progress)), weight, trained.loss)

    def personalize(client: Client, start: Progress) -> Progress:
        return reconstruct(_phase(client, 0), start, everything)

    def recon_eval(client: Client) -> Measured:
        rebuilt = reconstruct(_phase(client, 0), begin(client), evaluated.support)
        if fine_tune:
            rebuilt = fine_tune(_phase(client, 1), rebuilt, evaluated.support).progress
        return evaluate(client, rebuilt, evaluated.query)

    return Algorithm(
        model,
        partition,
        client_update,
        personalize,
        recon_eval,
        aggregator or mean(),
        optimizer,
        choices(partition, choose),
        check,
    )


def _phase(client: Client, number: int) -> Client:
    """The client with randomness of its own for this phase of the round."""
    return client._replace(rng=child(client.rng, f"phase {number}"))
