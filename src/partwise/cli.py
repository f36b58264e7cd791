"""The command line. Every command prints a table for people, or with --json one JSON document for machines."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from partwise.types import UserError

err = Console(stderr=True)
out = Console()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; 0, or 2 with one paragraph for anything that the user can mend."""
    options = _parser().parse_args(arguments)
    try:
        _keep_compiled_programs()
        result = options.run(options)
        if options.json:
            sys.stdout.write(json.dumps(_plain(result), indent=1) + "\n")
        return 0
    except UserError as error:
        return _fail(str(error), options.json, 2)
    except KeyboardInterrupt:
        return _fail("stopped. A run with --out goes on with --resume.", options.json, 130)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _fail(message: str, as_json: bool, code: int) -> int:
    if as_json:
        sys.stdout.write(json.dumps({"error": message}) + "\n")
    err.print(f"[bold red]partwise:[/] {message}", highlight=False, soft_wrap=True)
    return code


def _keep_compiled_programs() -> None:
    """Programs compiled once are kept for the next command (JAX_COMPILATION_CACHE_DIR chooses where)."""
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        cache = os.environ.get("XDG_CACHE_HOME", os.path.expanduser("~/.cache"))
        os.environ["JAX_COMPILATION_CACHE_DIR"] = os.path.join(cache, "partwise", "jax")
        os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.5")


# Commands. Each returns what --json prints; imports are inside, so that `partwise --help` is quick.


def _train(options: argparse.Namespace) -> Mapping[str, Any]:
    from partwise.experiments.run import train

    changes = _changes(options)
    folder = options.out or _free_folder(options, changes)
    with _progress(options, f"{options.task}") as show:
        run = train(
            options.task, data=options.data, out=folder, resume=options.resume, progress=show, changes=changes
        )
    if not options.json:
        _show_summary(run.summary, folder)
    return {**run.summary, "folder": str(folder)}


def _changes(options: argparse.Namespace) -> dict[str, Any]:
    """The TOML file, then the named options, then --set."""
    from partwise.config.settings import parse_assignments, read_toml

    changes = read_toml(Path(options.config)) if options.config else {}
    options.task = options.task or changes.pop("task", "planted")
    changes.pop("task", None)
    named = {"algorithm": options.algorithm, "rounds": options.rounds, "cohort.size": options.cohort}
    changes |= {key: value for key, value in {**named, "seed": options.seed}.items() if value is not None}
    return changes | parse_assignments(options.set)


def _free_folder(options: argparse.Namespace, changes: Mapping[str, Any]) -> Path:
    if options.resume:
        raise UserError("--resume needs the folder of the run: --out DIR")
    name = f"{options.task}-{changes.get('algorithm', 'fed_recon')}-seed{changes.get('seed', 0)}"
    folder, number = Path("runs") / name, 1
    while folder.exists():
        number += 1
        folder = Path("runs") / f"{name}-{number}"
    return folder


def _show_summary(summary: Mapping[str, Any], folder: Any) -> None:
    table = Table(title=f"{summary['algorithm']} on {summary['task']}: {summary['rounds']} rounds")
    for column in ("metric", "test clients", "mean over clients", "5 % .. 95 % of clients", "best reachable"):
        table.add_column(column, justify="left" if column == "metric" else "right")
    for name, spread in summary["test"]["over_clients"].items():
        best = summary["best"].get(name)
        table.add_row(
            name,
            f"{summary['test'][name]:.4f}",
            f"{spread['mean']:.4f}" if "mean" in spread else "-",
            f"{spread['p5']:.3f} .. {spread['p95']:.3f}" if "p5" in spread else "-",
            f"{best:.4f}" if best is not None else "-",
        )
    out.print(table)
    out.print(
        f"{summary['test']['clients']} test clients; a client fetched "
        f"{summary['bytes_down_per_client'] / 1e3:.1f} kB and sent {summary['bytes_up_per_client'] / 1e3:.1f} kB "
        f"a round; {1e3 * summary['seconds_per_round']:.2f} ms a round ({summary['lanes']} lanes, "
        f"{summary['device']}), {summary['seconds_compile']:.1f} s compiling, "
        f"{summary['seconds_total']:.1f} s in all.",
        highlight=False,
        soft_wrap=True,
    )
    out.print(
        f"Recorded in {folder} (curve.png, metrics.jsonl, summary.json, model.safetensors).", highlight=False
    )


def _evaluate(options: argparse.Namespace) -> Mapping[str, Any]:
    from partwise.config.settings import parse_assignments
    from partwise.experiments.run import evaluate_run

    result = evaluate_run(options.run_folder, options.split, parse_assignments(options.set))
    if not options.json:
        table = Table(
            "metric", "pooled", "mean over clients", title=f"{options.run_folder}: {options.split} clients"
        )
        for name, spread in result["over_clients"].items():
            table.add_row(name, f"{result[name]:.4f}", f"{spread.get('mean', float('nan')):.4f}")
        out.print(table)
    return {"run": options.run_folder, "split": options.split, **result}


def _personalize(options: argparse.Namespace) -> Mapping[str, Any]:
    from partwise.experiments.personal import Personal, load_local, save_local

    personal = Personal.open(options.run_folder)
    client = personal.read(options.client, personal.setting.columns)
    before = load_local(options.local) if options.local else None
    local = personal.personalize(client.examples, before)
    save_local(options.out, local, options.run_folder)
    result = {
        "out": options.out,
        "examples": client.examples.num_examples,
        "unknown": client.unknown,
        "leaves": {path: list(leaf.shape) for path, leaf in local.items()},
    }
    if not options.json:
        _tell_unknown(client.unknown)
        out.print(
            f"Rebuilt {', '.join(local)} from {result['examples']} examples; kept in {options.out}, sent nowhere."
        )
    return result


def _predict(options: argparse.Namespace) -> Mapping[str, Any]:
    from partwise.experiments.personal import Personal, load_local

    personal = Personal.open(options.run_folder)
    keys = tuple(name for name in personal.setting.columns if name in personal.vocabularies)
    client = personal.read(options.client, keys)
    outputs = personal.predict(load_local(options.local), client.examples)
    ids = {name: personal.vocabularies[name][client.examples.columns[name]] for name in keys}
    rows = [
        {
            "row": int(row) + 1,
            **{name: values[i].item() for name, values in ids.items()},
            "output": float(outputs[i]),
        }
        for i, row in enumerate(client.rows)
    ]
    if not options.json:
        _tell_unknown(client.unknown)
        table = Table("row", *keys, "output")
        for row in rows:
            table.add_row(str(row["row"]), *(str(row[name]) for name in keys), f"{row['output']:.4f}")
        out.print(table)
    return {"predictions": rows, "unknown": client.unknown}


def _tell_unknown(unknown: Mapping[str, int]) -> None:
    for name, count in unknown.items():
        if count:
            err.print(
                f"{count} rows name a value of '{name}' that the model does not know; they are left out."
            )


def _reproduce(options: argparse.Namespace) -> Mapping[str, Any]:
    from partwise.experiments.reproduce import reproduce

    with _progress(options, options.name) as show:
        result = reproduce(
            options.name,
            data=options.data,
            out=options.out,
            seeds=options.seeds,
            quick=options.quick,
            progress=show,
        )
    if not options.json:
        from partwise.experiments.reproduce import show_table

        show_table(out, result)
    return result


def _bench(options: argparse.Namespace) -> Mapping[str, Any]:
    from partwise.experiments.bench import BENCHMARKS, bench, show_table

    if options.name is None:
        names = {name: entry.summary for name, entry in BENCHMARKS.items()}
        return _listing(options, "benchmark", names)
    result = bench(options.name, data=options.data, quick=options.quick)
    if not options.json:
        show_table(out, result)
    return result


def _tasks(options: argparse.Namespace) -> Mapping[str, Any]:
    from partwise.tasks import TASKS

    return _listing(options, "task", {name: entry.summary for name, entry in TASKS.items()})


def _algorithms(options: argparse.Namespace) -> Mapping[str, Any]:
    from partwise.config.algorithms import ALGORITHMS

    return _listing(options, "algorithm", {name: entry.summary for name, entry in ALGORITHMS.items()})


def _listing(options: argparse.Namespace, kind: str, entries: Mapping[str, str]) -> Mapping[str, Any]:
    if not options.json:
        table = Table(kind, "what it is")
        for name, summary in entries.items():
            table.add_row(name, summary)
        out.print(table)
    return {f"{kind}s": dict(entries)}


def _describe(options: argparse.Namespace) -> Mapping[str, Any]:
    from partwise.config.settings import parse_assignments
    from partwise.experiments.describe import describe

    result = describe(options.task, options.data, parse_assignments(options.set))
    if not options.json:
        table = Table(
            "path", "shape", "role", "bytes down", "bytes up", title=f"{options.task}, per client and round"
        )
        for line in result["parameters"]:
            table.add_row(
                line["path"],
                str(tuple(line["shape"])),
                line["role"],
                f"{line['bytes_down']:,}",
                f"{line['bytes_up']:,}",
            )
        out.print(table)
        for part, numbers in result["clients"].items():
            out.print(
                f"{part}: {numbers['clients']:,} clients, {numbers['examples']:,} examples", highlight=False
            )
        for name, value in result["source"].items():
            out.print(f"{name}: {value}", highlight=False, soft_wrap=True)
    return result


# Helpers


@contextmanager
def _progress(options: argparse.Namespace, title: str) -> Iterator[Callable[[Any], None]]:
    """A bar with the running metric and the time left; nothing where nobody looks."""
    if options.json or not err.is_terminal:
        yield lambda status: None
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[metric]}"),
    )
    with Progress(*columns, console=err) as bar:
        job = bar.add_task(title, total=None, metric="compiling")
        last = {"evaluation": ""}

        def show(status: Any) -> None:
            if status.evaluation:
                name = next((n for n in status.evaluation if n not in ("loss",)), "loss")
                last["evaluation"] = f"  {name} {status.evaluation[name]:.4f}"
            metric = f"loss {status.loss:.4f}{last['evaluation']}"
            bar.update(job, completed=status.round, total=status.rounds, metric=metric)

        yield show


def _plain(value: Any) -> Any:
    from partwise.experiments.folder import to_plain

    return to_plain(value)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="partwise",
        description="Federated learning in which every client holds only its part of the model.",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, run: Callable, text: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text, description=text)
        sub.add_argument("--json", action="store_true", help="print one JSON document instead of tables")
        sub.set_defaults(run=run)
        return sub

    sub = command("train", _train, "train a task (default: planted, which needs no data)")
    sub.add_argument("task", nargs="?", help="a name from `partwise tasks`")
    sub.add_argument("--algorithm", help="a name from `partwise algorithms` (default: fed_recon)")
    sub.add_argument("--data", help="file or folder of the data (default: PARTWISE_DATA)")
    sub.add_argument("--rounds", type=int)
    sub.add_argument("--cohort", type=int, help="clients per round")
    sub.add_argument("--seed", type=int)
    sub.add_argument("--config", help="a TOML file, such as the config.toml of another run")
    sub.add_argument("--set", action="append", default=[], metavar="dotted.key=value")
    sub.add_argument("--out", help="folder of the run (default: a new one under runs/)")
    sub.add_argument("--resume", action="store_true", help="go on with the run in --out")

    sub = command("evaluate", _evaluate, "evaluate a run again, perhaps with other settings")
    sub.add_argument("run_folder", metavar="RUN")
    sub.add_argument("--split", default="test", help="train, validation or test")
    sub.add_argument("--set", action="append", default=[], metavar="dotted.key=value")

    sub = command("reproduce", _reproduce, "a table or figure of a paper, its figures beside ours")
    sub.add_argument("name", help="fedrecon-table1, fedrecon-figure3 or fedrecon-figure4")
    sub.add_argument("--data")
    sub.add_argument("--out", help="folder for JSON and pictures (default: runs/NAME)")
    sub.add_argument("--seeds", type=int, default=3)
    sub.add_argument("--quick", action="store_true", help="few rounds and settings, to see that it works")

    sub = command("personalize", _personalize, "rebuild a client's local part from its own file, offline")
    sub.add_argument("run_folder", metavar="RUN")
    sub.add_argument(
        "--client", required=True, metavar="FILE", help="CSV or Parquet of the client's examples"
    )
    sub.add_argument("--local", metavar="FILE", help="the local part there was, to be refreshed")
    sub.add_argument(
        "--out", required=True, metavar="FILE", help="where to keep the local part (.safetensors)"
    )

    sub = command("predict", _predict, "use a model with a client's local part, offline")
    sub.add_argument("run_folder", metavar="RUN")
    sub.add_argument("--local", required=True, metavar="FILE")
    sub.add_argument("--client", required=True, metavar="FILE", help="CSV or Parquet of what to predict for")

    sub = command("bench", _bench, "measure speed and memory (without a name: list the benchmarks)")
    sub.add_argument("name", nargs="?")
    sub.add_argument("--data")
    sub.add_argument("--quick", action="store_true", help="fewer cases")

    command("tasks", _tasks, "list the tasks")
    command("algorithms", _algorithms, "list the algorithms")

    sub = command("describe", _describe, "a task's parameters with their roles and bytes, and its clients")
    sub.add_argument("task")
    sub.add_argument("--data")
    sub.add_argument("--set", action="append", default=[], metavar="dotted.key=value")
    return parser


if __name__ == "__main__":
    sys.exit(main())
