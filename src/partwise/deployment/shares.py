"""What a task on a device is made of: its clients, and the share that each of them has in it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from partwise.data.store import ClientStore
from partwise.deployment.jobs import Job
from partwise.device import Asked
from partwise.metrics import Measured, Sums
from partwise.model.partition import Partition
from partwise.randomness import EVALUATION_ROUND, round_rng
from partwise.server.messages import Invitation, Slices, key_data
from partwise.types import UserError


class Share(NamedTuple):
    """One client's share in a task: what it was given, and what it keeps."""

    client: str
    message: bytes | Slices
    examples: ClientStore
    asked: Asked
    kept: Mapping[str, np.ndarray]


def large_enough(store: ClientStore, least: int) -> dict[str, int]:
    """The places of the clients that have so many examples, by name."""
    names = store.client_ids.tolist()
    return {str(names[place]): place for place in np.flatnonzero(store.counts >= least).tolist()}


def clients_of(job: Job) -> Sequence[str]:
    """The clients of a task. Of one client, the invitation says which it is."""
    return job.clients if len(job.clients) > 1 else (job.invitation.client,)


def rows_of(
    partition: Partition, slices: Slices, keys: Mapping[str, np.ndarray], own: Mapping[str, np.ndarray]
) -> Slices:
    """The slices of one client's own keys, from those of the keys of several (both sorted)."""
    places = {space: np.searchsorted(keys[space], each) for space, each in own.items()}
    keyed = partition.of("keyed")
    cut = lambda path, leaf: leaf[places[partition.roles[path].space]] if path in keyed else leaf
    return slices._replace(params={path: cut(path, leaf) for path, leaf in slices.params.items()})


def moved(leaf: np.ndarray, keys: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """The rows of these keys as rows of the wanted ones (both sorted); zeros where there was none."""
    if np.array_equal(keys, wanted):
        return leaf
    rows = np.zeros((len(wanted), *leaf.shape[1:]), leaf.dtype)
    _, here, there = np.intersect1d(keys, wanted, assume_unique=True, return_indices=True)
    rows[there] = leaf[here]
    return rows


def sums_of(measured: Measured) -> dict[str, Sums]:
    """The metrics that are sums. Others would need the scores and labels of all examples, which stay here."""
    return {name: each for name, each in measured.items() if isinstance(each, Sums)}


def evaluation_rng(invitation: Invitation) -> np.ndarray:
    """The randomness of an evaluation, which is the same for all versions: files have that of their version's
    training."""
    return key_data(round_rng(invitation.seed, EVALUATION_ROUND))


def check_invitation(invitation: Invitation) -> None:
    """Raise `UserError` if a task is not what a server may send."""
    here = invitation.about
    values = {**invitation._asdict(), **here._asdict()}
    for name, kind in {"client": str, "run": str, "task": str, "model": str}.items():
        if not isinstance(values[name], kind) or len(values[name]) > 1000:
            raise UserError(f"its {name} is {str(values[name])[:100]!r}")
    for name in ("seed", "round", "version"):
        if type(values[name]) is not int or not 0 <= values[name] < 2**63:
            raise UserError(f"its {name} is {str(values[name])[:100]!r}")
