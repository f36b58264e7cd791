"""Devices are decided when a training begins: not by an import, a model, or a client on its own.

Every case is a process of its own, because JAX starts once.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import textwrap

import pytest

import partwise

CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()

PLAIN = """
import jax, jax.numpy as jnp, partwise as pw
error = lambda outputs, batch: jnp.square(outputs - batch["rating"])
model = pw.Model(
    lambda rng: {"item": jax.random.normal(rng, (6, 2)), "user": jnp.ones(2)},
    lambda params, batch, rng: params["item"][batch["item"]] @ params["user"],
    error,
)
roles = {"item": pw.keyed("item"), "user": pw.local()}
"""

KERAS = """
import os
os.environ["KERAS_BACKEND"] = "jax"
import jax.numpy as jnp, keras, partwise as pw
error = lambda outputs, batch: jnp.square(outputs[:, 0] - batch["rating"])

def build(num_items):
    item = keras.Input((), dtype="int32", name="item")
    x = keras.layers.Embedding(num_items, 2, name="table")(item)
    return keras.Model(item, keras.layers.Dense(1, name="out")(keras.layers.Dropout(0.1)(x)))

model = pw.keras(build, error, rows={"num_items": 6}, inputs="item")
roles = {"table/*": pw.keyed("item"), "out/*": pw.local()}
"""

NNX = """
import jax.numpy as jnp, partwise as pw
from flax import nnx
error = lambda outputs, batch: jnp.square(outputs[:, 0] - batch["rating"])

class Scores(nnx.Module):
    def __init__(self, rngs):
        self.table, self.out = nnx.Embed(6, 2, rngs=rngs), nnx.Linear(2, 1, rngs=rngs)

    def __call__(self, item):
        return self.out(self.table(item))

model = pw.nnx(Scores, error, inputs="item")
roles = {"table/*": pw.keyed("item"), "out/*": pw.local()}
"""

TORCH = """
import jax.numpy as jnp, partwise as pw, torch
error = lambda outputs, batch: jnp.square(outputs[:, 0] - batch["rating"])
model = pw.torch(torch.nn.Sequential(torch.nn.Embedding(6, 2), torch.nn.Linear(2, 1)), error, inputs="item")
roles = {"0/*": pw.keyed("item"), "1/*": pw.local()}
"""

TASK = """
import numpy as np
from partwise.data import by_client
from partwise.data.store import group_rows
rows = {"item": np.arange(60, dtype=np.int32) % 6, "rating": np.linspace(1, 5, 60, dtype=np.float32)}
stores = by_client(group_rows(np.arange(60) // 3, rows, (), {}))
setting = pw.Setting(model, pw.partition(model, roles), ("item", "rating"))
task = pw.Task("mine", *stores, setting)
"""

TRAIN = """
import jax
run = pw.train(task, rounds=2, cohort__size=4, split__batch_size=1, simulation__lanes=1)
print(jax.device_count(), run.summary["device"].split()[0], round(run.test["loss"], 4))
"""

MESH = """
import jax
from partwise.simulation.mesh import make_mesh
make_mesh()
print(jax.device_count())
"""


def python(code: str, **environment: str) -> list[str]:
    """The words that a new process prints, in which nothing may warn."""
    own = ("XLA_FLAGS", "JAX_NUM_CPU_DEVICES")
    clean = {name: value for name, value in os.environ.items() if name not in own}
    command = [sys.executable, "-W", "error::RuntimeWarning", "-c", textwrap.dedent(code)]
    done = subprocess.run(command, env=clean | environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_a_task_made_in_python_is_trained_on_all_cores():
    there, told, loss = python(PLAIN + TASK + TRAIN)
    assert (int(there), int(told)) == (CORES, CORES)
    one = python(PLAIN + TASK + TRAIN, JAX_NUM_CPU_DEVICES="1")
    assert one[:2] == ["1", "1"]
    assert float(one[2]) == pytest.approx(float(loss), abs=2e-4)


@pytest.mark.parametrize(("made", "needs"), [(KERAS, "keras"), (NNX, "flax"), (TORCH, "torchax")])
def test_no_framework_starts_jax_when_a_model_is_made_of_its_own(made, needs):
    if importlib.util.find_spec(needs) is None:  # importing it here would change the JAX of the other tests
        pytest.skip(f"{needs} is not installed")
    assert python(made + TASK + MESH) == [str(CORES)]


def test_what_the_user_said_wins():
    assert python(MESH, XLA_FLAGS="--xla_force_host_platform_device_count=3") == ["3"]
    assert python("import jax; jax.config.update('jax_num_cpu_devices', 3)" + MESH) == ["3"]


def test_where_jax_was_used_before_a_training_says_what_that_costs():
    code = """
    import warnings, jax
    from partwise.simulation.mesh import make_mesh
    jax.random.key(0)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("default")
        make_mesh(), make_mesh()
    print(jax.device_count(), *(each.message for each in told))
    """
    words = " ".join(python(code))
    if CORES == 1:
        assert words == "1"
    else:
        assert words.startswith(f"1 JAX was used before this training, so it runs on one of {CORES} cores.")
        assert words.endswith(f'import jax; jax.config.update("jax_num_cpu_devices", {CORES})')


def test_a_client_leaves_jax_as_it_is(tmp_path):
    """Nothing that is imported starts JAX or changes its configuration, and nothing that one client does."""
    small = {"num_clients": 20, "num_items": 25, "mean_examples": 15, "dim": 2}
    changes = {"rounds": 1, "cohort.size": 2, "simulation.lanes": 1}
    changes |= {f"data.{name}": value for name, value in small.items()}
    partwise.train("planted", changes=changes, out=tmp_path / "run")
    (tmp_path / "mine.csv").write_text("item,rating\n1,3\n2,4\n")
    code = """
    import jax
    before = dict(jax.config.values)
    import partwise
    for name in set(partwise.__all__) - {"keras", "nnx", "torch"}:
        getattr(partwise, name)
    me = partwise.Personal.open("run")
    mine = me.read("mine.csv", ("item", "rating")).examples
    print(me.predict(me.personalize(mine), mine).shape[0], jax.device_count())
    assert dict(jax.config.values) == before
    """
    code = f"import os; os.chdir({str(tmp_path)!r})" + textwrap.dedent(code)
    assert python(code) == ["2", "1"]
