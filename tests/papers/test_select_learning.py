"""Cheaper forms of Federated Select learn as the plain ones do. Slow: run with `-m slow`."""

import math
import os

import pytest

from partwise.model.partition import with_psi
from partwise.model.psi import PSIS
from partwise.runs.train import train
from partwise.tasks import Task, load_task

pytestmark = pytest.mark.slow


def with_encoding(task: Task, psi: str) -> Task:
    """The same, with slices that travel as psi makes them."""
    setting = task.personal._replace(partition=with_psi(task.personal.partition, PSIS[psi]))
    return task._replace(personal=setting, stateful=setting)


def test_slices_of_fewer_bits_learn_as_well():
    shape = {"num_words": 1000, "num_tags": 50, "mean_examples": 30, "words_per_example": 20}
    task = load_task("tags-planted", num_clients=500, **shape)
    changes = {"rounds": 150, "select.word": "top:200", "simulation.lanes": 4}
    runs = {psi: train(with_encoding(task, psi), changes=changes) for psi in PSIS}
    recall = {psi: run.test["recall_at_5"] for psi, run in runs.items()}
    assert recall["take"] > 0.75 * task.best(None)["recall_at_5"]
    assert abs(recall["float16"] - recall["take"]) < 0.005
    assert abs(recall["int8"] - recall["take"]) < 0.01
    down = {psi: run.summary["bytes_down_per_client"] for psi, run in runs.items()}
    assert down["int8"] < down["float16"] < 0.6 * down["take"]


@pytest.mark.skipif(not os.environ.get("PARTWISE_DATA"), reason="PARTWISE_DATA is not set")
def test_a_sampled_softmax_learns_the_next_word():
    """As in docs/reproduction_select.md: far below the loss of a uniform guess, about as good as all outputs."""
    shape = {"num_words": 1000, "width": 32, "heads": 4, "units": 128, "max_sentences": 50, "comments": False}
    changes = {"rounds": 300, "cohort.size": 20, "simulation.lanes": 1, "server.rate": 0.03}
    loss = {}
    for sampled in (0, 64):
        task = load_task("next-word", **shape, sampled=sampled)
        loss[sampled] = train(task, changes=changes).test["loss"]
    assert loss[64] < 0.75 * math.log(task.options["num_ids"])
    assert loss[64] < loss[0] + 0.1
