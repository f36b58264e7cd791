"""FedSubAvg's theory on small data: Example 1 by simulation, sparse condition numbers against dense ones."""

import json
import os

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from partwise.data.store import ClientStore
from partwise.papers import reproduce as papers
from partwise.papers import sparse_conditioning, theory
from partwise.papers.conditioning import conditioning, logistic_hessians
from partwise.papers.sparse_conditioning import logistic_conditioning
from partwise.runs.train import silent
from partwise.types import UserError


@pytest.mark.parametrize(("name", "corrected"), [("FedAvg", False), ("FedSubAvg", True)])
def test_example_1_contracts_as_the_closed_form_says(name, corrected):
    path = theory.example1(corrected, silent, rounds=12)
    expected = np.array(theory.START) * theory.closed_form(name) ** np.arange(13)[:, None]
    np.testing.assert_allclose(path, expected, rtol=1e-5)


@hypothesis_settings(max_examples=25)
@given(st.integers(0, 2**32 - 1), st.sampled_from([3, 40, 300]), st.sampled_from([1.0, 0.05]))
def test_sparse_equals_dense(seed, num_clients, l2):
    """With few clients also those whose own Hessians are of full rank."""
    rng = np.random.default_rng(seed)
    features = np.minimum(rng.zipf(1.5, (120, 3)) - 1, 24)
    features[rng.random(features.shape) < 0.1] = -1
    store = ClientStore.from_arrays(rng.integers(0, num_clients, 120), feature=features)
    expected = conditioning(logistic_hessians(store, "feature", 30, l2=l2), 30)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sparse_conditioning, "DENSE", 3)
        found = logistic_conditioning(store, "feature", 30, l2)
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_mistakes():
    store = ClientStore.from_arrays([1, 1], feature=[[0, 1], [2, 3]])
    with pytest.raises(UserError, match="unknown column 'features'"):
        logistic_conditioning(store, "features", 4)
    with pytest.raises(UserError, match=r"'feature' has only 0\.\.2"):
        logistic_conditioning(store, "feature", 3)
    with pytest.raises(UserError, match=r"least eigenvalue.*an l2 above 0"):
        logistic_conditioning(store, "feature", 4, l2=0.0)


def check_rows(rows):
    """The closed form is met, and every bound holds."""
    for row in rows:
        if row["metric"] == "factor a round":
            assert row["ours"] == pytest.approx(row["paper"], rel=1e-5)
        if "at least" in row["metric"]:
            assert row["ours"] >= row["paper"]
        if "at most" in row["metric"]:
            assert row["ours"] <= row["paper"] * (1 + 1e-6)
    assert len(rows) == 4 + 2 + 3 * len(theory.L2)


def test_the_reproduction_runs_quick_to_the_end(liked_folder, tmp_path):
    result = papers.reproduce("fedsubavg-theory", str(liked_folder), tmp_path, seeds=2, quick=True)
    check_rows(result["rows"])
    assert (result["clients"], result["parameters"]) == (24, 2 + 7 + 10 * 20 + 1)
    assert {row["seeds"] for row in result["rows"] if "l2" in row} == {2}
    written = json.loads((tmp_path / "fedsubavg-theory.json").read_text())
    assert written["rows"] == result["rows"]
    assert (tmp_path / "fedsubavg-theory.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
@pytest.mark.skipif(not os.environ.get("PARTWISE_DATA"), reason="PARTWISE_DATA is not set")
def test_the_whole_of_movielens(tmp_path):
    """Table 1's dispersion, and a correction that takes the dispersion out of the condition number."""
    rows = papers.reproduce("fedsubavg-theory", None, tmp_path)["rows"]
    check_rows(rows)
    dispersion = {row["row"]: row["ours"] for row in rows if row["metric"] == "dispersion"}
    assert dispersion == {"MovieLens, features": 4331, "MovieLens, parameters": 6040}
    for row in rows:
        if "l2" in row:
            (found,) = row["theory"]
            assert found["condition"] > 3000 * found["corrected"]
