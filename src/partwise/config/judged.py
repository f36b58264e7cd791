"""How clients are evaluated: with which setting, and which configurations are allowed."""

from __future__ import annotations

import dataclasses

from partwise.config.parts import one_of
from partwise.config.settings import Config
from partwise.tasks.base import Setting, Task
from partwise.types import UserError

LOCAL = ("rebuilt", "tuned", "trained")  # values of evaluation.local
AS_KEPT = "as the client kept it"  # in a summary: how the local part of a client was evaluated


def judged_setting(setting: Setting, config: Config) -> Setting:
    """The setting in which clients are evaluated. A local part that the server trained starts from the
    trained values."""
    one_of("evaluation.local", config.evaluation.local, LOCAL)
    if config.evaluation.local == "rebuilt":
        return setting
    begun = lambda role: dataclasses.replace(role, initial="learned") if role.kind == "local" else role
    roles = {path: begun(role) for path, role in setting.partition.roles.items()}
    return setting._replace(partition=dataclasses.replace(setting.partition, roles=roles))


def check_judged(task: Task, config: Config) -> None:
    """Raise `UserError` if a setting of evaluation would have no effect."""
    local, steps = config.evaluation.local, config.fine_tune.max_steps
    one_of("evaluation.local", local, LOCAL)
    if task.seen and steps != 0:
        raise UserError(
            f"fine_tune.max_steps = {'none' if steps is None else steps} tunes on the support set of an unseen "
            f"client, and task '{task.name}' judges seen ones, as they were trained: leave it at 0, or use a "
            f"task of unseen clients"
        )
    roles = task.personal.partition.roles.values()
    if local == "tuned" and not task.seen and all(r.initial == "learned" for r in roles if r.kind == "local"):
        raise UserError(
            f"evaluation.local = tuned would have no effect: local parameters of task '{task.name}' begin at the "
            f"default that was learned, and are rebuilt from there anyway. Leave it at rebuilt."
        )
    if local != "rebuilt" and (task.seen or not task.personal.partition.local_paths):
        has = "has seen ones alone" if task.seen else "has no local part"
        raise UserError(
            f"evaluation.local = {local} says with which local part an unseen client is judged, and task "
            f"'{task.name}' {has}: leave it at rebuilt, or use another task"
        )


def server_side(task: Task) -> Setting:
    """The setting in which all parameters are on the server."""
    if task.stateful is None and not task.personal.partition.local_paths:
        return task.personal
    if task.stateful is None:
        remedy = "give the Task such a setting too (stateful=Setting(...))"
        if task.loaded.get("order") == "as is":
            remedy = "load the table in an order other than 'as is' (--set data.order=shuffle)"
        paths = ", ".join(task.personal.partition.local_paths)
        raise UserError(
            f"task '{task.name}' has local parameters ({paths}) and no setting in which they are on the server, "
            f"keyed by client: use fed_recon, or {remedy}"
        )
    return task.stateful


def check_rebuilt(config: Config) -> None:
    """Raise `UserError` if clients would be evaluated with a server-trained local part, although the server
    trains none."""
    one_of("evaluation.local", config.evaluation.local, LOCAL)
    if config.evaluation.local != "rebuilt":
        raise UserError(
            f"evaluation.local = {config.evaluation.local} takes local parameters that the server trained, and "
            f"with {config.algorithm} it trains none: use rebuilt, or an algorithm that averages all parameters, "
            f"such as fed_avg"
        )
