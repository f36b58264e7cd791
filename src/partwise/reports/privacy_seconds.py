"""How long the cryptography of the options takes on this machine, for a task's own shapes.

Times are those of a processor: the least of a few calls, after a first one in which loops are compiled. Nothing
waits for a network. A few clients stand for a cohort, and a part of a large model for all of it: their times are
scaled linearly.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from partwise.privacy import retrieval, two_servers
from partwise.privacy.sealing import new_sealing_key
from partwise.privacy.secret_noise import secret_normals
from partwise.privacy.sum_words import SumWords
from partwise.privacy.two_servers import Agreement
from partwise.server.messages import About
from partwise.server.private_slices import Tables, ask_privately, bucketed, helper_answer, read_question

REPEATS = 3
GROUP = 8  # clients that are measured
WORDS = 1 << 20  # of a vector that is measured
TABLE_BYTES = 1 << 25  # of a table that is measured


class Seconds(NamedTuple):
    """What an option takes in a round: a client, and all servers together for the whole cohort. `how` says what was
    measured and what was scaled."""

    client: float
    server: float
    how: str


def timed(function: Callable[[], Any]) -> float:
    """The least seconds of a few calls, after one more."""
    function()
    found = []
    for _ in range(REPEATS):
        began = time.process_time()
        function()
        found.append(time.process_time() - began)
    return min(found)


def measure_noise(num_words: int) -> float:
    """Noise for every number of a sum."""
    return timed(lambda: secret_normals(min(num_words, WORDS))) * num_words / min(num_words, WORDS)


def measure_two_servers(agreement: Agreement, cohort: int) -> Seconds:
    """Private retrieval and a sum by two servers. All keys that a client may have are asked for and written to."""
    sample, scale = _sample(agreement)
    draw = np.random.default_rng(1)
    keys = {space: draw.permutation(form.num_keys)[: form.most] for space, form in sample.tables.items()}
    private, public = new_sealing_key()
    rows = {
        space: draw.integers(0, 256, (form.num_keys, form.row_bytes), np.uint8)
        for space, form in sample.tables.items()
    }
    tables = bucketed(sample, 0, rows)
    client, asked = _asking(sample, (private, public), tables, keys)
    write, added = _adding(sample, (private, public), keys)
    once = 2 * timed(lambda: bucketed(sample, 0, rows)) + _noise(sample)
    each = asked + added
    how = f"{GROUP // 2} clients, scaled to {cohort:,}"
    if scale > 1:
        how += f"; tables cut to a part, and servers' times scaled by {scale:.3g}"
    return Seconds(client + write, (cohort * each + once) * scale, how)


def _sample(agreement: Agreement) -> tuple[Agreement, float]:
    """The agreement with tables that are not too large, and how much larger all of them are."""
    size = sum(form.num_keys * form.row_bytes for form in agreement.tables.values())
    scale = max(1.0, size / TABLE_BYTES)
    cut = lambda form: form._replace(
        num_keys=max(1, int(form.num_keys / scale)), most=max(1, min(form.most, int(form.num_keys / scale)))
    )
    tables = {space: cut(form) for space, form in agreement.tables.items()}
    return agreement._replace(tables=tables, noise=1.0, count_noise=1.0), scale


def _asking(
    agreement: Agreement, sealing: tuple[bytes, bytes], tables: Tables, keys: Mapping[str, np.ndarray]
) -> tuple[float, float]:
    """To ask and to read, at the client; to answer, at both servers."""
    private, public = sealing
    belongs = About(task="one")
    ask = lambda: ask_privately(agreement, public, belongs, keys)
    question = ask()
    asked = read_question(agreement, question.message)
    helper = lambda: helper_answer(agreement, private, tables, 0, "one", asked.public, asked.sealed)
    first = lambda: {
        space: retrieval.answer_first(tables[space], agreement.layout(space), asked.to_both[space], told)
        for space, told in asked.to_first.items()
    }
    theirs, mine, answers, at = helper(), first(), {}, 0
    for space, answer in mine.items():
        answers[space] = retrieval.joined(answer, theirs[at : at + len(answer)])
        at += len(answer)

    def read() -> None:
        for space, query in question.queries.items():
            layout, label = agreement.layout(space), agreement.context(0, space)
            retrieval.read_joined(query, layout, label, answers[space], question.pads[space])

    return timed(ask) + timed(read), timed(helper) + timed(first)


def _adding(
    agreement: Agreement, sealing: tuple[bytes, bytes], keys: Mapping[str, np.ndarray]
) -> tuple[float, float]:
    """To write, at the client; to add one more report, at both servers."""
    private, public = sealing
    words = SumWords(
        np.zeros(agreement.num_dense, np.uint32),
        {
            space: np.zeros((len(some), agreement.tables[space].num_words), np.uint32)
            for space, some in keys.items()
        },
    )
    write = lambda task: two_servers.make_parts(agreement, public, 0, task, words, keys)
    reports = [write(f"report {number}") for number in range(GROUP // 2)]
    boxes = [two_servers.for_helper(each) for each in reports]
    first = lambda number: timed(lambda: two_servers.first_share(agreement, 0, reports[:number]))
    second = lambda number: timed(lambda: two_servers.helper_share(agreement, private, 0, boxes[:number]))
    more = sum(share(len(reports)) - share(1) for share in (first, second))
    return timed(lambda: write("another")), max(more, 0.0) / (len(reports) - 1)


def _noise(agreement: Agreement) -> float:
    """The noise of both servers."""
    rows = {
        space: np.zeros((form.num_keys, form.num_words), np.uint32)
        for space, form in agreement.tables.items()
    }
    share = SumWords(np.zeros(agreement.num_dense, np.uint32), rows)
    return 2 * timed(lambda: two_servers.with_noise(agreement, share))
