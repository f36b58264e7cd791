"""Trains with one seed until the validation clients get no better, in as many sittings as it takes.

At every look, all that the rest of the training depends on is written to a file. A training that was killed goes
on from there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from partwise.checkpoint import load_arrays, load_tree, save_arrays, save_tree
from partwise.runs.document import to_plain
from partwise.runs.stopping import Best, WatchedMetric
from partwise.simulation.backend import Backend
from partwise.types import UserError

WATCHED = "watched"
Look = Callable[[Mapping[str, Any]], Mapping[str, float]]  # parameters -> values of the validation clients


class TrainingCourse(NamedTuple):
    """How a training went: values at every look (`WATCHED` is what it stops by), the loss of every round, and the
    round whose model is judged."""

    rounds: list[int]
    values: dict[str, list[float]]
    losses: list[float]
    judged: int = 0
    seconds: float = 0.0
    diverged: bool = False

    def ended(self, looks: Sequence[int], patience: int) -> bool:
        """Whether there is nothing more to train."""
        return self.rounds == list(looks) or (patience > 0 and self.best().since >= patience)

    def best(self) -> Best:
        """The best of the looks so far."""
        best = Best(WatchedMetric(WATCHED, -1.0))
        for number, value in zip(self.rounds, self.values.get(WATCHED, ()), strict=False):
            best.look({"round": number, "evaluation": {WATCHED: np.nan if value is None else value}})
        return best

    def after(
        self, number: int, found: Mapping[str, float], losses: Sequence[float], seconds: float
    ) -> TrainingCourse:
        """The course with one more look."""
        values = {name: [*self.values.get(name, ()), value] for name, value in found.items()}
        rounds, seconds = [*self.rounds, number], self.seconds + seconds
        return TrainingCourse(rounds, values, [*self.losses, *losses], number, seconds)


def train_to_the_end(
    simulation: Backend,
    seed: int,
    looks: Sequence[int],
    look: Look,
    patience: int,
    file: Path,
    show: Callable[[Any], None],
    clock: Callable[[], float],
) -> tuple[dict[str, Any], TrainingCourse]:
    """The parameters to be judged, and how the training went.

    Args:
        simulation: What runs the rounds; it is started again.
        seed: The seed.
        looks: The rounds after which validation clients are evaluated; the last is the last round of all.
        look: The evaluation. If there is patience, its values must have `WATCHED`.
        patience: The training ends after so many looks without a better value, and the model of the best look
            is judged (also if it diverges later); 0: it does not, and the last model is judged.
        file: Where the training is kept in between.
        show: Called with the records of every call.
        clock: Seconds, as from `time.perf_counter`.
    """
    simulation.restart(seed)
    course = TrainingCourse([], {}, [])
    judged = {path: np.asarray(leaf) for path, leaf in simulation.state.params.items()}
    if file.exists():
        (saved, judged), told = load_tree(file, (simulation.current(), judged))
        course = TrainingCourse(**told["course"])
        simulation.resume(saved, course.rounds[-1], told.get("capacity", {}))
    while not course.ended(looks, patience):
        began, losses = clock(), []
        number = looks[len(course.rounds)]
        try:
            for records in simulation.run(number - simulation.round):
                losses += [record.loss for record in records]
                show(records)
        except UserError:
            if not (patience and course.rounds):
                raise
            return judged, course._replace(diverged=True)
        params = dict(simulation.state.params)
        found = look(params)
        if patience and not course.rounds and not np.isfinite(np.array(found[WATCHED], float)):
            raise UserError(
                f"validation clients have no value to watch after {number} rounds, because nothing of theirs is "
                f"judged or the training has diverged (mean loss {losses[-1]:.4g}): look at the data, or give more"
            )
        course = course.after(number, found, losses, clock() - began)
        if not patience or course.best().since == 0:
            judged = {path: np.asarray(leaf) for path, leaf in params.items()}
        course = course._replace(judged=course.best().round if patience else number)
        told = {"course": to_plain(course._asdict()), "capacity": dict(simulation.capacity)}
        save_tree(file, (simulation.current(), judged), told)
    return judged, course


def save_model(path: Path, params: Mapping[str, Any], course: TrainingCourse) -> None:
    """Write the parameters that are judged, and the course of their training."""
    save_arrays(path, dict(params), {"course": to_plain(course._asdict())})


def load_model(path: Path) -> tuple[dict[str, Any], TrainingCourse]:
    """What `save_model` wrote."""
    params, told = load_arrays(path)
    return dict(params), TrainingCourse(**told["course"])
