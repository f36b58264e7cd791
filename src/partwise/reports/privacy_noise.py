"""What differential privacy costs a task: epsilon, the noise that it takes, and what is left of a row's signal.

The same for all options: they differ in who sees a sum before its noise.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from partwise.config.protection import protection
from partwise.config.settings import Config
from partwise.privacy.ledger import Ledger
from partwise.reports.privacy_facts import PrivacyFacts
from partwise.reports.privacy_seconds import measure_noise
from partwise.types import UserError

TARGETS = (1.0, 4.0, 8.0)  # epsilons
USUAL_NOISE = 1.0


def tell_noise(facts: PrivacyFacts) -> dict[str, Any]:
    """Epsilon of the task's rounds at a reference noise (`privacy.noise`, or 1), and the noise for some epsilons.

    Cohorts of one size need more noise than Poisson ones, and it takes long to find: the noise is then that of
    Poisson cohorts, and both epsilons are told.
    """
    ledger = _ledger(facts)
    rounds = facts.config.rounds
    drawn = ledger.rounds._replace(sampling="poisson") if ledger.rounds.sampling == "fixed" else ledger.rounds
    as_drawn = ledger._replace(rounds=drawn)
    needed = [_needed(as_drawn, rounds, target) for target in TARGETS]
    return {
        "rounds": rounds,
        "cohort": facts.cohort,
        "population": facts.population,
        "delta": ledger.delta,
        "sampling": ledger.rounds.sampling,
        "noise": ledger.rounds.noise,
        "epsilon": _finite(ledger.epsilon(rounds)),
        "needed_sampling": drawn.sampling,
        "needed_epsilon": _finite(as_drawn.epsilon(rounds)),
        "needed": [each for each in needed if each["noise"] is not None],
        "seconds_server": measure_noise(facts.num_words),
    }


def _ledger(facts: PrivacyFacts) -> Ledger:
    """That of the settings, with those that a promise needs."""
    config = facts.config
    changes: dict[str, Any] = {"privacy.clip": config.privacy.clip or 1.0, **settings_for_noise(config)}
    if config.privacy.noise is None and config.privacy.epsilon is None:
        changes["privacy.noise"] = USUAL_NOISE
    promised = protection(config.changed(changes), facts.population)
    assert promised is not None
    return promised.ledger


def settings_for_noise(config: Config) -> dict[str, Any]:
    """Settings that a promise needs, and that are others here."""
    server, changes = config.server, {}
    if server.weighting != "uniform":
        changes["server.weighting"] = "uniform"
    if server.mean != "cohort" and config.privacy.heat == "none":
        changes["server.mean"] = "cohort"
    if server.optimizer.startswith("lazy_"):
        changes["server.optimizer"] = server.optimizer.removeprefix("lazy_")
    return changes


def _needed(ledger: Ledger, rounds: int, target: float) -> dict[str, Any]:
    try:
        return {"epsilon": target, "noise": ledger.calibrated(rounds, target).rounds.noise}
    except UserError:  # no noise is enough
        return {"epsilon": target, "noise": None}


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def tell_signals(facts: PrivacyFacts, noise: dict[str, Any] | None) -> list[dict[str, Any]]:
    """For every space with heat, the signal to noise of its median and of its hottest row in a round: n clients of
    a cohort touch it, each with its share of the clip, so it is n / (z sqrt(m d))."""
    if noise is None:
        return []
    told = []
    for space, heat in facts.heats.items():
        held, keys = heat.counts[heat.counts > 0], facts.counts[space]
        if not len(held) or not keys.any():
            continue
        m, d = float(keys[keys > 0].mean()), facts.agreement.tables[space].num_words
        touching = {
            "median": float(np.median(held)) / heat.total * facts.cohort,
            "hottest": float(held.max()) / heat.total * facts.cohort,
        }
        levels = [{"epsilon": noise["epsilon"], "noise": noise["noise"]}, *noise["needed"]]
        told.append(
            {
                "space": space,
                "keys_of_a_client": m,
                "row_words": d,
                "clients_on_a_row": touching,
                "signal_to_noise": [
                    level
                    | {
                        row: number / (level["noise"] * math.sqrt(m * d)) if level["noise"] else None
                        for row, number in touching.items()
                    }
                    for level in levels
                ],
            }
        )
    return told
