"""How ill-conditioned heat makes the global objective, and what the correction does (FedSubAvg, section 4).

FedAvg descends an objective with the Hessian H = 1/N sum H_i, with equal weights for all clients. FedSubAvg
descends one with the Hessian D^(1/2) H D^(1/2), D = diag(N / n_m) (equation 2). Both are dense here, for a
few hundred features. Use `sparse_conditioning` for more.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from partwise.data.checks import check_keys, check_known
from partwise.data.heat import Heat, coefficients
from partwise.data.store import ClientStore
from partwise.types import UserError

ROUNDING = 1e-12  # an eigenvalue that is smaller than this, relative to the largest, counts as 0


class ClientHessian(NamedTuple):
    """The second derivatives of one client's objective in the parameters that it holds."""

    held: np.ndarray  # [k] S(i), the indices of its parameters
    hessian: np.ndarray  # [k, k]


class Conditioning(NamedTuple):
    """Condition numbers, and the paper's bounds on them for objectives that are convex on every client (alpha
    = 0).

    rho_1, rho_2:         the smallest and the largest eigenvalue of any client's Hessian (Assumption 1)
    lower:                Theorem 1: condition >= (n_max / n_min) rho_1 / rho_2
    upper, corrected_upper: Theorem 2's k = rho_2 n_max / (N sigma_min) and its counterpart after correction
    corrected_bound:      Theorem 2: corrected <= rho_2 / rho_1
    """

    condition: float
    corrected: float
    dispersion: float
    rho_1: float
    rho_2: float
    lower: float
    upper: float
    corrected_upper: float
    corrected_bound: float


def conditioning(clients: Iterable[ClientHessian], num_parameters: int) -> Conditioning:
    """The condition numbers of the mean of the clients' Hessians, without and with the correction by heat.

    Parameters that no client holds are left out. A client's Hessian must be positive definite.
    """
    total, counts = np.zeros((num_parameters, num_parameters)), np.zeros(num_parameters, np.int64)
    num_clients, rho_1, rho_2 = 0, np.inf, 0.0
    for held, hessian in clients:
        num_clients += 1
        if not len(held):
            continue
        eigenvalues = np.linalg.eigvalsh(hessian)
        rho_1, rho_2 = min(rho_1, float(eigenvalues[0])), max(rho_2, float(eigenvalues[-1]))
        total[np.ix_(held, held)] += hessian
        counts[held] += 1
    check_curved(rho_1, rho_2)
    return _compare(total / num_clients, Heat("", counts, num_clients), rho_1, rho_2)


def check_curved(rho_1: float, rho_2: float) -> None:
    """Raise `UserError` unless the clients' Hessians are positive definite."""
    if not ROUNDING * rho_2 < rho_1 < np.inf:
        raise UserError(
            f"the least eigenvalue of a client's Hessian is {rho_1:g}, and the theorems need more than 0 "
            f"(Assumption 1): give clients that hold something, and an l2 above 0"
        )


def _compare(hessian: np.ndarray, heat: Heat, rho_1: float, rho_2: float) -> Conditioning:
    held = np.flatnonzero(heat.counts)
    root = np.sqrt(coefficients(heat)[held].astype(float))
    hessian = hessian[np.ix_(held, held)]
    values, corrected = np.linalg.eigvalsh(hessian), np.linalg.eigvalsh(root[:, None] * hessian * root)
    return bounded((values[0], values[-1]), (corrected[0], corrected[-1]), heat, rho_1, rho_2)


def bounded(
    plain: tuple[float, float], corrected: tuple[float, float], heat: Heat, rho_1: float, rho_2: float
) -> Conditioning:
    """Condition numbers with their bounds, from (smallest, largest) eigenvalues without and with the
    correction."""
    least, most = int(heat.counts[heat.counts > 0].min()), int(heat.counts.max())
    return Conditioning(
        condition=float(plain[1] / plain[0]),
        corrected=float(corrected[1] / corrected[0]),
        dispersion=most / least,
        rho_1=rho_1,
        rho_2=rho_2,
        lower=most * rho_1 / (least * rho_2),
        upper=float(rho_2 * most / (heat.total * plain[0])),
        corrected_upper=float(rho_2 / corrected[0]),
        corrected_bound=rho_2 / rho_1,
    )


def logistic_hessians(
    store: ClientStore, column: str, num_features: int, weights: np.ndarray | None = None, l2: float = 0.01
) -> Iterator[ClientHessian]:
    """Every client's Hessian of a logistic regression on one-hot features.

    The objective of a client is the mean loss of its examples + (l2 / 2) |w|^2 over the features that it
    holds. Without the second term, a client with fewer examples than features has flat directions, and rho_1
    is 0.

    Args:
        store: The clients.
        column: The column with the features of every example, [N] or [N, L]; -1 for none.
        num_features: The number of features.
        weights: [num_features], where the Hessian is computed (default: 0).
        l2: The strength of the second term.
    """
    check_known([column], store.columns)
    weights = np.zeros(num_features) if weights is None else np.asarray(weights, float)
    for position in range(store.num_clients):
        ids = store.examples(position)[column]
        check_keys(column, ids, column, num_features, lowest=-1)
        yield _logistic_hessian(ids.reshape(len(ids), -1), weights, l2)


def _logistic_hessian(ids: np.ndarray, weights: np.ndarray, l2: float) -> ClientHessian:
    held = np.unique(ids[ids >= 0])
    features = np.zeros((len(ids), len(held)))
    example, place = np.nonzero(ids >= 0)
    np.add.at(features, (example, np.searchsorted(held, ids[example, place])), 1.0)
    chance = 1 / (1 + np.exp(-features @ weights[held]))
    curvature = features * (chance * (1 - chance))[:, None] / max(len(ids), 1)
    return ClientHessian(held, features.T @ curvature + l2 * np.eye(len(held)))
