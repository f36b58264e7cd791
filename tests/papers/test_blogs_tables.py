"""The language tables on people of many sentences: trained to the end, in several sittings, on generated texts."""

from __future__ import annotations

import json
from types import SimpleNamespace

import matplotlib.image
import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
import pytest

from partwise.cli import main
from partwise.papers import fedrecon_support, fedrecon_words, words_desk
from partwise.papers.study import PARTS
from partwise.papers.to_the_end import WATCHED, TrainingCourse, train_to_the_end
from partwise.papers.words_protocol import LONG, LONG_ON_CPU, SHORT, protocol_of
from partwise.runs.train import silent
from partwise.types import UserError

USERS, SENTENCES = 20, 8


@pytest.fixture(scope="module")
def blogs(tmp_path_factory):
    """Twenty people with eight sentences of words with a long tail, as a table."""
    folder, rng = tmp_path_factory.mktemp("blogs"), np.random.default_rng(0)
    users = np.repeat(np.arange(USERS), SENTENCES)
    said = [" ".join(f"w{k}" for k in np.minimum(rng.zipf(1.2, 7), 200)) for _ in users]
    table = pa.table({"user": users, "rank": np.arange(len(users)) % SENTENCES, "text": said})
    pyarrow.parquet.write_table(table, folder / "blog_sentences.parquet")
    return str(folder)


class Counting:
    """A simulation whose only parameter is the number of its rounds; it diverges at some round."""

    def __init__(self, diverges=10**6):
        self.diverges, self.started, self.capacity = diverges, 0, {}
        self.restart(0)

    def restart(self, seed):
        self.round, self.started = 0, self.started + 1

    @property
    def state(self):
        return SimpleNamespace(params={"a": np.array([self.round], np.float32)})

    def current(self):
        return {"a": np.array([self.round], np.float32)}

    def resume(self, saved, round_number, capacity):
        assert saved["a"][0] == round_number
        self.round = round_number

    def run(self, rounds):
        for _ in range(rounds):
            self.round += 1
            if self.round >= self.diverges:
                raise UserError("diverged")
            yield [SimpleNamespace(loss=1.0 / self.round)]


def go(simulation, file, values, patience, looks=(2, 4, 6, 8, 10)):
    """Train with these values of the validation clients at rounds 2, 4, ..."""
    look = lambda params: {WATCHED: values[int(params["a"][0]) // 2 - 1]}
    return train_to_the_end(simulation, 0, looks, look, patience, file, lambda records: None, lambda: 0.0)


def test_a_training_ends_when_it_gets_no_better(tmp_path):
    params, course = go(Counting(), tmp_path / "a", [0.1, 0.3, 0.2, 0.25, 0.9], patience=2)
    assert (course.rounds, course.judged, params["a"].tolist()) == ([2, 4, 6, 8], 4, [4])
    assert len(course.losses) == 8
    params, course = go(Counting(), tmp_path / "b", [0.1, 0.3, 0.2, 0.25, 0.9], patience=0)
    assert (course.rounds[-1], course.judged, params["a"].tolist()) == (10, 10, [10])


def test_a_training_that_was_killed_goes_on(tmp_path):
    values = [0.1, 0.3, 0.2, 0.35, 0.9]
    whole = go(Counting(), tmp_path / "whole", values, patience=3)
    with pytest.raises(IndexError):  # at the third look
        go(Counting(), tmp_path / "cut", values[:2], patience=3)
    again = go(Counting(), tmp_path / "cut", [None, None, *values[2:]], patience=3)
    assert again[1] == whole[1]
    assert again[0]["a"] == whole[0]["a"]


def test_a_training_that_diverges_later_is_judged_at_its_best(tmp_path):
    params, course = go(Counting(diverges=5), tmp_path / "a", [0.2, 0.1, 0.3], patience=2)
    assert (course.diverged, course.judged, params["a"].tolist()) == (True, 2, [2])
    with pytest.raises(UserError, match="diverged"):
        go(Counting(diverges=1), tmp_path / "b", [0.2], patience=2)


def test_values_that_are_not_numbers_are_never_the_best():
    course = TrainingCourse([2, 4, 6], {WATCHED: [None, 0.1, None]}, [])
    assert (course.best().round, course.best().since) == (4, 1)


def test_the_data_decides_how_it_is_trained(blogs, tmp_path):
    assert protocol_of(blogs, False)._replace(model={}) == LONG_ON_CPU  # no accelerator in these tests
    assert protocol_of(str(tmp_path), False).rates == SHORT.rates
    assert (LONG.sentences, LONG.vocabularies, LONG.buckets) == (300, (1000, 5000, 10_000), 500)
    assert max(LONG.steps["reconstruct.max_steps"]) > 10 < max(LONG.steps["update.max_steps"])
    with pytest.raises(UserError, match="fedrecon-support needs people with hundreds of sentences"):
        fedrecon_support.support(str(tmp_path), tmp_path, [0], True, silent)
    with pytest.raises(UserError, match="nowhere does not exist: give blogs or a table of sentences"):
        fedrecon_support.support(str(tmp_path / "nowhere"), tmp_path, [0], True, silent)


def test_texts_are_read_once_for_all_vocabularies(blogs, tmp_path, monkeypatch):
    desk = words_desk.Desk(blogs, tmp_path, [0], True, silent)
    small, large = (desk.task(size, 0) for size in desk.vocabularies)
    assert (small.options["num_words"], large.options["num_words"]) == (30, 60)
    assert [store.num_clients for store in (small.train, small.validation, small.test)] == [16, 2, 2]
    assert small.defaults["update.rate"] == 0.3
    monkeypatch.setattr(words_desk, "find_corpus", None)
    again = words_desk.Desk(blogs, tmp_path, [0], True, silent).task(30, 0)
    np.testing.assert_array_equal(again.train.columns["word"], small.train.columns["word"])


def test_other_texts_of_the_same_size_are_read_again(blogs, tmp_path):
    file, table = (
        tmp_path / "sentences.csv",
        pyarrow.parquet.read_table(f"{blogs}/blog_sentences.parquet"),
    )
    pyarrow.csv.write_csv(table, file)
    (tmp_path / "README").symlink_to(tmp_path / "nowhere")
    first, size = _read_by_desk(tmp_path), file.stat().st_size
    order = table["rank"].to_numpy()
    changed = table.set_column(1, "rank", pa.array(SENTENCES - 1 - order))
    pyarrow.csv.write_csv(changed, file)
    assert file.stat().st_size == size
    assert not np.array_equal(_read_by_desk(tmp_path), first)


def _read_by_desk(folder):
    return words_desk.Desk(str(folder), folder / "out", [0], True, silent).task(30, 0).train.columns["word"]


def test_a_training_whose_first_look_finds_nothing_is_refused(tmp_path):
    with pytest.raises(
        UserError, match="no value to watch after 2 rounds, because nothing of theirs is judged"
    ):
        go(Counting(), tmp_path / "a", [np.nan, 0.1], patience=2)


def test_clients_are_judged_on_the_same_sentences_whatever_their_support(blogs, tmp_path):
    desk = words_desk.Desk(blogs, tmp_path, [0], True, silent)
    judge = fedrecon_support.SupportJudge(desk, fedrecon_support.RECON)
    few, many = (judge.stores(size)[1].gather() for size in desk.protocol.supports)
    query = desk.protocol.query
    assert set(few.counts) == {1 + query}
    assert set(many.counts) == {3 + query}
    for client in range(few.num_clients):
        last = [store.examples(client)["word"] for store in (few, many)]
        np.testing.assert_array_equal(last[0], last[1][-(1 + query) :])


@pytest.mark.slow
def test_table_and_support_share_their_parts(blogs, tmp_path, capsys, recorded_cohorts):
    out = ["--out", str(tmp_path / "out"), "--seeds", "1", "--quick", "--json", "--data", blogs]
    with pytest.MonkeyPatch.context() as patch, recorded_cohorts() as drawn:
        patch.setattr(fedrecon_words, "TRAININGS", (fedrecon_words.RECON, fedrecon_words.YOGI))
        assert main(["reproduce", "fedrecon-table2", *out]) == 0
        table = json.loads(capsys.readouterr().out)
        assert len(table["rows"]) == 2 * 6
        assert all(len(row["rounds"]) == 1 for row in table["rows"])
        done = len(drawn)
        assert main(["reproduce", "fedrecon-support", *out]) == 0
        told = json.loads(capsys.readouterr().out)
        assert len(drawn) == done + 1  # only the learned default is new
    names = [row["row"] for row in told["rows"]]
    sizes = [
        f"{n} sentences: {what}"
        for n in (1, 3)
        for what in ("rebuilt as in training", "without rebuilding", "gain")
    ]
    assert names[:6] == sizes
    assert len(names) == 6 + len(fedrecon_support.WAYS) + len(fedrecon_support.OF_LEARNED) + 3 * 5
    for rebuilt, begun, gain in zip(*(told["rows"][k:6:3] for k in range(3)), strict=True):
        assert gain["ours"] == pytest.approx(rebuilt["ours"] - begun["ours"])
        among = [row["others"][fedrecon_support.AMONG] for row in (rebuilt, begun, gain)]
        assert among[2] == pytest.approx(among[0] - among[1])
    assert matplotlib.image.imread(tmp_path / "out" / "fedrecon-support.png").ndim == 3
    assert not list((tmp_path / "out" / PARTS).glob("*unfinished*"))


@pytest.mark.slow
def test_figures_run_from_the_command_line(blogs, tmp_path, capsys):
    rows = {"figure2": 10, "figure3-words": 2, "figure5": 2, "figure6": 4}
    for name, number in rows.items():
        given = ["--data", blogs, "--out", str(tmp_path / "out"), "--seeds", "1", "--quick", "--json"]
        assert main(["reproduce", f"fedrecon-{name}", *given]) == 0
        told = json.loads(capsys.readouterr().out)
        assert len(told["rows"]) == number
        assert (tmp_path / "out" / f"fedrecon-{name}.png").exists()


@pytest.mark.parametrize(
    ("seeds", "curves", "rounds"),
    [([7], [[0, 0]], [1, 2]), ([7, 8], [[10, 10, 10]], [1, 2, 3]), ([7, 8, 9], [[10, 10], [20, 20]], [1, 2])],
)
def test_curves_are_of_all_seeds_but_the_first_as_long_as_all_trained(
    blogs, tmp_path, monkeypatch, seeds, curves, rounds
):
    """At the end of the first seed the rates of evaluation are chosen, with which curves are drawn."""
    lengths = {7: 2, 8: 3, 9: 2}

    def evaluate(trainer, seed, chosen):
        value = 10.0 * seeds.index(seed)
        told = {row.name: [value] * lengths[seed] for row in trainer._curves(seed)}
        looks = list(range(1, lengths[seed] + 1))
        course = TrainingCourse(looks, told | {WATCHED: [value] * lengths[seed]}, [1.0] * lengths[seed])
        tests = {row.name: {} for row in trainer.training.rows}
        return {"tests": tests, "chosen": {"a": 1}, "course": course._asdict(), "seconds": 0.0}

    monkeypatch.setattr(words_desk.Trainer, "evaluate", evaluate)
    desk = words_desk.Desk(blogs, tmp_path, seeds, True, silent)
    done = desk.learn(fedrecon_words.RECON, desk.vocabularies[0])
    drawn = [row.name for row in fedrecon_words.RECON.rows if row.curve]
    assert done.curves == dict.fromkeys(drawn, curves)
    assert done.rounds == rounds
