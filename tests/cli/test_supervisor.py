"""`partwise train --processes N`: what becomes of a run whose processes are killed, hang, or make a mistake."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from partwise.cli import process_shares, supervisor
from partwise.cli.process_shares import joins, number_to_start, shares
from partwise.runs.folder import Folder
from partwise.types import UserError

HEARTBEAT = 5
RUN = {
    "data.num_clients": 200,
    "data.num_items": 60,
    "data.mean_examples": 15,
    "data.dim": 4,
    "cohort.size": 20,
}
RUN |= {
    "rounds": 600,
    "simulation.rounds_per_call": 10,
    "simulation.evaluate_every": 200,
    "simulation.lanes": 4,
}
RUN |= {"simulation.checkpoint_every": 50, "server.schedule": "constant"}
TRAIN = ["train", "planted", *(word for key, value in RUN.items() for word in ("--set", f"{key}={value}"))]


# The rule, with processes that only end in some way


def processes_that(code: str, monkeypatch) -> None:
    """Let workers run this code, in which `index`, `number` and `given` are what a worker is told, and `turn` says
    how often it was started."""
    known = """
import os, signal, sys, time
from pathlib import Path
messages, *given = sys.argv[1:]
index, number = int(os.environ["PARTWISE_PROCESS"]), int(os.environ["PARTWISE_PROCESSES"])
folder = Path(given[0])
file = folder / f"turns {index}"
turn = len(file.read_text()) if file.exists() else 0
file.write_text("x" * (turn + 1))
def lost():
    os.kill(os.getpid(), signal.SIGKILL)
"""
    monkeypatch.setattr(supervisor, "WORKER", ("-c", known + code))


def test_all_end_well(monkeypatch, tmp_path):
    processes_that("print(given, number)", monkeypatch)
    assert supervisor.supervise([str(tmp_path)], 3, tmp_path) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["turns 0", "turns 1", "turns 2"]


def test_after_a_loss_the_same_number_goes_on(monkeypatch, tmp_path, capfd):
    """The others, who would wait forever, are ended. What was recorded is resumed."""
    code = """
(folder / f"given {index} {turn}").write_text(" ".join(given[1:]) + f" {number}")
(folder / "config.toml").touch()
if turn == 0:
    time.sleep(0.3) or lost() if index == 1 else time.sleep(1000)
"""
    processes_that(code, monkeypatch)
    assert supervisor.supervise([str(tmp_path), "train"], 2, tmp_path) == 0
    assert (tmp_path / "given 0 0").read_text() == "train 2"
    assert (tmp_path / "given 0 1").read_text() == "train --resume 2"
    told = "process 1 was lost (SIGKILL): going on from the beginning with 2 of them"
    assert told in " ".join(capfd.readouterr().err.split())


def test_without_getting_further_half_as_many_go_on_and_in_the_end_none(monkeypatch, tmp_path, capfd):
    processes_that("sys.stderr.write('no memory'); lost()", monkeypatch)
    with pytest.raises(
        UserError, match=r"lost \(SIGKILL\), again and again, also when it was alone.*no memory"
    ):
        supervisor.supervise([str(tmp_path)], 3, tmp_path)
    told = capfd.readouterr().err
    assert [told.count(f"with {number} of them") for number in (3, 2, 1)] == [1, 0, 2]


def test_as_long_as_it_gets_further_it_goes_on(monkeypatch, tmp_path):
    code = """
(folder / "checkpoints").mkdir(exist_ok=True)
if index == 1 and turn < 6:
    (folder / "checkpoints" / f"{turn + 1:08d}.safetensors").touch()
    lost()
"""
    processes_that(code, monkeypatch)
    assert supervisor.supervise([str(tmp_path)], 2, tmp_path) == 0
    assert len((tmp_path / "turns 1").read_text()) == 7


@pytest.mark.parametrize("who", [0, 1])
def test_a_mistake_ends_all_with_its_message(monkeypatch, tmp_path, capfd, who):
    """Those that notice it end by themselves, others are ended."""
    monkeypatch.setattr(supervisor, "GRACE_SECONDS", 0.2)
    code = f"""
if index == {who}:
    os.write(int(messages), b"partwise: there is no such file\\n")
    sys.exit(2)
time.sleep(1000)
"""
    processes_that(code, monkeypatch)
    if who == 0:
        assert supervisor.supervise([str(tmp_path)], 2, tmp_path) == 2
        assert capfd.readouterr().err == "partwise: there is no such file\n"
        return
    with pytest.raises(UserError, match=r"^there is no such file$"):
        supervisor.supervise([str(tmp_path)], 2, tmp_path)


def test_messages_are_shown_also_if_standard_error_is_no_file(monkeypatch, tmp_path, capfd):
    """As in a notebook."""
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    processes_that("os.write(int(messages), b'round 1\\n')", monkeypatch)
    assert supervisor.supervise([str(tmp_path)], 2, tmp_path) == 0
    assert capfd.readouterr().err == "round 1\n"


def test_a_bug_is_shown_and_not_repeated(monkeypatch, tmp_path, capfd):
    monkeypatch.setattr(supervisor, "GRACE_SECONDS", 0.2)
    processes_that("1 / 0 if index == 1 else time.sleep(1000)", monkeypatch)
    assert supervisor.supervise([str(tmp_path)], 2, tmp_path) == 1
    assert "ZeroDivisionError" in capfd.readouterr().err
    assert (tmp_path / "turns 1").read_text() == "x"


def test_one_that_was_killed_is_the_cause_and_not_those_that_follow():
    assert supervisor._first_cause([-signal.SIGABRT, None, -signal.SIGKILL], [0, 2]) == 2
    assert supervisor._first_cause([75, -signal.SIGABRT], [0, 1]) == 1
    assert supervisor._first_cause([None, 2], [1]) == 1


# Shares


def test_shares_are_equal(monkeypatch):
    monkeypatch.setattr(process_shares, "own_cores", lambda: [0, 1, 2, 3, 6])
    monkeypatch.setattr(process_shares, "_gpus", lambda environment: [])
    for name in ("JAX_NUM_CPU_DEVICES", "XLA_FLAGS"):
        monkeypatch.delenv(name, raising=False)
    assert [list(share.cores) for share in shares(2)] == [[0, 1], [2, 3]]
    assert [share.environment["JAX_NUM_CPU_DEVICES"] for share in shares(2)] == ["2", "2"]
    assert [list(share.cores) for share in shares(6)] == [[0], [1], [2], [3], [6], [0]]
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "3")
    assert not shares(2)[0].environment


def test_each_process_has_gpus_of_its_own(monkeypatch):
    monkeypatch.setattr(process_shares, "_gpus", lambda environment: ["0", "3", "5", "7"])
    assert [share.environment["CUDA_VISIBLE_DEVICES"] for share in shares(2)] == ["0,3", "5,7"]
    with pytest.raises(
        UserError, match=r"5 processes need a GPU each, and there are only 4 GPUs: .*--processes 4"
    ):
        shares(5)


def test_gpus_are_those_that_jax_would_use(monkeypatch, tmp_path):
    monkeypatch.setattr(process_shares, "PLUGINS", ("json",))
    monkeypatch.setattr(process_shares, "DRIVER", tmp_path)
    (tmp_path / "0000:01").mkdir()
    assert process_shares._gpus({}) == ["0"]
    assert process_shares._gpus({"CUDA_VISIBLE_DEVICES": "2,3"}) == ["2", "3"]
    assert process_shares._gpus({"CUDA_VISIBLE_DEVICES": ""}) == []
    assert process_shares._gpus({"JAX_PLATFORMS": "cpu"}) == []
    monkeypatch.setattr(process_shares, "PLUGINS", ("there is no such module",))
    assert process_shares._gpus({}) == []


def test_who_starts_and_who_joins():
    started = {"PARTWISE_PROCESSES": "2"}
    assert (number_to_start(None, started), joins(None, started)) == (0, False)
    assert (number_to_start("1", {}), joins("1", {})) == (0, False)
    assert (number_to_start("4", {}), joins("4", {})) == (4, False)
    assert (number_to_start("2", started), joins("2", started)) == (0, True)
    assert (number_to_start("auto", {}), joins("auto", {})) == (0, True)
    assert not joins("2", {"PARTWISE_PROCESSES": "1"})


@pytest.mark.parametrize("text", ["0", "-1", "two", "1.5", "2000", ""])
def test_a_wrong_number_is_refused(mistake, text):
    assert f"--processes must be a number from 1 to 1024, or auto, not '{text}'" in mistake(
        "train", "planted", f"--processes={text}"
    )


# Real runs


def begun(out: Path, *more: str, **environment: str) -> subprocess.Popen:
    command = [sys.executable, "-m", "partwise.cli", *TRAIN, "--processes", "2", "--out", str(out), *more]
    given = os.environ | {"PARTWISE_HEARTBEAT": str(HEARTBEAT)} | environment
    return subprocess.Popen(command, env=given, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def workers(process: subprocess.Popen) -> list[int]:
    """The processes that a command has started, in order."""
    return [int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]


def wait_until(condition, seconds: float = 900) -> float:
    """Wait until something is so, and return how long it took."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < seconds
        time.sleep(0.02)
    return time.monotonic() - began


def wait_for_rounds(process: subprocess.Popen, out: Path, number: int) -> None:
    """Wait for a checkpoint after so many rounds, as long as the command goes on."""

    def saved() -> bool:
        assert process.poll() is None, process.communicate()
        return supervisor.rounds_saved(out) >= number

    wait_until(saved)


def gone(pids: list[int]) -> bool:
    return not any(Path(f"/proc/{pid}").exists() for pid in pids)


def ended(process: subprocess.Popen) -> str:
    _, err = process.communicate(timeout=900)
    assert process.returncode == 0, err
    assert "Traceback" not in err
    return " ".join(err.split())


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> Path:
    """The same run, in two processes that nobody disturbed."""
    out = tmp_path_factory.mktemp("undisturbed") / "run"
    ended(begun(out))
    return out


def assert_undisturbed(out: Path, whole: Path) -> None:
    assert (out / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()
    losses = [[record["train"]["loss"] for record in Folder(each).records()] for each in (out, whole)]
    assert losses[0] == losses[1]


@pytest.mark.slow
@pytest.mark.parametrize("who", [0, 1])
def test_killed_it_goes_on_and_ends_in_the_same_bytes(tmp_path, undisturbed, who):
    process = begun(tmp_path / "run")
    wait_for_rounds(process, tmp_path / "run", 100)
    before = workers(process)
    os.kill(before[who], signal.SIGKILL)
    assert wait_until(lambda: gone(before)) < 5
    assert f"process {who} was lost (SIGKILL): going on from round " in ended(process)
    assert_undisturbed(tmp_path / "run", undisturbed)


@pytest.mark.slow
@pytest.mark.parametrize("who", [0, 1])
def test_one_that_hangs_is_noticed_by_its_heartbeat(tmp_path, undisturbed, who):
    process = begun(tmp_path / "run")
    wait_for_rounds(process, tmp_path / "run", 100)
    before = workers(process)
    os.kill(before[who], signal.SIGSTOP)
    assert wait_until(lambda: gone(before)) < 2 * HEARTBEAT + 1
    assert "was lost (SIGABRT): going on from round " in ended(process)
    assert_undisturbed(tmp_path / "run", undisturbed)


@pytest.fixture
def interruptible():
    """What a shell starts in the background ignores SIGINT, and so would a command that the tests start."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_all_and_says_how_to_go_on(tmp_path, undisturbed, interruptible, number, code):
    out = tmp_path / "run"
    process = begun(out)
    wait_for_rounds(process, out, 50)
    before = workers(process)
    process.send_signal(number)
    _, err = process.communicate(timeout=300)
    assert (process.returncode, gone(before)) == (code, True)
    assert f"stopped. Go on with: partwise train --resume --processes 2 --out {out}" in " ".join(err.split())
    ended(begun(out, "--resume"))
    assert_undisturbed(out, undisturbed)


@pytest.mark.slow
def test_processes_do_not_outlive_the_command(tmp_path):
    process = begun(tmp_path / "run")
    wait_until(lambda: len(workers(process)) == 2)
    before = workers(process)
    time.sleep(3)
    process.kill()
    process.communicate()
    wait_until(lambda: gone(before))


@pytest.mark.slow
def test_a_run_that_is_there_is_refused(tmp_path, undisturbed):
    began = time.monotonic()
    process = begun(undisturbed)
    _, err = process.communicate(timeout=600)
    assert (process.returncode, "already holds a run: add --resume" in err) == (2, True)
    assert time.monotonic() - began < 60


@pytest.mark.slow
def test_data_that_is_wrong_in_one_process_ends_both_with_its_message(start_together, tmp_path):
    """The first has the file that it names, the second has not."""
    (tmp_path / "here.csv").write_text(
        "user,item,rating\n" + "".join(f"{i % 9},{i % 7},3\n" for i in range(99))
    )
    command = lambda name: ["-m", "partwise.cli", "train", "ratings", "--data", str(tmp_path / name)]
    more = ["--processes", "auto", "--out", str(tmp_path / "run"), "--json"]
    running = start_together(command("here.csv") + more, command("gone.csv") + more)
    told = [process.communicate(timeout=600) for process in running]
    assert [process.returncode for process in running] == [2, 2], told
    (out, err), others = told
    assert "gone.csv" in err
    assert "gone.csv" in json.loads(out)["error"]
    assert others == ("", "")
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_other_settings_in_one_process_end_both(start_together, tmp_path):
    command = ["-m", "partwise.cli", *TRAIN, "--processes", "auto", "--out", str(tmp_path / "run")]
    running = start_together(command, [*command, "--seed", "3"])
    (_, err), others = (process.communicate(timeout=600) for process in running)
    assert [process.returncode for process in running] == [2, 2], err
    assert "process 0 and process 1 do not train the same: seed is 0 and 3" in " ".join(err.split())
    assert others == ("", "")


@pytest.mark.slow
@pytest.mark.parametrize("late", ["before it joins", "before its first round"])
def test_a_process_that_is_a_minute_late_is_waited_for(start_together, tmp_path, late):
    """Longer than gloo waits for a first connection."""
    code = """
import sys, time
import partwise as pw
from partwise.runs import train
if sys.argv.pop(1) == "before it joins":
    time.sleep(60)
    pw.join_processes()
else:
    pw.join_processes()
    time.sleep(60)
pw.train("planted", changes={"rounds": 3, "data.num_clients": 40, "cohort.size": 4, "simulation.lanes": 2})
print("done")
"""
    prompt = ["-c", code.replace("time.sleep(60)", "pass"), late]
    for process in start_together(prompt, ["-c", code, late], PARTWISE_HEARTBEAT=str(HEARTBEAT)):
        out, err = process.communicate(timeout=900)
        assert (process.returncode, out) == (0, "done\n"), err
