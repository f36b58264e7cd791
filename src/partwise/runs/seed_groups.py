"""Runs that differ in the seed alone are one group: a row of `compare`, a line of `report`."""

from __future__ import annotations

from collections.abc import Iterable

from partwise.runs.run_view import RunView

ALONE = ("seed", "data.path")  # settings in which the runs of a group may differ
HOW_RUN = ("simulation.", "deploy.")  # settings of how rounds are run, not of what is learned


def group_over_seeds(runs: Iterable[RunView]) -> list[list[RunView]]:
    """Groups in the order of their first runs, each sorted by seed: the same settings and the same data, by its
    fingerprint. If two runs of a group finished with the same seed, the second is a group of its own, to be seen:
    it is no second seed."""
    groups: dict[str, list[RunView]] = {}
    for number, run in enumerate(runs):
        settings = sorted((key, str(value)) for key, value in run.settings.items() if is_compared(key))
        alike = str((settings, run.begun.get("data")))
        others = [other.seed for other in groups.get(alike, ()) if other.state == "finished"]
        again = run.state == "finished" and run.seed in others
        groups.setdefault(f"{number} {alike}" if again else alike, []).append(run)
    return [sorted(group, key=lambda run: run.seed) for group in groups.values()]


def is_compared(key: str) -> bool:
    """Whether runs that differ in this setting are of different groups."""
    return key not in ALONE and not key.startswith(HOW_RUN)
