"""How a run stands at a moment: in words, for a program, and as the strip at the top of a live page."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from partwise.pages.numbers import NONE, brief, definition_list, duration, number, part, size, text, whole
from partwise.runs.run_view import RunView

RECENT = 50  # rounds by which the time of the next ones is guessed
GOING = ("starting", "training", "serving", "evaluating")  # states in which more is to come


class Moment(NamedTuple):
    """How a run stands.

    state:   starting, training, evaluating, serving, stalled, stopped, failed, finished, damaged or unreachable
    words:   the same, in a sentence
    devices: what a coordinator says of its devices, in words; nothing for a simulation
    """

    state: str
    words: str
    devices: Mapping[str, str] = {}


def status(run: RunView, moment: Moment) -> dict[str, Any]:
    """For scripts: one JSON document."""
    series = run.series
    last = series.looks[-1] if series.looks else None
    told = {
        "name": run.name,
        "task": run.settings.get("task"),
        "algorithm": run.settings.get("algorithm"),
        "state": moment.state,
        "words": moment.words,
        "round": series.done,
        "rounds": run.rounds,
        "loss": _known(series.losses[-1]) if series.losses else None,
        "evaluation": last and {"round": last.round, **last.metrics},
        "clients": series.last.get("clients"),
        "bytes": series.sent if series.rounds else None,
        **series.counts,
        "seconds_per_round": _known(pace(run)),
        "seconds_left": seconds_left(run, moment),
    }
    epsilon = _known(series.epsilons[-1]) if series.epsilons else None
    return told | ({"epsilon": epsilon} if epsilon is not None else {}) | {"devices": dict(moment.devices)}


def pace(run: RunView) -> float:
    """The usual seconds of the latest rounds."""
    known = [value for value in run.series.seconds[-RECENT:] if math.isfinite(value)]
    return float(np.median(known)) if known else math.nan


def seconds_left(run: RunView, moment: Moment) -> float | None:
    """About how long the rounds that are left will take; None if nothing is going on."""
    left = run.rounds - run.series.done
    return _known(left * pace(run)) if moment.state in GOING and left > 0 else None


def _known(value: float) -> float | None:
    return value if math.isfinite(value) else None


def tell(run: RunView, moment: Moment) -> str:
    """One line for a terminal."""
    told = status(run, moment)
    loss = f", loss {number(told['loss'])}" if told["loss"] is not None else ""
    left = f", about {duration(told['seconds_left'])} left" if told["seconds_left"] else ""
    return (
        f"round {told['round']:,} of {told['rounds']:,}{loss}{left}: {moment.words}"
        if run.rounds
        else moment.words
    )


def live_strip(run: RunView, moment: Moment) -> str:
    """The strip at the top of a live page."""
    done, of = run.series.done, run.rounds
    value = f'max="{of}" value="{min(done, of)}" ' if of else ""
    bar = f'<progress {value}aria-label="Rounds">{f"{done} of {of}" if of else ""}</progress>'
    dot = f'<span class="dot {moment.state}"></span>'
    state = f'<div class="state" role="status" data-part="state">{dot}<span>{text(moment.words)}</span></div>'
    return (
        f'<div class="live" id="live">{state}'
        f"{part('progress', bar + definition_list(_facts(run, moment), 'facts'))}</div>"
    )


def _facts(run: RunView, moment: Moment) -> dict[str, str]:
    series, told = run.series, status(run, moment)
    devices = {name: text(value) for name, value in moment.devices.items()}
    facts = {"round": f"{whole(told['round'])} <small>of {whole(run.rounds)}</small>"} if run.rounds else {}
    if not series.rounds:
        return facts | devices
    facts["training loss"] = number(told["loss"])
    if series.looks:
        name = next(iter(series.looks[-1].metrics), "")
        facts[f"validation {name}"] = (
            f"{number(series.looks[-1].metrics.get(name))} <small>round {series.looks[-1].round:,}</small>"
        )
    facts["clients in the round"] = whole(told["clients"])
    facts["bytes so far"] = size(told["bytes"]) if told["bytes"] is not None else "not told"
    facts["dropped out"] = "not told" if series.lost is None else whole(series.lost)
    facts["broken updates"] = "not told" if told["broken"] is None else whole(told["broken"])
    if series.counts["outliers"]:
        facts["updates out of proportion"] = whole(series.counts["outliers"])
    if "epsilon" in told:
        facts["epsilon so far"] = brief(told["epsilon"])
    facts["a round takes"] = duration(told["seconds_per_round"])
    facts["time left"] = f"about {duration(told['seconds_left'])}" if told["seconds_left"] else NONE
    return facts | devices
