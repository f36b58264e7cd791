"""Metrics of every client: those of the summary, by id, in files, and how fairly they are spread."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest

import partwise as pw
from partwise.metrics import PERCENTILES
from partwise.runs.evaluation import evaluate_run, judge_run
from partwise.runs.per_client import DIRECTION, parse_groups, write_clients
from partwise.runs.train import train
from partwise.types import RunWarning, UserError

PRIVATE = {"privacy.clip": 1.0, "privacy.noise": 1.0, "server.weighting": "uniform"}


@pytest.fixture(scope="module")
def run(tiny, tmp_path_factory):
    return train(
        "planted", out=tmp_path_factory.mktemp("clients") / "run", changes=tiny | {"data.num_clients": 60}
    )


@pytest.fixture(scope="module")
def table(run):
    return run.clients("test")


def test_every_client_is_there_with_its_id(run, table):
    assert table.column_names == ["client", "examples", "judged", "rmse", "accuracy", "loss"]
    assert table["client"].to_pylist() == run.task.test.client_ids.tolist()
    assert table["examples"].to_pylist() == run.task.test.counts.tolist()
    assert all(j < e for j, e in zip(table["judged"].to_pylist(), table["examples"].to_pylist(), strict=True))
    np.testing.assert_allclose(table["rmse"].to_numpy() ** 2, table["loss"].to_numpy(), rtol=1e-5)


def test_they_are_those_of_the_summary(run, table):
    for name, spread in run.test["over_clients"].items():
        values = table[name].drop_null().to_numpy()
        assert (len(values), values.mean()) == (spread["clients"], spread["mean"])
        assert [np.percentile(values, p) for p in PERCENTILES] == [spread[f"p{p}"] for p in PERCENTILES]
    weighted = np.average(table["loss"].to_numpy(), weights=table["judged"].to_numpy())
    assert weighted == pytest.approx(run.test["loss"])


def test_a_recorded_run_gives_the_same_table(run, table):
    judged = judge_run(run.recorded.folder.path)
    assert judged.table().equals(table)
    assert judged.metrics == evaluate_run(run.recorded.folder.path)
    with pytest.raises(UserError, match="the split must be one of train, validation, test, not 'all'"):
        run.clients("all")


def test_files_hold_the_table(table, tmp_path):
    write_clients(tmp_path / "clients.parquet", table)
    assert pyarrow.parquet.read_table(tmp_path / "clients.parquet").equals(table)
    write_clients(tmp_path / "clients.csv", table)
    lines = (tmp_path / "clients.csv").read_text().splitlines()
    assert lines[0] == '"client","examples","judged","rmse","accuracy","loss"'
    assert len(lines) == table.num_rows + 1
    with pytest.raises(UserError, match=r"should end in .csv or .parquet"):
        write_clients(tmp_path / "clients.txt", table)


def made(values, groups, higher=False):
    field = pa.field("score", pa.float64(), metadata={DIRECTION: str(higher).encode()})
    schema = pa.schema([pa.field("client", pa.int64()), pa.field("group", pa.string()), field])
    return pa.Table.from_arrays(
        [pa.array(range(len(values))), pa.array(groups), pa.array(values)], schema=schema
    )


def test_fairness_by_hand():
    values = [float(i) for i in range(1, 21)] + [None]
    groups = ["a"] * 10 + ["b"] * 10 + [None]
    told = pw.fairness(made(values, groups))
    assert {k: told["score"][k] for k in ("clients", "mean", "worst_tenth", "best_tenth", "gap")} == {
        "clients": 20,
        "mean": 10.5,
        "worst_tenth": 19.5,
        "best_tenth": 1.5,
        "gap": 18.0,
    }
    assert told["groups"]["a"]["score"]["mean"] == 5.5
    assert told["groups"]["b"]["score"]["worst_tenth"] == 20
    assert told["group_gap"] == {"score": 10.0}
    assert pw.fairness(made(values, groups, higher=True))["score"]["worst_tenth"] == 1.5
    assert pw.fairness(made([None], ["a"]).set_column(2, "score", pa.array([None], pa.float64()))) is not None


def test_groups_come_from_a_table(run, table, tmp_path):
    ids = run.task.test.client_ids.tolist()
    lines = [f"{client},{'even' if place % 2 == 0 else 'odd'}" for place, client in enumerate(ids[:-1])]
    file = tmp_path / "users.csv"
    file.write_text("\n".join(["id,parity", *lines]) + "\n")
    with pytest.warns(RunWarning, match="1 of 6 clients are in no group"):
        grouped = run.clients("test", parse_groups(f"{file}:id,parity"))
    assert grouped["group"].to_pylist() == ["even", "odd", "even", "odd", "even", None]
    told = pw.fairness(grouped)["groups"]
    assert told["odd"]["rmse"]["mean"] == pytest.approx(table["rmse"].to_numpy()[1:5:2].mean())
    for text, message in (
        (f"{file}:id", "--group takes FILE.csv:CLIENT,COLUMN"),
        (f"{file}:id,age", "unknown column of"),
        (f"{tmp_path}/none.csv:id,age", "could not read"),
    ):
        with pytest.raises(UserError, match=message):
            parse_groups(text)
    file.write_text("id,parity\n1,odd\n1,even\n")
    with pytest.raises(UserError, match="names 1 client twice"):
        parse_groups(f"{file}:id,parity")
    file.write_bytes(b"id,parity\n1,odd\n2,\xe9ven\n")
    with pytest.raises(
        UserError, match=r"users.csv, line 3, column 'parity': .*expected text in UTF-8. Save"
    ):
        parse_groups(f"{file}:id,parity")
    with pytest.raises(UserError, match="the groups name none of the 6 clients"):
        run.clients("test", {"nobody": "a"})


def test_clients_that_keep_something_are_judged_with_it(liked_folder, tmp_path):
    changes = {"algorithm": "fed_rep", "data.dim": 3, "rounds": 3, "cohort.size": 6, "simulation.lanes": 3}
    changes |= {"simulation.evaluate_every": 1, "keep.best": "loss"}
    run = train("movielens-seen", data=str(liked_folder), out=tmp_path / "run", changes=changes)
    values = run.clients("test")["loss"].drop_null().to_numpy()
    assert values.mean() == run.test["over_clients"]["loss"]["mean"]
    with pytest.raises(
        UserError, match="what they keep from round to round, which is of the run's last model"
    ):
        run.best.clients("test")
    with pytest.raises(UserError, match="evaluate that one"):
        evaluate_run(tmp_path / "run", model="best")
    assert run.summary["best_model"]["test"] is None


def test_under_a_promise_of_privacy_the_table_says_what_it_is(tiny):
    run = train("planted", changes=tiny | PRIVATE)
    with pytest.warns(
        RunWarning, match="not covered by the promise of privacy .epsilon.: of training clients"
    ):
        table = run.clients("train")
    assert b"not covered" in table.schema.metadata[b"privacy"]


def test_other_things_than_groups_and_tables_are_refused(tiny_run):
    with pytest.raises(UserError, match=r"groups is a list: give \{client id: group\}"):
        pw.load(tiny_run).clients("test", groups=["a"])
    with pytest.raises(UserError, match=r"the table is a list: give what `run.clients` returned"):
        pw.fairness([1])
