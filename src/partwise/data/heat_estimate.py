"""An estimate of the heat n_m / N from the cohorts seen so far, for cases where the population cannot be
counted.

Of s clients seen, h held key m. A share h / s of 0 would give an infinite factor. So the share is the mean of
a Beta posterior, (h + a) / (s + 2a): a = 1/2 is Jeffreys' prior, a = 1 Laplace's. Its standard error is the
standard deviation of that posterior, sqrt(p (1 - p) / (s + 2a + 1)). For a cohort drawn without replacement,
the true error is smaller.

Only arithmetic is used, so the arrays may be numpy or JAX arrays, also inside a compiled round.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from partwise.types import UserError

JEFFREYS, LAPLACE = 0.5, 1.0


class Seen(NamedTuple):
    """What the cohorts showed: `holders` [K] is how many of the `clients` seen held each key. A client that
    comes again is counted again. Cohorts must be drawn uniformly, independent of what clients hold."""

    holders: Any
    clients: Any

    def add(self, holders: Any, clients: Any) -> Seen:
        """Add a cohort: how many of its clients hold each key, [K], and how many clients it has."""
        return Seen(self.holders + holders, self.clients + clients)

    def share(self, prior: float = JEFFREYS) -> Any:
        """The estimate of n_m / N, [K], never 0 and never 1."""
        if not prior > 0:
            raise UserError(f"prior is {prior}: give more than 0 (0.5: Jeffreys, 1: Laplace)")
        return (self.holders + prior) / (self.clients + 2 * prior)

    def standard_error(self, prior: float = JEFFREYS) -> Any:
        """The standard error of `share`, [K]. It decreases as 1 / sqrt(clients seen)."""
        share = self.share(prior)
        return (share * (1 - share) / (self.clients + 2 * prior + 1)) ** 0.5

    def coefficients(self, prior: float = JEFFREYS, cap: float | None = None) -> Any:
        """The estimate of N / n_m, [K]. For a key that was never seen it is (s + 2a) / a, which grows with
        the clients seen."""
        if cap is not None and not cap >= 1:
            raise UserError(f"cap is {cap}: give at least 1 (no correction), or None (no bound)")
        share = self.share(prior)
        return 1 / (share if cap is None else share.clip(1 / cap))
