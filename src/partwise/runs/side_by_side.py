"""Runs that share one compiled program: side by side in one call, or one after the other.

Rates and the seed are values in a program. Runs side by side are one more axis of it. That needs room for all their
tables at once; algorithms whose clients keep something, populations that are not resident, tables that are cut, and
models that fill a core's cache take their turns instead.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from partwise.algorithms.entry import Prepared
from partwise.algorithms.registry import ALGORITHMS, prepare
from partwise.config.settings import Config
from partwise.model.partition import DEFAULT
from partwise.runs.backends import Runtime, lanes_of, make_evaluator, make_simulation
from partwise.runs.document import to_plain
from partwise.runs.folder import Folder
from partwise.runs.sweep_plan import RATES, SweepCell
from partwise.simulation.evaluator import Evaluator
from partwise.simulation.loop import fits, lane_bytes, whole_tables
from partwise.simulation.many_runs import Sweep, why_alone
from partwise.simulation.member import Together
from partwise.simulation.mesh import fills_a_core
from partwise.simulation.stage import rooms_of
from partwise.simulation.table_places import AUTO, COPIES
from partwise.tasks import Task
from partwise.tree import num_bytes

MOST_BESIDE = 16  # runs in one call
STATE_BYTES = 1 << 30  # of all runs in one call, together
SEEDED = ("central",)  # algorithms that read the seed before the first round


class CellRun(NamedTuple):
    """A run of a sweep, ready to begin or to go on."""

    cell: SweepCell
    task: Task
    config: Config
    prepared: Prepared
    folder: Folder


def batches_of(runs: Sequence[CellRun]) -> list[list[CellRun]]:
    """The runs that share a program, in batches that run together; one alone if it shares none."""
    found: dict[str, list[CellRun]] = {}
    for number, run in enumerate(runs):
        found.setdefault(_program(run, number), []).append(run)
    return [batch for group in found.values() for batch in _cut(group, most_beside(group[0]))]


def _program(run: CellRun, number: int) -> str:
    """A text that is the same for runs with the same program."""
    config, rates = run.config, run.prepared.rates
    if config.algorithm not in ALGORITHMS:  # of another package, which may read its rates when it is prepared
        return f"run {number}"
    noisy_heat = config.privacy.clip is not None and config.server.mean == "heat"
    values = {key for key, name in RATES.items() if name in rates}
    values |= set() if config.algorithm in SEEDED or noisy_heat else {"seed"}
    fixed = {key: value for key, value in config.flat().items() if key not in values}
    return json.dumps([to_plain(fixed), sorted(rates)], sort_keys=True)


def _cut(runs: list[CellRun], most: int) -> Iterator[list[CellRun]]:
    """Batches of about the same size. Runs that take turns are one batch."""
    if most <= 1:
        yield runs
        return
    number = -(-len(runs) // most)
    size = -(-len(runs) // number)
    for first in range(0, len(runs), size):
        yield runs[first : first + size]


def most_beside(run: CellRun) -> int:
    """How many runs like this one may go side by side; 1 if they take turns."""
    prepared, config = run.prepared, run.config
    algorithm = prepared.build(prepared.rates)
    if config.simulation.backend != "compiled" or why_alone(algorithm) or not fits(prepared.store):
        return 1
    if config.simulation.tables not in (AUTO, COPIES):
        return 1
    partition = algorithm.partition
    room = rooms_of(prepared.store, partition, algorithm.choose)[0]
    cut = not whole_tables(algorithm, prepared.store, prepared.recruiting, room)
    if cut or fills_a_core(lane_bytes(partition, room)):
        return 1
    leaves = [partition.shapes[path.removeprefix(DEFAULT)] for path in partition.server_paths]
    state = 3 * sum(num_bytes(leaf.shape, leaf.dtype) for leaf in leaves)  # with moments of an optimizer
    return max(min(MOST_BESIDE, STATE_BYTES // max(state, 1)), 1)


def goes_beside(batch: Sequence[CellRun]) -> bool:
    """Whether the runs of a batch go side by side."""
    return len(batch) > 1 and most_beside(batch[0]) > 1


class Programs:
    """The compiled program of the last batch. It is used again if the next one can share it."""

    def __init__(self):
        self._name = ""
        self._sweep: Sweep | None = None
        self._evaluate: Evaluator | None = None

    def runtimes(self, batch: Sequence[CellRun], trials: int) -> Iterator[tuple[CellRun, Runtime]]:
        """What runs each of a batch. Runs side by side get theirs at once. A run that takes its turn gets it when
        the one before has ended, because it is the same program."""
        first, evaluate = batch[0], self._evaluator(batch)
        own = lambda run: evaluate.with_rates(run.prepared.rates, run.config.seed)
        if goes_beside(batch):
            members = Together(self._many(batch)).members()
            for run, member in zip(batch, members, strict=True):
                yield run, Runtime(member, own(run), len(batch), trials, draws=False)
            return
        lanes = next((found for run in batch if (found := lanes_of(run.folder))), 0)
        simulation = make_simulation(first.prepared, first.config, lanes)
        for run in batch:
            simulation.restart(run.config.seed, run.prepared.rates)
            yield run, Runtime(simulation, own(run), 1, trials, draws=False)

    def _evaluator(self, batch: Sequence[CellRun]) -> Evaluator:
        first, name = batch[0], _program(batch[0], 0) + str(len(batch))
        if name != self._name or self._evaluate is None:
            self._name, self._sweep = name, None
            parts = (first.task.validation, first.task.test)
            self._evaluate = make_evaluator(first.prepared, first.config, *parts)
        return self._evaluate

    def _many(self, batch: Sequence[CellRun]) -> Sweep:
        prepared, config = batch[0].prepared, batch[0].config
        runs = [run.prepared.rates for run in batch], [run.config.seed for run in batch]
        if self._sweep is not None:
            self._sweep.restart(*runs)
            return self._sweep
        self._sweep = Sweep(
            prepared.build,
            *runs,
            prepared.store,
            prepared.recruiting,
            rounds_per_call=config.simulation.rounds_per_call,
            serving=config.serving.way,
            lanes=config.simulation.lanes or None,
        )
        return self._sweep


def prepared_run(cell: SweepCell, task: Task, config: Config, folder: Folder) -> CellRun:
    """A run of a sweep with what runs it."""
    return CellRun(cell, task, config, prepare(task, config), folder)
