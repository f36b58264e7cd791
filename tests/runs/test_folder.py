"""A run's folder with parts of it damaged, missing or left over: it goes on to the same end, or says why not."""

from __future__ import annotations

import random
import shutil
import warnings

import numpy as np
import pytest

from partwise.runs import backends
from partwise.runs import train as runs
from partwise.runs.evaluation import evaluate_run
from partwise.runs.folder import Folder
from partwise.runs.personal import Personal
from partwise.runs.train import train
from partwise.types import RunWarning, UserError

NEWEST, OLDER = "checkpoints/00000006.safetensors", "checkpoints/00000004.safetensors"


@pytest.fixture(scope="module")
def model(tiny_run):
    """The bytes that every way to the end must give."""
    return (tiny_run / "model.safetensors").read_bytes()


@pytest.fixture(autouse=True)
def no_picture(monkeypatch):
    monkeypatch.setattr(runs, "_draw", lambda *_: None)


def test_the_newest_checkpoint_damaged_the_older_serves(copied, flip, model):
    flip(copied / NEWEST, 4000)
    (copied / "model.safetensors").unlink()
    with pytest.warns(
        RunWarning, match=r"going on from round 4, because .*00000006\.safetensors' is damaged"
    ):
        done = train(out=copied, resume=True)
    assert (copied / "model.safetensors").read_bytes() == model
    assert [record["round"] for record in done.records] == list(range(1, 7))


def test_both_checkpoints_damaged_is_an_error_that_names_them(copied, flip):
    flip(copied / NEWEST, 4000)
    (copied / OLDER).write_bytes(b"")
    with pytest.raises(UserError, match=r"cannot go on: .*00000006.*damaged.*00000004.*damaged"):
        train(out=copied, resume=True)
    assert len(Folder(copied).records()) == 6


def lines_of(folder):
    return (folder / "metrics.jsonl").read_bytes().splitlines(keepends=True)


@pytest.mark.parametrize("kept", [[0, 1, 2, 3, 5], [0, 1, 2, 3, 4]])
def test_records_damaged_after_the_older_checkpoint_are_run_again(copied, kept, model):
    lines = lines_of(copied)
    (copied / "metrics.jsonl").write_bytes(b"".join(lines[k] for k in kept))
    with pytest.warns(RunWarning, match=r"going on from round 4, because .*line [56] should be of round"):
        train(out=copied, resume=True)
    assert len(lines_of(copied)) == 6
    assert (copied / "model.safetensors").read_bytes() == model


def test_records_damaged_before_it_are_an_error_that_names_the_line(copied):
    lines = lines_of(copied)
    (copied / "metrics.jsonl").write_bytes(b"".join([*lines[:2], b"garbage\n", *lines[3:]]))
    with pytest.raises(UserError, match=r"cannot go on: .*line 3 should be of round 3.*whole copy"):
        train(out=copied, resume=True)
    assert len(lines_of(copied)) == 6
    (copied / "metrics.jsonl").unlink()
    with pytest.raises(UserError, match="line 1 should be of round 1, and is missing"):
        train(out=copied, resume=True)


def test_what_follows_the_checkpoint_may_be_anything(copied, model):
    """As a kill leaves it: rounds that no checkpoint holds, and half a line."""
    (copied / NEWEST).unlink()
    (copied / "model.safetensors").unlink()
    with open(copied / "metrics.jsonl", "ab") as file:
        file.write(lines_of(copied)[0][:50])
    done = train(out=copied, resume=True)
    assert [record["round"] for record in done.records] == list(range(1, 7))
    assert (copied / "model.safetensors").read_bytes() == model


def test_temporary_files_of_killed_writers_go(copied):
    for place in (copied, copied / "checkpoints"):
        (place / ".model.safetensors.4711.tmp").write_bytes(b"half")
    train(out=copied, resume=True)
    assert not list(copied.rglob("*.tmp"))


def test_a_new_run_does_not_go_on_with_what_is_left_of_another(copied, tiny):
    (copied / "config.toml").unlink()
    with pytest.raises(UserError, match=r"holds metrics\.jsonl, checkpoints, .* but no config\.toml: move"):
        train("planted", out=copied, changes=tiny)
    with pytest.raises(UserError, match="holds no run to go on with"):
        train("planted", out=copied, resume=True)


def test_lanes_belong_to_the_folder_from_the_start(tiny, tmp_path, monkeypatch):
    """Killed before its first checkpoint, it goes on with the lanes that it began with, whatever is best now."""
    chosen = iter([3, 2])
    monkeypatch.setattr(backends, "choose_lanes", lambda make, *_: make(next(chosen)))
    changes = tiny | {"simulation.lanes": 0, "simulation.checkpoint_every": 0, "cohort.size": 8}

    class KilledError(BaseException):
        pass

    def kill(status):
        raise KilledError

    with pytest.raises(KilledError):
        train("planted", out=tmp_path / "run", changes=changes, progress=kill)
    assert Folder(tmp_path / "run").rounds_done() == 0
    done = train(out=tmp_path / "run", resume=True)
    assert (done.summary["lanes"], next(chosen)) == (3, 2)


def test_another_number_of_devices_is_told(copied, monkeypatch):
    monkeypatch.setattr(runs, "device_words", lambda: "5 x cpu")
    with pytest.warns(RunWarning, match="began on 2 x cpu and goes on on 5 x cpu"):
        train(out=copied, resume=True)


def test_a_configuration_changed_by_hand_is_refused(copied):
    file = copied / "config.toml"
    file.write_text(file.read_text().replace("rounds = 6", "rounds = 8"))
    for use in (evaluate_run, Personal.open, lambda run: train(out=run, resume=True)):
        with pytest.raises(
            UserError, match=r"config\.toml' is damaged.*put the file back.*--rounds.*--config"
        ):
            use(copied)


@pytest.mark.parametrize("name", ["model.json", "vocabularies.json", "start.json", "summary.json"])
@pytest.mark.parametrize("content", [b"[]", b"NaN", b"\xff\xfe", b'{"item": [1]}', b""])
def test_a_damaged_document_is_named(copied, name, content):
    (copied / name).write_bytes(content)
    folder = Folder(copied)
    read = {"model.json": folder.model_options, "vocabularies.json": folder.source}
    read |= {"start.json": folder.begun, "summary.json": folder.summary}
    with pytest.raises(UserError, match=rf"{name.replace('.', '[.]')}' is damaged or foreign"):
        read[name]()
    (copied / name).unlink()
    with pytest.raises(UserError, match=f"could not read .*{name}"):
        read[name]()


def mutated(data: bytes, rng: random.Random) -> bytes:
    """A flipped bit, an end or a chunk that is missing, or a chunk of something else."""
    kind, place, size = (
        rng.choice(["flip", "cut", "chunk", "noise"]),
        rng.randrange(len(data)),
        rng.randint(1, 40),
    )
    if kind == "flip":
        return data[:place] + bytes([data[place] ^ 1 << rng.randrange(8)]) + data[place + 1 :]
    if kind == "cut":
        return data[:place]
    noise = rng.randbytes(size) if kind == "noise" else b""
    return data[:place] + noise + data[place + size :]


THOROUGH = 16  # one of so many also runs the rounds that are left and is evaluated, which takes its time
NOT_RESUMED = ("model.json", "model.safetensors", "summary.json")  # not read by a run that goes on


@pytest.mark.parametrize("seeds", [range(50), pytest.param(range(50, 250), marks=pytest.mark.slow)], ids=len)
def test_no_damage_gives_another_result(tiny_run, model, tmp_path, seeds):
    """Whatever happens to a file, the outcome is the right one or an error that the user can read."""
    expected = {"evaluate": evaluate_run(tiny_run), "open": Personal.open(tiny_run).params}
    names = [
        p.relative_to(tiny_run) for p in sorted(tiny_run.rglob("*")) if p.is_file() and p.suffix != ".png"
    ]
    refused = 0
    for seed in seeds:
        rng, folder = random.Random(seed), tmp_path / "run"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(tiny_run, folder)
        name = names[seed % len(names)]
        (folder / name).write_bytes(mutated((folder / name).read_bytes(), rng))
        refused += not opens_the_same(folder, expected["open"])
        thorough = seed % THOROUGH == 0
        if thorough or name.name not in NOT_RESUMED:
            refused += not goes_on_the_same(folder, model, expected["evaluate"], thorough)
    assert refused > len(seeds) // 2


def opens_the_same(folder, params) -> bool:
    try:
        found = Personal.open(folder).params
    except UserError:
        return False
    for path, leaf in params.items():
        np.testing.assert_array_equal(found[path], leaf)
    return True


class EnoughError(Exception):
    """All files have been read."""


def enough(course):
    """In place of the rounds that are left: what has been read is what was written, up to some round."""
    assert course.simulation.round == course.recorder.tally.rounds
    assert course.simulation.round in (4, 6)
    raise EnoughError


def goes_on_the_same(folder, model, evaluation, thorough) -> bool:
    """Resumed and evaluated, to the end where it is `thorough`, else as far as files are read."""
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore", RunWarning)
        if not thorough:
            patch.setattr(runs, "run_rounds", enough)
        try:
            train(out=folder, resume=True)
            assert (folder / "model.safetensors").read_bytes() == model
            assert evaluate_run(folder) == evaluation
        except UserError:
            return False
        except EnoughError:
            return True
    return True
