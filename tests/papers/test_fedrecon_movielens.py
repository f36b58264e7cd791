"""Quick checks of FedRecon's reproductions on MovieLens, on a generated release of MovieLens-100k."""

from __future__ import annotations

import json

import matplotlib.image
import numpy as np
import pytest

from partwise.papers import fedrecon
from partwise.papers import reproduce as papers
from partwise.papers.fedrecon import relative_to

USERS, ITEMS, RATED = 40, 30, 20


@pytest.fixture(scope="module")
def movielens(tmp_path_factory):
    """Forty users who rate twenty of thirty movies each, mostly with four stars."""
    rng, folder = np.random.default_rng(0), tmp_path_factory.mktemp("movielens") / "ml-100k"
    folder.mkdir()
    lines = [
        f"{user}\t{item}\t{rng.choice([3, 4, 4, 5])}\t{870_000_000 + place}"
        for user in range(1, USERS + 1)
        for place, item in enumerate(rng.permutation(ITEMS)[:RATED] + 1)
    ]
    (folder / "u.data").write_text("\n".join(lines) + "\n")
    return str(folder)


@pytest.mark.parametrize(
    ("name", "rows"),
    [
        ("fedrecon-figure3", 2),
        ("fedrecon-figure4", 4),
        pytest.param("fedrecon-table1", 20, marks=pytest.mark.slow),
        pytest.param("paper-settings", 0, marks=pytest.mark.slow),
    ],
)
def test_a_quick_check(movielens, tmp_path, name, rows):
    told = papers.reproduce(name, movielens, tmp_path, seeds=1, quick=True)
    assert told["quick"]
    assert len(told["rows"]) == rows or not rows
    assert all(np.isfinite(row["ours"]) for row in told["rows"])
    assert all(matplotlib.image.imread(path).ndim == 3 for path in tmp_path.glob("*.png"))


def test_what_is_relative_to_a_model_that_learned_nothing_is_no_number(movielens, tmp_path, monkeypatch):
    assert relative_to(0.5, [0.25, 0.5]).tolist() == [0.5, 1.0]
    monkeypatch.setattr(fedrecon, "QUICK_ROUNDS", 1)
    told = papers.reproduce("fedrecon-figure3", movielens, tmp_path, seeds=1, quick=True)
    assert told["base_accuracy"] == 0
    assert all(np.isnan(row["ours"]) for row in told["rows"])
    assert json.loads((tmp_path / "fedrecon-figure3.json").read_text())["rows"][0]["ours"] is None
