"""Loggers: callbacks that write a run's rounds to TensorBoard, Weights & Biases or MLflow.

A log has every round once, also if the run is killed and resumed. The rounds that a resumed run runs again are the
same as before; what a log has of them already is replaced (TensorBoard) or not written again (the others).
"""

from __future__ import annotations

import contextlib
import importlib.util
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from partwise.checkpoint import load_json, save_json
from partwise.runs.callbacks import Callback, Records, Start
from partwise.types import UserError, unknown

LOGGED = ("train", "clients", "examples", "bytes_down", "bytes_up", "privacy", "seconds")  # of a record
MOST_METRICS = 500  # in one call of MLflow, which takes 1,000
MOST_SETTINGS = 100  # in one call of MLflow
LONGEST_SETTING = 6000  # characters of a value that MLflow takes

Scalars = dict[str, float]


class Writer(NamedTuple):
    """An open log: the last round that it has already, and how rounds and results are written."""

    last: int
    write: Callable[[Sequence[tuple[int, Scalars]]], None]
    close: Callable[[int, Scalars], None]  # (rounds of the run, what is said at its end)


def scalars(record: Mapping[str, Any]) -> Scalars:
    """The finite numbers of a record that are logged: `train/loss`, `validation/rmse`,
    `validation/over_clients/rmse/p95`, ..."""
    named = {name: record[name] for name in LOGGED if name in record}
    return dict(_numbers({**named, "validation": record["evaluation"] or {}}, ""))


def _numbers(values: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, float]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _numbers(value, f"{prefix}{name}/")
        elif isinstance(value, int | float) and name != "round" and math.isfinite(value):
            yield prefix + name, float(value)


def _logging(package: str, extra: str, open_log: Callable[[Start], Writer]) -> Callback:
    """A callback that writes to a log. Raises `UserError` at once if its package is not installed."""
    if importlib.util.find_spec(package) is None:
        raise UserError(
            f"a log for {extra} needs the package {package}, which is not installed: pip install "
            f"'partwise[{extra}]'"
        )
    log: list[Writer] = []

    def begin(start: Start) -> None:
        with _naming(extra, "opened: look at the place that you gave it"):
            log.append(open_log(start))

    def rounds(records: Records) -> None:
        new = [(r["round"], scalars(r)) for r in records if r["round"] > log[0].last]
        if new:
            with _naming(extra, "written, and what it lacks is written when the run goes on (--resume)"):
                log[0].write(new)

    def end(summary: Mapping[str, Any]) -> None:
        with _naming(extra, "closed; the run itself has ended well"):
            log[0].close(summary["rounds"], dict(_numbers({"test": summary["test"]}, "")))

    return Callback(begin, rounds, end)


@contextlib.contextmanager
def _naming(extra: str, what: str) -> Iterator[None]:
    """Tell what a log's own package says is wrong as what it is: a matter of the log."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        told = str(error).strip().splitlines()
        cause = f"{type(error).__name__}{f', {told[0]}' if told else ''}"
        raise UserError(f"the log for {extra} could not be {what}. Its package says: {cause}") from error


def tensorboard(place: str | Path | None = None) -> Callback:
    """Write event files for TensorBoard (`partwise[tensorboard]`).

    Args:
        place: The folder of the event files (default: `tensorboard` in the run's folder).
    """

    def open_log(start: Start) -> Writer:
        from tensorboardX import SummaryWriter
        from tensorboardX.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]

        if place is None and start.folder is None:
            raise UserError(
                "say where the event files go: pw.tensorboard('DIR'), or give the run a folder (out=)"
            )
        folder = Path(place) if place is not None else Path(start.folder or "") / "tensorboard"
        # The last round is written again, because what was said at an earlier end is at this round too.
        suffix = f".{time.time_ns()}.{start.round}"
        writer = SummaryWriter(str(folder), purge_step=start.round, filename_suffix=suffix)
        events: Any = writer.file_writer

        def write(rounds: Sequence[tuple[int, Scalars]]) -> None:
            for (
                number,
                values,
            ) in rounds:  # one event for a round, which takes less time than one for a number
                told = [Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
                events.add_summary(Summary(value=told), number)
            writer.flush()

        def close(number: int, values: Scalars) -> None:
            write([(number, values)])
            writer.close()

        return Writer(max(start.round - 1, 0), write, close)

    return _logging("tensorboardX", "tensorboard", open_log)


def wandb(project: str = "partwise") -> Callback:
    """Log to Weights & Biases (`partwise[wandb]`). With the environment variable WANDB_MODE=offline, nothing leaves
    this machine.

    Args:
        project: The project to which the run belongs.
    """

    def open_log(start: Start) -> Writer:
        import wandb as package  # pyright: ignore[reportMissingImports]

        file = start.folder and Path(start.folder) / "wandb.json"
        known = load_json(file) if file and file.exists() else {}
        run = package.init(
            project=project,
            name=start.folder and Path(start.folder).name,
            id=known.get("id"),
            resume="allow",
            config=start.config.flat(),
            dir=start.folder,
            settings=package.Settings(console="off"),
        )

        def write(rounds: Sequence[tuple[int, Scalars]]) -> None:
            for number, values in rounds:
                run.log(values, step=number)
            if file:
                save_json(file, {"id": run.id, "round": rounds[-1][0]})

        def close(number: int, values: Scalars) -> None:
            run.summary.update(values)
            run.finish()

        return Writer(int(known.get("round", 0)), write, close)

    return _logging("wandb", "wandb", open_log)


def mlflow(uri: str | None = None) -> Callback:
    """Log to MLflow (`partwise[mlflow]`), in an experiment with the task's name.

    Args:
        uri: The tracking server or store, as `sqlite:///mlflow.db` (default: MLflow's own, MLFLOW_TRACKING_URI).
    """

    def open_log(start: Start) -> Writer:
        from mlflow.entities import Metric  # pyright: ignore[reportMissingImports]
        from mlflow.tracking import MlflowClient  # pyright: ignore[reportMissingImports]

        client = MlflowClient(uri)
        run_id, before = _mlflow_run(client, start)
        steps = lambda name: [each.step for each in client.get_metric_history(run_id, name)] if before else []

        def write(rounds: Sequence[tuple[int, Scalars]]) -> None:
            now = int(time.time() * 1000)
            metrics = [
                Metric(name, value, now, number) for number, each in rounds for name, value in each.items()
            ]
            for first in range(0, len(metrics), MOST_METRICS):
                client.log_batch(run_id, metrics[first : first + MOST_METRICS])

        def close(number: int, values: Scalars) -> None:
            if number not in steps("test/loss"):
                write([(number, values)])
            client.set_terminated(run_id)

        return Writer(max(steps("seconds"), default=0), write, close)

    return _logging("mlflow", "mlflow", open_log)


def _mlflow_run(client: Any, start: Start) -> tuple[str, bool]:
    """The id of the run of MLflow, and whether it was there before. The run's folder remembers it."""
    file = start.folder and Path(start.folder) / "mlflow.json"
    if file and file.exists():
        run_id = load_json(file)["run_id"]
        client.update_run(run_id, status="RUNNING")
        return run_id, True
    name = start.config.task
    experiment = client.get_experiment_by_name(name)
    experiment_id = experiment.experiment_id if experiment else client.create_experiment(name)
    run_id = client.create_run(experiment_id, run_name=start.folder and Path(start.folder).name).info.run_id
    _log_settings(client, run_id, start.config.flat())
    if file:
        save_json(file, {"run_id": run_id})
    return run_id, False


def _log_settings(client: Any, run_id: str, settings: Mapping[str, Any]) -> None:
    from mlflow.entities import Param  # pyright: ignore[reportMissingImports]

    params = [Param(name, str(value)[:LONGEST_SETTING]) for name, value in settings.items()]
    for first in range(0, len(params), MOST_SETTINGS):
        client.log_batch(run_id, params=params[first : first + MOST_SETTINGS])


LOGGERS: Mapping[str, Callable[..., Callback]] = {
    "tensorboard": tensorboard,
    "wandb": wandb,
    "mlflow": mlflow,
}


def make_logger(text: str) -> Callback:
    """The logger that `NAME` or `NAME:PLACE` names; PLACE is a folder (TensorBoard), a project (W&B) or a URI."""
    name, sign, place = text.partition(":")
    if name not in LOGGERS:
        raise unknown("log", name, LOGGERS)
    if sign and not place:
        raise UserError(f"--log {text} names no place: leave the colon out, or say where, as in {name}:PLACE")
    return LOGGERS[name](place) if place else LOGGERS[name]()
