"""An exported model answers as `Personal.predict` does, for every kind of task; what an export refuses."""

from __future__ import annotations

import dataclasses
import errno
import importlib.util
import json
import os
import stat
import sys
from pathlib import Path

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file

from partwise import checkpoint
from partwise.algorithm import init_params
from partwise.algorithms.registry import prepare
from partwise.config.settings import Config
from partwise.data.checks import narrow
from partwise.data.ragged import pad_to_power
from partwise.model.partition import keyed, local, partition, shared
from partwise.model.psi import int8
from partwise.model.spec import Model, lookup
from partwise.randomness import INIT_ROUND, round_rng
from partwise.runs.client_file import Source, source_of
from partwise.runs.export import export
from partwise.runs.onnx_program import distance
from partwise.runs.personal import Personal, save_local
from partwise.runs.resolve import resolve
from partwise.tasks import Setting
from partwise.tasks.next_word import next_word_task
from partwise.types import UserError

PLANTED = {"data.num_clients": 40, "data.num_items": 30, "data.mean_examples": 12, "data.dim": 4}
WORDS = {"data.num_clients": 20, "data.sentences": 8, "data.num_words": 30, "data.num_buckets": 4}
TAGS = {"data.num_clients": 30, "data.num_words": 120, "data.num_tags": 12, "data.mean_examples": 8}
GENERATED = [
    ("planted", PLANTED),
    ("planted", PLANTED | {"data.biases": "true"}),
    ("tags-planted", TAGS),
    ("next-word-planted", WORDS),
    ("next-word-planted", WORDS | {"data.words": "keyed"}),
    ("writers", {"data.num_clients": 20, "data.network": "2nn"}),
    ("writers", {"data.num_clients": 20, "data.network": "cnn", "data.median": 20}),
]
has_onnx = pytest.mark.skipif(
    not all(importlib.util.find_spec(name) for name in ("jax2onnx", "onnxruntime")),
    reason="jax2onnx and onnxruntime are not installed",
)


def shaken(params):
    """A model as training might have left it: no two rows alike, without the time that training takes."""
    keys = jax.random.split(jax.random.key(5), len(params))
    return {
        path: np.asarray(leaf + 0.3 * jax.random.normal(key, leaf.shape).astype(leaf.dtype))
        for (path, leaf), key in zip(params.items(), keys, strict=True)
    }


def personal_of(name, changes, data=None):
    """A client's model for a task, and its examples."""
    task, config = resolve(name, data, changes)
    prepared = prepare(task, config)
    params = shaken(init_params(prepared.build(prepared.rates), round_rng(0, INIT_ROUND)))
    return Personal(config, task.personal, params, source_of(task.train)), task.test.gather([0])


def answers(folder, store):
    """The outputs of the program in a folder, by JAX alone, as run.py computes them."""
    about = json.loads((folder / "model.json").read_text())
    call = jax.jit(jax.export.deserialize(bytearray((folder / "model.stablehlo").read_bytes())).call)
    columns = {name: pad_to_power(narrow(name, store.columns[name])) for name in about["inputs"]}
    return np.asarray(call(load_file(folder / "model.safetensors"), columns))[: store.num_examples]


def onnx_answers(folder, store):
    import onnxruntime  # pyright: ignore[reportMissingImports]

    about = json.loads((folder / "model.json").read_text())
    session = onnxruntime.InferenceSession(folder / "model.onnx")
    assert [each.name for each in session.get_inputs()] == list(about["inputs"])
    size = about["rows"]["model.onnx"] or store.num_examples
    filled = lambda column: np.resize(column, (size, *column.shape[1:]))
    return session.run(None, {name: filled(narrow(name, store.columns[name])) for name in about["inputs"]})[0]


@pytest.mark.parametrize(("name", "changes"), GENERATED)
def test_the_program_answers_as_the_device_does(name, changes, tmp_path):
    personal, mine = personal_of(name, changes)
    rebuilt = personal.personalize(mine)
    about = export(personal, tmp_path / "model", rebuilt)
    assert about["rows"] == {"model.stablehlo": None}  # any number
    expected = personal.predict(rebuilt, mine)
    np.testing.assert_array_equal(answers(tmp_path / "model", mine), expected)
    assert about["output"] == {"shape": list(expected.shape[1:]), "type": "float32"}
    assert not {"rating", "tags", "label", "next"} & set(about["inputs"])  # which only the loss reads


@has_onnx
@pytest.mark.slow
@pytest.mark.parametrize(("name", "changes"), GENERATED)
def test_onnxruntime_answers_as_the_device_does(name, changes, tmp_path):
    personal, mine = personal_of(name, changes)
    rebuilt = personal.personalize(mine)
    about = export(personal, tmp_path / "model", rebuilt, formats=["onnx"])
    needs_a_number = name == "tags-planted" or changes.get("data.network") == "cnn"
    assert about["rows"] == {"model.onnx": 64 if needs_a_number else None}
    found, expected = onnx_answers(tmp_path / "model", mine), personal.predict(rebuilt, mine)
    some = min(len(found), len(expected))
    assert some
    assert distance(found[:some], expected[:some]) < 1e-5
    assert stat.S_IMODE((tmp_path / "model" / "model.onnx").stat().st_mode) == 0o600
    assert not (tmp_path / "model" / "run.py").exists()  # which needs StableHLO


@pytest.mark.slow
def test_tasks_with_files_of_their_own(tmp_path, liked_folder):
    clicks, tweets = tmp_path / "amazon_train.tsv", tmp_path / "some.csv"
    rng = np.random.default_rng(0)
    history = lambda: ",".join(map(str, rng.choice(12, rng.integers(1, 6), replace=False) + 1))
    rows = [f"{i % 2}\t{user}\t{i % 12 + 1}\t{history()}\n" for user in range(1, 31) for i in range(20)]
    clicks.write_text("".join(rows))
    said = lambda: " ".join(f"w{word}" for word in rng.integers(0, 40, rng.integers(3, 12)))
    row = '"{}","{}","Mon Apr 06 22:19:45 PDT 2009","NO_QUERY","u{}","{}"\n'
    tweets.write_text("".join(row.format(4 * (i % 2), i, i % 3, said()) for i in range(130)))
    for name, data in (("clicks", clicks), ("sentiment", tweets), ("movielens-liked", liked_folder)):
        personal, mine = personal_of(name, {}, str(data))
        about = export(personal, tmp_path / name, personal.personalize(mine))
        np.testing.assert_array_equal(answers(tmp_path / name, mine), personal.predict({}, mine))
        assert about["rows"] == {"model.stablehlo": None}, name


def transformer(make_store):
    """A client's model of sentences, and its sentences, in which words are missing."""
    tokens = np.random.default_rng(0).integers(-1, 17, (12, 5)).astype(np.int32)
    store = dataclasses.replace(make_store([12], tokens=tokens), vocabularies={"tokens": np.arange(17)})
    task = next_word_task(store, store, store, num_buckets=1, width=8, heads=2, units=8, length=4)
    params = shaken(task.personal.partition.split(task.personal.model.init(jax.random.key(0)))[0])
    config = Config().changed({"algorithm": "fed_select"})
    return Personal(config, task.personal, params, source_of(store)), store


@pytest.mark.slow
def test_sentences_from_a_store_with_missing_words(make_store, tmp_path):
    personal, store = transformer(make_store)
    export(personal, tmp_path / "model")
    np.testing.assert_array_equal(answers(tmp_path / "model", store), personal.predict({}, store))


def test_how_far_outputs_are_apart():
    expected = np.array([[3.0, -1e9], [0.0, 0.5]], np.float32)
    assert distance(expected, expected) == 0
    assert distance(expected + np.float32([[0.3, 0], [0, 0]]), expected) == pytest.approx(0.1)
    assert distance(expected + np.float32([[0, 1e8], [0, 0]]), expected) == pytest.approx(0.1)


@has_onnx
@pytest.mark.slow
def test_a_model_that_cannot_be_converted_is_refused_with_the_reason(make_store, tmp_path):
    personal, _ = transformer(make_store)
    with pytest.raises(UserError, match=r"jax2onnx cannot convert this model \(.*leave onnx out of --format"):
        export(personal, tmp_path / "model", formats=["stablehlo", "onnx"])
    assert not (tmp_path / "model").exists()


# Models of a user's own


def scoring(predict=None) -> Model:
    """The sum of the rows of a list of ids, times the client's own vector."""

    def init(rng):
        item, user, scale = jax.random.split(rng, 3)
        normal = jax.random.normal
        return {"item": normal(item, (9, 3)), "user": normal(user, (3,)), "scale": normal(scale, (3,))}

    def scores(params, batch, rng):
        rows = lookup(params["item"], batch["past"]).sum(1)
        return (rows * params["user"] * params["scale"]).sum(-1) + batch["bias"]

    return Model(init, predict or scores, lambda outputs, batch: jnp.square(outputs - batch["rating"]))


def own(make_store, roles, model=None) -> tuple[Personal, object]:
    rng = np.random.default_rng(0)
    past = rng.integers(-1, 9, (11, 4)).astype(np.int32)
    store = make_store([11], past=past, bias=rng.normal(size=11), rating=rng.normal(size=11))
    model = model or scoring()
    parts = partition(model, roles, columns={"item": ("past",)} if "item" in roles else {})
    setting = Setting(model, parts, ("past", "bias", "rating"))
    source = source_of(store)._replace(vocabularies={"past": np.array([f"f{i} x" for i in range(9)])})
    params = shaken(parts.split(model.init(jax.random.key(0)))[0])
    changes = {"algorithm": "fed_recon", "reconstruct.method": "steps"}
    return Personal(Config().changed(changes), setting, params, source), store


ROLES = {
    "keyed": {"item": keyed("item"), "user": local()},
    "int8": {"item": keyed("item", psi=int8), "user": local("learned")},
    "whole": {"item": keyed("item", whole=True), "user": local("zero")},
    "add": {"user": shared(twin="add")},
    "average": {"user": shared(twin="average"), "item": keyed("item")},
    "nothing local": {"item": keyed("item")},
}


@pytest.mark.parametrize("roles", ROLES)
def test_every_role_and_lists_with_missing_ids(roles, make_store, tmp_path):
    personal, mine = own(make_store, ROLES[roles])
    rebuilt = personal.personalize(mine)
    about = export(personal, tmp_path / "model", rebuilt or None)
    np.testing.assert_array_equal(answers(tmp_path / "model", mine), personal.predict(rebuilt, mine))
    assert about["inputs"]["bias"] == {"shape": [], "type": "float32", "column": "bias", "ids": False}
    assert about["inputs"]["past"] == {"shape": [4], "type": "int32", "column": "past", "ids": True}


def test_a_fixed_number_of_rows(make_store, tmp_path):
    personal, mine = own(make_store, ROLES["keyed"])
    rebuilt = personal.personalize(mine)
    assert export(personal, tmp_path / "model", rebuilt, rows=16)["rows"] == {"model.stablehlo": 16}
    np.testing.assert_array_equal(answers(tmp_path / "model", mine), personal.predict(rebuilt, mine))
    with pytest.raises(ValueError, match="16"):
        answers(tmp_path / "model", mine.gather([0, 0]))


def test_a_model_that_must_know_the_number_of_rows_gets_one(make_store, tmp_path):
    def predict(params, batch, rng):
        halves = batch["bias"].reshape(2, -1) if len(batch["bias"]) % 2 == 0 else batch["bias"]
        return halves.reshape(-1) * params["user"].sum()

    personal, mine = own(make_store, {"user": local()}, scoring(predict))
    about = export(personal, tmp_path / "model", personal.personalize(mine))
    assert about["rows"] == {"model.stablehlo": 64}
    assert set(about["inputs"]) == {"bias"}
    assert set(load_file(tmp_path / "model" / "model.safetensors")) == {"local/user"}  # all that it reads


def test_a_model_that_reads_nothing_is_refused(make_store, tmp_path):
    predict = lambda params, batch, rng: jnp.zeros(batch["bias"].shape) + params["user"].sum()
    personal, mine = own(make_store, {"user": local()}, scoring(predict))
    with pytest.raises(UserError, match="depend on no column"):
        export(personal, tmp_path / "model", personal.personalize(mine))


def test_a_model_that_calls_back_into_python_is_refused(make_store, tmp_path):
    def predict(params, batch, rng):
        bias = batch["bias"]
        twice = jax.pure_callback(lambda x: 2 * x, jax.ShapeDtypeStruct(bias.shape, bias.dtype), bias)
        return twice * params["user"].sum()

    personal, _ = own(make_store, {"user": local()}, scoring(predict))
    for rows in (None, 4):
        with pytest.raises(UserError, match=r"JAX cannot export what this model predicts \(.*mend the model"):
            export(personal, tmp_path / "model", {"user": np.zeros(3, np.float32)}, rows=rows)


# Files


@pytest.fixture
def exported(tiny_run, tmp_path) -> tuple[Path, Path]:
    """The tiny run's model, and a client's local part, as files."""
    personal = Personal.open(tiny_run)
    kept = tmp_path / "local.safetensors"
    save_local(kept, {"user": np.array([0.5, -1.0], np.float32)}, personal.digest)
    export(tiny_run, tmp_path / "model", kept)
    return tmp_path / "model", kept


def test_what_the_files_say_and_who_may_read_them(tiny_run, exported):
    folder, _ = exported
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()}
    assert set(modes) == {"model.safetensors", "model.stablehlo", "model.json", "ids.json", "run.py"}
    assert modes["model.safetensors"] == 0o600
    with safe_open(folder / "model.safetensors", "numpy") as file:
        header = json.loads(file.metadata()["partwise"])
    assert (header["kind"], header["model"]) == ("personal model", Personal.open(tiny_run).digest)
    arrays = load_file(folder / "model.safetensors")
    assert {path: leaf.shape for path, leaf in arrays.items()} == {
        "server/item": (12, 2),
        "server/default/user": (2,),
        "local/user": (2,),
    }
    assert json.loads((folder / "ids.json").read_text())["ids"]["item"] == list(range(12))
    program = (folder / "model.stablehlo").read_bytes()
    assert b".py" not in program  # nor the places of this machine
    assert arrays["local/user"].tobytes() not in program


def test_an_export_is_replaced_and_the_same_one_has_the_same_bytes(tiny_run, exported, tmp_path):
    folder, kept = exported
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    export(tiny_run, folder, kept)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    (tmp_path / "empty").mkdir()
    export(tiny_run, tmp_path / "empty", kept)
    assert not list(tmp_path.glob(".*.tmp"))


def test_a_full_disk_leaves_the_earlier_export(tiny_run, exported, monkeypatch):
    folder, kept = exported
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    write = checkpoint.write_atomically

    def full(path, fill, mode=0o666):
        if path.name == "model.stablehlo":
            raise UserError(f"could not write '{path}': {os.strerror(errno.ENOSPC)}")
        write(path, fill, mode)

    monkeypatch.setattr(checkpoint, "write_atomically", full)
    with pytest.raises(UserError, match=r"could not write .*No space left"):
        export(tiny_run, folder, kept)
    with pytest.raises(UserError, match=r"could not write .*No space left"):
        export(tiny_run, folder.with_name("other"), kept)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert {path.name for path in folder.parent.iterdir()} == {"model", "local.safetensors"}


def test_a_folder_with_other_things_in_it_is_left_alone(tiny_run, exported, tmp_path):
    folder, kept = exported
    (folder / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match=r"has other things in it.*choose a new folder with --out"):
        export(tiny_run, folder, kept)
    (tmp_path / "model.json").write_text("{}")
    for place in (kept, tmp_path, tiny_run):
        with pytest.raises(UserError, match=r"is there, and .*choose a new folder with --out"):
            export(tiny_run, place, kept)
    with pytest.raises(UserError, match="could not write"):
        export(tiny_run, kept / "below", kept)


def test_mistakes(tiny_run, exported, tmp_path):
    _, kept = exported
    out = tmp_path / "new"
    cases = [
        ({"run": tmp_path}, "holds no run"),
        ({"local": None}, r"has a local part \(user\).*`partwise personalize`.*--local"),
        ({"local": tmp_path / "none"}, "none"),
        ({"local": tiny_run / "model.safetensors"}, "is not a local part"),
        ({"local": {"user": np.zeros(3, np.float32)}}, "was rebuilt for another model"),
        ({"formats": ["torchscript"]}, "unknown format 'torchscript'"),
        ({"formats": []}, "no format was given: choose one or more of stablehlo, onnx"),
        ({"rows": 0}, r"--rows \(rows\) is 0: give 1 or more"),
    ]
    for changed, says in cases:
        with pytest.raises(UserError, match=says):
            export(**{"run": tiny_run, "out": out, "local": kept, **changed})
    other = tmp_path / "other.safetensors"
    save_local(other, {"user": np.zeros(2, np.float32)}, "of another model")
    with pytest.raises(UserError, match="was rebuilt for another model, and means nothing to this one"):
        export(tiny_run, out, other)
    assert not out.exists()


def test_a_run_that_does_not_say_its_types_is_refused(copied, tmp_path):
    personal = Personal.open(copied)
    assert personal.types["rating"] == "float32"
    personal.types = Source({}, {}, "user").types
    with pytest.raises(UserError, match=r"which type its column 'item' had.*train it again"):
        export(personal, tmp_path / "model", {"user": np.zeros(2, np.float32)})


def test_onnx_without_its_package_says_what_to_install(tiny_run, exported, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "jax2onnx", None)
    with pytest.raises(UserError, match=r"pip install 'partwise\[onnx\]'"):
        export(tiny_run, tmp_path / "new", exported[1], formats=["stablehlo", "onnx"])
    assert not (tmp_path / "new").exists()
