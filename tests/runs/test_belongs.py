"""A file that is whole may still be another run's: it is not taken for this one's."""

from __future__ import annotations

import shutil

import numpy as np
import pytest

from partwise.runs.evaluation import evaluate_run
from partwise.runs.folder import Folder
from partwise.runs.personal import Personal, load_local, save_local
from partwise.runs.train import train
from partwise.types import RunWarning, UserError


@pytest.fixture(scope="module")
def other(tiny, tmp_path_factory):
    """The tiny run with another seed."""
    out = tmp_path_factory.mktemp("other") / "run"
    train("planted", out=out, changes=tiny, seed=1)
    return out


def swap(copied, other, name):
    target = copied / name
    shutil.rmtree(target) if target.is_dir() else target.unlink()
    copy = shutil.copytree if (other / name).is_dir() else shutil.copy
    copy(other / name, target)


def test_the_model_of_another_run_is_refused(copied, other):
    swap(copied, other, "model.safetensors")
    with pytest.raises(UserError, match=r"is the model of another run"):
        evaluate_run(copied)
    with pytest.raises(UserError, match=r"is the model of another run"):
        Personal.open(copied)


def test_the_configuration_of_another_run_is_refused(copied, other):
    swap(copied, other, "config.toml")
    with pytest.raises(UserError, match=r"config.toml' is of another run than the rest"):
        train(out=copied, resume=True)


def test_checkpoints_and_records_of_another_run_are_refused(copied, other):
    swap(copied, other, "checkpoints")
    with pytest.raises(UserError, match="is of another round or run"):
        train(out=copied, resume=True, rounds=8)
    swap(copied, other, "metrics.jsonl")
    with pytest.raises(UserError, match="of another run"):
        Folder(copied).records()


def test_the_same_run_again_is_the_same_to_the_last_byte(tiny, tiny_run, tmp_path):
    """The word that files carry says what a run is, not when it was run; and it may go on to more rounds."""
    train("planted", out=tmp_path / "again", changes=tiny)
    assert (tmp_path / "again" / "model.safetensors").read_bytes() == (
        tiny_run / "model.safetensors"
    ).read_bytes()
    assert Folder(tmp_path / "again").run == Folder(tiny_run).run
    train(out=tmp_path / "again", resume=True, rounds=8)
    evaluate_run(tmp_path / "again")


def test_a_run_without_its_checkpoints_says_that_it_begins_anew(copied):
    shutil.rmtree(copied / "checkpoints")
    with pytest.warns(RunWarning, match="has no checkpoint, so it begins anew"):
        train(out=copied, resume=True, rounds=6)


def test_a_local_part_belongs_to_a_model(tiny_run, other, tmp_path):
    mine, theirs = Personal.open(tiny_run), Personal.open(other)
    assert mine.digest == Personal.open(tiny_run).digest != theirs.digest
    save_local(tmp_path / "local", {"user": np.zeros(2, np.float32)}, mine.digest)
    load_local(tmp_path / "local", mine.digest)
    load_local(tmp_path / "local")  # to go on from it with another model
    with pytest.raises(UserError, match="was rebuilt for another model"):
        load_local(tmp_path / "local", theirs.digest)


def test_a_local_part_overwrites_nothing_else(copied, tmp_path):
    before = (copied / "config.toml").read_bytes()
    for name in ("config.toml", "model.safetensors"):
        with pytest.raises(UserError, match="is there, and is not a local part"):
            save_local(copied / name, {"user": np.zeros(2)}, "model")
    assert (copied / "config.toml").read_bytes() == before
    save_local(tmp_path / "local", {"user": np.zeros(2)}, "a")
    save_local(tmp_path / "local", {"user": np.ones(2)}, "b")
    assert load_local(tmp_path / "local", "b")["user"].tolist() == [1, 1]
