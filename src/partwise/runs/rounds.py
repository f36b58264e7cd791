"""The rounds of a run: run, evaluated, recorded, shown to callbacks, and saved."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from partwise.config.protection import Protection
from partwise.config.settings import Config
from partwise.runs.callbacks import Followed
from partwise.runs.recorder import Recorder
from partwise.runs.records import as_record
from partwise.runs.sanity import check_going
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


def run_rounds(course: Course) -> Iterator[None]:
    """Run the rounds that remain, or those until a callback ends the run, and yield before every call of the
    simulation. An evaluated round is recorded together with its evaluation."""
    simulation, rounds, followed = course.simulation, course.rounds, course.followed
    every, saving = course.config.simulation.evaluate_every, course.config.simulation.checkpoint_every
    followed.show_again(course.recorder)
    while simulation.round < rounds and not followed.reason:
        yield
        due, save = _next(simulation.round, every), _next(simulation.round, saving)
        stop = min(due, save, rounds)
        last = yield from _run_until(course, stop, evaluated=stop in (due, rounds))
        if last:
            last["evaluation"] = course.evaluate(simulation.state.params, kept=simulation.kept_of)
            last |= _spent(course.promised, stop, exactly=True)
            _write(course, [last])
            course.progress(Status(stop, rounds, last["train"]["loss"], last["evaluation"]))
        done = simulation.round
        if course.recorder.folder and (done in (save, rounds) or followed.reason):
            course.recorder.folder.save_checkpoint(simulation.snapshot(), done)


def _run_until(course: Course, stop: int, evaluated: bool) -> Generator[None, None, dict[str, Any]]:
    """Run and record rounds up to `stop`, or to the end of the call after which a callback ends the run. If the
    last round is to be evaluated, it is returned instead of recorded."""
    simulation = course.simulation
    for call in simulation.run(stop - simulation.round):
        lines = [as_record(each) | _spent(course.promised, each.round) for each in call]
        last = lines.pop() if evaluated and simulation.round == stop else {}
        _write(course, lines)
        course.progress(Status(simulation.round, course.rounds, call[-1].loss, None))
        if last or course.followed.reason:
            return last
        if simulation.round < stop:
            yield
    return {}


def _spent(promised: Protection | None, number: int, exactly: bool = False) -> dict[str, Any]:
    return {"privacy": promised.spent(number, exactly)} if promised else {}


def _write(course: Course, lines: list[dict[str, Any]]) -> None:
    course.recorder.add(lines)
    config = course.config
    check_going(course.recorder.tally, config.simulation.patience, config.rounds, course.rates)
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


def _next(round_number: int, every: int) -> int:
    """The next multiple of `every`; 0 means never."""
    return (round_number // every + 1) * every if every > 0 else sys.maxsize
