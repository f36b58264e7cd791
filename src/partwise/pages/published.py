"""Figures that papers report for a task, to be shown beside a run's. `papers` has the same ones with what they need
to be reproduced; a test compares them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

RECON = "Federated Reconstruction, Table 1"
WORDS = "Federated Reconstruction, Table 2, Stack Overflow"
WORD_METRIC = "accuracy_no_oov_or_eos"
VOCABULARIES = (1_000, 5_000, 10_000)


class PublishedRow(NamedTuple):
    """One row of a paper's table. Shares are shares, not percent."""

    source: str
    row: str
    metrics: Mapping[str, float]


def _ratings(row: str, rmse: float, percent: float) -> PublishedRow:
    return PublishedRow(RECON, row, {"rmse": rmse, "accuracy": percent / 100})


MOVIELENS = {
    "movielens": (
        _ratings("Centralized + standard eval (unseen)", 3.80, 0.0),
        _ratings("Centralized + ReconEval", 1.36, 40.8),
        _ratings("FedAvg + ReconEval", 0.934, 40.0),
        _ratings("FedRecon", 0.907, 43.3),
        _ratings("FedRecon (no split)", 0.912, 42.5),
        _ratings("FedRecon (joint training)", 0.915, 42.1),
        _ratings("FedRecon (Adagrad)", 0.883, 44.1),
    ),
    "movielens-seen": (
        _ratings("Centralized + standard eval", 0.923, 43.2),
        _ratings("FedAvg + standard eval", 0.939, 41.5),
    ),
}
WORD_ACCURACIES = {  # in percent, by vocabulary
    "FedYogi": (24.3, 26.3, 26.7),
    "FedRecon (1 OOV)": (24.1, 26.2, 26.4),
    "FedRecon (500 OOV)": (29.6, 28.1, 27.7),
    "FedRecon + fine-tune (500 OOV)": (30.7, 28.9, 28.6),
    "OOV fine-tuning (500 OOV)": (30.0, 28.1, 27.9),
    "Full fine-tuning (500 OOV)": (30.8, 29.2, 28.8),
    "FedRecon (500 OOV, no split)": (28.8, 28.1, 27.7),
    "FedRecon (500 OOV, joint training)": (29.3, 27.9, 27.7),
}


def published_rows(settings: Mapping[str, Any]) -> list[PublishedRow]:
    """What papers report for the task of a run. The source says so where their data may be another."""
    task, words = settings.get("task"), settings.get("data.num_words")
    if task in MOVIELENS and settings.get("data.size", "1m") == "1m":
        return list(MOVIELENS[task])
    if task == "next-word-lstm" and words in VOCABULARIES:
        number = VOCABULARIES.index(words)
        return [
            PublishedRow(f"{WORDS}, {words:,} words", row, {WORD_METRIC: percents[number] / 100})
            for row, percents in WORD_ACCURACIES.items()
        ]
    return []
