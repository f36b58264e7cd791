"""What a round costs in one process with two devices, and in two processes with one device each.

Both have the same two cores, each of which is a device. They are timed in turns, in pairs, because a machine is not
equally busy at all times.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any, NamedTuple

import numpy as np

from partwise.simulation.cores import own_cores
from partwise.types import UserError

COLUMNS: Mapping[str, Callable[[Mapping[str, Any]], str]] = {
    "ms a round,\n1 process": lambda line: f"{1e3 * line['seconds_per_round']:.2f}",
    "ms a round,\n2 processes": lambda line: f"{1e3 * line['seconds_per_round_apart']:.2f}",
    "ratio": lambda line: f"{np.median(line['ratios']):.2f}",
    "of all\npairs": lambda line: f"{min(line['ratios']):.2f} to {max(line['ratios']):.2f}",
    "load": lambda line: f"{line['load']:.1f}",
}
NOTE = (
    "Two cores: both for one process with two devices, or one for each of two processes, in turns. Medians over "
    "calls after the first, then over pairs. The load is that of the last minute."
)
MOVIELENS = {"server.rate": 1.0, "simulation.lanes": 8}
POSTS = {"data.num_clients": 1000, "select.word": "top:1000", "simulation.lanes": 1}
POSTS |= {"simulation.rounds_per_call": 5}
QUICK = {"data.num_clients": 40, "data.num_items": 99, "data.dim": 2, "cohort.size": 8, "simulation.lanes": 2}
QUICK |= {"simulation.rounds_per_call": 2}
PAIRS = 5


class TimedTraining(NamedTuple):
    """What all processes train: a task with its data, its settings, and for how many rounds."""

    task: str
    data: str | None
    changes: Mapping[str, Any]
    rounds: int
    preset: str | None = None

    def resolved(self) -> tuple[Any, Any]:
        """The task and its configuration."""
        from partwise.runs.resolve import resolve

        return resolve(self.task, self.data, self.changes, self.preset)


def cases(quick: bool) -> list[tuple[str, TimedTraining, int]]:
    """Name, training and number of pairs."""
    if quick:
        return [("planted", TimedTraining("planted", None, QUICK, 6), 1)]
    return [
        ("movielens, 100 clients", TimedTraining("movielens", None, MOVIELENS, 200, "paper"), PAIRS),
        ("tags, 50 clients, m = 1,000", TimedTraining("tags-planted", None, POSTS, 50), PAIRS),
    ]


def measure_processes(training: TimedTraining, pairs: int) -> dict[str, Any]:
    """Train in one process and in two, in turns, so many times."""
    cores = own_cores()[:2]
    if len(cores) < 2:
        raise UserError(
            "two processes are compared on two cores, and this process may use only one: allow it two"
        )
    training.resolved()  # a mistake is told before anything is started
    alone, apart = [cores], [[core] for core in cores]
    seconds = np.array([[_trained(training, alone), _trained(training, apart)] for _ in range(pairs)])
    one, two = np.median(seconds, axis=0)
    return {
        "seconds_per_round": float(one),
        "seconds_per_round_apart": float(two),
        "ratios": (seconds[:, 1] / seconds[:, 0]).tolist(),
        "load": os.getloadavg()[0],
        "device": "2 CPU cores",
    }


def _trained(training: TimedTraining, shares: Sequence[Sequence[int]]) -> float:
    """The seconds of a round in a process for every share of the cores."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(len(shares), mp_context=spawn) as processes:
        places = [(address, len(shares), index) for index in range(len(shares))]
        running = [processes.submit(_train, training, *each) for each in zip(shares, places, strict=True)]
        return max(each.result() for each in running)


def _train(training: TimedTraining, cores: Sequence[int], place: tuple[str, int, int]) -> float:
    """The seconds of a round, in one of the processes."""
    os.sched_setaffinity(0, cores)
    os.environ["JAX_PLATFORMS"] = "cpu"
    from partwise.algorithms.registry import prepare
    from partwise.runs.backends import make_simulation
    from partwise.simulation.mesh import use_all_cores
    from partwise.simulation.processes import join_processes

    if place[1] > 1:
        join_processes(*place)  # before anything starts JAX
    use_all_cores()
    task, config = training.resolved()
    simulation: Any = make_simulation(prepare(task, config), config, config.simulation.lanes)
    if simulation.mesh.size != 2:
        raise UserError(
            f"each of two cores must be a device, and here are {simulation.mesh.size}: unset JAX_NUM_CPU_DEVICES "
            f"and XLA_FLAGS"
        )
    calls = [[record.seconds for record in records] for records in simulation.run(training.rounds)]
    return float(np.median([np.mean(call) for call in calls[1:]]))
