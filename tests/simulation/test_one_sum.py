"""Between processes a round costs one sum: its compiled program, in two real processes, has one collective."""

from __future__ import annotations

import json

import pytest

COUNT = """
import json, re, sys
import jax, numpy as np
import partwise as pw
from partwise.algorithms.registry import prepare
from partwise.runs.backends import make_evaluator, make_simulation
from partwise.runs.resolve import resolve
from partwise.simulation import loop
from partwise.simulation.exchange import put_along

task, changes, staged = json.loads(sys.argv[1])
pw.join_processes()
if staged:
    loop.RESIDENT_BYTES = 0
task, config = resolve(task, None, changes)
prepared = prepare(task, config)

def collectives(program):
    kinds = "all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute|collective-broadcast"
    return re.findall(rf"= \\(?([a-z0-9]+)\\[.*? ({kinds})(?:-start)?\\(", program.compile().as_text())

simulation = make_simulation(prepared, config, config.simulation.lanes)
simulation._place()
number = simulation.rounds_per_call
call = simulation._settled(simulation._stage(0, number))
given = simulation._placed_plan(call.staged), jax.random.key(0), np.uint32(0), np.int32(number)
rounds = simulation._rounds.lower(simulation.rates, simulation._state, call.staged.shelf, *given)

evaluate = make_evaluator(prepared, config, task.validation)
block = evaluate._stage(0)
plan = put_along(evaluate._with_kept(block, 0, simulation.kept_of), evaluate.mesh, 1)
judged = evaluate._program.lower(evaluate.rates, simulation._state.params, block.shelf, plan, jax.random.key(0))
print(json.dumps([collectives(rounds), collectives(judged)]))
"""
SMALL = {"data.num_clients": 40, "cohort.size": 7, "simulation.rounds_per_call": 2, "simulation.lanes": 2}
RATINGS = SMALL | {"data.num_items": 30, "data.mean_examples": 12, "data.dim": 2}
POSTS = SMALL | {"data.num_words": 120, "data.num_tags": 6, "data.words_per_example": 5}
PRIVATE = {"privacy.clip": 1.0, "privacy.noise": 0.5, "privacy.delta": 1e-5, "server.weighting": "uniform"}
MASKED = PRIVATE | {"privacy.noise": 0.0, "privacy.sums": "masked"}
KEPT = {"algorithm": "scaffold", "scaffold.control": "clients"}
CASES = {
    "cut tables": ("tags-planted", POSTS | {"algorithm": "fed_select", "server.optimizer": "lazy_adam"}),
    "messages of their own": ("tags-planted", POSTS | {"data.num_words": 3000, "data.num_tags": 100}),
    "heat": ("tags-planted", POSTS | {"algorithm": "fed_sub_avg"}),
    "heat of cohorts": ("tags-planted", POSTS | {"algorithm": "fed_sub_avg", "server.mean": "seen"}),
    "kept": ("tags-planted", POSTS | KEPT),
    "network": ("next-word-planted", SMALL),
    "noise": ("planted", RATINGS | PRIVATE),
    "whole numbers": ("planted", RATINGS | MASKED),
}


def collectives(start, task: str, changes: dict, staged: bool) -> list[list[list[str]]]:
    """[type, kind] of every collective of two processes' programs: that of rounds, and that of evaluations."""
    words = ["-c", COUNT, json.dumps([task, changes, staged])]
    running = start(words, words)
    told = [each.communicate(timeout=600) for each in running]
    for process, (_, err) in zip(running, told, strict=True):
        assert process.returncode == 0, err
    assert told[0][0] == told[1][0]
    return json.loads(told[0][0])


def test_a_round_is_one_sum(start_together):
    """And an evaluation is none: its results are gathered once."""
    assert collectives(start_together, "planted", RATINGS, False) == [[["f32", "all-reduce"]], []]


@pytest.mark.slow
def test_rows_of_shards_are_one_more_sum(start_together):
    """The rows of tables and of what the optimizer has of them come together."""
    changes = RATINGS | {"data.num_items": 2001, "server.optimizer": "adagrad", "simulation.tables": "shards"}
    rounds = collectives(start_together, "planted", changes, False)[0]
    assert sorted(rounds) == [["f32", "all-reduce"], ["u32", "all-reduce"]]


@pytest.mark.slow
@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_a_round_of_any_kind_is_one_sum(start_together, case, staged):
    """Also if each process has read its own clients, and in whole numbers if these are added up."""
    number = "u32" if case == "whole numbers" else "f32"
    assert collectives(start_together, *CASES[case], staged) == [[[number, "all-reduce"]], []]
