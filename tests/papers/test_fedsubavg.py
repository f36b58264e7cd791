"""Tables 2 and 3 of Federated Submodel Averaging, quick and on small files; and what a row says."""

from __future__ import annotations

import json
import shutil

import matplotlib.image
import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest

from partwise.papers import fedsubavg, long_tails, study
from partwise.papers.fedsubavg import ALGORITHMS, CASES, Comparison, Curves, Line
from partwise.papers.reproduce import reproduce
from partwise.runs.train import silent
from partwise.types import UserError


@pytest.fixture(scope="module")
def data(tmp_path_factory, liked_folder):
    """MovieLens, reviews and clicks as they lie beside one another."""
    root, rng = tmp_path_factory.mktemp("data"), np.random.default_rng(0)
    shutil.copytree(liked_folder, root / "ml-1m")
    reviews = [
        {
            "reviewerID": f"A{number % 8}",
            "overall": 1 + int(rng.integers(5)),
            "unixReviewTime": number,
            "reviewText": " ".join(f"w{k}" for k in rng.integers(0, 20, 6)),
        }
        for number in range(64)
    ]
    (root / "reviews_Some_5.json").write_text("".join(json.dumps(each) + "\n" for each in reviews))
    clicks = [
        f"{int(rng.integers(2))}\t{user}\t{item}\t{1 + item % 4}\n"
        for user in range(1, 9)
        for item in rng.integers(1, 12, 12)
    ]
    (root / "amazon-electronics-fedsubavg").mkdir()
    (root / "amazon-electronics-fedsubavg" / "amazon_train.tsv").write_text("".join(clicks))
    lines = [f"{user} {' '.join(map(str, 1 + rng.permutation(30)[:7]))}\n" for user in range(1, 9)]
    (root / "Yelp.txt").write_text("".join(lines))
    return str(root)


@pytest.fixture(scope="module")
def blogs(tmp_path_factory):
    """Thirty people with four sentences each, as a table."""
    folder, rng = tmp_path_factory.mktemp("blogs"), np.random.default_rng(0)
    users, rank = np.divmod(np.arange(120), 4)
    said = [" ".join(f"w{k}" for k in np.minimum(rng.zipf(1.3, 7), 200)) for _ in users]
    pyarrow.parquet.write_table(
        pa.table({"user": users, "rank": rank, "text": said}), folder / "blog_sentences.parquet"
    )
    return str(folder)


def test_table2_and_its_figure(data, tmp_path, monkeypatch):
    """Every algorithm, on the task whose programs are small."""
    monkeypatch.setattr(fedsubavg, "CASES", CASES[:1])
    result = reproduce("fedsubavg-table2", data, tmp_path, seeds=1, quick=True)
    names = [f"MovieLens, {name}" for name in ALGORITHMS.values()]
    assert [row["row"] for row in result["rows"]] == names * 2  # for both targets
    assert all(np.isfinite(row["values"]).all() and row["rates"] for row in result["rows"])
    assert matplotlib.image.imread(tmp_path / "fedsubavg-figure3.png").ndim == 3
    assert not (tmp_path / study.PARTS).exists()


@pytest.mark.slow
@pytest.mark.parametrize(("name", "spaces"), [("Yelp", ["item", "user"]), ("blogs", ["word"])])
def test_long_tails(data, blogs, tmp_path, name, spaces):
    result = reproduce("fedsubavg-tails", blogs if name == "blogs" else data, tmp_path, seeds=1, quick=True)
    heat = [row for row in result["rows"] if row["metric"] == "dispersion"]
    assert [row["row"] for row in heat] == [f"{name}, keys of {space}" for space in spaces]
    assert heat[0]["ours"] == heat[0]["heat"]["n_max"] / heat[0]["heat"]["n_min"] > 1
    assert [row["row"] for row in result["rows"][len(spaces) :]] == [
        f"{name}, {ALGORITHMS[each]}" for each in long_tails.COMPARED
    ]
    assert matplotlib.image.imread(tmp_path / "fedsubavg-tails.png").ndim == 3


def test_rows_of_another_file_of_sequences_have_its_name(data, blogs, tmp_path):
    shutil.copy(f"{data}/Yelp.txt", tmp_path / "Toys.txt")
    cases = {place: long_tails.case_of(str(place)) for place in (data, tmp_path / "Toys.txt", blogs)}
    assert [case.name for case in cases.values()] == ["Yelp", "Toys", "blogs"]
    case = cases[tmp_path / "Toys.txt"]
    comparison = Comparison(case, str(tmp_path / "Toys.txt"), tmp_path, True, silent)
    rows = long_tails.heat_rows(case.name, comparison.task)
    assert [row["row"] for row in rows] == ["Toys, keys of item", "Toys, keys of user"]
    assert comparison.task.train.info["source"] == "sequences Toys"


@pytest.mark.parametrize("case", CASES[1:], ids=lambda case: case.task)
def test_the_other_tasks_run_too(case, data, tmp_path):
    curves = Comparison(case, data, tmp_path, True, silent).train("fed_sub_avg", range(1))
    assert np.shape(curves.values) == (1, 2)
    assert np.isfinite(curves.values).all()


def test_clients_of_whom_nothing_is_judged_are_refused(data, tmp_path, monkeypatch):
    """A metric that does not exist is not the worst value of it."""
    comparison = Comparison(CASES[2], data, tmp_path, True, silent)
    nothing = comparison.task.validation.take(np.arange(0))
    comparison.task = comparison.task._replace(validation=nothing)
    with pytest.raises(UserError, match="the validation clients have no auc, because nothing of theirs"):
        comparison.train("fed_sub_avg", range(1))


def test_table3_goes_on_where_it_was_killed(data, tmp_path, monkeypatch):
    """All that was trained before is not trained again, and the result is the same."""
    trained, train = [], fedsubavg.TrainedCurve.__call__

    def counted(trial, *given):
        if len(trained) == 2:
            raise KeyboardInterrupt
        trained.append(given)
        return train(trial, *given)

    monkeypatch.setattr(fedsubavg.TrainedCurve, "__call__", counted)
    monkeypatch.setattr(fedsubavg, "CASES", CASES[:1])
    with pytest.raises(KeyboardInterrupt):
        reproduce("fedsubavg-table3", data, tmp_path / "killed", seeds=1, quick=True)
    monkeypatch.setattr(
        fedsubavg.TrainedCurve, "__call__", lambda *given: trained.append(given) or train(*given)
    )
    gone_on = reproduce("fedsubavg-table3", data, tmp_path / "killed", seeds=1, quick=True)["rows"]
    whole = len(trained)
    again = reproduce("fedsubavg-table3", data, tmp_path / "whole", seeds=1, quick=True)["rows"]
    assert len(trained) - whole == whole
    bare = lambda rows: [{k: v for k, v in row.items() if k != "seconds_per_round"} for row in rows]
    assert bare(gone_on) == bare(again)
    assert [row["row"] for row in again] == ["MovieLens, K = 2", "MovieLens, K = 4"] * 2


def test_a_row_tells_the_first_round_at_the_target(data, tmp_path):
    comparison = Comparison(CASES[0], data, tmp_path, True, silent)
    comparison.target, line = 0.65, Line("FedAvg", "fed_avg", {}, 170)
    curves = lambda *values: Curves([5, 10, 15], list(values), {}, [], 0.0)
    row = comparison.row(line, curves([0.7, 0.6, 0.5], [0.7, 0.66, 0.65]))
    assert (row["ours"], row["spread"], row["best"], row["paper"]) == (12.5, 2.5, 0.575, 170)
    assert row["metric"] == "rounds to train loss 0.65"
    missed = comparison.row(line, curves([0.7, 0.6, 0.5], [0.7, 0.7, 0.66]))
    assert (missed["ours"], missed["beyond"]) == (None, 15)
    rising = CASES[2]
    assert rising.first([5, 10], [0.59, 0.6], 0.6) == 10
    assert rising.first([5, 10], [0.59, 0.5], 0.6) == float("inf")


def test_central_sgd_takes_the_cohorts_examples(data, tmp_path):
    """Its batch is the cohort's batches together, its steps those of a client on average (section 5.1)."""
    comparison = Comparison(CASES[0], data, tmp_path, False, silent)
    federated, central = (comparison._config(name, {}) for name in ("fed_avg", "central"))
    assert central.update.batch_size == federated.update.batch_size * federated.cohort.size
    store = comparison.task.train
    assert central.update.max_steps == round(store.num_examples / store.num_clients / 4)
    assert comparison._config("scaffold", {}).own == {"scaffold.control": "clients"}
    assert all(len(comparison._grid(name)) == 6 for name in ALGORITHMS)
