"""metrics.jsonl: whole and consecutive, or said not to be; and a tally that does not grow with the rounds."""

from __future__ import annotations

import json
import tracemalloc
from itertools import pairwise

import pytest

from partwise.config.settings import Config
from partwise.runs.client_file import Source
from partwise.runs.folder import Folder
from partwise.runs.recorder import Recorder
from partwise.runs.records import append_records, how_far, keep_first, read_records
from partwise.runs.tally import POINTS, Tally, Thinned
from partwise.types import UserError


def line(number, loss=1.0, clients=4, broken=(), evaluation=None):
    counts = dict.fromkeys(("empty", "too_small", "dropped", "spare"), 0)
    sizes = {"bytes_down": 100, "bytes_up": 50, "seconds": 0.01 * number, "examples": 40}
    told = {"train": {"loss": loss}, "broken": list(broken), "evaluation": evaluation}
    return {"round": number, "clients": clients, **counts, **sizes, **told}


@pytest.fixture
def file(tmp_path):
    """Five rounds."""
    path = tmp_path / "metrics.jsonl"
    append_records(path, map(line, range(1, 4)))
    append_records(path, map(line, range(4, 6)))
    return path


def test_rounds_are_read_as_they_were_written(file):
    assert read_records(file) == [line(number) for number in range(1, 6)]
    assert all(json.loads(text)["crc32"] for text in file.read_text().splitlines())
    assert how_far(file) == (5, "")


def damage(file, number, change):
    lines = file.read_bytes().splitlines(keepends=True)
    lines[number - 1] = change(lines[number - 1])
    file.write_bytes(b"".join(lines))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda text: text.replace(b'"clients": 4', b'"clients": 5'), "line 3 .*does not fit its checksum"),
        (lambda text: b"", "line 3 should be of round 3, and it is of round 4, not 3"),
        (lambda text: text[:40], "line 3 .*checksum"),
        (lambda text: b"\xff\xfe\n", "line 3 .*checksum"),
        (lambda text: b"[]\n", "line 3 .*checksum"),
        (lambda text: text + text, "line 4 should be of round 4, and it is of round 3"),
    ],
    ids=["another number", "missing", "cut", "no text", "a list", "twice"],
)
def test_a_damaged_line_is_named_and_nothing_is_read_past_it(file, change, says):
    damage(file, 3, change)
    with pytest.raises(UserError, match=rf"metrics\.jsonl' is damaged: {says}"):
        read_records(file)
    assert how_far(file).rounds in (2, 3)


def test_a_last_line_that_was_cut_is_normal(file):
    for cut in (1, 30):
        file.write_bytes(file.read_bytes()[:-cut])
        assert [record["round"] for record in read_records(file)] == [1, 2, 3, 4]
    keep_first(file, 4)
    assert how_far(file) == (4, "")
    keep_first(file, 0)
    assert read_records(file) == []
    assert read_records(file.with_name("none")) == []


def test_a_recorder_does_not_grow_with_the_rounds(tmp_path):
    """What it holds after 8,000 rounds is what it held after 4,000; a run without a folder keeps its rounds."""
    Folder(tmp_path).start(Config(), {}, Source({}, {}, "user"), {})
    recorder = Recorder(Folder(tmp_path))
    look = {"rmse": 1.0, "over_clients": {"rmse": {"mean": 1.0}}}
    tracemalloc.start()
    sizes = []
    for first in range(1, 8_001, 100):
        numbers = range(first, first + 100)
        recorder.add([line(number, evaluation=look if number % 5 == 0 else None) for number in numbers])
        if numbers[-1] % 2_000 == 0:
            sizes.append(tracemalloc.get_traced_memory()[0])
    tracemalloc.stop()
    assert sizes[-1] < sizes[1] + 100_000
    assert recorder.tally.sums["bytes_down"] == 800_000
    curve = recorder.tally.curve()
    assert len(curve) < 2 * POINTS
    assert (curve[0]["round"], curve[-1]["round"]) == (1, 8_000)
    assert sum(1 for point in curve if point["evaluation"]) > 100
    assert recorder.tally.median_seconds() == pytest.approx(40, rel=0.01)
    assert len(recorder.records()) == 8_000


def test_a_recorder_goes_on_with_what_a_folder_has(tmp_path):
    Folder(tmp_path).start(Config(), {}, Source({}, {}, "user"), {})
    first = Recorder(Folder(tmp_path))
    first.add([line(1), line(2, evaluation={"rmse": 2.0})])
    again = Recorder(Folder(tmp_path))
    again.add([line(3)])
    assert again.tally.rounds == 3
    assert again.tally.curve() == [*first.tally.curve(), {**again.tally.curve()[-1]}]
    memory = Recorder(None)
    memory.add([line(1)])
    assert memory.records() == [line(1)]


@pytest.mark.parametrize("count", [0, 1, 9, 10, 11, 1000, 1001])
def test_what_is_thinned_has_both_ends_and_is_spread_evenly(count):
    thinned = Thinned(10)
    for number in range(count):
        thinned.add(number)
    kept = thinned.all()
    assert kept == list(range(count)) if count <= 10 else 5 <= len(kept) <= 11
    assert (kept[:1], kept[-1:]) == (list(range(count))[:1], list(range(count))[-1:])
    assert len({b - a for a, b in pairwise(kept[:-1])}) <= 1


def tallied(*rounds):
    tally = Tally()
    for number, (loss, clients, broken) in enumerate(rounds, 1):
        tally.add(line(number, loss, clients, [f"c{k}" for k in range(broken)]))
    return tally


GOOD, NAN = (1.0, 4, 0), float("nan")


@pytest.mark.parametrize(
    ("rounds", "wrong"),
    [
        ([GOOD] * 9, 0),
        ([GOOD] * 3 + [(999.0, 4, 0)] * 9, 0),  # bad, and perhaps a noisy cohort
        ([(1e-9, 4, 0)] * 3 + [(5.0, 4, 0)] * 9, 0),  # near zero at first, then usual
        ([(-3.0, 4, 0), (-100.0, 4, 0), (-1.0, 4, 0), (2.0, 4, 0)], 0),  # negative losses
        ([(5e8, 4, 0), (2e8, 4, 0), (7e8, 4, 0), (9e9, 4, 0)], 0),  # squared errors of large numbers
        ([GOOD, (1.0, 3, 1), (1.0, 2, 2)], 0),  # some updates are broken, not most
        ([GOOD, (NAN, 0, 0), (NAN, 0, 0)], 0),  # nobody reported
        ([GOOD, (NAN, 0, 4), (1.0, 1, 3)], 2),
        ([GOOD] * 3 + [(NAN, 4, 0), (float("inf"), 4, 0), (float("-inf"), 4, 0), (None, 4, 0)], 4),
        ([GOOD] * 3 + [(1001.0, 4, 0)] * 5, 5),
        ([(1e4, 4, 0)] * 3 + [(1.1e7, 4, 0)] * 5, 5),
        ([GOOD] * 3 + [(NAN, 4, 0)] * 5 + [GOOD] * 2, 3),  # it may come back
        ([(1.0, 4, 0), (NAN, 1, 3)] * 9 + [GOOD] * 9, 0),
    ],
)
def test_a_round_that_goes_wrong_is_told_from_a_noisy_one(rounds, wrong):
    assert tallied(*rounds).wrong == wrong
