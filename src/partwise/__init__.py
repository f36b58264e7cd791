"""Federated learning in which every client holds, fetches and trains only its part of the model."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from partwise.data import ClientStore as ClientStore
    from partwise.data import by_client as by_client
    from partwise.data import open_store as open_store
    from partwise.data import read_rows as read_rows
    from partwise.data import read_table as read_table
    from partwise.model.keras import keras_model as keras
    from partwise.model.nnx import nnx_model as nnx
    from partwise.model.partition import partition as partition
    from partwise.model.roles import frozen as frozen
    from partwise.model.roles import keyed as keyed
    from partwise.model.roles import local as local
    from partwise.model.roles import shared as shared
    from partwise.model.spec import Metric as Metric
    from partwise.model.spec import Model as Model
    from partwise.model.torch import torch_model as torch
    from partwise.pages.report import report as report
    from partwise.runs.callbacks import Callback as Callback
    from partwise.runs.compare import compare as compare
    from partwise.runs.fleet import fleet as fleet
    from partwise.runs.loggers import mlflow as mlflow
    from partwise.runs.loggers import tensorboard as tensorboard
    from partwise.runs.loggers import wandb as wandb
    from partwise.runs.per_client import fairness as fairness
    from partwise.runs.personal import Personal as Personal
    from partwise.runs.personal import load_local as load_local
    from partwise.runs.personal import save_local as save_local
    from partwise.runs.reopen import load as load
    from partwise.runs.run import Run as Run
    from partwise.runs.sweep import sweep as sweep
    from partwise.runs.train import train as train
    from partwise.simulation.processes import join_processes as join_processes
    from partwise.tasks import Setting as Setting
    from partwise.tasks import Task as Task
    from partwise.tasks import load_task as load_task
    from partwise.tasks.events import events_task as events_task
    from partwise.tasks.ratings import ratings_task as ratings_task
    from partwise.types import UserError as UserError

__version__ = "0.1.0"

_HOMES = {
    "partwise.data": ("ClientStore", "by_client", "open_store", "read_rows", "read_table"),
    "partwise.pages.report": ("report",),
    "partwise.runs.callbacks": ("Callback",),
    "partwise.runs.loggers": ("mlflow", "tensorboard", "wandb"),
    "partwise.runs.per_client": ("fairness",),
    "partwise.runs.personal": ("Personal", "load_local", "save_local"),
    "partwise.runs.reopen": ("load",),
    "partwise.runs.compare": ("compare",),
    "partwise.runs.fleet": ("fleet",),
    "partwise.runs.sweep": ("sweep",),
    "partwise.runs.run": ("Run",),
    "partwise.runs.train": ("train",),
    "partwise.model.partition": ("partition",),
    "partwise.model.roles": ("frozen", "keyed", "local", "shared"),
    "partwise.model.spec": ("Metric", "Model"),
    "partwise.simulation.processes": ("join_processes",),
    "partwise.tasks": ("Setting", "Task", "load_task"),
    "partwise.tasks.events": ("events_task",),
    "partwise.tasks.ratings": ("ratings_task",),
    "partwise.types": ("UserError",),
}
_HOME_OF = {name: (home, name) for home, names in _HOMES.items() for name in names} | {
    framework: (f"partwise.model.{framework}", f"{framework}_model")
    for framework in ("keras", "nnx", "torch")
}
__all__ = [  # written out, because a type checker reads it
    "Callback",
    "ClientStore",
    "Metric",
    "Model",
    "Personal",
    "Run",
    "Setting",
    "Task",
    "UserError",
    "by_client",
    "compare",
    "events_task",
    "fairness",
    "fleet",
    "frozen",
    "join_processes",
    "keras",
    "keyed",
    "load",
    "load_local",
    "load_task",
    "local",
    "mlflow",
    "nnx",
    "open_store",
    "partition",
    "ratings_task",
    "read_rows",
    "read_table",
    "report",
    "save_local",
    "shared",
    "sweep",
    "tensorboard",
    "torch",
    "train",
    "wandb",
]


def __dir__() -> list[str]:
    return sorted([*__all__, *(name for name in globals() if name.startswith("__"))])


if not TYPE_CHECKING:  # otherwise a type checker would accept any name

    def __getattr__(name: str) -> Any:
        """Import a name when it is first used, so that the command line starts quickly."""
        if name not in _HOME_OF:
            raise AttributeError(f"module 'partwise' has no attribute '{name}'")
        home, inside = _HOME_OF[name]
        return getattr(importlib.import_module(home), inside)
