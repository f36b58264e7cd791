"""The task and the configuration of a run: from what the user asks for, or from the folder of a run."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from partwise.algorithms.effects import check_effects, read_of
from partwise.algorithms.entry import AlgorithmEntry
from partwise.algorithms.registry import (
    ALGORITHMS,
    check_keys,
    configuration,
    find_algorithm,
    settings_for,
    without_foreign,
)
from partwise.config.options import explain_options, read_options
from partwise.config.private_settings import CORRELATED
from partwise.config.schedule_text import spans_rounds
from partwise.config.schedule_text import written as as_values
from partwise.config.settings import Config
from partwise.runs.document import to_plain
from partwise.runs.fingerprint import PARTS, differences, fingerprint
from partwise.runs.folder import MAY_CHANGE, Folder
from partwise.runs.heat_counts import with_counts
from partwise.runs.trust import check_own
from partwise.tasks import (
    Entry,
    Setting,
    Task,
    algorithm_of,
    data_options,
    find_task,
    fitting,
    is_code,
    is_named,
    keyword_options,
    load_task,
    with_preset,
)
from partwise.types import UserError, counted

TUNED = ("update.rate", "server.rate")  # what is to be chosen for an algorithm
AROUND = (0.3, 1, 3)  # times their values: what is to be tried


def resolve(
    task: str | Task,
    data: str | None,
    changes: Mapping[str, Any],
    preset: str | None = None,
    recorded: Mapping[str, Any] | None = None,
) -> tuple[Task, Config]:
    """The task and its configuration, with the heat that `server.counts` names.

    The configuration is made of the defaults, then the task's settings or those of its preset, then all
    settings of a recorded run if there is one, then `changes`. A setting in `changes` that has no effect
    raises `UserError`.
    """
    return with_counts(*_resolved(task, data, changes, preset, recorded))


def _resolved(
    task: str | Task,
    data: str | None,
    changes: Mapping[str, Any],
    preset: str | None = None,
    recorded: Mapping[str, Any] | None = None,
) -> tuple[Task, Config]:
    """The same, without heat."""
    by_name = isinstance(task, str)
    name = task if isinstance(task, str) else task.name
    if preset is not None and recorded:
        raise UserError(
            f"the preset '{preset}' would have no effect: the configuration of another run says all settings "
            f"already. Leave one of the two out."
        )
    written = dict(changes) | ({"data.path": str(data)} if data else {})
    given = fitting(recorded or {}, changes) | written
    if given.get("task", name) != name:
        raise UserError(
            f"the task is '{name}', but the settings say '{given['task']}': leave out task={given['task']}"
        )
    check_keys(written, name, _options_of(task))
    options = data_options(given)
    task = _load(name, options, preset) if isinstance(task, str) else _unchanged(task, options, preset)
    algorithm = given.get("algorithm", algorithm_of(task.defaults))
    given = without_foreign(fitting(recorded or {}, changes), algorithm) | written
    before = fitting(settings_for(task.defaults, algorithm), given)
    usual, config = configuration(name, before), configuration(name, before | given)
    config = config.changed(
        as_values({key: given[key] for key in given if callable(given[key])}, config.rounds)
    )
    config = dataclasses.replace(config, data=dict(task.loaded))
    entry = find_algorithm(algorithm)
    check_effects(task, config, entry, usual, changes)
    config = entry.settle(task, config)
    if preset is None and not recorded:
        task = task._replace(notes=(*task.notes, *_untuned(task, by_name, config, entry, written)))
    return task, config


def _untuned(
    task: Task, by_name: bool, config: Config, entry: AlgorithmEntry, written: Mapping[str, Any]
) -> list[str]:
    """A note if no rates of the algorithm were chosen on the task, and the user gives none."""
    algorithm, rates = config.algorithm, read_of(TUNED, task, config, entry)
    chosen = algorithm in (algorithm_of(task.defaults), *task.defaults)
    if chosen or not (rates and task.defaults) or algorithm not in ALGORITHMS or {*rates} & {*written}:
        return []
    told = f"No rates were chosen for {algorithm} on the task '{task.name}': it has general ones."
    if not by_name or any(map(callable, written.values())):
        return [f"{told} Before you compare, choose some with pw.sweep."]
    here = config.flat()
    options = ["--data", str(written["data.path"])] if "data.path" in written else []
    for key, value in written.items():
        options += ["--set", f"{key}={value}"] if key not in ("data.path", "algorithm", "task") else []
    for key in rates:
        options += ["--grid", f"{key}={','.join(f'{here[key] * times:.2g}' for times in AROUND)}"]
    words = ["partwise", "sweep", task.name, "--algorithm", algorithm, *options]
    return [f"{told} Before you compare, choose some: {shlex.join([*words, '--out', f'sweeps/{algorithm}'])}"]


def _options_of(task: str | Task) -> list[str]:
    """The keys of a task's own options."""
    if isinstance(task, Task):
        return [f"data.{name}" for name in task.loaded]
    return [key for key, _, _ in explain_options(find_task(task).load)]


def _load(name: str, options: Mapping[str, Any], preset: str | None) -> Task:
    named = {key: value for key, value in options.items() if key != "path"}
    read = read_options(find_task(name).load, named)
    return load_task(name, options.get("path"), preset=preset, **read)


def _unchanged(task: Task, options: Mapping[str, Any], preset: str | None) -> Task:
    """A Task object that is already loaded. Neither options nor a preset can change its data, so other values
    raise `UserError`."""
    if preset is not None:
        task = with_preset(task, preset)
        options = data_options(task.defaults) | dict(options)
    for name, value in options.items():
        if name not in task.loaded or str(task.loaded[name]) != str(value):
            raise UserError(
                f"data.{name} = {value!r} cannot change a Task object, which is loaded already: make the Task "
                f"with it, or give the name of a task instead"
            )
    return task


def check_resumable(folder: Folder) -> None:
    """Raise `UserError` if the folder has no run to continue."""
    if not folder.exists():
        raise UserError(
            f"'{folder.path}' holds no run to go on with: look at --out (out=...), or leave out --resume "
            f"(resume=True) to begin one there"
        )


def resumed(
    folder: Folder,
    task: str | Task | None,
    data: str | None,
    changes: Mapping[str, Any],
    preset: str | None = None,
) -> tuple[Task, Config]:
    """The task and configuration of the run in a folder, to continue it. Everything must be as before, except
    the number of rounds and a few more (`MAY_CHANGE`). A preset must be the one with which the run began."""
    check_resumable(folder)
    if folder.begun().get("fleet"):
        raise UserError(
            f"'{folder.path}' holds the run of a fleet, whose schedule must be made again: go on with the command "
            f"that began it, `partwise fleet ... --out {folder.path.parent} --resume`"
        )
    saved = folder.config()
    name = task.name if isinstance(task, Task) else task or saved.task
    if name != saved.task:
        raise UserError(
            f"the run in '{folder.path}' is of task '{saved.task}', not '{name}': leave the task out to go on "
            f"with it, or begin another run in another folder"
        )
    loaded, config = with_counts(*reopened(folder, data, changes, task))
    if preset is not None:
        own = with_preset(loaded, preset).defaults
        options = {f"data.{name}": value for name, value in data_options(own).items()}
        config = config.changed(settings_for(own, saved.algorithm) | options | dict(changes))
    check_goes_on(folder, loaded, config)
    return loaded, config


def check_goes_on(folder: Folder, task: Task, config: Config) -> None:
    """Raise `UserError` unless this is what the run in a folder was begun with, as far as it must be."""
    saved = folder.config()
    _check_same(folder, saved, config)
    _check_rounds(folder, saved, config)
    check_data(folder, task)


def reopened(
    folder: Folder, data: str | None, changes: Mapping[str, Any], task: str | Task | None = None
) -> tuple[Task, Config]:
    """The task and configuration of a recorded run, with changes, for an evaluation, which needs no heat; its data
    may have moved to `data`. `task` is as in `settings_of`."""
    saved = folder.config()
    if not isinstance(task, Task):
        name = _named(folder, saved, task)
        task = name if name == saved.task else _by_other_name(folder, saved, name, data)
    loaded, config = _resolved(task, data, changes, recorded=saved.flat())
    for name, ids in folder.source().vocabularies.items():
        if not np.array_equal(ids, loaded.train.vocabularies.get(name, ())):
            raise UserError(
                f"column '{name}' of the data has other ids than when the run in '{folder.path}' was trained: "
                f"give the data of that time with --data (data=...)"
            )
    return loaded, config


def check_data(folder: Folder, task: Task) -> None:
    """Raise `UserError` if the data is not what the run was trained on."""
    if "fetched" in folder.begun():
        raise UserError(
            f"the model in '{folder.path}' was fetched from {folder.begun()['fetched']}, and the data that it was "
            f"trained on is not known here: evaluate the run where it is served"
        )
    other = differences(folder.begun()["data"], fingerprint(task))
    if other:
        raise UserError(
            f"the data is not that of the run in '{folder.path}': {'; '.join(other)}. Give the data of that time "
            f"with --data (data=...), or train again on this one"
        )


def check_other_data(folder: Folder, task: Task, keys: Sequence[str]) -> None:
    """Raise `UserError` if options of [data] that were changed for an evaluation would change the trained
    model, or would change nothing."""
    trained, now = folder.model_options(), to_plain(dict(task.options))
    for key in keys:
        name = key.removeprefix("data.")
        if name in trained and trained[name] != now.get(name):
            raise UserError(
                f"{key} = {now.get(name)} would make another model, and the one in '{folder.path}' is trained "
                f"already, with {trained[name]}. Leave it out."
            )
    before, after = folder.begun()["data"], fingerprint(task)
    if all(before[part] == after[part] for part in PARTS):
        raise UserError(f"{', '.join(keys)} would have no effect: the clients stay the same. Leave it out.")


def as_trained(folder: Folder, task: Task) -> Task:
    """The task with the model as it was trained. Constants from the training data, such as the mean rating,
    are not computed again."""
    if not is_named(task.name):
        return task
    personal, stateful = find_task(task.name).settings(**folder.model_options())
    return task._replace(personal=personal, stateful=stateful if task.stateful else None)


def entry_of(name: str) -> Entry:
    """The entry of a task that a server offers. Code that it names is not run."""
    if is_code(name):
        raise UserError(
            f"the task '{name}' is code of one machine, and devices do not run code that a server names: over a "
            f"network, give the task a name by an entry point of a package (docs/adding.md)"
        )
    return find_task(name)


def _by_other_name(folder: Folder, saved: Config, name: str, data: str | None) -> Task:
    """The task of a run that was made of a Task, or whose code has moved."""
    known = keyword_options(find_task(name).load)
    options = {key: value for key, value in saved.data.items() if key in known}
    task = load_task(name, data or saved.data.get("path"), **options)
    return task._replace(name=saved.task, options=folder.model_options())


def settings_of(folder: Folder, task: str | Task | Setting | None = None) -> tuple[Setting, Setting | None]:
    """The settings of the run in a folder, without its data if the task can do that.

    Args:
        folder: The run's folder.
        task: What the run was made of: its Task or its setting; the name of its task, or of a function that makes
            it; or None for the name that the folder says.
    """
    if isinstance(task, Setting):
        return task, None
    if isinstance(task, Task):
        return task.personal, task.stateful
    saved, options = folder.config(), folder.model_options()
    name = _named(folder, saved, task)
    entry = find_task(name)
    if name != saved.task:  # of a run that was made of a Task, and not by this name
        known = keyword_options(entry.load)
        options = {key: value for key, value in options.items() if key in known}
    return entry.settings(**options)


def _named(folder: Folder, saved: Config, task: str | None) -> str:
    """The name by which a run's task is found: what the user says, or what the folder says, if it may."""
    if task is not None:
        return task
    if is_code(saved.task):
        check_own(folder.path, saved.task, folder.begun())
    elif not is_named(saved.task):
        raise UserError(
            f"the run in '{folder.path}' is of a task '{saved.task}' that was made in Python, so its folder alone "
            f"cannot rebuild it: name the function that makes it, --task MODULE:FUNCTION, or in Python give the "
            f"Task or its setting, as in Personal.open(folder, setting) (docs/reopening.md)"
        )
    return saved.task


def _check_same(folder: Folder, saved: Config, config: Config) -> None:
    before, now = saved.flat(), config.flat()
    other = [key for key in {**before, **now} if before.get(key) != now.get(key) and key not in MAY_CHANGE]
    other = [key for key in other if key in before or now[key]]  # what is new since then and off is no change
    if other:
        told = ", ".join(f"{key} was {before.get(key)} and is {now.get(key)}" for key in other)
        raise UserError(
            f"a resumed run keeps its configuration, and in '{folder.path}' {told}: only the number of rounds may "
            f"be changed (--rounds, rounds=), its patience, and when it stops (stop.*)"
        )


def _check_rounds(folder: Folder, saved: Config, config: Config) -> None:
    done, fixed = folder.rounds_done(), spans_rounds(saved)
    if config.rounds < done:
        larger = "" if fixed else ", or give a larger one"
        raise UserError(
            f"the run in '{folder.path}' already has {counted(done, 'round')}; it cannot go on to {config.rounds}. "
            f"Leave the number out to end it as it was begun ({counted(saved.rounds, 'round')}){larger}"
        )
    if config.rounds != saved.rounds and fixed:
        raise UserError(
            f"the rate of this run changes over its {saved.rounds} rounds ({', '.join(fixed)}), so it can be made "
            f"neither longer nor shorter ({config.rounds} were asked for): leave the number out, or begin another "
            f"run"
        )
    part = saved.privacy
    if config.rounds != saved.rounds and part.clip is not None:
        _check_same_noise(saved, config)


def _check_same_noise(saved: Config, config: Config) -> None:
    """Raise `UserError` if the noise of the rounds that were run was made for another number of rounds."""
    part = saved.privacy
    if part.noise is None or part.mechanism in CORRELATED:
        raise UserError(
            f"the noise of this run was made for {saved.rounds} rounds, so it can be made neither longer nor "
            f"shorter ({config.rounds} were asked for): leave the number out, or begin another run"
        )
