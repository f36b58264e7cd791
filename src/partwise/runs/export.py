"""Write the personal model of one client for systems without partwise: the patent's export to an inference
system.

The folder has the parameters (model.safetensors), the prediction as a program (model.stablehlo, model.onnx),
what goes in and comes out (model.json), the source ids of keys (ids.json) and a script that runs it (run.py). With
the format "numpy" there is no program: model.npz has the parameters for whoever writes the prediction anew.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from partwise.checkpoint import digest_of, load_json, read_file, save_arrays, save_json, write_file
from partwise.runs.onnx_program import to_onnx
from partwise.runs.personal import Personal
from partwise.runs.program import PLATFORMS, Program, Stages, program_of, to_numpy, to_stablehlo
from partwise.runs.versions import versions
from partwise.tasks import Setting, Task
from partwise.types import UserError, unknown

KIND = "personal model"  # in the headers
FORMATS: Mapping[str, Callable[[Program, int | None], Stages]] = {
    "stablehlo": to_stablehlo,
    "onnx": to_onnx,
    "numpy": to_numpy,
}
FILE_OF = {name: f"model.{'npz' if name == 'numpy' else name}" for name in FORMATS}
SCRIPT = Path(__file__).with_name("run_exported.py")
FILES = ("model.safetensors", "model.json", "ids.json", "run.py", *FILE_OF.values())
PRIVATE = 0o600  # for what holds the local part


def export(
    run: str | Path | Personal,
    out: str | Path,
    local: str | Path | Mapping[str, Any] | None = None,
    rows: int | None = None,
    formats: Sequence[str] = ("stablehlo",),
    task: Setting | Task | str | None = None,
) -> dict[str, Any]:
    """Write the personal model of one client to a folder. The training data is not needed.

    Args:
        run: The folder of a run, or what `Personal.open` or `run.personal` returned.
        out: The folder to write. It must be new, empty, or an earlier export, which is replaced.
        local: The client's local part: the file that `partwise personalize` wrote, or what
            `Personal.personalize` returned. A model without local parameters needs none.
        rows: The number of rows that the program takes at once. By default any number, if the model allows it.
        formats: Of "stablehlo" (with a script, run.py), "onnx" and "numpy" (the parameters alone, as .npz).
        task: What the run was made of, unless it is a named task: see `Personal.open`.

    Returns:
        The content of model.json.
    """
    _check(formats, rows)
    out = Path(out).resolve()
    _check_free(out)
    personal = run if isinstance(run, Personal) else Personal.open(run, task)
    program = program_of(personal, personal.find_local(local))
    staged = {FILE_OF[name]: FORMATS[name](program, rows) for name in dict.fromkeys(formats)}
    about = _about(personal, program, staged)
    with _whole(out) as folder:
        _write(folder, personal, program, staged, about)
    return about


def _check(formats: Sequence[str], rows: int | None) -> None:
    if not formats:
        raise UserError(f"no format was given: choose one or more of {', '.join(FORMATS)}")
    for name in formats:
        if name not in FORMATS:
            raise unknown("format", name, FORMATS)
    if rows is not None and rows < 1:
        raise UserError(f"--rows (rows) is {rows}: give 1 or more, or leave it out for any number of rows")


def _check_free(out: Path) -> None:
    """Raise `UserError` if there is something at `out` that is no export."""
    if not out.exists():
        return
    found = sorted(path.name for path in out.iterdir()) if out.is_dir() else None
    if found is None or (found and not (set(found) <= set(FILES) and _is_export(out))):
        holds = "is a file" if found is None else f"has other things in it ({', '.join(found[:3])})"
        raise UserError(f"'{out}' is there, and {holds}: choose a new folder with --out (out=...)")


def _is_export(folder: Path) -> bool:
    try:
        return load_json(folder / "model.json").get("kind") == KIND
    except UserError:
        return False


def _about(personal: Personal, program: Program, staged: Mapping[str, Stages]) -> dict[str, Any]:
    """The content of model.json."""
    told = lambda each: {"shape": list(each.shape), "type": each.dtype.name}
    inputs = {
        name: told(each) | {"column": personal.names[name], "ids": name in personal.vocabularies}
        for name, each in program.columns.items()
    }
    return {
        "kind": KIND,
        "model": personal.digest,
        "parameters": digest_of(program.params, {}),
        "inputs": inputs,
        "output": told(next(iter(staged.values())).output),
        "rows": {name: each.rows for name, each in staged.items()},
        "platforms": list(PLATFORMS),
        "bytes": sum(leaf.nbytes for leaf in program.params.values()),
        "versions": versions(),
    }


def _write(
    folder: Path, personal: Personal, program: Program, staged: Mapping[str, Stages], about: Mapping[str, Any]
) -> None:
    header = {name: about[name] for name in ("kind", "model", "versions")}
    save_arrays(folder / "model.safetensors", program.params, header, mode=PRIVATE)
    for name, each in staged.items():
        write_file(folder / name, each.data, mode=PRIVATE)
    named = [name for name in program.columns if name in personal.vocabularies]
    save_json(folder / "ids.json", {"ids": {name: personal.vocabularies[name].tolist() for name in named}})
    if "model.stablehlo" in staged:
        write_file(folder / "run.py", read_file(SCRIPT))
    save_json(folder / "model.json", about)


@contextmanager
def _whole(out: Path) -> Iterator[Path]:
    """A folder to fill, which then takes the place of `out`. If anything goes wrong, `out` stays as it was."""
    filling = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    try:
        yield filling
        if out.exists():
            shutil.rmtree(out)
        filling.rename(out)
    except OSError as error:
        raise UserError(
            f"could not write '{out}': {error.strerror or error}. Choose another place with --out (out=...)"
        ) from error
    finally:
        shutil.rmtree(filling, ignore_errors=True)
