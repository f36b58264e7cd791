"""What Tables 2 and 4 and the language figures of Federated Reconstruction compare.

A *training* is learned once with every seed, on the same clients in the same rounds as all others. The rows
of the tables are ways to evaluate it on unseen clients.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

METRIC = "accuracy_no_oov_or_eos"
BUCKETS = 500
LOCAL_RATES = {"reconstruct.rate": (0.1, 0.3, 1.0)}
FINE_RATES = {"fine_tune.rate": (0.03, 0.1, 0.3)}
FINE_STEPS = {"fine_tune.max_steps": 100}


class JudgedRow(NamedTuple):
    """A way to evaluate a training: changes of the configuration, the rates that are searched for it, and the
    paper's accuracy by vocabulary."""

    name: str
    changes: Mapping[str, Any] = {}
    grid: Mapping[str, Sequence[float]] = {}
    paper: Sequence[float | None] = (None, None, None)
    curve: bool = False  # whether it is evaluated during training (Figure 2)


class Training(NamedTuple):
    """What is learned: an algorithm, a number of buckets (0 means the large number), and changes of the
    configuration and of the model's options."""

    name: str
    algorithm: str
    buckets: int
    rows: Sequence[JudgedRow]
    changes: Mapping[str, Any] = {}
    options: Mapping[str, Any] = {}
    kept: bool = False  # whether its models are kept under `out`, because they are judged in other ways too

    @property
    def sends_all(self) -> bool:
        """Whether embeddings of buckets are sent too."""
        return self.algorithm != "fed_recon"


YOGI = Training(
    "FedYogi, 500 OOV",
    "fed_yogi",
    0,
    (
        JudgedRow("FedYogi (500 OOV)", curve=True),
        JudgedRow(
            "OOV fine-tuning (500 OOV)",
            {"evaluation.local": "tuned"},
            LOCAL_RATES,
            (30.0, 28.1, 27.9),
            curve=True,
        ),
        JudgedRow(
            "Full fine-tuning (500 OOV)",
            {"evaluation.local": "trained", "fine_tune.joint": True, **FINE_STEPS},
            FINE_RATES,
            (30.8, 29.2, 28.8),
            curve=True,
        ),
    ),
)
RECON = Training(
    "FedRecon, 500 OOV",
    "fed_recon",
    0,
    (
        JudgedRow("FedRecon (500 OOV)", paper=(29.6, 28.1, 27.7), curve=True),
        JudgedRow("FedRecon + fine-tune (500 OOV)", FINE_STEPS, FINE_RATES, (30.7, 28.9, 28.6), curve=True),
        JudgedRow("FedRecon (500 OOV), judged without rebuilding", {"reconstruct.method": "skip"}),
    ),
    kept=True,
)

TRAININGS = (
    Training("FedYogi", "fed_yogi", 1, (JudgedRow("FedYogi", paper=(24.3, 26.3, 26.7)),)),
    Training("FedRecon, 1 OOV", "fed_recon", 1, (JudgedRow("FedRecon (1 OOV)", paper=(24.1, 26.2, 26.4)),)),
    RECON,
    YOGI,
    Training(
        "FedRecon, no split",
        "fed_recon",
        0,
        (JudgedRow("FedRecon (500 OOV, no split)", paper=(28.8, 28.1, 27.7)),),
        {"split.kind": "none"},
    ),
    Training(
        "FedRecon, joint",
        "fed_recon",
        0,
        (JudgedRow("FedRecon (500 OOV, joint training)", paper=(29.3, 27.9, 27.7)),),
        {"update.joint": True},
    ),
)


class Learned(NamedTuple):
    """The result of a training with every seed."""

    tests: Mapping[str, Sequence[Mapping[str, Any]]]  # row -> metrics of every seed
    chosen: Mapping[str, Mapping[str, float]]  # row -> rates of its evaluation
    curves: Mapping[str, Sequence[Sequence[float]]]  # row -> of validation clients, by seed and `rounds`
    rounds: Sequence[int]
    losses: Sequence[Sequence[float]]  # of training, by seed and round, as long as all of them trained
    sizes: Mapping[str, int]  # parameters: local (the embeddings of buckets), others
    coverage: float  # share of the training clients' words that are in the vocabulary
    seconds: float
    judged: Sequence[int] = ()  # the round of every seed whose model was evaluated

    def percent(self, row: str, metric: str = METRIC) -> np.ndarray:
        """The metric of a row in percent, [seeds]."""
        return 100 * np.array([test[metric] for test in self.tests[row]])

    def sent(self, everything: bool) -> int:
        """The number of parameters that are sent down and up, per client and round."""
        return 2 * (self.sizes["others"] + (self.sizes["local"] if everything else 0))
