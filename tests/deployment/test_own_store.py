"""What a device keeps survives its process, belongs to one run and model, and never leaves the device."""

from __future__ import annotations

import json
import logging
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from partwise.deployment import own_store
from partwise.deployment.agent import Agent, run_agent
from partwise.deployment.http_link import HttpLink
from partwise.deployment.link import UnreachableError
from partwise.deployment.own_store import OwnStore, opened
from partwise.deployment.shares import moved
from partwise.types import UserError

ARRAYS = {"control/item": np.arange(6, dtype=np.float32).reshape(3, 2)}


def modes(folder: Path) -> dict[str, int]:
    """Who may do what with every folder and file of the store."""
    return {
        str(path.relative_to(folder)): stat.S_IMODE(path.stat().st_mode)
        for path in [folder, *folder.rglob("*")]
        if path.name != ".partwise.lock"
    }


def test_what_was_put_is_there_after_a_restart(tmp_path):
    old = os.umask(0)
    try:
        with opened(tmp_path / "own") as store:
            store.belong("run", "model")
            store.put("kept", "ann/../é", ARRAYS, version=3)
    finally:
        os.umask(old)
    assert all(mode & 0o077 == 0 for mode in modes(tmp_path / "own").values())
    assert not [path for path in (tmp_path / "own").rglob("*") if "ann" in path.name]
    with opened(tmp_path / "own") as store:
        store.belong("run", "model")
        found = store.get("kept", "ann/../é")
        assert found is not None
        np.testing.assert_array_equal(found.arrays["control/item"], ARRAYS["control/item"])
        assert found.said["version"] == 3
        assert store.get("local", "ann/../é") is None
        assert store.get("kept", "bob") is None


def test_a_folder_that_all_could_read_is_closed(tmp_path):
    (tmp_path / "own").mkdir(mode=0o755)
    with opened(tmp_path / "own"):
        assert stat.S_IMODE((tmp_path / "own").stat().st_mode) == 0o700


@pytest.mark.parametrize("other", [("another", "model"), ("run", "another")])
def test_what_is_of_another_run_or_model_is_set_aside(tmp_path, caplog, other):
    with opened(tmp_path) as store:
        store.belong("run", "model")
        store.put("kept", "ann", ARRAYS)
        caplog.set_level(logging.WARNING, "partwise.agent")
        store.belong(*other)
        assert store.get("kept", "ann") is None
        store.put("kept", "ann", {"x": np.ones(1)})
    assert "is of another run or model: it is set aside" in caplog.text
    assert len(list((tmp_path / "aside-1" / "clients").iterdir())) == 1
    with opened(tmp_path) as store:  # and back: still not mixed
        store.belong("run", "model")
        assert store.get("kept", "ann") is None
    assert (tmp_path / "aside-2" / "clients").exists()


def test_a_file_that_was_moved_there_by_hand_is_not_used(tmp_path, caplog):
    with opened(tmp_path) as store:
        store.belong("run", "model")
        store.put("kept", "ann", ARRAYS)
        store.put("kept", "bob", {"x": np.ones(1)})
        ann, bob = (store._file(tmp_path, "kept", name) for name in ("ann", "bob"))
        os.replace(ann, bob)
        assert store.get("kept", "bob") is None
        assert "is not of this client" in caplog.text


@pytest.mark.parametrize(
    "damage", [lambda data: data[:-3], lambda data: data[:-1] + b"\x01", lambda data: b""]
)
def test_a_damaged_file_is_not_used(tmp_path, caplog, damage):
    with opened(tmp_path) as store:
        store.belong("run", "model")
        store.put("kept", "ann", ARRAYS)
        file = store._file(tmp_path, "kept", "ann")
        file.write_bytes(damage(file.read_bytes()))
        assert store.get("kept", "ann") is None
        assert len(caplog.records) == 1
        store.put("kept", "ann", ARRAYS)
        assert store.get("kept", "ann") is not None


def test_a_second_agent_is_refused(tmp_path):
    with opened(tmp_path), pytest.raises(UserError, match=r"another agent uses the store .*process \d+"):
        next(run_agent(HttpLink("http://127.0.0.1:9", None), "none.csv", tmp_path))  # type: ignore[arg-type]
    with opened(tmp_path):
        pass


@pytest.mark.parametrize("place", ["file", "file/below"])
def test_what_cannot_be_a_folder_is_refused(tmp_path, place):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be a device's store"), opened(tmp_path / place):
        pass


def test_a_full_disk_is_one_line_in_the_log(tmp_path, caplog, monkeypatch):
    """The agent goes on with what is in memory, and writes it when it can."""
    full = True

    def save(path, *args, **more):
        if full:
            raise UserError(f"could not write '{path}': No space left on device")
        return written(path, *args, **more)

    written = own_store.save_arrays
    monkeypatch.setattr(own_store, "save_arrays", save)
    with opened(tmp_path) as store:
        store.belong("run", "model")
        for version in range(3):
            store.put("kept", "ann", ARRAYS, version=version)
            store.put("kept", "bob", ARRAYS, version=version)
        assert [store.get("kept", name).said["version"] for name in ("ann", "bob")] == [2, 2]
        assert [
            record.message for record in caplog.records if "kept in memory" in record.message
        ].__len__() == 1
        full = False
        store.put("kept", "cid", ARRAYS, version=3)
    with opened(tmp_path) as store:
        store.belong("run", "model")
        assert [store.get("kept", name).said["version"] for name in ("ann", "bob", "cid")] == [2, 2, 3]


KILLED = """
import sys
import numpy as np
from partwise.deployment.own_store import opened
with opened(sys.argv[1]) as store:
    store.belong("run", "model")
    print("ready", flush=True)
    for version in range(10**9):
        store.put("kept", "ann", {"x": np.full(2000, version)}, version=version)
"""


def test_a_killed_process_leaves_whole_files(tmp_path):
    for _ in range(3):
        process = subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path)], stdout=subprocess.PIPE)
        assert process.stdout is not None
        process.stdout.readline()
        while not list(tmp_path.glob("clients/*.kept")):
            pass
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()
        with opened(tmp_path) as store:
            store.belong("run", "model")
            found = store.get("kept", "ann")
            assert found is not None
            assert set(found.arrays["x"].tolist()) == {found.said["version"]}
        assert not list(tmp_path.rglob("*.tmp"))


def test_rows_follow_their_keys():
    rows = np.array([[1.0], [2.0], [3.0]])
    old, new = np.array([2, 5, 9]), np.array([1, 5, 9, 11])
    assert moved(rows, old, new).tolist() == [[0.0], [2.0], [3.0], [0.0]]
    assert moved(rows, old, old) is rows


@pytest.mark.slow
def test_what_clients_keep_survives_a_restart(federate, tmp_path):
    """FedPer in pieces, with the memory of a new process each time, gives the model of FedPer in one go."""
    states = []
    for folder, pieces in (("whole", 1), ("pieces", 4)):
        run = federate(
            folder, settings={"algorithm": "fed_per", "rounds": 4, "cohort.size": 8}, population=24
        )
        link = run.link()
        algorithm = run.prepared.build(run.prepared.rates)
        for piece in range(pieces):
            with opened(tmp_path / f"own {folder}") as own:
                own.belong(run.offer.run, run.offer.model)
                for number, _ in enumerate(Agent(link, algorithm, run.prepared.store, own=own).run(), 1):
                    if number == 8 and piece < pieces - 1:
                        break
        assert len(list((tmp_path / f"own {folder}" / "clients").glob("*.kept"))) > 8
        states.append(run.hub.state(4).params)
    for path, leaf in states[0].items():
        np.testing.assert_array_equal(np.asarray(states[1][path]), np.asarray(leaf))


class Loud(HttpLink):
    """A link that notes everything that it sends."""

    def __init__(self, url, key):
        super().__init__(url, key)
        self.sent = b""

    def _request(self, method, path, body=b"", *more):
        self.sent += f"{method} {path} {self.key.headers(method, path, body)}".encode() + body
        return super()._request(method, path, body, *more)


def test_nothing_of_the_local_part_or_the_data_is_sent(federate, tmp_path):
    run = federate(settings={"cohort.size": 4}, quorum=4)
    marks = [round(2.0 + 0.0137123 * (k + 1), 7) for k in range(60)]  # of digits that are nowhere by chance
    rows = [f"client {k % 6},{(k * 7) % 20},{mark}" for k, mark in enumerate(marks)]
    (tmp_path / "mine.csv").write_text("\n".join(["user,item,rating", *rows]))
    link = Loud(run.url, run.key())
    done = list(run_agent(link, str(tmp_path / "mine.csv"), tmp_path / "own", refresh=1))
    assert len(done) == 12
    assert all(each.accepted for each in done)
    assert b"client 3" in link.sent  # what is sent is noted
    with opened(tmp_path / "own") as own:
        own.belong(run.offer.run, run.offer.model)
        locals_ = [own.get("local", name) for name in {each.client for each in done}]
    assert all(local is not None and local.arrays["user"].size == 2 for local in locals_)
    assert {local.said["version"] for local in locals_} <= {0, 1, 2}
    numbers = [*marks, *(number for local in locals_ for number in local.arrays["user"].reshape(-1).tolist())]
    for number in numbers:
        assert np.float64(number).tobytes() not in link.sent
        assert np.float32(number).tobytes() not in link.sent
        assert str(number).encode() not in link.sent


def test_a_local_part_is_rebuilt_when_data_or_version_moved_on(federate, tmp_path):
    run = federate(settings={"rounds": 7, "cohort.size": 1})
    data = tmp_path / "mine.csv"
    data.write_text("user,item,rating\nann,1,2.0\nann,2,5.0\n")
    told = []
    for done in run_agent(run.link(), str(data), tmp_path / "own", refresh=3):
        own = OwnStore(tmp_path / "own")
        own._belongs = {"run": run.offer.run, "model": run.offer.model}
        told.append(own.get("local", "ann").said["version"])
        if done.version == 4:
            data.write_text("user,item,rating\nann,1,2.0\nann,2,5.0\nann,3,1.0\n")
    assert told == [0, 0, 0, 3, 3, 5, 5]


def test_a_report_whose_answer_was_lost_is_sent_again_and_counts_once(federate, tmp_path):
    run = federate(settings={"algorithm": "fed_per"})

    class Lossy(HttpLink):
        lost = 0

        def report(self, report):
            answer = super().report(report)
            self.lost += 1
            if self.lost % 2:
                raise UnreachableError("the answer was lost")
            return answer

    algorithm = run.prepared.build(run.prepared.rates)
    with opened(tmp_path / "own") as own:
        own.belong(run.offer.run, run.offer.model)
        agent = Agent(Lossy(run.url, run.key()), algorithm, run.prepared.store, own=own, sleep=lambda _: None)
        done = list(agent.run())
        assert [each.accepted for each in done] == [True] * 6
        assert all(own.get("kept", each.client) is not None for each in done)
    assert [json.loads(run.hub.version(number).record)["clients"] for number in (1, 2, 3)] == [2, 2, 2]
