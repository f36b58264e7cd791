"""The rounds of a run: run, evaluated, recorded, shown to callbacks, and saved."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import closing
from typing import Any, NamedTuple

from partwise.config.protection import Protection
from partwise.config.settings import Config
from partwise.runs.callbacks import Followed
from partwise.runs.recorder import Recorder
from partwise.runs.records import as_record
from partwise.runs.sanity import FindCause, check_going, tell_outlier
from partwise.server.record import Record
from partwise.simulation.backend import Backend
from partwise.simulation.evaluator import Evaluator
from partwise.types import RunWarning, UserError


class Status(NamedTuple):
    """How far a run is, for a progress bar."""

    round: int
    rounds: int
    loss: float
    evaluation: Mapping[str, Any] | None
    part: str = ""  # which of several trainings


OnStatus = Callable[[Status], None]


def silent(status: Status) -> None:
    """Show no progress."""


class Course(NamedTuple):
    """What a run's rounds need: what is run and evaluated, for how many rounds, and who is told."""

    simulation: Backend
    evaluate: Evaluator
    config: Config
    rounds: int
    promised: Protection | None
    recorder: Recorder
    progress: OnStatus
    rates: Sequence[str]  # those that may be lowered if the training goes wrong
    followed: Followed
    find_cause: FindCause  # why updates of clients are not finite
    patience: int  # rounds that may go wrong


def run_rounds(course: Course) -> Iterator[None]:
    """Run the rounds that remain, or those until a callback ends the run, and yield before every call of the
    simulation. An evaluated round is recorded together with its evaluation."""
    simulation, rounds, followed = course.simulation, course.rounds, course.followed
    every, saving = course.config.simulation.evaluate_every, course.config.simulation.checkpoint_every
    followed.show_again(course.recorder)
    evaluated, saved = ({*_multiples(simulation.round, rounds, each), rounds} for each in (every, saving))
    with closing(simulation.run(rounds - simulation.round, evaluated | saved)) as calls:
        while simulation.round < rounds and not followed.reason:
            yield
            _record(course, next(calls), evaluated)
            if course.recorder.folder and (simulation.round in saved or followed.reason):
                state, capacity = simulation.current(), simulation.capacity
                course.recorder.folder.save_checkpoint(state, simulation.round, capacity)


def _record(course: Course, call: Sequence[Record], evaluated: Collection[int]) -> None:
    """Record the rounds of a call, the last of them with its evaluation if it is one of the `evaluated`."""
    simulation, rounds, done = course.simulation, course.rounds, course.simulation.round
    lines = [as_record(each) | _spent(course.promised, each.round) for each in call]
    last = lines.pop() if done in evaluated else {}
    _write(course, lines)
    if last:
        last["evaluation"] = course.evaluate(simulation.state.params, kept=simulation.kept_of)
        last |= _spent(course.promised, done, exactly=True)
        _write(course, [last])
    course.progress(Status(done, rounds, call[-1].loss, last.get("evaluation")))


def _spent(promised: Protection | None, number: int, exactly: bool = False) -> dict[str, Any]:
    return {"privacy": promised.spent(number, exactly)} if promised else {}


def _write(course: Course, lines: list[dict[str, Any]]) -> None:
    tally, config = course.recorder.tally, course.config
    before = tally.outlier
    course.recorder.add(lines)
    if tally.outlier and not before:
        warnings.warn(tell_outlier(tally.outlier), RunWarning, stacklevel=8)
    more = (course.rates, course.find_cause, config.simulation.backend)
    check_going(tally, course.patience, config.rounds, *more)
    course.followed.show(lines)


def affordable(promised: Protection | None, wanted: int) -> int:
    """How many rounds the privacy budget allows. Raises `UserError` if it is none."""
    if promised is None:
        return wanted
    rounds = promised.most_rounds(wanted)
    if rounds == 0:
        raise UserError(
            f"one round costs more than privacy.epsilon = {promised.budget:g}: give more noise than "
            f"{promised.rounds.noise:g} (privacy.noise), or leave it out, and it is found for all {wanted:,} rounds"
        )
    if rounds < wanted:
        warnings.warn(
            f"privacy.epsilon = {promised.budget:g} ends the run after {rounds:,} of {wanted:,} rounds",
            RunWarning,
            stacklevel=5,
        )
    return rounds


def _multiples(first: int, last: int, every: int) -> range:
    """The multiples of `every` after `first` up to `last`; 0 means none."""
    return range((first // every + 1) * every, last + 1, every) if every > 0 else range(0)
