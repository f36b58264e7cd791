"""Logs of runs, read back by the programs they are for; resumed runs go on in them without a round twice."""

import struct
from collections.abc import Iterator

import pytest

import partwise as pw
from partwise.runs.loggers import make_logger, scalars
from partwise.runs.train import train
from partwise.types import UserError

BLOCK = 1 << 15


class Killed(BaseException):
    pass


def killed_and_resumed(tiny, out, make):
    """A run of 6 rounds that is killed in round 5, after a checkpoint in round 4; its log has more by then."""

    def kill(status):
        if status.round == 5:
            raise Killed

    changes = tiny | {"simulation.rounds_per_call": 1}
    with pytest.raises(Killed):
        train("planted", out=out, callbacks=[make()], progress=kill, changes=changes)
    train(out=out, resume=True, callbacks=[make()])
    return train(out=out, resume=True, callbacks=[make()])  # it has ended, so nothing is added


def test_the_numbers_of_a_record():
    record = {
        "round": 3,
        "clients": 4,
        "train": {"loss": 0.5},
        "broken": [],
        "spare": 3,
        "bytes_up": None,
        "evaluation": {
            "rmse": 0.25,
            "auc": None,
            "over_clients": {"rmse": {"p95": float("nan"), "mean": 0.75}},
        },
    }
    assert scalars(record) == {
        "validation/rmse": 0.25,
        "validation/over_clients/rmse/mean": 0.75,
        "clients": 4.0,
        "train/loss": 0.5,
    }


def test_tensorboard_reads_every_round_once(tiny, tmp_path):
    pytest.importorskip("tensorboardX")
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    run = killed_and_resumed(tiny, tmp_path / "run", pw.tensorboard)
    log = reader.EventAccumulator(str(tmp_path / "run" / "tensorboard")).Reload()
    found = [(each.step, each.value) for each in log.Scalars("train/loss")]
    assert found == [(r["round"], pytest.approx(r["train"]["loss"], rel=1e-6)) for r in run.records]
    assert [each.step for each in log.Scalars("validation/over_clients/rmse/p95")] == [3, 6]
    [test] = log.Scalars("test/rmse")
    assert (test.step, test.value) == (6, pytest.approx(run.test["rmse"], rel=1e-6))


def test_mlflow_has_every_round_once(tiny, tmp_path):
    pytest.importorskip("mlflow")
    from mlflow.tracking import MlflowClient

    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    run = killed_and_resumed(tiny, tmp_path / "run", lambda: pw.mlflow(uri))
    client = MlflowClient(uri)
    experiment = client.get_experiment_by_name("planted")
    [logged] = client.search_runs([experiment.experiment_id])
    history = lambda name: [(m.step, m.value) for m in client.get_metric_history(logged.info.run_id, name)]
    assert history("train/loss") == [(r["round"], r["train"]["loss"]) for r in run.records]
    assert history("test/rmse") == [(6, pytest.approx(run.test["rmse"], rel=1e-6))]
    assert [step for step, _ in history("validation/rmse")] == [3, 6]
    assert logged.data.params["cohort.size"] == "4"
    assert (logged.info.status, logged.info.run_name) == ("FINISHED", "run")


def lines_of(data: bytes) -> Iterator[bytes]:
    """The lines of W&B's file: LevelDB's log, blocks of 32 KiB with pieces of lines, after 7 bytes of its own."""
    at, line = 7, b""
    while at + 7 <= len(data):
        if BLOCK - at % BLOCK < 7:  # no piece begins so near to a block's end
            at += BLOCK - at % BLOCK
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        line += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # a whole line, or its last piece
            yield line
            line = b""


def test_wandb_has_every_round_once(tiny, tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    from wandb.proto import wandb_internal_pb2

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    run = killed_and_resumed(tiny, tmp_path / "run", lambda: pw.wandb("tests"))
    wandb.teardown()
    steps, ids, losses = [], set(), []
    for file in sorted((tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb")):
        for line in lines_of(file.read_bytes()):
            item = wandb_internal_pb2.Record()
            item.ParseFromString(line)
            ids |= {item.run.run_id} if item.run.run_id else set()
            if item.HasField("history"):
                values = {
                    each.key or "/".join(each.nested_key): each.value_json for each in item.history.item
                }
                steps.append(int(values["_step"]))
                losses.append(float(values["train/loss"]))
    assert (steps, len(ids)) == ([1, 2, 3, 4, 5, 6], 1)
    assert losses == pytest.approx([record["train"]["loss"] for record in run.records])


def test_a_missing_package_is_named_before_anything_is_trained(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for name, package in (("tensorboard", "tensorboardX"), ("wandb", "wandb"), ("mlflow", "mlflow")):
        with pytest.raises(
            UserError, match=rf"needs the package {package}.*pip install 'partwise\[{name}\]'"
        ):
            make_logger(name)


def test_a_log_that_cannot_be_opened_is_named_and_leaves_no_run(tiny, tmp_path):
    pytest.importorskip("mlflow")
    told = r"the log for mlflow could not be opened: look at the place.*Its package says: \w+"
    with pytest.raises(UserError, match=told):
        train("planted", callbacks=[pw.mlflow("foo://bar")], changes=tiny, out=tmp_path / "run")
    assert not (tmp_path / "run" / "config.toml").exists()


def test_a_log_that_cannot_be_written_any_more_is_named(tiny, tmp_path, monkeypatch):
    pytest.importorskip("tensorboardX")
    from tensorboardX import SummaryWriter

    def full(self):
        raise OSError("No space left on device")

    monkeypatch.setattr(SummaryWriter, "flush", full)
    with pytest.raises(UserError, match=r"for tensorboard could not be written.*OSError, No space left"):
        train("planted", callbacks=[pw.tensorboard(tmp_path / "log")], changes=tiny)


def test_wrong_logs_are_refused(tiny):
    with pytest.raises(UserError, match=r"unknown log 'tensorbord' \(nearest: tensorboard"):
        make_logger("tensorbord")
    with pytest.raises(UserError, match="names no place"):
        make_logger("mlflow:")
    pytest.importorskip("tensorboardX")
    with pytest.raises(UserError, match="say where the event files go"):
        train("planted", callbacks=[pw.tensorboard()], changes=tiny)
