"""Condition numbers of a logistic regression on tens of thousands of one-hot features (FedSubAvg, section 4).

`conditioning` has dense matrices. With one-hot features, only features of the same example interact. So H =
1/N sum H_i is sparse, and all of it fits into memory. Its largest and its smallest eigenvalue come from
Lanczos iterations (the smallest with a sparse factorisation of H). The clients' own largest eigenvalues come
from power iterations, for all clients side by side.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from scipy import sparse
from scipy.sparse.linalg import eigsh

from partwise.data.checks import check_known
from partwise.data.heat import count_heat
from partwise.data.ragged import owners
from partwise.data.store import ClientStore
from partwise.papers.conditioning import (
    Conditioning,
    bounded,
    check_curved,
    conditioning,
    logistic_hessians,
)

DENSE = 200  # up to this many features, matrices are dense
STEPS, TOLERANCE = 500, 1e-9  # the most iterations, and their relative tolerance


def logistic_conditioning(
    store: ClientStore, column: str, num_features: int, l2: float = 0.01
) -> Conditioning:
    """`conditioning` of `logistic_hessians` at weights of 0, without a dense matrix of all features."""
    check_known([column], store.columns)
    heat = count_heat(store, column, num_keys=num_features)
    whole = store.select((column,)).gather()
    client, ids = owners(whole.counts), whole.columns[column].reshape(whole.num_examples, -1)
    example, place = np.nonzero(ids >= 0)
    feature, weight = ids[example, place].astype(np.int64), 1 / (4 * whole.counts[client])
    pairs, pair = np.unique(client[example] * num_features + feature, return_inverse=True)
    holder = pairs // num_features
    if np.all(np.bincount(holder, minlength=store.num_clients) <= whole.counts):  # rho_1 may be above l2
        return conditioning(logistic_hessians(store, column, num_features, l2=l2), num_features)
    place_of = lambda columns, count: sparse.csr_array(
        (np.ones(len(example)), (example, columns)), shape=(whole.num_examples, count)
    )
    each = place_of(pair, len(pairs))
    rho_2 = _largest_of_any(each, weight, holder, store.num_clients) + l2
    check_curved(l2, rho_2)
    held = np.flatnonzero(heat.counts)
    features = place_of(np.searchsorted(held, feature), len(held))
    curvature = features.T @ (features * weight[:, None]) / heat.total
    root = np.sqrt(heat.total / heat.counts[held])
    diagonal = sparse.diags_array(root)
    plain = curvature + sparse.diags_array(l2 / root**2)
    corrected = diagonal @ curvature @ diagonal + l2 * sparse.eye_array(len(held))
    return bounded(_extremes(plain), _extremes(corrected), heat, l2, rho_2)


def _extremes(matrix: Any) -> tuple[float, float]:
    """The smallest and the largest eigenvalue."""
    if matrix.shape[0] <= DENSE:
        values = np.linalg.eigvalsh(matrix.toarray())
        return float(values[0]), float(values[-1])
    start = np.random.default_rng(0).normal(size=matrix.shape[0])  # a fixed seed, so that results repeat
    given = {"v0": start, "tol": TOLERANCE, "return_eigenvectors": False}
    largest = eigsh(matrix, 1, which="LA", **given)
    least = eigsh(matrix.tocsc(), 1, sigma=0, which="LM", **given)
    return float(least[0]), float(largest[0])


def _largest_of_any(each: Any, weight: np.ndarray, holder: np.ndarray, num_clients: int) -> float:
    """The largest eigenvalue of any client's X' diag(weight) X. Each column of `each` belongs to one client."""
    over = lambda values: np.bincount(holder, values, num_clients)
    back, largest = each.T.tocsr(), np.zeros(num_clients)
    vector = np.ones(each.shape[1])  # no entry is negative, so the eigenvector has no negative entries either
    for _ in range(STEPS):
        before, vector = largest, vector / np.sqrt(over(vector**2))[holder]
        after = back @ (weight * (each @ vector))
        largest, vector = over(after * vector), after
        if np.all(largest - before <= TOLERANCE * largest):
            break
    return float(largest.max())
