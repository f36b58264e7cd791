"""The language tables and figures of Federated Reconstruction run to the end, quick and on a small dump."""

from __future__ import annotations

import json
import shutil

import matplotlib.image
import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest

from partwise.algorithms.registry import prepare
from partwise.cli import main
from partwise.papers import fedrecon_support as support
from partwise.papers import fedrecon_words as words
from partwise.papers import study
from partwise.papers import words_desk as trained
from partwise.papers.reproduce import reproduce
from partwise.runs.summary import judged
from partwise.runs.sweep_plan import RATES
from partwise.runs.train import silent

SEEDS, USERS = 2, 30
FEW = (words.TRAININGS[1], words.RECON, words.YOGI)  # of those that table 2 compares
NAMES = [row.name for training in FEW for row in training.rows]
CURVES = [row.name for training in (words.YOGI, words.RECON) for row in training.rows if row.curve]


def write_dump(folder, num_words):
    """30 users with two questions of two sentences each, and a comment, as Parquet."""
    rng, posts = np.random.default_rng(0), 2 * USERS
    said = [[f"w{k}" for k in np.minimum(rng.zipf(1.2, 14), num_words)] for _ in range(posts)]
    columns = {
        "Site": ["beer"] * posts,
        "Id": [*range(posts)],
        "PostTypeId": [1] * posts,
        "ParentId": pa.array([None] * posts, pa.int64()),
        "CreationDate": ["2020-01-01T00:00:00.000"] * posts,
        "Body": [f"<p>{' '.join(each[:7])}. {' '.join(each[7:])}.</p>" for each in said],
        "OwnerUserId": [k % USERS + 1 for k in range(posts)],
        "Title": ["a title"] * posts,
        "Tags": ["<tag>"] * posts,
    }
    pyarrow.parquet.write_table(pa.table(columns), folder / "posts.parquet")
    comment = {"Site": ["beer"], "Id": [1], "CreationDate": ["2021-01-01T00:00:00.000"], "Text": ["so it is"]}
    pyarrow.parquet.write_table(pa.table({**comment, "UserId": [1]}), folder / "comments.parquet")
    return str(folder)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """So few words that they are in the smallest vocabulary already: what is trained with one serves for all."""
    return write_dump(tmp_path_factory.mktemp("few"), 20)


@pytest.fixture(scope="module")
def rich(tmp_path_factory):
    """More words than the largest vocabulary has."""
    return write_dump(tmp_path_factory.mktemp("rich"), 200)


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    """One folder for all, so that what one has trained is there for the others."""
    return tmp_path_factory.mktemp("out")


@pytest.fixture(scope="module")
def trainings(recorded_cohorts):
    """The clients of every round, a list for each training."""
    with recorded_cohorts() as drawn:
        yield drawn


@pytest.fixture(scope="module")
def table(data, out, trainings):
    """Table 2 with a few of its trainings; what it did is left under `out`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(words, "TRAININGS", FEW)
        return words.table2(data, out, range(SEEDS), True, silent)


def check(result, rows):
    assert [row["row"] for row in result["rows"]] == rows
    for row in result["rows"]:
        assert np.isfinite([row["ours"], row["spread"]]).all()


@pytest.mark.slow
def test_table_2(table, out, trainings):
    check(table, [f"{size} words: {name}" for size in (30, 60) for name in NAMES])
    for row in table["rows"]:
        assert 0 <= row["ours"] <= 100
        assert row["seeds"] == SEEDS
        assert set(row["others"]) == {"accuracy_no_oov", "accuracy_with_oov", "accuracy_among_words"}
        assert (row["judged"]["clients"], row["judged"]["weights"]) == ("unseen", "tokens")
    assert matplotlib.image.imread(out / "fedrecon-table2.png").ndim == 3
    assert len(trainings) == SEEDS * len(FEW)  # once for both vocabularies, which are the same here
    first, second = trainings[:2]
    assert first != second
    assert trainings == [first, second] * len(FEW)


@pytest.mark.slow
def test_what_is_done_is_not_done_again(table, data, out, trainings, monkeypatch):
    done = len(trainings)
    monkeypatch.setattr(words, "TRAININGS", FEW)
    assert words.table2(data, out, range(SEEDS), True, silent)["rows"] == table["rows"]
    assert len(trainings) == done


@pytest.mark.slow
def test_figures_2_and_5_are_trained_by_the_table(table, data, out, trainings):
    done = len(trainings)
    curves = words.figure2(data, out, range(SEEDS), True, silent)
    check(curves, [f"{size} words: {name}" for size in (30, 60) for name in CURVES])
    assert all(len(row["x"]) == len(row["y"]) == 3 for row in curves["rows"])  # at rounds 0, 1, 2
    assert all(row["x"] == [0, row["x"][1], 2 * row["x"][1]] for row in curves["rows"])
    sent = {row["row"].split(": ")[1]: row["x"][1] for row in curves["rows"]}
    assert sent["FedRecon (500 OOV)"] < sent["FedYogi (500 OOV)"]
    losses = words.figure5(data, out, range(SEEDS), True, silent)
    check(losses, ["30 words", "60 words"])
    assert all(row["metric"] == "training loss" for row in losses["rows"])
    for name in ("figure2", "figure5"):
        assert matplotlib.image.imread(out / f"fedrecon-{name}.png").ndim == 3
    assert len(trainings) == done


@pytest.mark.slow
def test_figures_3_and_6_train_what_is_new_in_them(table, data, out, trainings):
    done = len(trainings)
    steps = words.figure3(data, out, range(SEEDS), True, silent)
    check(steps, [row["row"] for row in steps["rows"]])
    assert [row["row"][:3] for row in steps["rows"]] == ["k_r", "k_u"]
    assert 0 <= steps["base_accuracy"] <= 100
    assert len(trainings) == done + SEEDS * 2
    buckets = words.figure6(data, out, range(SEEDS), True, silent)
    check(buckets, [f"{size} words, {number} OOV" for size in (30, 60) for number in (1, 2)])
    assert len(trainings) == done + SEEDS * 3
    for name in ("figure3-words", "figure6"):
        assert matplotlib.image.imread(out / f"fedrecon-{name}.png").ndim == 3


@pytest.mark.slow
def test_reproduce_takes_the_parts_and_leaves_them_to_others(table, data, out, trainings):
    done, again = len(trainings), out.parent / f"{out.name}-again"
    shutil.copytree(out, again)
    result = reproduce("fedrecon-figure5", data, again, seeds=SEEDS, quick=True)
    assert json.loads((again / "fedrecon-figure5.json").read_text())["rows"] == result["rows"]
    assert len(trainings) == done
    assert (again / study.PARTS).exists()


@pytest.fixture(scope="module")
def desk(rich, tmp_path_factory):
    return words.Desk(rich, tmp_path_factory.mktemp("desk"), [0], True, silent)


def test_every_training_and_row_can_be_prepared(desk):
    for vocabulary in desk.vocabularies:
        for training in words.TRAININGS:
            task = desk.task(vocabulary, training.buckets)
            assert task.options["num_words"] == vocabulary
            assert task.options["num_buckets"] == (training.buckets or desk.protocol.buckets)
            config = desk.config(task, training).changed(desk.rates(training, vocabulary))
            assert config.reconstruct.rate == config.update.rate
            for row in training.rows:
                ready = prepare(task, config.changed(row.changes))
                assert set(row.grid) <= set(RATES)
                assert ready.evaluated.partition.local_paths == ("oov",)


def test_every_training_of_the_table_has_rates_of_its_own(desk, monkeypatch):
    """With one bucket at every vocabulary. What is not in the table has those of FedRecon."""
    searched = []

    def tune(task, config, *rest):
        sizes = (task.options["num_words"], task.options["num_buckets"])
        searched.append((config.algorithm, *sizes, config.split.kind, config.update.joint))
        return {"update.rate": 0.1, "server.rate": 0.2}, []

    monkeypatch.setattr(trained, "tune", tune)
    (few, more), many = desk.vocabularies, desk.protocol.buckets
    for training in (*words.TRAININGS, words.RECON._replace(buckets=3), support.LEARNED):
        assert desk.rates(training, more)["reconstruct.rate"] == 0.1
    recon = ("fed_recon", few, many, "halves", False)
    assert searched == [
        ("fed_yogi", more, 1, "halves", False),
        ("fed_recon", more, 1, "halves", False),
        recon,
        ("fed_yogi", few, many, "halves", False),
        ("fed_recon", few, many, "none", False),
        ("fed_recon", few, many, "halves", True),
        recon,
        recon,
    ]


def test_a_row_by_hand(desk):
    training, row = words.YOGI, words.YOGI.rows[1]
    values = {words.METRIC: (0.2, 0.4), "accuracy_with_oov": (0.5, 0.7), "loss": (3.0, 3.0)}
    tests = {row.name: [{name: pair[seed] for name, pair in values.items()} for seed in range(2)]}
    sizes, chosen = {"local": 10, "others": 100}, {row.name: {"reconstruct.rate": 0.3}}
    done = trained.Learned(tests, chosen, {}, [1, 2], [4.0, 3.0], sizes, 0.8, 1.5, [2, 1])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(desk, "learn", lambda *given: done)
        told = words._row(desk, training, row, 1)
    assert told == {
        "row": "60 words: OOV fine-tuning (500 OOV)",
        "metric": "accuracy %",
        "paper": None,  # a quick check is not beside the paper
        "ours": pytest.approx(30),
        "spread": pytest.approx(10),
        "seeds": 2,
        "others": {"accuracy_with_oov": pytest.approx(60)},
        "rates": {"reconstruct.rate": 0.3},
        "parameters_sent": 220,
        "coverage": 0.8,
        "rounds": [2, 1],
        "judged": {
            "clients": "unseen",
            "local": "as the server trained it, then fine-tuned",
            "others": "as trained",
            "weights": "tokens",
            "split": "halves",
        },
        "seconds": 1.5,
    }
    assert done.sent(words.RECON.sends_all) == 200


def test_rows_say_how_clients_are_judged_and_what_the_paper_has(desk):
    said, paper = {}, {}
    for training in words.TRAININGS:
        task = desk.task(desk.vocabularies[0], training.buckets)
        for row in training.rows:
            config = desk.config(task, training).changed(row.changes)
            told = judged(task, prepare(task, config), config)
            said[row.name] = told["local"], told["others"]
            paper[row.name] = tuple(row.paper)
    as_trained = "as the server trained it"
    assert said["FedYogi"] == said["FedYogi (500 OOV)"] == (as_trained, "as trained")
    assert said["OOV fine-tuning (500 OOV)"] == (f"{as_trained}, then fine-tuned", "as trained")
    assert said["Full fine-tuning (500 OOV)"] == (f"{as_trained}, then fine-tuned", "fine-tuned")
    assert said["FedRecon (500 OOV)"] == said["FedRecon (1 OOV)"] == ("rebuilt", "as trained")
    assert said["FedRecon + fine-tune (500 OOV)"] == ("rebuilt", "fine-tuned")
    assert said["FedRecon (500 OOV), judged without rebuilding"] == ("as it begins", "as trained")
    without = [name for name, figures in paper.items() if figures == (None, None, None)]
    assert without == ["FedRecon (500 OOV), judged without rebuilding", "FedYogi (500 OOV)"]
    assert paper["FedYogi"] == (24.3, 26.3, 26.7)
    assert paper["FedRecon (500 OOV)"] == (29.6, 28.1, 27.7)


def test_how_much_of_the_text_a_vocabulary_covers(desk):
    small, large = (trained._coverage(desk.task(size, 0)) for size in desk.vocabularies)
    assert 0 < small < large < 1


@pytest.mark.slow
def test_all_from_the_command_line(rich, tmp_path, capsys):
    """With both vocabularies and every row."""
    rows = {"table2": 20, "figure2": 10, "figure3-words": 2, "figure5": 2, "figure6": 4}
    for name, number in rows.items():
        given = ["--data", rich, "--out", str(tmp_path / name), "--seeds", "1", "--quick", "--json"]
        assert main(["reproduce", f"fedrecon-{name}", *given]) == 0
        told = json.loads(capsys.readouterr().out)
        assert len(told["rows"]) == number
        assert all(np.isfinite(row["ours"]) for row in told["rows"])
        assert (tmp_path / name / f"fedrecon-{name}.png").exists()
