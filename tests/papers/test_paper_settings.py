"""Every reproduction and benchmark has the very settings that it had when its figures were made.

`paper_settings.json` was written before tasks had defaults other than the papers' settings; it holds what differs
from its own `base`. Data are small files, and models of benchmarks small, which changes no setting.
"""

from __future__ import annotations

import inspect
import json
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest

from partwise import bench
from partwise.config.settings import LATER, Config
from partwise.data.generated.writers import generate_writers
from partwise.papers import fedrecon, fedsubavg, staleness
from partwise.papers import fedselect as select
from partwise.papers import words_desk as words
from partwise.runs.train import silent
from partwise.tasks import PAPER, TASKS, find_task, load_task
from partwise.types import UserError

NEWER = {"simulation.patience": 20, "cohort.sampling": "fixed", "server.counts": ""}  # settings of no paper
NEWER |= {key: value for key, value in Config().flat().items() if key.startswith(LATER)}
OF_OTHERS = {"scaffold.control": "clients", "update.passes": 1, "update.proximal": 0.0}
WRITTEN = Path(__file__).with_name("paper_settings.json")
SMALL = {
    "planted": {"data.num_clients": 20, "data.num_items": 20, "data.mean_examples": 12},
    "tags-planted": {
        "data.num_clients": 20,
        "data.num_words": 200,
        "data.num_tags": 6,
        "data.mean_examples": 5,
    },
    "writers": {"data.num_clients": 20, "data.median": 20},
    "next-word-planted": {"data.num_clients": 20, "data.num_words": 20, "data.units": 8, "data.embedding": 8},
}


@pytest.fixture(scope="module")
def root(tmp_path_factory, liked_folder) -> str:
    """MovieLens, reviews, clicks, posts and digits as they lie beside one another."""
    folder, rng = tmp_path_factory.mktemp("data"), np.random.default_rng(0)
    shutil.copytree(liked_folder, folder / "ml-1m")
    said = lambda: " ".join(f"w{k}" for k in rng.integers(0, 20, 6))
    reviews = [
        {"reviewerID": f"A{k % 8}", "overall": 1 + k % 5, "unixReviewTime": k, "reviewText": said()}
        for k in range(64)
    ]
    (folder / "reviews_Some_5.json").write_text("".join(json.dumps(each) + "\n" for each in reviews))
    clicks = [f"{k % 2}\t{1 + k % 8}\t{1 + k % 11}\t{1 + k % 4}\n" for k in range(96)]
    (folder / "amazon-electronics-fedsubavg").mkdir()
    (folder / "amazon-electronics-fedsubavg" / "amazon_train.tsv").write_text("".join(clicks))
    _write_posts(folder / "stackexchange", said)
    return str(folder)


def _write_posts(folder: Path, said) -> None:
    folder.mkdir()
    number = np.arange(60)
    columns = {
        "Site": ["beer"] * 60,
        "Id": number,
        "PostTypeId": [1] * 60,
        "ParentId": pa.array([None] * 60, pa.int64()),
        "CreationDate": ["2020-01-01T00:00:00.000"] * 60,
        "Body": [f"<p>{said()}. {said()}.</p>" for _ in number],
        "OwnerUserId": number % 30 + 1,
        "Title": ["a title"] * 60,
        "Tags": [f"<tag{k % 3}>" for k in number],
    }
    pyarrow.parquet.write_table(pa.table(columns), folder / "posts.parquet")
    comment = {"Site": ["beer"], "Id": [1], "CreationDate": ["2021-01-01T00:00:00.000"], "Text": ["so it is"]}
    pyarrow.parquet.write_table(pa.table({**comment, "UserId": [1]}), folder / "comments.parquet")


@pytest.fixture(scope="module")
def digits(tmp_path_factory) -> str:
    store = generate_writers(20, 12, 10, min_examples=10, max_examples=12)
    writer = np.repeat(np.arange(20), store.counts).astype(np.int16)
    folder = tmp_path_factory.mktemp("mnist")
    arrays = {"images": store.columns["pixels"], "labels": store.columns["label"].astype(np.uint8)}
    split = (writer >= 15).astype(np.uint8)
    np.savez(folder / "mnist_by_writer.npz", **arrays, writer=writer, split=split)
    return str(folder)


def told(task, config) -> dict:
    """All that a training hangs on: settings, the model, who is judged."""
    flat = {key: value for key, value in config.flat().items() if not key.startswith("data.")}
    sizes = [getattr(task, part).num_examples for part in ("train", "validation", "test")]
    return {**flat, "model": dict(task.options), "seen": task.seen, "examples": sizes}


def all_settings(root: str, digits: str, out: Path) -> dict[str, dict]:
    found = {}
    runs = fedrecon.MovieLensRuns(root, [0], False, silent)
    rows = [
        fedrecon.TableRow(name, None, None, "movielens", {"server.optimizer": name}, {})
        for name in fedrecon.SERVER_RATES
    ]
    for row in (*fedrecon.ROWS, fedrecon.OURS, *rows):
        found[f"fedrecon {row.name}"] = told(*runs.prepared(row))
    stale = staleness.StalenessRuns(root, False, silent)
    for algorithm in staleness.LOCAL_RATES:
        found[f"staleness {algorithm}"] = told(stale.task, stale.config(algorithm, 10))
    for case in fedsubavg.CASES:
        one = fedsubavg.Comparison(case, root, out, False, silent)
        for algorithm in fedsubavg.ALGORITHMS:
            found[f"fedsubavg {case.task} {algorithm}"] = told(one.task, one._config(algorithm, {}))
    desk = words.Desk(f"{root}/stackexchange", out, [0], False, silent)
    for training in words.TRAININGS:
        task = desk.task(1000, training.buckets)
        found[f"words {training.name}"] = told(task, desk.config(task, training))
    studies = {"TAGS": select.TAGS, "CNN": select.CNN, "TWO_LAYERS": select.TWO_LAYERS, "WORDS": select.WORDS}
    for name, study in studies.items():
        data = digits if study.task == "handwriting" else f"{root}/stackexchange"
        setup = select.Setup(study, data, out, False, silent)
        found[f"select {name}"] = told(setup.task, setup.config)
    return found | benchmarks(root)


def benchmarks(root: str) -> dict[str, dict]:
    found = {}
    for name, benchmark in bench.BENCHMARKS.items():
        if name in (
            "deployment",
            "private-slices",
            "processes",
            "recommend",
            "remote",
            "secure-sum",
        ):  # of no paper
            continue
        for case in benchmark.cases(False):
            small = case._replace(changes={**case.changes, **SMALL.get(case.task, {})})
            found[f"bench {name}: {case.name.strip()}"] = told(*bench.resolved(small, root))
    return found


def whole(task: str, options: dict) -> dict:
    """A model's options with those that were left to `settings`."""
    about = inspect.signature(find_task(task).settings).parameters
    return {name: options.get(name, option.default) for name, option in about.items()}


def test_they_are_what_they_were(root, digits, tmp_path):
    written = json.loads(WRITTEN.read_text())
    base = written.pop("base")
    del written["declared"]
    found = all_settings(root, digits, tmp_path)
    assert found.keys() == written.keys()
    for name, settings in found.items():
        before = {**base, **NEWER, **written[name]}
        if before["evaluation.local"] == "trained":  # then nothing reads it, and writing it is refused
            before["reconstruct.rate"] = settings["reconstruct.rate"]
        for key in OF_OTHERS.keys() - settings.keys():  # settings that only some algorithms have now
            assert before.pop(key) == OF_OTHERS[key]
        before["model"] = whole(before["task"], before["model"])
        settings["model"] = whole(settings["task"], settings["model"])
        read = {
            key: value for key, value in settings.items() if not key.startswith(("deploy.", "privacy."))
        }  # by simulations
        assert json.loads(json.dumps(read)) == before, name


NO_PAPER = ("events", "events-planted", "next-item", "check-ins", "listening")


@pytest.mark.parametrize("name", [name for name in TASKS if name not in (*bench.GENERATED, *NO_PAPER)])
def test_the_preset_of_a_task_is_the_papers_settings(name):
    declared = json.loads(WRITTEN.read_text())["declared"][name]
    preset = find_task(name).presets[PAPER]
    settings = {key: value for key, value in preset.items() if not key.startswith("data.")}
    settings.pop("select.filter", None)  # was made when data was loaded
    settings.pop("fed_recon", None)  # a rate that does not diverge, which reproductions do not take
    if name == "movielens-seen":
        assert settings.pop("algorithm") == "fed_avg"  # there was none that worked
    assert json.loads(json.dumps(settings)) == declared


@pytest.mark.parametrize("name", bench.GENERATED)
def test_tasks_without_a_paper_say_so(name):
    with pytest.raises(UserError, match=f"task '{name}' has no preset 'paper': it comes from no paper"):
        load_task(name, preset=PAPER)
