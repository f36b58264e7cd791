"""What the commands do. Each returns what --json prints. Imports are inside the functions, so that `partwise
--help` is fast."""

from __future__ import annotations

import argparse
import os
import shlex
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from partwise.cli import show
from partwise.cli.fairness import by_client, show_fairness
from partwise.cli.interrupt import begin_work
from partwise.cli.network import kept_model, refreshed
from partwise.cli.process_shares import joins, number_to_start
from partwise.cli.progress import show_progress
from partwise.runs.lock import refuse_if_held
from partwise.types import UserError, counted

Options = argparse.Namespace
Result = Mapping[str, Any]


def train(options: Options) -> Result | int:
    """`partwise train`. With --processes N, other processes print, and only their exit code is returned."""
    number, joining = (each(options.processes, os.environ) for each in (number_to_start, joins))
    if options.out is not None and not joining:
        refuse_if_held(options.out)
    if number:
        return _supervised(options, number)
    from partwise.runs.loggers import make_logger
    from partwise.runs.train import train as train_task
    from partwise.simulation.exchange import agreed, agreeing
    from partwise.simulation.processes import is_writer, join_processes

    if joining:
        join_processes()
        options.silent = not is_writer()
        options.quiet = options.quiet or options.silent
    with agreeing():
        task, recorded, changes = asked(options)
        folder = _folder(options, task, {**recorded, **changes})
        loggers = [make_logger(each) for each in options.log] if is_writer() else []
    options.folder = Path(agreed(str(folder)))
    if joining:
        options.again = _again(options, options.processes)
    begin_work()
    with show_progress(options, task or (options.folder.name if options.resume else "planted")) as progress:
        run = train_task(
            task,
            data=options.data,
            out=options.folder,
            resume=options.resume,
            preset=options.preset,
            progress=progress,
            told=progress,
            callbacks=loggers,
            changes=changes,
            recorded=recorded,
            began=options.began,
        )
    if not options.json and not options.silent:
        show.summary(run.summary, options.folder)
    return {**run.summary, "folder": str(options.folder)}


def _supervised(options: Options, number: int) -> int:
    from partwise.cli.supervisor import supervise

    task, recorded, changes = asked(options)
    options.folder = _folder(options, task, {**recorded, **changes})
    begin_work()
    options.again = _again(options, number)
    return supervise([*options.given, "--out", str(options.folder)], number, options.folder)


def _again(options: Options, processes: object) -> str:
    """The command that goes on with a run."""
    return f"partwise train --resume --processes {processes} --out {shlex.quote(str(options.folder))}"


def _folder(options: Options, task: str | None, changes: Mapping[str, Any]) -> Path:
    if options.resume and options.out is None:
        raise UserError("--resume needs the folder of the run: --out DIR")
    return free_folder(task, changes) if options.out is None else Path(options.out)


def asked(options: Options) -> tuple[str | None, dict[str, Any], dict[str, Any]]:
    """The task; the settings of a recorded run, if the TOML file is one; and the settings that the user
    wrote: another TOML file, then the named options, then --set."""
    from partwise.config.settings import is_record, parse_assignments, read_toml

    changes = read_toml(Path(options.config)) if options.config else {}
    written = changes.pop("task", None)
    if not options.task and ":" in str(written):
        raise UserError(
            f"'{options.config}' is of the task '{written}', which is code, and no file decides which code is run: "
            f"name it yourself, as in partwise train {written} --config {options.config}"
        )
    recorded, changes = (changes, {}) if is_record(changes) else ({}, changes)
    named = {"algorithm": options.algorithm, "rounds": options.rounds, "cohort.size": options.cohort}
    changes |= {key: value for key, value in {**named, "seed": options.seed}.items() if value is not None}
    changes |= parse_assignments(options.set)
    if options.task and changes.get("task", options.task) != options.task:
        raise UserError(
            f"two tasks were given, '{options.task}' and --set task={changes['task']}: leave one out"
        )
    return options.task or changes.pop("task", written), recorded, changes


def free_folder(task: str | None, changes: Mapping[str, Any]) -> Path:
    """A folder under runs/ that is not there yet, named after a task and its settings."""
    from partwise.tasks import algorithm_of, find_task, is_code

    task = task or "planted"
    algorithm = changes.get("algorithm") or ("" if is_code(task) else algorithm_of(find_task(task).defaults))
    name = "-".join(filter(None, (task.replace(":", "-"), algorithm, f"seed{changes.get('seed', 0)}")))
    folder, number = Path("runs") / name, 1
    while folder.exists():
        number += 1
        folder = Path("runs") / f"{name}-{number}"
    return folder


def settings(options: Options) -> Result:
    """`partwise settings`."""
    from partwise.reports.describe import list_settings

    task = options.task or "planted"
    lines = list_settings(task, options.algorithm, options.preset)
    if options.word:
        lines = [line for line in lines if options.word.lower() in f"{line['key']} {line['meaning']}".lower()]
    if not options.json:
        of = f"{task}, preset {options.preset}" if options.preset else task
        show.settings_table(
            lines, f"settings of {of}" if options.task else f"settings of {of}, the default task"
        )
    return {"task": task, "settings": lines}


def evaluate(options: Options) -> Result:
    """`partwise evaluate`."""
    from partwise.config.settings import parse_assignments
    from partwise.runs.evaluation import judge_run
    from partwise.runs.summary import not_finite

    if options.per_client or options.group:
        result = by_client(options)
    else:
        changes = parse_assignments(options.set)
        how = (options.data, options.task, options.model)
        result = judge_run(options.run_folder, options.split, changes, *how).metrics
    if not options.json:
        show.evaluation(result, f"{options.run_folder}: {options.split} clients")
        if "fairness" in result:
            show_fairness(result["fairness"])
        show.warn_not_finite(not_finite(result), options.split)
    return {"run": options.run_folder, "split": options.split, **result, "not_finite": not_finite(result)}


def personalize(options: Options) -> Result:
    """`partwise personalize`."""
    from partwise.runs.personal import Personal, load_local, save_local

    personal = Personal.open(refreshed(options), options.task, options.model)
    client = personal.read(options.client, personal.table_columns, options.id)
    before = load_local(options.local) if options.local else None
    local = personal.personalize(client.examples, before)
    save_local(options.out, local, personal.digest)
    num_examples = client.examples.num_examples
    if not options.json:
        names = ", ".join(local) or "nothing (the model has no local part)"
        show.say(
            f"Rebuilt {names} from {counted(num_examples, 'example')}; kept in {options.out}, sent nowhere."
        )
    shapes = {path: list(leaf.shape) for path, leaf in local.items()}
    return {"out": options.out, "examples": num_examples, "unknown": client.unknown, "leaves": shapes}


def predict(options: Options) -> Result:
    """`partwise predict`."""
    from partwise.runs.client_file import source_ids
    from partwise.runs.personal import Personal

    personal = Personal.open(kept_model(options.run_folder), options.task, options.model)
    local = personal.find_local(options.local)
    client = personal.read(options.client, personal.columns_in(options.client), options.id)
    outputs = personal.predict(local, client)
    keys = [name for name in client.examples.columns if name in personal.vocabularies]
    ids = {name: source_ids(personal.vocabularies[name], client.examples.columns[name]) for name in keys}
    rows = [
        {
            "row": int(row) + 1,
            **{name: values[i] for name, values in ids.items()},
            "output": outputs[i].tolist(),
        }
        for i, row in enumerate(client.rows)
    ]
    if not options.json:
        show.predictions(rows, keys)
    return {"predictions": rows, "unknown": client.unknown}


def export(options: Options) -> Result:
    """`partwise export`."""
    from partwise.runs.export import export as export_model
    from partwise.runs.personal import Personal

    formats = [name.strip() for name in options.format.split(",") if name.strip()]
    personal = Personal.open(options.run_folder, options.task, options.model)
    about = export_model(personal, options.out, options.local, options.rows, formats)
    if not options.json:
        rows = ", ".join(f"{name} for {each or 'any number of'} rows" for name, each in about["rows"].items())
        show.say(f"Wrote {rows} with {about['bytes']:,} bytes of parameters to {options.out}.")
        if "model.stablehlo" in about["rows"]:
            show.say(f"To run it without partwise: python {Path(options.out) / 'run.py'} --help")
    return {"out": options.out, **about}


def reproduce(options: Options) -> Result:
    """`partwise reproduce`."""
    if options.out is not None:
        refuse_if_held(options.out)
    from partwise.papers import reproduce as papers

    begin_work()
    with show_progress(options, options.name) as progress:
        result = papers.reproduce(
            options.name,
            data=options.data,
            out=options.out,
            seeds=options.seeds,
            quick=options.quick,
            progress=progress,
        )
    if not options.json:
        papers.show_table(show.out, result)
    return result


def bench(options: Options) -> Result:
    """`partwise bench`."""
    from partwise import bench as benchmarks

    if options.name is None:
        names = {name: entry.summary for name, entry in benchmarks.BENCHMARKS.items()}
        return _listing(options, "benchmark", names)
    told = (lambda text: None) if options.json else partial(show.say, where=show.err)
    result = benchmarks.bench(options.name, data=options.data, quick=options.quick, told=told)
    if not options.json:
        benchmarks.show_table(show.out, result)
    return result


def tasks(options: Options) -> Result:
    """`partwise tasks`."""
    from partwise.tasks import all_tasks

    return _listing(options, "task", {name: entry.summary for name, entry in all_tasks().items()})


def algorithms(options: Options) -> Result:
    """`partwise algorithms`."""
    from partwise.algorithms.registry import all_algorithms

    return _listing(options, "algorithm", {name: entry.summary for name, entry in all_algorithms().items()})


def _listing(options: Options, kind: str, entries: Mapping[str, str]) -> Result:
    if not options.json:
        show.listing(kind, entries)
    return {f"{kind}s": dict(entries)}


def describe(options: Options) -> Result:
    """`partwise describe`."""
    from partwise.config.settings import parse_assignments
    from partwise.reports.describe import describe as describe_task

    result = describe_task(options.task, options.data, parse_assignments(options.set))
    if not options.json:
        show.description(result)
    return result


def serving(options: Options) -> Result:
    """`partwise serving`."""
    from partwise.config.settings import parse_assignments
    from partwise.reports.serving_costs import compare_serving

    result = compare_serving(options.task, options.data, parse_assignments(options.set), options.rounds)
    if not options.json:
        show.serving(result)
    return result


def privacy(options: Options) -> Result:
    """`partwise privacy`."""
    from partwise.cli.show_privacy import show_options
    from partwise.config.settings import parse_assignments
    from partwise.reports.privacy_options import compare_options

    result = compare_options(options.task, options.data, parse_assignments(options.set), options.out)
    if not options.json:
        show_options(result)
        if options.out:
            show.say(f"Picture and JSON are in {options.out}.")
    return result


def heat(options: Options) -> Result:
    """`partwise heat`."""
    from partwise.config.settings import parse_assignments
    from partwise.reports.heat_report import measure_heat

    changes = parse_assignments(options.set)
    result = measure_heat(options.task, options.data, changes, options.by, options.split, options.out)
    if not options.json:
        show.heat(result)
        if options.out:
            show.say(f"Picture, JSON and counts are in {options.out}.")
    return result
