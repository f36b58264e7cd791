"""Tasks that a user's own code makes, named `module:function`, without a package.

The function returns a `Task`. Its arguments are the task's options ([data]); an argument `data` is what --data
gives. In place of a function, the name may be that of an `Entry`, whose model can be built again without the data.
What the code prints goes to the error output, because the output of a command may be JSON.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import os
import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from partwise.tasks.base import Entry, Setting, Task
from partwise.types import UserError, unknown

PLAIN = (bool, int, float, str)  # values of options that a run records


def find_code(name: str) -> Entry:
    """The task that `module:function` names. This imports the module and runs what is in it.

    Modules are looked for in the current folder first, as `python -m` does.
    """
    module, _, function = name.partition(":")
    if not all(part.isidentifier() for part in (*module.split("."), function)):
        raise UserError(
            f"the task '{name}' must be a name of `partwise tasks`, or name code as module:function, as in "
            f"my_tasks:make_task for the function make_task of my_tasks.py"
        )
    found = getattr(_imported(name, module), function, None)
    if isinstance(found, Entry):
        return found
    if found is None:
        here = [each for each, value in vars(sys.modules[module]).items() if inspect.isfunction(value)]
        raise unknown(f"function of module '{module}'", function, here)
    if not callable(found):
        raise UserError(
            f"'{name}' is a {type(found).__name__}: it must be a function that returns a Task, or an Entry"
        )
    told = (inspect.getdoc(found) or "a task of your own").splitlines()[0]
    return Entry(told, _load_by(name, found), partial(_settings_by, name, found))


def _imported(name: str, module: str) -> Any:
    here = os.getcwd()
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise _failed(name, f"importing {module}", error) from error
        raise UserError(
            f"the task '{name}' is in a module '{error.name}' that is neither in the current folder ({here}) nor "
            f"among the installed packages: go to the folder of {error.name.replace('.', '/')}.py, or add it to "
            f"PYTHONPATH"
        ) from None
    except Exception as error:
        raise _failed(name, f"importing {module}", error) from error


def _failed(name: str, what: str, error: Exception) -> UserError:
    if isinstance(error, UserError):
        return error
    return UserError(
        f"{what} for the task '{name}' failed: {type(error).__name__}: {error}. Mend it (--debug shows where it "
        f"happened)"
    )


def _load_by(name: str, function: Callable[..., Any]) -> Callable[..., Task]:
    """A `load` that calls the function. Plain options are recorded, so that it can be called with them again."""
    taken = _signature(function).parameters
    options = [
        p for key, p in taken.items() if key != "data" and p.kind is not inspect.Parameter.VAR_POSITIONAL
    ]
    usual = {p.name: p.default for p in options if isinstance(p.default, PLAIN)}

    def load(data: str | None = None, **given: Any) -> Task:
        if data is not None and "data" not in taken:
            raise UserError(
                f"the function {name} takes no argument `data`, but was given --data {data} (data=...): leave "
                f"it out, or let the function take it"
            )
        given |= {} if data is None else {"data": str(data)}
        task = _called(name, function, given)
        return task._replace(name=name, options=usual | given, loaded=usual | given)

    first = inspect.Parameter("data", inspect.Parameter.POSITIONAL_OR_KEYWORD, default=None)
    load.__signature__ = inspect.Signature([first, *map(_by_name, options)])  # pyright: ignore[reportFunctionMemberAccess]
    return load


def _signature(function: Callable[..., Any]) -> inspect.Signature:
    try:
        return inspect.signature(function, eval_str=True)
    except NameError:  # types that only a type checker imports
        return inspect.signature(function)


def _by_name(option: inspect.Parameter) -> inspect.Parameter:
    """An argument as an option, which is given by its name."""
    if option.kind is inspect.Parameter.VAR_KEYWORD:
        return option
    default = None if option.default is inspect.Parameter.empty else option.default
    return option.replace(kind=inspect.Parameter.KEYWORD_ONLY, default=default)


def _settings_by(name: str, function: Callable[..., Any], **options: Any) -> tuple[Setting, Setting | None]:
    """The settings of the task that the function makes with the options of a run."""
    task = _called(name, function, options)
    return task.personal, task.stateful


def _called(name: str, function: Callable[..., Any], options: Mapping[str, Any]) -> Task:
    try:
        inspect.signature(function).bind(**options)
    except TypeError as error:
        raise UserError(
            f"the function {name} cannot be called with {_shown(options)}: {error}. Its arguments are options: "
            f"--set data.NAME=VALUE for each that has no default, and --data for `data`"
        ) from None
    try:
        with contextlib.redirect_stdout(sys.stderr):
            task = function(**options)
    except Exception as error:
        raise _failed(name, f"calling {name}", error) from error
    if not isinstance(task, Task):
        raise UserError(f"the function {name} returned a {type(task).__name__}: it must return a Task")
    return task


def _shown(options: Mapping[str, Any]) -> str:
    """Options in words."""
    return ", ".join(f"{key}={value!r}" for key, value in options.items()) or "no arguments"
