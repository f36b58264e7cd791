"""The ledger of a run: everything about clients that is released, and what it costs together.

The noisy sums of all rounds are one entry. What is released once, such as the counts of heat, has its own. Their
epsilons do not add up: the accountant composes the mechanisms (`privacy.accounting`), which costs less.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from partwise.privacy.accounting import Rounds, epsilon, most_rounds, noise_for


class SingleRelease(NamedTuple):
    """Something that is released once, with Gaussian noise.

    what:  what it is, in words
    noise: standard deviation of the noise, in units of the most that a client adds to it
    """

    what: str
    noise: float


class Ledger(NamedTuple):
    """What a run releases.

    rounds: the noisy sum of every round
    delta:  chance that the promise does not hold
    once:   all else
    parts:  what else, besides the update, is in the sum of a round, in words
    """

    rounds: Rounds
    delta: float
    once: tuple[SingleRelease, ...] = ()
    parts: tuple[str, ...] = ()

    def epsilon(self, number: int) -> float:
        """Epsilon of everything, after so many rounds."""
        return epsilon(self.rounds, number, self.delta, self._noises)

    def most_rounds(self, target: float, limit: int) -> int:
        """The largest number of rounds, up to `limit`, with which everything stays within `target`."""
        return most_rounds(self.rounds, target, self.delta, limit, self._noises)

    def calibrated(self, number: int, target: float) -> Ledger:
        """The ledger with the noise with which so many rounds and everything else stay within `target`."""
        found = noise_for(self.rounds, number, target, self.delta, self._noises)
        return self._replace(rounds=self.rounds._replace(noise=found))

    def entries(self, number: int) -> list[dict[str, Any]]:
        """What was released in so many rounds: each with what it would cost alone."""
        rounds = self.rounds
        trials = f" in {rounds.trials} trials" if rounds.trials > 1 else ""
        updates = {
            "what": ", ".join((f"sums of {number} rounds{trials}: updates", *self.parts)),
            "epsilon_alone": epsilon(rounds, number, self.delta),
            "mechanism": mechanism(rounds),
            "noise": rounds.noise,
        }
        return [updates, *map(self._entry, self.once)]

    def _entry(self, release: SingleRelease) -> dict[str, Any]:
        alone = epsilon(self.rounds, 0, self.delta, (release.noise,))
        return {
            "what": release.what,
            "epsilon_alone": alone,
            "mechanism": "one Gaussian mechanism over all clients",
            "noise": release.noise,
        }

    @property
    def _noises(self) -> tuple[float, ...]:
        return tuple(release.noise for release in self.once)


def mechanism(rounds: Rounds) -> str:
    """How the noise of the rounds is made and accounted for, in words."""
    if rounds.sampling == "apart":
        kind = "correlated" if rounds.matrix else "independent"
        return f"Gaussian, {kind} noise, a client waits {rounds.separation} rounds: one mechanism over all rounds"
    kind = "Skellam" if rounds.grid else "Gaussian"
    drawn = "cohorts without replacement" if rounds.sampling == "fixed" else "Poisson cohorts"
    moments = rounds.grid or rounds.sampling == "fixed"
    return f"{kind}, {drawn}, by {'Rényi divergences' if moments else 'privacy loss distributions'}"
