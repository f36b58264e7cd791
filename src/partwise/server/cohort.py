"""Who takes part in a round: a function of the seed and the round alone."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from partwise.types import UserError


class Recruiting(NamedTuple):
    """How a cohort is chosen.

    size:           clients whose reports are wanted
    over_selection: so many times more are asked (FedRecon, section 7)
    dropout:        chance that a client that was asked never reports
    min_examples:   reports of clients with fewer examples are not used (patent claim 12)
    """

    size: int
    over_selection: float = 1.0
    dropout: float = 0.0
    min_examples: int = 0

    def check(self, num_clients: int) -> Recruiting:
        """Itself, if so many clients can be had."""
        if self.size < 1:
            raise UserError(f"a cohort needs at least 1 client, not {self.size}")
        if self.over_selection < 1 or not 0 <= self.dropout < 1:
            raise UserError(
                f"over_selection must be at least 1 and dropout in 0..1, "
                f"not {self.over_selection} and {self.dropout}"
            )
        if self.asked > num_clients:
            fits = int(num_clients / self.over_selection)
            remedy = (
                f"--cohort {fits} or fewer" if fits else f"less over_selection than {self.over_selection:g}"
            )
            raise UserError(
                f"{self.asked} clients are to be asked every round, but the population has only {num_clients}. "
                f"Use {remedy}."
            )
        return self

    @property
    def asked(self) -> int:
        """How many clients are asked every round."""
        return int(np.ceil(round(self.size * self.over_selection, 6)))


class Cohort(NamedTuple):
    """Positions of the clients whose reports count, and what became of the others that were asked."""

    clients: np.ndarray
    dropped: int  # never reported
    too_small: int  # reported, with too few examples
    spare: int  # reported after the cohort was full


def recruit(recruiting: Recruiting, counts: np.ndarray, seed: int, round_number: int) -> Cohort:
    """Sample without replacement; of those that stay and have enough examples, the first `size`."""
    rng = np.random.default_rng([seed, round_number])
    asked = rng.choice(len(counts), recruiting.asked, replace=False)
    stayed = asked[rng.random(len(asked)) >= recruiting.dropout] if recruiting.dropout else asked
    useful = stayed[counts[stayed] >= recruiting.min_examples] if recruiting.min_examples else stayed
    clients = useful[: recruiting.size]
    return Cohort(clients, len(asked) - len(stayed), len(stayed) - len(useful), len(useful) - len(clients))
