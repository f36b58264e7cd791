"""Servers that cannot close their rounds are refused at the start, and no others."""

from __future__ import annotations

import resource

import jax
import numpy as np
import pytest

from partwise.algorithm import init_server
from partwise.deployment import memory
from partwise.deployment.federation import found_run, open_run
from partwise.deployment.memory import check_memory, memory_limits, memory_of_closing
from partwise.deployment.rules import Rules
from partwise.runs.resolve import resolve
from partwise.server.cohort import Recruiting
from partwise.server.round import Server
from partwise.types import UserError

RULES = Rules(Recruiting(3), seed=1, rounds=9, quorum=1)
SMALL = {"data.num_clients": 30, "data.num_items": 20, "data.mean_examples": 12, "data.dim": 2}
GROUP = "system.slice/partwise.service"


def system(root, files, group=f"0::/{GROUP}"):
    """The files of a system."""
    for name, text in {
        "proc/self/cgroup": f"{group}\n",
        "proc/meminfo": "SwapTotal: 0 kB\n",
        **files,
    }.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{text}\n")
    return root


def limit(root):
    """What the control groups say, in files below `root`."""
    found = {name: each for name, each in memory_limits(root).items() if name.startswith(str(root))}
    return min(found.values(), default=None)


@pytest.mark.parametrize(
    ("group", "files", "wanted"),
    [
        (f"0::/{GROUP}", {f"sys/fs/cgroup/{GROUP}/memory.max": "1000"}, 1000),
        (f"0::/{GROUP}", {f"sys/fs/cgroup/{GROUP}/memory.max": "max"}, None),
        (
            f"0::/{GROUP}",
            {f"sys/fs/cgroup/{GROUP}/memory.max": "5000", "sys/fs/cgroup/system.slice/memory.max": "700"},
            700,
        ),
        ("0::/", {"sys/fs/cgroup/memory.max": "300"}, 300),
        (
            f"5:cpu,cpuacct:/x\n4:memory:/{GROUP}\n0::/x",
            {f"sys/fs/cgroup/memory/{GROUP}/memory.limit_in_bytes": "800"},
            800,
        ),
        ("4:memory:/docker/x", {"sys/fs/cgroup/memory/memory.limit_in_bytes": "900"}, 900),
        ("0::/", {"sys/fs/cgroup/memory.max": "300", "proc/meminfo": "SwapTotal:   2 kB"}, 300 + 2048),
        ("", {}, None),
    ],
)
def test_limits_are_those_of_the_group_and_of_all_around_it(tmp_path, group, files, wanted):
    if not group:
        assert limit(tmp_path) is None
    else:
        assert limit(system(tmp_path, files, group)) == wanted


def test_a_machine_has_memory_and_a_process_may_have_less(tmp_path, monkeypatch):
    [(_, there)] = memory_limits(tmp_path).items()
    assert there > 1 << 28
    monkeypatch.setattr(resource, "getrlimit", lambda which: (12345, 99999))
    assert memory_limits(tmp_path)["ulimit -v"] == 12345


def shapes_of(server):
    return jax.eval_shape(lambda: init_server(server.algorithm, jax.random.key(0)))


@pytest.fixture(scope="module")
def server():
    from partwise.algorithms.registry import prepare

    task, config = resolve("planted", None, SMALL)
    prepared = prepare(task, config)
    return Server(prepared.build(prepared.rates), "run")


def test_what_is_needed_follows_the_state(server):
    like, size = shapes_of(server), lambda tree: sum(each.nbytes for each in jax.tree_util.tree_leaves(tree))
    start = init_server(server.algorithm, jax.random.key(0))
    more = memory_of_closing(server, like, RULES) - memory.PROCESS
    assert more >= 3 * size(start) + size(server.zero(start.params))
    assert memory_of_closing(server, like, RULES._replace(rounds=1)) == more + memory.PROCESS - size(start)


def test_a_server_that_has_just_enough_is_not_refused(server, tmp_path):
    like = shapes_of(server)
    need = memory_of_closing(server, like, RULES)
    name = f"sys/fs/cgroup/{GROUP}/memory.max"
    check_memory(server, like, RULES, system(tmp_path, {name: need}))
    with pytest.raises(UserError, match=rf"needs 250 MB .* may have 250 MB .*{GROUP}/memory.max.*MemoryMax="):
        check_memory(server, like, RULES, system(tmp_path, {name: need - 1}))


def test_a_run_that_cannot_fit_is_not_opened(tmp_path, monkeypatch):
    task, config = resolve("planted", None, SMALL)
    found_run(task, config, tmp_path / "run")
    small = {"sys/fs/cgroup/memory.max": "1000000"}
    limits = memory_limits(system(tmp_path / "system", small, "0::/"))
    monkeypatch.setattr(memory, "memory_limits", lambda root: limits)
    with pytest.raises(UserError, match="may have 1 MB"):
        open_run(tmp_path / "run")
    monkeypatch.undo()
    opened = open_run(tmp_path / "run")
    assert np.isfinite(float(memory_of_closing(opened.hub.coordinator.server, opened.hub.state(0), RULES)))
    opened.hub.close()
