"""How the language tables of Federated Reconstruction are trained: on short clients, on long ones, quickly."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from partwise.papers.fedrecon import STEPS
from partwise.tasks.base import on_accelerator
from partwise.tasks.language import has_long_clients


class WordsProtocol(NamedTuple):
    """What trainings on some data have in common.

    vocabularies: numbers of words
    buckets:      the large number of buckets
    settings:     changes of the paper's settings
    rates:        rates of training that are searched
    tuning:       rounds of a training in this search
    looks:        rounds between evaluations of the validation clients; 0: ten evaluations in all
    patience:     a training ends when so many evaluations were no better, and its best model is judged; 0: it
                  has all its rounds, and its last model is judged
    sentences:    the most sentences of a client; all lanes wait for the largest one
    model:        sizes of the model that are not the paper's
    steps:        numbers of steps in Figure 3
    passes:       whether these take as many passes over the sentences as they need, or no more than the paper's
    numbered:     whether texts are read once for all vocabularies, because they are many
    supports:     for `fedrecon-support`, numbers of sentences from which clients rebuild
    query:        and the sentences at a client's end on which it is then judged
    """

    vocabularies: Sequence[int] = (1000, 5000, 10_000)
    buckets: int = 500
    settings: Mapping[str, Any] = {"cohort.size": 20, "rounds": 300}
    rates: Mapping[str, Sequence[float]] = {"server.rate": (0.01, 0.03), "update.rate": (0.3, 1.0)}
    tuning: int = 100
    looks: int = 0
    patience: int = 0
    sentences: int = 64
    min_sentences: int = 1
    model: Mapping[str, Any] = {}
    steps: Mapping[str, Sequence[int]] = STEPS
    passes: bool = False
    numbered: bool = False
    supports: Sequence[int] = ()
    query: int = 0


NARROW = {"embedding": 32, "units": 64}
ON_CPU = {"simulation.lanes": 1}
ON_GPU = {"simulation.lanes": 20}
SHORT = WordsProtocol()  # Stack Exchange and others
LONG = WordsProtocol(  # blogs
    settings={"cohort.size": 50, "rounds": 2000, "simulation.lanes": 50},
    rates={"server.rate": (0.01, 0.03, 0.1), "update.rate": (0.1, 0.3)},
    looks=50,
    patience=4,
    sentences=300,
    min_sentences=200,
    steps={"reconstruct.max_steps": (0, 1, 5, 10, 20, 100), "update.max_steps": (1, 5, 10, 20, 50)},
    passes=True,
    numbered=True,
    supports=(5, 10, 20, 40, 80, 150),
    query=100,
)
LONG_ON_CPU = LONG._replace(settings={"cohort.size": 20, "rounds": 400, **ON_CPU}, tuning=50)
QUICK = {
    "cohort.size": 4,
    "rounds": 2,
    "reconstruct.max_steps": 2,
    "update.max_steps": 2,
    "simulation.lanes": 1,
}
QUICK_MODEL = {"embedding": 8, "units": 8, "length": 6}


def protocol_of(data: str | None, quick: bool) -> WordsProtocol:
    """The protocol for the data at this place, on this machine."""
    long, fast = has_long_clients(data), on_accelerator()
    if long:
        usual = LONG if fast else LONG_ON_CPU
    else:
        usual = SHORT._replace(settings={**SHORT.settings, **(ON_GPU if fast else ON_CPU)})
    usual = usual._replace(model={"precision": "bfloat16"} if fast else NARROW)
    return _quick(usual) if quick else usual


def _quick(usual: WordsProtocol) -> WordsProtocol:
    """The same with a small model, few rounds and one set of rates."""
    return usual._replace(
        vocabularies=(30, 60),
        buckets=5,
        settings={**usual.settings, **QUICK},
        rates={key: values[:1] for key, values in usual.rates.items()},
        looks=1 if usual.looks else 0,
        patience=1 if usual.patience else 0,
        sentences=6,
        min_sentences=1,
        model=QUICK_MODEL,
        steps={key: values[:1] for key, values in usual.steps.items()},
        supports=(1, 3) if usual.supports else (),
        query=3 if usual.query else 0,
    )
