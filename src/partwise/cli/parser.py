"""The commands and their options."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from partwise import __version__
from partwise.cli import commands
from partwise.cli.comparing_parser import add_comparing
from partwise.cli.fleet_command import add_fleet
from partwise.cli.looking_parser import add_looking
from partwise.cli.network_parser import add_network
from partwise.cli.recommending import add_recommend, add_run
from partwise.cli.storing import add_store


def make_parser() -> argparse.ArgumentParser:
    """The parser with all commands."""
    parser = argparse.ArgumentParser(
        prog="partwise",
        description="Federated learning in which every client holds only its part of the model.",
    )
    parser.add_argument(
        "--version",
        action="version",
        version=f"partwise {__version__}",
        help="the version; with --json after it, those of all that results may depend on",
    )
    subparsers = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, run: Callable, text: str, more: str = "") -> argparse.ArgumentParser:
        sub = subparsers.add_parser(name, help=text, description=f"{text}{more}")
        sub.add_argument("--json", action="store_true", help="print one JSON document instead of tables")
        sub.add_argument("--debug", action="store_true", help="with an error, print the traceback too")
        sub.set_defaults(run=run)
        return sub

    _add_train(command)
    _add_settings(command)
    _add_evaluate(command)
    _add_reproduce(command)
    _add_personalize(command)
    _add_predict(command)
    add_recommend(command)
    _add_export(command)
    add_looking(command)
    add_comparing(command, _add_task)
    add_network(command, _add_task)
    add_store(command)
    add_fleet(command, _add_task)
    _add_rest(command)
    return parser


Command = Callable[..., argparse.ArgumentParser]


def _add_set(sub: argparse.ArgumentParser) -> None:
    sub.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="dotted.key=value",
        help="change a setting; `partwise settings [TASK]` lists them all",
    )


def _add_preset(sub: argparse.ArgumentParser) -> None:
    sub.add_argument(
        "--preset", metavar="NAME", help="settings in place of the task's own: paper, those of its paper"
    )


def _add_quiet(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--quiet", action="store_true", help="show no progress")


def _add_train(command: Command) -> None:
    more = ". All settings, their defaults and meaning: `partwise settings [TASK]`."
    sub = command("train", commands.train, "train a task (default: planted, which needs no data)", more)
    _add_task(sub)
    sub.add_argument("--out", help="folder of the run (default: a new one under runs/)")
    sub.add_argument("--resume", action="store_true", help="go on with the run in --out")
    sub.add_argument(
        "--processes",
        metavar="N",
        help="train in N processes on this machine; auto: this is one of several that a launcher has started",
    )
    sub.add_argument(
        "--log",
        action="append",
        default=[],
        metavar="NAME[:PLACE]",
        help="write a log too: tensorboard[:DIR], wandb[:PROJECT], mlflow[:URI]; may be given several times",
    )
    _add_quiet(sub)


def _add_task(sub: argparse.ArgumentParser) -> None:
    """What is trained."""
    sub.add_argument("task", nargs="?", help="a name from `partwise tasks`, or module:function")
    sub.add_argument("--algorithm", help="a name from `partwise algorithms` (default: the task's own)")
    _add_preset(sub)
    sub.add_argument("--data", help="file or folder of the data (default: PARTWISE_DATA)")
    sub.add_argument("--rounds", metavar="N")
    sub.add_argument("--cohort", metavar="M", help="clients per round")
    sub.add_argument("--seed", metavar="S")
    sub.add_argument("--config", help="a TOML file, such as the config.toml of another run")
    _add_set(sub)


def _add_settings(command: Command) -> None:
    sub = command("settings", commands.settings, "list every --set key with its value and meaning")
    sub.add_argument("task", nargs="?", help="whose values and options (default: planted, as in `train`)")
    sub.add_argument("word", nargs="?", help="only keys with this in their name or meaning")
    sub.add_argument("--algorithm", help="with the task's values for this algorithm")
    _add_preset(sub)


def _add_evaluate(command: Command) -> None:
    sub = command("evaluate", commands.evaluate, "evaluate a run again, perhaps with other settings")
    add_run(sub, "RUN")
    sub.add_argument("--split", default="test", help="train, validation or test")
    sub.add_argument("--data", help="file or folder of the run's data (default: where it was)")
    sub.add_argument("--per-client", metavar="FILE", help="write every client's metrics (.csv or .parquet)")
    sub.add_argument("--group", metavar="FILE.csv:CLIENT,COLUMN", help="groups of clients to be compared")
    _add_set(sub)


def _add_reproduce(command: Command) -> None:
    sub = command("reproduce", commands.reproduce, "a table or figure of a paper, its figures beside ours")
    sub.add_argument("name", help="such as fedrecon-table1 or select-figure2; a wrong name lists them all")
    sub.add_argument("--data", help="file or folder of the data (default: PARTWISE_DATA)")
    sub.add_argument(
        "--out", help="folder for JSON and pictures (default: runs/NAME, or runs/NAME-quick with --quick)"
    )
    sub.add_argument("--seeds", type=int, help="trials of each row (default: as in the paper)")
    sub.add_argument(
        "--quick",
        action="store_true",
        help="few rounds and settings, to see that it works; FedRecon's MovieLens is then ml-100k",
    )
    _add_quiet(sub)


def _add_personalize(command: Command) -> None:
    more = ". From a URL, the newest version of the model is fetched first, if the server answers."
    sub = command("personalize", commands.personalize, "rebuild a client's local part, offline", more)
    add_run(sub)
    sub.add_argument("--key", metavar="FILE", help="the device's key, for a URL (`partwise enroll`)")
    sub.add_argument("--authority", metavar="FILE", help="certificate that signed the server's, for a URL")
    sub.add_argument(
        "--client", required=True, metavar="FILE", help="CSV or Parquet of the client's examples"
    )
    sub.add_argument("--id", metavar="VALUE", help="the client whose rows are meant, if FILE has several")
    sub.add_argument("--local", metavar="FILE", help="the local part there was, to be refreshed")
    sub.add_argument(
        "--out", required=True, metavar="FILE", help="where to keep the local part (.safetensors)"
    )


def _add_predict(command: Command) -> None:
    sub = command("predict", commands.predict, "use a model with a client's local part, offline")
    add_run(sub, help="of a URL, the model that personalize fetched")
    sub.add_argument("--local", required=True, metavar="FILE")
    sub.add_argument("--client", required=True, metavar="FILE", help="CSV or Parquet of what to predict for")
    sub.add_argument("--id", metavar="VALUE", help="the client whose rows are meant, if FILE has several")


def _add_export(command: Command) -> None:
    more = ": parameters, StableHLO and a script that needs no partwise"
    sub = command("export", commands.export, "write a client's personal model for other systems", more)
    add_run(sub, "RUN")
    sub.add_argument("--local", metavar="FILE", help="the client's local part, if the model has one")
    sub.add_argument("--out", required=True, metavar="DIR", help="a new folder, or an earlier export")
    sub.add_argument("--rows", type=int, metavar="N", help="rows at once (default: any number, if it can be)")
    sub.add_argument(
        "--format", default="stablehlo", help="one or more of stablehlo, onnx, numpy, with commas"
    )


def _add_rest(command: Command) -> None:
    sub = command("bench", commands.bench, "measure speed and memory (without a name: list the benchmarks)")
    sub.add_argument("name", nargs="?")
    sub.add_argument("--data")
    sub.add_argument("--quick", action="store_true", help="fewer cases")
    sub = command("serving", commands.serving, "what each way of serving a task's slices would cost")
    sub.add_argument("task", help="a name from `partwise tasks`")
    sub.add_argument("--data", help="file or folder of the data (default: PARTWISE_DATA)")
    sub.add_argument("--rounds", type=int, default=5, metavar="N", help="cohorts drawn; nothing is trained")
    _add_set(sub)
    _add_heat(command)
    _add_privacy(command)
    command("tasks", commands.tasks, "list the tasks")
    command("algorithms", commands.algorithms, "list the algorithms")
    sub = command("describe", commands.describe, "a task's parameters, roles and bytes, and its clients")
    sub.add_argument("task")
    sub.add_argument("--data")
    _add_set(sub)


def _add_privacy(command: Command) -> None:
    more = (
        ": who sees what of a client, bytes, seconds that are measured here, and noise. Nothing is trained."
    )
    sub = command(
        "privacy", commands.privacy, "which protection a task's clients can have, and its price", more
    )
    sub.add_argument("task", help="a name from `partwise tasks`")
    sub.add_argument("--data", help="file or folder of the data (default: PARTWISE_DATA)")
    _add_set(sub)
    sub.add_argument("--out", help="folder for privacy.png and privacy.json (default: none)")


def _add_heat(command: Command) -> None:
    more = " (FedSubAvg's heat), and how unevenly; nothing is trained."
    sub = command("heat", commands.heat, "how many clients hold each key of a task", more)
    sub.add_argument("task", help="a name from `partwise tasks`")
    sub.add_argument("--data", help="file or folder of the data (default: PARTWISE_DATA)")
    sub.add_argument("--by", default="clients", help="clients, or samples: all those of a key's clients")
    sub.add_argument("--split", default="train", help="train, validation, test or all")
    _add_set(sub)
    sub.add_argument("--out", help="folder for heat.png, heat.json and heat.safetensors (default: none)")
