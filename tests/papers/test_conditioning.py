"""FedSubAvg, section 4: what heat does to the condition number, on populations whose answer is known."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from partwise.data.store import ClientStore
from partwise.papers.conditioning import ClientHessian, conditioning, logistic_hessians
from partwise.types import UserError


@pytest.mark.parametrize("num_clients", [2, 100])
def test_example_1(num_clients):
    """w_1 involves client 1 alone, w_2 all of them; f_i = the sum of squares of what client i holds."""
    first, others = (
        ClientHessian(np.array([0, 1]), 2 * np.eye(2)),
        ClientHessian(np.array([1]), 2 * np.eye(1)),
    )
    found = conditioning([first] + [others] * (num_clients - 1), 2)
    assert found.condition == pytest.approx(num_clients)
    assert found.corrected == pytest.approx(1)
    assert found.dispersion == num_clients
    assert (found.rho_1, found.rho_2) == (2, 2)
    assert found.lower == pytest.approx(num_clients)  # all bounds are tight here
    assert found.upper == pytest.approx(num_clients)
    assert found.corrected_bound == found.corrected_upper == pytest.approx(1)


def test_example_1_as_a_logistic_regression():
    """With no weights every example has curvature 1/4. Client 0 has features 0 and 1 in one of two examples each,
    the other nine have feature 1 in both."""
    client = np.repeat(np.arange(10), 2)
    feature = np.array([0, 1] + [1, 1] * 9)
    store = ClientStore.from_arrays(client, feature=feature)
    found = conditioning(logistic_hessians(store, "feature", 3, l2=0.5), 3)  # feature 2 is nobody's
    cold, hot = (1 / 8 + 0.5) / 10, (1 / 8 + 0.5 + 9 * (1 / 4 + 0.5)) / 10
    assert found.condition == pytest.approx(hot / cold)
    assert found.corrected == pytest.approx(hot / (10 * cold))
    assert (found.rho_1, found.rho_2) == (pytest.approx(1 / 8 + 0.5), pytest.approx(0.75))
    assert found.dispersion == 10


def test_a_hessian_is_the_second_derivative_of_the_loss():
    ids = np.array([[0, 2], [2, -1], [3, 0], [2, 2]])
    weights, labels = np.array([0.3, 9.0, -0.5, 1.1]), np.array([1.0, 0.0, 1.0, 1.0])
    store = ClientStore.from_arrays(np.zeros(4, int), feature=ids)
    (found,) = logistic_hessians(store, "feature", 4, weights, l2=0.1)

    def objective(moved):
        w = weights.copy()
        w[found.held] += moved
        scores = np.sum(np.where(ids >= 0, w[ids], 0.0), axis=1)
        return np.mean(np.logaddexp(0, scores) - labels * scores) + 0.05 * np.sum(w[found.held] ** 2)

    assert found.held.tolist() == [0, 2, 3]
    step = 1e-3 * np.eye(3)
    for i, j in np.ndindex(3, 3):  # central differences
        signs = [objective(a * step[i] + b * step[j]) * a * b for a in (1, -1) for b in (1, -1)]
        assert sum(signs) / 4e-6 == pytest.approx(found.hessian[i, j], abs=1e-6)


@given(st.integers(0, 2**32 - 1))
def test_the_theorems_hold(seed):
    rng = np.random.default_rng(seed)
    features = np.minimum(rng.zipf(1.6, (60, 3)) - 1, 7)
    store = ClientStore.from_arrays(rng.integers(0, 15, 60), feature=features)
    found = conditioning(logistic_hessians(store, "feature", 8, rng.normal(size=8), l2=0.05), 8)
    assert found.lower * (1 - 1e-5) <= found.condition <= found.upper * (1 + 1e-5)
    assert found.corrected <= min(found.corrected_upper, found.corrected_bound) * (1 + 1e-5)
    assert found.corrected_upper <= found.upper * (1 + 1e-5)


def test_mistakes():
    store = ClientStore.from_arrays([1, 1, 2], feature=[[0, 1], [0, 1], [2, 1]])
    with pytest.raises(UserError, match=r"least eigenvalue.*an l2 above 0"):
        conditioning(logistic_hessians(store, "feature", 3, l2=0.0), 3)
    with pytest.raises(UserError, match=r"holds keys 0..1, but key space 'feature' has only 0..0"):
        conditioning(logistic_hessians(store, "feature", 1), 1)
    with pytest.raises(UserError, match="unknown column 'features'"):
        conditioning(logistic_hessians(store, "features", 3), 3)
