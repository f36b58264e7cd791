"""What attacks have in common: how much a score tells, with a confidence."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import beta, norm

SURE = 1e-6  # chance that a test which says something of chance is wrong


def _at_least(hits: np.ndarray, trials: int, risk: float) -> np.ndarray:
    """The lower end of a chance that gave so many hits (Clopper and Pearson, 1934)."""
    return np.where(hits > 0, beta.ppf(risk, np.maximum(hits, 1), trials - hits + 1), 0.0)


def _bounds(inside: np.ndarray, outside: np.ndarray, cuts: np.ndarray, delta: float, risk: float):
    """Lower bounds of epsilon for each cut, from who is above it: P(in) <= e^epsilon P(out) + delta."""
    above = lambda scores: len(scores) - np.searchsorted(np.sort(scores), cuts, "right")
    with np.errstate(divide="ignore", invalid="ignore"):
        hits = _at_least(above(inside), len(inside), risk / 2)
        alarms = 1 - _at_least(len(outside) - above(outside), len(outside), risk / 2)
        return np.where(hits > delta, np.log((hits - delta) / alarms), 0.0)


def _epsilon_bound(inside: np.ndarray, outside: np.ndarray, delta: float, risk: float = 0.05) -> float:
    """A lower bound of epsilon with the confidence 1 - risk, from scores that should be higher where the canary
    took part (Nasr et al., 2021). Half of the scores choose the cut and the side, the others give the bound."""
    inside, outside = np.asarray(inside, np.float64), np.asarray(outside, np.float64)
    sides = [(inside, outside), (-outside, -inside)]
    chosen = []
    for given, other in sides:
        cuts = np.quantile(np.concatenate([given[::2], other[::2]]), np.linspace(0, 1, 400))
        found = _bounds(given[::2], other[::2], cuts, delta, risk)
        chosen.append((found.max(), cuts[found.argmax()]))
    side = int(chosen[1][0] > chosen[0][0])
    given, other = sides[side]
    return float(_bounds(given[1::2], other[1::2], np.array([chosen[side][1]]), delta, risk)[0])


def _success(scores: np.ndarray, truth: np.ndarray) -> tuple[float, float]:
    """How often an attack's score of something true is above that of something false (0.5: it knows nothing), and
    by how much this may differ from 0.5 by chance. `scores` are of independent trials, [trial, thing]."""
    ranks = np.argsort(np.argsort(scores, axis=1), axis=1) + 1.0
    true, false = int(truth.sum()), int((~truth).sum())
    right = ranks[:, truth].sum(1) - true * (true + 1) / 2
    spread = np.sqrt((true + false + 1) / (12 * true * false * len(scores)))
    return float(right.mean() / (true * false)), float(norm.isf(SURE / 2) * spread)


@pytest.fixture(scope="session")
def epsilon_bound():
    return _epsilon_bound


@pytest.fixture(scope="session")
def success():
    return _success
