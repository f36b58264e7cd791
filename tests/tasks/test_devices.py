"""Models that suit the device: chosen when a task is loaded, told, and recorded."""

from __future__ import annotations

import subprocess
import sys

import pytest

from partwise.data import holdout
from partwise.data.generated.planted_sentences import planted_sentences
from partwise.tasks import PAPER, base, find_task, load_task, next_word, next_word_lstm

SIZES = {"next-word": next_word, "next-word-lstm": next_word_lstm}


@pytest.fixture
def sentences(monkeypatch):
    """Few sentences in place of a dump, whatever is asked for."""

    def load(data, num_words, *, num_buckets, comments, seed, **shape):
        store = planted_sentences(20, 4, 20, num_buckets, 6)
        return holdout.by_client(store, (0.8, 0.1, 0.1))

    for module in SIZES.values():
        monkeypatch.setattr(module, "load_sentences", load)


@pytest.fixture(params=["cpu", "gpu"])
def device(request, monkeypatch):
    monkeypatch.setattr(base.jax, "default_backend", lambda: request.param)
    return request.param


@pytest.mark.parametrize("name", list(SIZES))
def test_sizes_are_of_the_device_and_recorded(name, sentences, device):
    module = SIZES[name]
    task = load_task(name, num_buckets=3)
    wanted = module.NARROW if device == "cpu" else module.WIDE
    assert {option: task.loaded[option] for option in wanted} == wanted
    assert {size: task.options[size] for size in ("units",)} == {"units": wanted["units"]}
    assert bool(task.notes) == (device == "cpu")
    again = load_task(name, **task.loaded)  # as from a run's config.toml, on whatever device
    assert again.options == task.options
    assert not again.notes


@pytest.mark.parametrize("name", list(SIZES))
def test_the_preset_is_wide_on_every_device(name, sentences, device):
    task = load_task(name, preset=PAPER, num_buckets=3)
    assert task.options["units"] == SIZES[name].WIDE["units"]
    assert not task.notes


def test_what_is_asked_for_is_what_there_is(sentences, device):
    task = load_task("next-word-lstm", num_buckets=3, units=7)
    assert task.options["units"] == 7
    assert not any("units" in note for note in task.notes)


def test_handwriting_has_a_network_of_the_device(device):
    task = load_task("writers", num_clients=20, median=20, num_classes=4)
    assert task.options["network"] == task.loaded["network"] == ("2nn" if device == "cpu" else "cnn")
    assert bool(task.notes) == (device == "cpu")
    assert task.defaults["select.filter"] == ("random:50" if device == "cpu" else "random:16")
    assert find_task("handwriting").presets[PAPER]["data.network"] == "cnn"


def test_no_device_is_asked_for_at_import():
    code = "import partwise.tasks as t; t.find_task('next-word-lstm'); from jax._src import xla_bridge as x; "
    code += "assert not x._backends"
    subprocess.run([sys.executable, "-c", code], check=True)
