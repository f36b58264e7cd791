"""Which settings fit a promise to clients (`privacy.clip`), and why others do not."""

from __future__ import annotations

from partwise.config.settings import Config
from partwise.optimizers import Optimizer
from partwise.parts.declare import find
from partwise.server.cohort import parse_sampling
from partwise.types import UserError, unknown

CORRELATED = ("blt", "banded")  # mechanisms whose noise takes back some of the noise before
KNOWN = {
    "heat": ("none", "gaussian", "response"),
    "mechanism": ("independent", "skellam", *CORRELATED),
    "rows": ("all", "filtered"),
}


def check_unset(config: Config) -> None:
    """Raise `UserError` if something is promised without a clip."""
    part = config.privacy
    if part.noise is not None or part.epsilon is not None or part.noise_cohort or part.heat != "none":
        raise UserError(
            "privacy needs a clip: give privacy.clip, the largest norm of a client's update, as in 1.0"
        )


def check_fits(config: Config) -> None:
    """Raise `UserError` if something would leave a round by another way than the door."""
    for name, known in KNOWN.items():
        if (value := getattr(config.privacy, name)) not in known:
            raise unknown(f"value of privacy.{name}", value, known)
    _check_server(config)
    _check_cohort(config)
    if config.privacy.mechanism == "skellam":
        _check_skellam(config)


def _check_server(config: Config) -> None:
    server = config.server
    if server.weighting != "uniform":
        raise UserError(
            f"server.weighting = {server.weighting} tells how many examples clients have: with privacy.clip, set "
            f"server.weighting=uniform"
        )
    if server.mean not in ("cohort", "heat") or (server.mean == "heat" and config.privacy.heat == "none"):
        raise UserError(
            f"server.mean = {server.mean} needs counts of the clients that hold a row, which have no noise: with "
            f"privacy.clip, set server.mean=cohort, or server.mean=heat with privacy.heat=gaussian"
        )
    if server.mean != "heat" and config.privacy.heat != "none":
        raise UserError(
            f"privacy.heat = {config.privacy.heat} would have no effect: server.mean = {server.mean} reads no "
            f"heat. Leave it out, or set server.mean=heat"
        )
    if find(Optimizer, server.optimizer)().rows == "asked":  # pyright: ignore[reportAttributeAccessIssue]
        raise UserError(
            f"server.optimizer = {server.optimizer} moves only rows that were asked for, which shows which they "
            f"are: with privacy.clip, use {server.optimizer.removeprefix('lazy_')}"
        )


def _check_cohort(config: Config) -> None:
    cohort, mechanism = config.cohort, config.privacy.mechanism
    if cohort.min_examples and cohort.over_selection > 1:
        raise UserError(
            "cohort.min_examples with cohort.over_selection lets one client's data decide whether another takes "
            "part: with privacy.clip, leave one of them out"
        )
    if mechanism in CORRELATED and parse_sampling(cohort.sampling).wait < 2:
        raise UserError(
            f"privacy.mechanism = {mechanism} rests on clients that wait between their rounds: set "
            f"cohort.sampling=apart:ROUNDS, as in apart:60, or privacy.mechanism=independent"
        )


def _check_skellam(config: Config) -> None:
    part = config.privacy
    if part.sums != "masked":
        raise UserError(
            f"privacy.mechanism = skellam lets clients add the noise to sums that nobody sees before, and with "
            f"privacy.sums = {part.sums} there is none: set privacy.sums=masked, or privacy.mechanism=independent"
        )
    if parse_sampling(config.cohort.sampling).wait > 1:
        raise UserError(
            f"privacy.mechanism = skellam is for cohorts of poisson:MOST or fixed, not for cohort.sampling = "
            f"{config.cohort.sampling}: choose one of these, or privacy.mechanism=independent"
        )
    if part.noise_cohort:
        raise UserError(
            "privacy.mechanism = skellam shares the noise among the clients that come, and privacy.noise_cohort is "
            "that of others: leave one of them out"
        )
