"""Small runs of the planted task, and the Chromium of the system (tests/chromium.py)."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from partwise.config.protection import Protection, protection
from partwise.config.settings import Config
from partwise.runs.client_file import source_of
from partwise.runs.fingerprint import fingerprint
from partwise.runs.folder import Folder
from partwise.runs.resolve import resolve
from partwise.runs.versions import versions
from partwise.tasks import Task

_spec = importlib.util.spec_from_file_location("chromium_of_tests", Path(__file__).parents[1] / "chromium.py")
_module = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_module)
chromium = _module.chromium

SMALL = {
    "data.num_clients": 60,
    "data.num_items": 30,
    "data.mean_examples": 15,
    "data.dim": 3,
    "cohort.size": 8,
    "rounds": 24,
    "simulation.evaluate_every": 6,
    "simulation.rounds_per_call": 6,
    "simulation.lanes": 2,
}
JUDGED = {"clients": "unseen", "local": "rebuilt", "others": "as trained", "weights": "examples"}
PRIVATE = {
    "privacy.clip": 1.0,
    "privacy.epsilon": 8.0,
    "privacy.delta": 1e-3,
    "server.weighting": "uniform",
    "cohort.sampling": "poisson",
}


@pytest.fixture(scope="session")
def runs(tmp_path_factory):
    """Folders of runs by name: three seeds of one training, and a private one. Their files are as a training writes
    them, without the training: test_in_browser.py has a real one."""
    root, loaded = tmp_path_factory.mktemp("runs"), resolve("planted", None, SMALL)
    for seed in range(3):
        _write_run(*loaded, root / f"plain-{seed}", {"seed": seed}, 1 + 0.1 * seed)
    _write_run(*loaded, root / "private", PRIVATE, 1.5)
    return {path.name: path for path in sorted(root.iterdir())}


def _write_run(task: Task, config: Config, path: Path, changes: dict[str, Any], factor: float) -> None:
    config, folder = config.changed(changes), Folder(path)
    begun = {"lanes": 2, "device": "2 x cpu", "data": fingerprint(task)}
    promised = protection(config, task.train.num_clients)
    path.mkdir()
    folder.start(config, task.options, source_of(task.train), begun)
    folder.append(_record(number, config, factor, promised) for number in range(1, config.rounds + 1))
    folder.save_model({}, {"task": config.task, "round": config.rounds})
    folder.save_summary(
        {
            "task": config.task,
            "algorithm": config.algorithm,
            "seed": config.seed,
            "rounds": config.rounds,
            "test": _metrics(0.6 * factor) | {"judged": JUDGED},
            "best": {"rmse": 0.5},
            "bytes_down_per_client": None if promised else 1000.0,
            "bytes_up_per_client": None if promised else 1200.0,
            "seconds_total": 3.0,
            "device": "2 x cpu",
            "versions": versions(),
            "privacy": promised and promised.promise(config.rounds),
        }
    )


def _record(number: int, config: Config, factor: float, promised: Protection | None) -> dict[str, Any]:
    noise = float(np.random.default_rng(number + config.seed).normal())
    told = {"seconds": 0.01, "clients": 8, "examples": 120, "bytes_down": 8000, "bytes_up": 9600}
    sizes = {"missed": 0, "empty": 0, "dropped": 1, "too_small": 0, "spare": 0}
    if promised:
        told |= dict.fromkeys(("examples", "bytes_down", "bytes_up"))
        sizes = dict.fromkeys(sizes)
    looked = number % config.simulation.evaluate_every == 0
    return {
        "round": number,
        **told,
        **sizes,
        "broken": [],
        "train": {"loss": factor * (20 / number + 0.2 + 0.02 * noise)},
        "evaluation": _metrics(factor * (0.55 + 1 / number)) if looked else None,
    } | ({"privacy": promised.spent(number, exactly=number == config.rounds)} if promised else {})


def _metrics(rmse: float) -> dict[str, Any]:
    metrics = {"rmse": rmse, "accuracy": 0.9 - rmse / 2, "loss": rmse**2}
    spread = lambda value: {f"p{p}": value * (0.7 + p / 160) for p in (5, 25, 50, 75, 95)} | {"mean": value}
    over = {name: {"clients": 6, **spread(value)} for name, value in metrics.items()}
    return {**metrics, "clients": 6, "clients_without_examples": 0, "over_clients": over}


@pytest.fixture
def copy(runs, tmp_path):
    """`copy("plain-0", "new name")` is a folder that a test may damage."""

    def copied(name: str, to: str = "") -> Path:
        return shutil.copytree(runs[name], tmp_path / (to or name))

    return copied
