"""Federated Submodel Averaging on data that its paper does not have: how heat is spread, and rounds to a target.

* Sequences: Yelp, with the deep interest network as on Amazon electronics. There are 30,431 clients of few examples
  each. An item is held by some dozen of them, and a user's vector by one. Another file of the format may be given.
* Blogs, or another table of sentences: the next word, with the transformer of Federated Select on words as keys. A
  word's row and column are held by those who use the word.

Which of them follows from the data. The target of words is the best that CentralSGD reaches (the paper's rule,
section 5.2), and tuning is that of `fedsubavg`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from partwise.data.heat import summarize
from partwise.data.loaders import sequences
from partwise.papers.fedsubavg import ALGORITHMS, Comparison, Line, PaperTask, compare, draw
from partwise.runs.train import OnStatus
from partwise.selection.key_heat import count_heats
from partwise.tasks import Task
from partwise.tasks.language import has_long_clients

COMPARED = ("central", "fed_avg", "fed_adam", "fed_sub_avg")
YELP = PaperTask(
    name="Yelp",
    task="clicks",
    metric="auc",
    part="test",
    tuned="validation",
    targets=(0.6,),  # of the paper's Amazon electronics, which has the same model
    paper={},
    cohorts={},
    every=20,
    rates=(0.03, 0.1, 0.3, 1.0, 3.0, 10.0),
    adam=((0.1, 0.01), (0.1, 0.03), (0.3, 0.01), (0.3, 0.03), (0.3, 0.1), (1.0, 0.03)),
    options={"file": "Yelp", "length": 20},
)
BLOGS = YELP._replace(
    name="blogs",
    task="next-word",
    metric="accuracy",
    targets=(None,),
    options={"num_words": 10_000, "width": 32, "heads": 4, "units": 256, "max_sentences": 100},
)


def long_tails(
    data: str | None, out: Path, seeds: Sequence[int], quick: bool, progress: OnStatus
) -> dict[str, Any]:
    """The dispersion of every key space, and rounds to the target by algorithm."""
    case = case_of(data)
    comparison = Comparison(case, data, out, quick, progress)
    lines = [Line(ALGORITHMS[name], name, {}, None) for name in COMPARED]
    rows, panel = compare(comparison, lines, seeds)
    draw(out / "fedsubavg-tails.png", {f"{case.name}: {case.word}": panel}, quick)
    return {"rows": [*heat_rows(case.name, comparison.task), *rows]}


def case_of(data: str | None) -> PaperTask:
    """Blogs if the data is sentences of many people, otherwise Yelp, or the file of sequences that was given."""
    if has_long_clients(data):
        return BLOGS
    name = sequences.name_in(data, None, YELP.name)
    return YELP._replace(name=name, options={**YELP.options, "file": name})


def heat_rows(name: str, task: Task) -> list[dict[str, Any]]:
    """n_max / n_min of every key space, over the training clients."""
    return [
        {
            "row": f"{name}, keys of {space}",
            "metric": "dispersion",
            "paper": None,
            "ours": told["dispersion"],
            "spread": 0.0,
            "seeds": 1,
            "heat": told,
        }
        for space, heat in count_heats(task.train, task.personal.partition).items()
        for told in (summarize(heat),)
    ]
