"""Bits do not depend on the cores that a process is bound to, on what is in the program cache, or on processes.

Every case is a process of its own, because JAX starts once.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

CORES = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
TRAIN = """
import hashlib, json, os, sys
kind, cores, several, data = json.loads(sys.argv[1])
if cores:
    os.sched_setaffinity(0, cores)
import jax, jax.numpy as jnp, numpy as np, partwise as pw
if several:
    pw.join_processes()

def dense():
    '''A network of which a batch has 1600 examples: large products.'''
    drawn = np.random.default_rng(0)
    rows = {"x": drawn.normal(size=(4, 1600, 64)), "y": drawn.normal(size=(4, 1600))}
    rows = {name: np.concatenate(each).astype(np.float32) for name, each in rows.items()}
    model = pw.Model(
        lambda rng: {"first": jax.random.normal(rng, (64, 64)) / 8, "out": jnp.ones(64) / 8},
        lambda params, batch, rng: jnp.tanh(batch["x"] @ params["first"]) @ params["out"],
        lambda outputs, batch: jnp.square(outputs - batch["y"]),
    )
    store = pw.ClientStore(rows, np.arange(4) * 1600, np.full(4, 1600), np.arange(4))
    setting = pw.Setting(model, pw.partition(model, {}), ("x", "y"))
    task = pw.Task("dense", store, store, store, setting)
    return task, {"algorithm": "fed_avg", "cohort.size": 4, "update.batch_size": 1600, "simulation.lanes": 1}

def ratings():
    small = {"data.num_clients": 40, "data.num_items": 300, "data.dim": 8, "data.mean_examples": 20}
    return "planted", small | {"cohort.size": 8, "simulation.lanes": 4}

def movielens():
    return "movielens", {"simulation.lanes": 8, "data.path": data}

task, changes = {"dense": dense, "ratings": ratings, "movielens": movielens}[kind]()
run = pw.train(task, rounds=3, seed=1, changes=changes)
bits = hashlib.sha256(b"".join(np.asarray(leaf).tobytes() for leaf in run.params.values()))
records = [{name: each for name, each in record.items() if name != "seconds"} for record in run.records]
print(bits.hexdigest(), run.test, records)
"""


def words(kind: str, cores: list[int], several: bool = False) -> list[str]:
    data = os.environ.get("PARTWISE_DATA", "")
    return ["-c", TRAIN, json.dumps([kind, cores, several, f"{data}/movielens-1m/ml-1m.zip"])]


def as_users(devices: int, cache: Path | None) -> dict[str, str]:
    """The environment: programs as users compile them, from no cache but this one."""
    own = ("XLA_FLAGS", "JAX_COMPILATION_CACHE_DIR", "NPROC")
    clean = {name: each for name, each in os.environ.items() if name not in own}
    more = {"JAX_COMPILATION_CACHE_DIR": str(cache), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    return clean | {"JAX_NUM_CPU_DEVICES": str(devices)} | (more if cache else {})


def trained(kind: str, cores: list[int], devices: int, cache: Path | None = None) -> str:
    """What a process that is bound to these cores prints."""
    command = [sys.executable, *words(kind, cores)]
    done = subprocess.run(
        command, env=as_users(devices, cache), capture_output=True, text=True, check=False, timeout=1200
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


KINDS = [
    "dense",
    pytest.param("ratings", marks=pytest.mark.slow),
    pytest.param(
        "movielens",
        marks=[
            pytest.mark.slow,
            pytest.mark.skipif(not os.environ.get("PARTWISE_DATA"), reason="PARTWISE_DATA is not set"),
        ],
    ),
]


@pytest.mark.skipif(len(CORES) < 2, reason="this machine has one core")
@pytest.mark.parametrize("kind", KINDS)
def test_a_bound_process_computes_the_same_bits_with_a_cold_cache_and_with_a_warm_one(tmp_path, kind):
    free = trained(kind, CORES, 1, tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir())
    assert trained(kind, CORES[:1], 1) == free  # cold
    assert (
        trained(kind, CORES[:1], 1, tmp_path / "cache") == free
    )  # what a process with more cores has compiled


@pytest.mark.skipif(len(CORES) < 2, reason="this machine has one core")
@pytest.mark.parametrize("kind", KINDS)
def test_two_processes_of_one_core_compute_the_bits_of_one_with_two_devices(start_together, kind):
    one = trained(kind, CORES, 2)
    assert trained(kind, CORES[:1], 2) == one
    clean = {"XLA_FLAGS": "", "JAX_ENABLE_COMPILATION_CACHE": "false"}
    running = start_together(*(words(kind, [core], several=True) for core in CORES[:2]), **clean)
    told = [process.communicate(timeout=1200) for process in running]
    assert [process.returncode for process in running] == [0, 0], told
    assert told[0][0] == one


COMPILE = """
import json, os, sys
os.sched_setaffinity(0, json.loads(sys.argv[1]))
import jax, jax.numpy as jnp
from partwise.programs import jit, jit_program

def large(x):
    return jnp.tanh(x).sum(0), jax.nn.softmax(x @ x.T)

for make in (jax.jit, jit, jit_program):
    print(hash(make(large).lower(jax.ShapeDtypeStruct((1000, 1000), jnp.float32)).compile().as_text()))
"""


@pytest.mark.skipif(len(CORES) < 2, reason="this machine has one core")
def test_programs_are_compiled_alike_for_any_cores():
    """Those of `jax.jit` are not; if they ever are, `programs.ANY_CORES` can go."""

    def compiled(cores: list[int]) -> list[str]:
        command = [sys.executable, "-c", COMPILE, json.dumps(cores)]
        environment = as_users(1, None) | {"PYTHONHASHSEED": "0"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout.split()

    plain, *ours = zip(compiled(CORES[:1]), compiled(CORES), strict=True)
    assert plain[0] != plain[1]
    assert all(bound == free for bound, free in ours)
