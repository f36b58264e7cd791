"""What goes between processes: real ones, of two devices each, that run one program of checks; and what one alone
does."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import jax
import numpy as np
import pytest

from partwise.simulation import exchange, processes
from partwise.simulation.apart import CallClients, joined
from partwise.simulation.mesh import make_mesh
from partwise.types import UserError

CHECKS = """
import jax, numpy as np, sys
from partwise.simulation.processes import check_alone, is_writer, join_processes, num_processes
from partwise.simulation.exchange import *
from partwise.simulation.apart import CallClients, of_all_processes
from partwise.simulation.mesh import make_mesh
from partwise.simulation.exchange import added_up
from partwise.types import UserError
from jax.sharding import PartitionSpec as P

join_processes()
me, mesh = jax.process_index(), make_mesh()
assert (num_processes(), jax.device_count(), is_writer()) == (2, 4, me == 0)
assert own_devices(mesh) == slice(2 * me, 2 * me + 2)

# Words of any length, values, decisions and mistakes
assert told(b"x" * 5 * me) == [b"", b"xxxxx"]
assert agreed({"round": me + 7}) == {"round": 7}
assert agreed(None) is None
with agreeing():
    pass
try:
    with agreeing():
        if me == 1:
            raise UserError("there is no such file")
except UserError as error:
    assert str(error) == "there is no such file" + (" (process 1 of 2 says so)" if me == 0 else "")
else:
    raise AssertionError
try:
    check_alone("this is", "do it elsewhere")
except UserError as error:
    assert str(error) == "this is, in one process, and here are 2: do it elsewhere"

# Arrays: the same everywhere, own ones along an axis of devices, and all of them on the host
same = put_everywhere({"a": np.arange(3.0, dtype=np.float32)}, mesh)
assert put_everywhere(same, mesh)["a"] is same["a"]
along = put_along(np.full((3, 2), me, np.int32), mesh, 1)
assert to_host(along).tolist() == [[0, 0, 1, 1]] * 3
assert to_host(put_own(np.array([me, 9], np.uint8), mesh)).tolist() == [[0, 9], [0, 9], [1, 9], [1, 9]]
np.testing.assert_array_equal(to_host(same)["a"], [0, 1, 2])

# One sum for each type; counts above 2^24 and words modulo 2^32 stay exact
leaves = {
    "table": np.full((4, 3), 0.1, np.float32),
    "words": np.full((4, 2), 2**31 + 1, np.uint32),
    "clients": np.full(4, 2**24 + 1, np.int32),
    "loss": np.full(4, 0.7, np.float32),
}
own = jax.tree_util.tree_map(lambda x: x[own_devices(mesh)], leaves)
add = jax.shard_map(added_up, mesh=mesh, in_specs=P("clients"), out_specs=P("clients"), check_vma=False)
program = jax.jit(add).lower(put_along(own, mesh, 0)).compile()
total = to_host(program(put_along(own, mesh, 0)))
assert program.as_text().count(" all-reduce(") == 3, program.as_text()
np.testing.assert_array_equal(total["clients"], 4 * (2**24 + 1))
np.testing.assert_array_equal(total["words"], np.uint32(4))
np.testing.assert_allclose(total["table"], 0.4, rtol=1e-6)

# What each knows of its own clients
one = lambda value: np.array([[[[value]]]])
known = CallClients(one(me), {"item": one(1 + me)}, np.array([me]), {"item": [np.array([5, 5 + me])]}, {"a": me})
found = of_all_processes(known)
assert found.clients.ravel().tolist() == [0, 1] and found.key_count["item"].ravel().tolist() == [1, 2]
assert found.missed.tolist() == [1] and found.rows["item"][0].tolist() == [5, 6] and found.sizes == {"a": 1}
print("all is well")
"""


ALL_CORES = """
import jax, partwise as pw
from partwise.simulation import mesh

mesh.own_cores = lambda: [0, 1, 2]
pw.join_processes()
print(jax.local_device_count())
"""
LEAVES = """
import os, signal
import jax
from partwise.simulation import processes

jax.distributed.is_initialized = lambda: True
jax.distributed.shutdown = lambda: os.kill(os.getpid(), signal.SIGTERM)
processes.leave(75)
"""


def test_two_processes_of_two_devices(start_together):
    told = [each.communicate(timeout=600) for each in start_together(*2 * [["-c", CHECKS]], devices=2)]
    for out, err in told:
        assert out == "all is well\n", err  # and nothing that gloo has to say


def test_one_process_sends_nothing(monkeypatch):
    monkeypatch.setattr(exchange, "_gathering", None)
    value = object()
    assert exchange.agreed(value) is value
    assert exchange.told(b"me") == [b"me"]
    assert exchange.put_along(value, make_mesh(), 0) is value
    with pytest.raises(UserError, match="mine"), exchange.agreeing():
        raise UserError("mine")


def test_what_parts_know_is_joined_by_devices():
    part = lambda client, keys: CallClients(
        np.array([[[[client]]], [[[-1]]]]),
        {"item": np.array([[[[len(keys)]]], [[[0]]]])},
        np.array([1, 0]),
        {"item": [np.array(keys), np.array([], int)]},
        {"examples": 10 * client},
    )
    whole = joined([part(3, [1, 4]), part(7, [2, 4, 9])])
    assert whole.clients[:, :, 0, 0].tolist() == [[3, 7], [-1, -1]]
    assert [each.tolist() for each in whole.rows["item"]] == [[1, 2, 4, 9], []]
    assert (whole.missed.tolist(), whole.sizes) == ([2, 0], {"examples": 70})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"PARTWISE_PROCESS": "0"},
            "PARTWISE_PROCESS=0 is set, but not PARTWISE_COORDINATOR, PARTWISE_PROCESSES",
        ),
        ({"PARTWISE_COORDINATOR": "here"}, "must be HOST:PORT, as in 10.0.0.1:1234, not 'here'"),
        ({"PARTWISE_COORDINATOR": ":12"}, "must be HOST:PORT"),
        ({"PARTWISE_PROCESS": "2"}, "not 2 and 2"),
        ({"PARTWISE_PROCESS": "-1"}, "not 2 and -1"),
        ({"PARTWISE_PROCESSES": "two"}, "not two and 0"),
    ],
)
def test_a_wrong_place_is_refused(given, message):
    whole = {"PARTWISE_COORDINATOR": "10.0.0.1:1234", "PARTWISE_PROCESSES": "2", "PARTWISE_PROCESS": "0"}
    environment = given if message.startswith("PARTWISE_PROCESS=0 is") else whole | given
    with pytest.raises(UserError, match=message):
        processes.find_place(environment)


def test_what_is_given_wins_over_the_environment():
    environment = {"PARTWISE_COORDINATOR": "10.0.0.1:1", "PARTWISE_PROCESSES": "2", "PARTWISE_PROCESS": "0"}
    assert processes.find_place(environment, process=1) == ("10.0.0.1:1", 2, 1)
    assert processes.find_place({}) is None


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (ValueError("coordinator_address should be defined."), "no launcher that JAX knows .*srun.*mpirun"),
        (
            RuntimeError("Kubernetes API Error: 403 - Forbidden\nIt appears"),
            r"does not say .*403 - Forbidden\)",
        ),
        (OSError("no token"), r"does not say which process this is \(OSError: no token\)"),
        (jax.errors.JaxRuntimeError("DEADLINE_EXCEEDED"), r"not all processes came \(DEADLINE_EXCEEDED\)"),
    ],
)
def test_why_a_launcher_did_not_bring_others(monkeypatch, error, message):
    def fails(**given):
        raise error

    monkeypatch.setattr(jax.distributed, "initialize", fails)
    monkeypatch.setattr(processes, "_let_threads_finish", lambda: None)
    with pytest.raises(UserError, match=message):
        processes.join_processes()


def run_python(code: str, **more: str) -> subprocess.CompletedProcess:
    environment = {name: value for name, value in os.environ.items() if name != "JAX_NUM_CPU_DEVICES"} | more
    command = [sys.executable, "-c", code]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_a_process_of_slurm_uses_all_its_cores():
    """As srun starts it, alone."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    slurm = {"JOB_ID": "7", "STEP_NODELIST": "127.0.0.1", "NTASKS": "1", "PROCID": "0", "LOCALID": "0"}
    place = {f"SLURM_{name}": value for name, value in slurm.items()}
    done = run_python(ALL_CORES, JAX_COORDINATOR_PORT=port, JAX_PLATFORMS="cpu", **place)
    assert (done.returncode, done.stdout) == (0, "3\n"), done.stderr


def test_a_signal_does_not_change_why_a_process_leaves():
    done = run_python(LEAVES)
    assert done.returncode == 75, done.stderr


@pytest.mark.parametrize("seconds", ["0", "soon", "1.5"])
def test_a_wrong_heartbeat_is_refused(seconds):
    with pytest.raises(UserError, match=f"whole seconds of at least 1, not '{seconds}'"):
        processes._heartbeat({"PARTWISE_HEARTBEAT": seconds})
