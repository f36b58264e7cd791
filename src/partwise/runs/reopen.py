"""Open a finished run again, in another process: its results, its model, and its data when they are asked for."""

from __future__ import annotations

from pathlib import Path

from partwise.config.judged import judged_setting
from partwise.runs.folder import Folder
from partwise.runs.personal import Personal
from partwise.runs.recorder import Recorder
from partwise.runs.resolve import reopened, settings_of
from partwise.runs.run import Reopened, Run
from partwise.runs.sanity import check_fits
from partwise.tasks import Setting, Task
from partwise.types import UserError


def load(run: str | Path, task: str | Task | Setting | None = None, *, data: str | None = None) -> Run:
    """Open the finished run in a folder. The training data is read only where it is needed: by `run.task`, and so
    by `run.evaluate`.

    Args:
        run: The folder.
        task: What the run was made of, unless it is a named task: its Task or its setting, or the name of a
            function that makes the Task (`module:function`).
        data: Where the data of a named task is, if it has moved.

    Returns:
        The run, as `train` returned it.
    """
    folder = Folder(run)
    config, params, summary = folder.config(), folder.model(), folder.summary()
    if isinstance(task, Task | Setting):
        check_fits(folder.path, judged_setting(settings_of(folder, task)[0], config), params)

    def loaded() -> Task:
        if isinstance(task, Setting):
            raise UserError(
                f"the run in '{folder.path}' was opened with a setting, which has no data: give the Task, as in "
                f"partwise.load(folder, task)"
            )
        return task if isinstance(task, Task) else reopened(folder, data, {}, task)[0]

    made_of = Reopened(loaded, lambda model: Personal.open(folder.path, task, model))
    return Run(config, made_of, params, summary, Recorder(folder))
