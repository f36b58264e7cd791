"""`partwise fleet`: its options, what it does, and what it shows."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from partwise.cli import show
from partwise.cli.interrupt import begin_work, same_command
from partwise.cli.progress import show_progress


def add_fleet(
    command: Callable[..., argparse.ArgumentParser], add_task: Callable[[argparse.ArgumentParser], None]
) -> None:
    """Add the command."""
    more = (
        ": versions and bytes a day, how stale reports are, and with --rounds what the model learns by when. "
        "Rounds, or none (deploy.buffer), are as over a network."
    )
    sub = command("fleet", fleet, "simulate a task on a fleet of devices, on a virtual clock", more)
    add_task(sub)
    sub.add_argument("--devices", default="1e6", metavar="N", help="how many there are (default: 1e6)")
    sub.add_argument(
        "--hours", default="24", metavar="H", help="how long, from midnight in UTC (default: 24)"
    )
    sub.add_argument(
        "--trace", metavar="FILE", help="a table of what devices are like (default: one that is made up)"
    )
    sub.add_argument(
        "--every",
        default="600",
        metavar="S",
        help="seconds after which an available device asks for work again, on average (default: 600)",
    )
    sub.add_argument(
        "--edges", default="100", metavar="N", help="places at which a CDN has caches (default: 100)"
    )
    sub.add_argument(
        "--out", metavar="DIR", help="folder for fleet.json, fleet.png, trace.csv and the run (default: none)"
    )
    sub.add_argument(
        "--resume", action="store_true", help="go on with a training in --out, with all else as it was"
    )
    sub.add_argument("--quiet", action="store_true", help="show no progress")


def fleet(options: argparse.Namespace) -> Mapping[str, Any]:
    """`partwise fleet`."""
    from partwise.cli.commands import asked
    from partwise.config.settings import to_number
    from partwise.runs.fleet import RUN
    from partwise.runs.fleet import fleet as simulate
    from partwise.runs.lock import check_place

    task, recorded, changes = asked(options)
    if options.out is not None:
        check_place(options.out)
    number = lambda name: to_number(f"--{name}", getattr(options, name))
    whole = lambda name, value: int(to_number(f"--{name}", value, "int"))
    begin_work()
    if options.out is not None and "rounds" in changes:
        options.folder, options.again = Path(options.out) / RUN, same_command(options)
    with show_progress(options, task or "planted") as progress:
        found = simulate(
            task,
            devices=whole("devices", options.devices),
            hours=number("hours"),
            trace=options.trace,
            every=number("every"),
            edges=whole("edges", options.edges),
            rounds=whole("rounds", changes.pop("rounds", 0)),
            data=options.data,
            out=options.out,
            resume=options.resume,
            preset=options.preset,
            progress=progress,
            told=progress,
            changes=changes,
            recorded=recorded,
        )
    if not options.json:
        show_fleet(found.result)
        if options.out:
            show.say(f"Picture and JSON are in {options.out}.")
    return found.result


ROWS = (
    ("versions of the model", "versions", "{:,.0f}"),
    ("tasks begun", "tasks", "{:,.0f}"),
    ("... on devices that never reported", "lost", "{:,.0f}"),
    ("reports used", "used", "{:,.0f}"),
    ("reports refused, too old or too late", "unused", "{:,.0f}"),
    ("rounds tried again", "repeated", "{:,.0f}"),
    ("different devices with a task", "devices_reached", "{:,.0f}"),
    ("GB from the server", "bytes_from_server", "{:,.2f}"),
    ("GB to the server", "bytes_to_server", "{:,.2f}"),
    ("GB from the CDN", "bytes_from_cdn", "{:,.2f}"),
)


def show_fleet(result: Mapping[str, Any]) -> None:
    """What happens in a day, and sentences about staleness, devices, caches and learning."""
    show.say(_title(result))
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("in a day")
    table.add_column("", justify="right")
    for words, name, form in ROWS:
        value = result["per_day"][name]
        if value or name in ("versions", "used", "lost"):
            table.add_row(words, form.format(value / (1e9 if name.startswith("bytes") else 1)))
    show.out.print(table)
    for sentence in (_staleness(result), _devices(result), _caches(result), _learned(result)):
        if sentence:
            show.say(sentence)
    for note in result["notes"]:
        show.say(f"Note: {note}.")
    speed = result["schedule"]
    show.say(
        f"The schedule took {speed['seconds']:,.3g} s ({speed['reports_per_second']:,.0f} reports a second), and "
        f"the process {speed['peak_memory_mb']:,.0f} MB at most."
    )


def _title(result: Mapping[str, Any]) -> str:
    rules = result["rules"]
    how = (
        f"a buffer of {rules['buffer']:,}, {rules['concurrency']:,} tasks at a time"
        if result["mode"] == "buffer"
        else f"rounds of {rules['cohort']:,} ({rules['asked']:,} asked, {rules['quorum']:,} needed)"
    )
    return f"{result['task']}: {result['devices']:,} devices, {result['hours']:g} hours, {how}"


def _staleness(result: Mapping[str, Any]) -> str:
    found = result["staleness"]
    if result["mode"] == "rounds":
        return "No report is stale: rounds wait."
    return (
        f"A used report is {found['mean']:.3g} versions old on average (half: at most {found['p50']}, 99 %: at "
        f"most {found['p99']}, all: at most {found['max']})."
    )


def _devices(result: Mapping[str, Any]) -> str:
    there, seconds = result["available"], result["seconds_of_tasks"]
    classes = "; ".join(
        f"{each['name']} {each['share']:.0%} of the devices and {each['share_of_used']:.0%} of the used reports"
        for each in result["classes"]
    )
    made_up = (
        " Devices are made up; --trace takes those that you measured."
        if result["trace"] == "synthetic"
        else ""
    )
    return (
        f"{there['least']:,.0f} to {there['most']:,.0f} devices are available at a time. A used task takes "
        f"{seconds['p50']:.3g} s (half), {seconds['p99']:.3g} s (99 %). Classes: {classes}.{made_up}"
    )


def _caches(result: Mapping[str, Any]) -> str:
    caches = result["caches"]
    if not caches or caches["hit_share"] is None:
        return ""
    shares = ", ".join(
        f"{name}: {share:.0%}" for name, share in caches["hit_share_by_heat"].items() if share is not None
    )
    found = f"{caches['hit_share']:.0%} of the bytes of pages ({shares})"
    return f"Caches at {caches['edges']:,} places answer {found}."


def _learned(result: Mapping[str, Any]) -> str:
    trained = result.get("trained")
    if not trained:
        return ""
    last = trained["curve"][-1]
    value = "no value" if last["value"] is None else f"{last['value']:.4f}"
    return (
        f"Trained {trained['versions']:,} versions, {last['hours']:.3g} hours on the virtual clock: validation "
        f"{trained['metric']} {value}, test {trained['metric']} {trained['test']:.4f}."
    )
