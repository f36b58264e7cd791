"""Differential privacy of several runs that look at the same clients: their costs compose."""

from __future__ import annotations

from partwise.config.protection import protection
from partwise.config.settings import Config
from partwise.types import UserError


def composed(config: Config, num_clients: int, trials: int) -> Config:
    """The configuration with the noise that keeps the budget for all trials together, as each of them looks at the
    same clients. Raises `UserError` if a given noise does not."""
    promised = protection(config, num_clients, trials)
    if promised is None:
        return config
    if promised.most_rounds(config.rounds) < config.rounds:
        raise UserError(
            f"{trials} trials of {config.rounds} rounds cost more than privacy.epsilon = {promised.budget:g}: "
            f"leave privacy.noise out, and it is found, or try fewer rates"
        )
    return config.changed({"privacy.noise": promised.rounds.noise})
