"""Local parameters never leave a client: their bytes are searched for in all that others could see of a run.

A spy notes every value that a local leaf ever has on a client, also while the model is checked. None of them may be
in a message or a report, in the run's folder, or in what the commands print and log; in the client's own file they
are.
"""

from __future__ import annotations

import itertools
import logging
import re
import stat
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from partwise import device
from partwise.cli import main
from partwise.client import state
from partwise.data import by_client, planted_ratings
from partwise.device import Device
from partwise.model.partition import DEFAULT, keyed, local, partition, shared
from partwise.model.spec import Model, squared_error
from partwise.runs.personal import load_local
from partwise.tasks import TASKS, Entry, Setting, Task

ITEMS, DIM, SCALE = 15, 6, 32768.0
# Of a size that no other number of a run has, so that even one of them alone can be looked for.
PLANTED = np.random.default_rng(20).uniform(2e4, 6e4, DIM).astype(np.float32)
ROLES = {
    "random": local(),
    "zero": local("zero"),
    "learned": local("learned"),
    "add": shared(twin="add"),
    "average": shared(twin="average"),
}
SETTINGS = {
    "rounds": 2,
    "cohort.size": 3,
    "simulation.lanes": 2,
    "simulation.rounds_per_call": 1,
    "simulation.evaluate_every": 1,
    "simulation.checkpoint_every": 1,
    "split.batch_size": 2,
    "update.rate": 0.1,
}
NUMBER = re.compile(rb"(\d+)\.(\d+)(?:[eE]([+-]?\d+))?")
WRITTEN = {".toml", ".json", ".jsonl", ".safetensors", ".png"}  # none of them packed, and a curve of metrics


def secret_settings(role: str) -> tuple[Setting, None]:
    """A rating is own . item / SCALE + base: the client's own vector is as large as the planted one."""

    def init(rng: jax.Array) -> dict:
        item = 0.3 * jax.random.normal(rng, (ITEMS, DIM))
        return {"own": jnp.asarray(PLANTED), "item": item, "base": jnp.zeros(())}

    def predict(params: dict, batch: dict, rng: jax.Array) -> jax.Array:
        return params["item"][batch["item"]] @ params["own"] / SCALE + params["base"]

    model = Model(init, predict, lambda outputs, batch: squared_error(outputs, batch, "rating"))
    roles = {"own": ROLES[role], "item": keyed("item")}
    return Setting(model, partition(model, roles), ("item", "rating")), None


def load_secret(data: str | None = None, *, role: str = "random") -> Task:
    store = planted_ratings(30, ITEMS, mean_examples=10, sigma=0).store
    return Task("secret", *by_client(store), secret_settings(role)[0], options={"role": role})


class Spy:
    """What local leaves were on clients, and where they started from if the server knows that."""

    def __init__(self, monkeypatch):
        self.seen, self.in_checks, self.sent = [], [], {}
        self.noted = self.seen
        values, report, check = state.local_values, Device.report_and_keep, device.check_model

        def spied(client, progress):
            for path, leaf in progress.local.items():
                known = client.received.shared
                start = known.get(DEFAULT + path, known.get(path, jnp.zeros_like(leaf)))
                jax.debug.callback(partial(self.note, self.noted), leaf, start)
            return values(client, progress)

        def checked(client):
            self.noted = self.in_checks
            check(client)
            self.noted = self.seen

        def reported(device, message, *given, **more):
            answer = report(device, message, *given, **more)
            self.sent |= {f"message {len(self.sent)}": message, f"report {len(self.sent)}": answer[0]}
            return answer

        monkeypatch.setattr(state, "local_values", spied)
        monkeypatch.setattr(Device, "report_and_keep", reported)
        monkeypatch.setattr(device, "check_model", checked)

    def note(self, noted, leaf, start) -> None:
        if np.ndim(leaf):  # a single number cannot be told from others by its bytes
            noted.append(np.where(leaf == start, 0, leaf))

    def secrets(self, checks: bool = True) -> np.ndarray:
        """[N, DIM]; 0 where the client's value is what the server sent, or nothing. A check of the model moves the
        values that it tries; without `checks` these are left out."""
        jax.effects_barrier()
        noted = self.seen + (self.in_checks if checks else [])
        return np.unique(np.array(noted, np.float32).reshape(-1, noted[0].shape[-1]), axis=0)


def runs_of(vectors: np.ndarray, size: int) -> np.ndarray:
    """All runs of so many neighbours that are all secret."""
    runs = np.lib.stride_tricks.sliding_window_view(vectors, size, axis=-1).reshape(-1, size)
    return runs[(runs != 0).all(axis=1)]


def search(blob: bytes, vectors: np.ndarray, size: int = 2) -> set[str]:
    """The spellings in which secrets are in some bytes, at any place in them: `size` neighbours as float32 or as
    decimal text, one as float64, four as float16 (fewer would be there by chance)."""
    found = {"text"} if search_text(blob, runs_of(vectors, size)) else set()
    for kind, count in (("f4", size), ("f8", 1), ("f2", 4)):
        for order in "<>":
            needles = np.ascontiguousarray(runs_of(vectors, count).astype(order + kind))
            width = needles.itemsize * count
            as_numbers = lambda data, width=width: np.frombuffer(data, f"u{width}")
            for offset in range(min(width, len(blob))):
                whole = blob[offset : offset + (len(blob) - offset) // width * width]
                if np.isin(as_numbers(needles.tobytes()), as_numbers(whole)).any():
                    found.add(order + kind)
    return found


def search_text(blob: bytes, runs: np.ndarray) -> bool:
    """Whether neighbours stand one after the other as numbers of four digits or more, rounded or cut."""
    spelled = [
        (float(match[0]), 10.0 ** (int(match[3] or 0) - len(match[2])))
        for match in NUMBER.finditer(blob)
        if len((match[1] + match[2]).lstrip(b"0")) >= 4
    ]
    runs = np.abs(runs[np.argsort(np.abs(runs[:, 0]))])
    for place, (value, error) in enumerate(spelled):
        first, last = np.searchsorted(runs[:, 0], [value - error, value + error])
        rest = np.array(spelled[place : place + runs.shape[1]])
        if last > first and len(rest) == runs.shape[1]:
            near = np.abs(runs[first:last] - rest[:, 0]) <= rest[:, 1]
            if near.all(axis=1).any():
                return True
    return False


@pytest.fixture
def spy(monkeypatch):
    monkeypatch.setitem(TASKS, "secret", Entry("a planted secret", load_secret, secret_settings))
    return Spy(monkeypatch)


@pytest.fixture
def watch(spy, tmp_path, capfd, caplog):
    """Run the commands of a server; all bytes that they and the clients gave away, by where they were found."""

    def run(task: str, settings: dict, *data: str) -> dict[str, bytes]:
        folder, given = str(tmp_path / "run"), SETTINGS | settings
        options = {key: value for key, value in given.items() if key.startswith("data.")}
        spell = lambda each: [word for key, value in each.items() for word in ("--set", f"{key}={value}")]
        with caplog.at_level(logging.DEBUG):
            assert main(["train", task, "--out", folder, *data, *spell(given)]) == 0
            assert main(["evaluate", folder, *data, "--json"]) == 0
            assert main(["describe", task, *data, *spell(options), "--json"]) == 0
        files = {str(file): file.read_bytes() for file in (tmp_path / "run").rglob("*") if file.is_file()}
        assert {file[file.rindex(".") :] for file in files} == WRITTEN
        printed = capfd.readouterr()
        assert "rounds" in printed.out
        return {
            **files,
            **spy.sent,
            "output": printed.out.encode(),
            "error": printed.err.encode(),
            "log": caplog.text.encode(),
        }

    return run


def personalize(tmp_path) -> bytes:
    """The local part that a new client rebuilds for itself."""
    mine, kept = tmp_path / "mine.csv", tmp_path / "local.safetensors"
    mine.write_text("item,rating\n1,4.5\n2,3.0\n3,2.0\n")
    kept.touch(0o644)  # what was there before does not decide who may read it
    assert main(["personalize", str(tmp_path / "run"), "--client", str(mine), "--out", str(kept)]) == 0
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600
    return kept.read_bytes()


def check_nothing_is_found(given_away: dict[str, bytes], vectors: np.ndarray, size: int = 2) -> None:
    assert len(runs_of(vectors, 4)) > 0
    for name, blob in given_away.items():
        assert not search(blob, vectors, size), name


@pytest.mark.parametrize("backend", ["plain", "compiled"])
def test_values_that_were_planted_stay(watch, spy, backend, tmp_path, capfd):
    """Not rebuilt at all, the local part is what was planted, to the bit; every single number is looked for."""
    given_away = watch("secret", {"simulation.backend": backend, "reconstruct.method": "skip"})
    assert len(spy.sent) == (2 * 2 * 3 if backend == "plain" else 0)
    np.testing.assert_array_equal(spy.secrets(checks=False), [PLANTED])
    check_nothing_is_found(given_away, spy.secrets(), size=1)
    assert search(personalize(tmp_path), PLANTED[None], size=1) == {"<f4"}
    assert not search(capfd.readouterr().out.encode(), PLANTED[None], size=1)


@pytest.mark.parametrize("role", ROLES)
def test_values_that_were_trained_stay(watch, spy, role, tmp_path):
    """Of a learned default and of a twin's shared leaf the server knows the start, and no more."""
    settings = {"simulation.backend": "plain", "reconstruct.rate": 0.1 * SCALE**2, "reconstruct.epochs": 1}
    settings |= {"data.role": role}
    given_away = watch("secret", settings)
    assert len(spy.secrets(checks=False)) > 2 * 3  # of every client in every round at least one
    check_nothing_is_found(given_away, spy.secrets())
    known_to_the_server = {"<f4"} if role in ("learned", "add", "average") else set()
    assert search(spy.sent["message 0"], PLANTED[None], size=1) == known_to_the_server
    kept = personalize(tmp_path)
    (mine,) = load_local(tmp_path / "local.safetensors").values()
    assert search(kept, mine[None]) == {"<f4"}


@pytest.mark.slow
def test_vectors_of_users_of_a_table_stay(watch, spy, tmp_path):
    rng, table = np.random.default_rng(0), tmp_path / "ratings.csv"
    rows = [f"{user},{rng.integers(ITEMS)},{rng.integers(1, 6)}\n" for user in range(30) for _ in range(8)]
    table.write_text("user,item,rating\n" + "".join(rows))
    settings = {"simulation.backend": "plain", "data.dim": DIM}
    check_nothing_is_found(watch("ratings", settings, "--data", str(table)), spy.secrets())
    kept = personalize(tmp_path)
    assert search(kept, load_local(tmp_path / "local.safetensors")["user"][None]) == {"<f4"}


def test_the_search_finds_any_spelling_anywhere():
    noise = np.random.default_rng(2).bytes(20_000)
    vectors = np.random.default_rng(1).normal(size=(50, DIM)).astype(np.float32)
    assert not search(noise, vectors)
    assert not search(b"", vectors)
    for before, kind in itertools.product(range(3), ("<f4", ">f4", "<f8", ">f8", "<f2", ">f2")):
        hidden = lambda values, before=before, kind=kind: (
            noise + b"x" * before + values.astype(kind).tobytes()
        )
        assert search(hidden(vectors[9, 1:5]) + noise, vectors) == {kind}
        alone = {kind} if kind[1:] != "f2" else set()
        assert search(hidden(PLANTED[2:3]), PLANTED[None], size=1) == alone


def test_the_search_finds_numbers_in_text():
    vectors = np.random.default_rng(1).normal(size=(50, DIM)).astype(np.float32)
    mine = vectors[9]
    for spelled in (str(mine.tolist()), str(mine), " ".join(f"{x:.4e}" for x in mine)):
        assert search(b"at 1.2345: " + spelled.encode(), vectors) == {"text"}
    assert search(f"{PLANTED[1]:.1f}".encode(), PLANTED[None], size=1) == {"text"}
    assert not search(str((1.01 * mine).tolist()).encode(), vectors)
