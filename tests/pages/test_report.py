"""`partwise report`: one file from the runs' files, whatever their state."""

from __future__ import annotations

import base64
import hashlib
import html
import itertools
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import partwise
from partwise.cli import main
from partwise.data.heat import Heat
from partwise.pages.details import read_detailed
from partwise.pages.page import make_page, make_view
from partwise.pages.report import report
from partwise.pages.run_groups import Curve, group_runs, thinned
from partwise.runs.compare import compare
from partwise.runs.folder import Folder
from partwise.runs.run_view import known
from partwise.runs.series import Series
from partwise.selection.key_heat import save_heats
from partwise.types import UserError

PLAIN = ("plain-0", "plain-1", "plain-2")


def read_run(folder):
    """A run as a report shows it."""
    return read_detailed([folder])[0]


def data_of(page: str) -> dict:
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.S)[1])


def words_of(page: str) -> str:
    """The page as a person reads it."""
    return html.unescape(re.sub(r"<[^>]+>", " ", re.sub(r"<(script|style).*?</\1>", "", page, flags=re.S)))


def chart_of(page: str, key: str) -> dict:
    return next(chart for chart in data_of(page)["charts"] if chart["key"] == key)


@pytest.fixture(scope="module")
def page(runs, tmp_path_factory):
    out = tmp_path_factory.mktemp("report") / "report.html"
    return report([runs[name] for name in (*PLAIN, "private")], out).read_text()


def test_it_is_one_small_file_that_may_fetch_nothing(page):
    assert len(page) < 1_000_000
    assert not re.findall(
        r"""(?:src|href)\s*=\s*["'](?!#)""", re.sub(r"<script>.*?</script>", "", page, flags=re.S)
    )
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page)[1]
    assert "default-src 'none'" in policy
    assert not re.search(r"https?:|\*|unsafe|connect-src", policy)
    scripts = re.findall(r"<script>(.*?)</script>", page, re.S)
    assert len(scripts) == 2
    assert "The MIT License" in scripts[0]  # which goes wherever the library goes
    for code in scripts + re.findall(r"<style>(.*?)</style>", page, re.S):
        assert base64.b64encode(hashlib.sha256(code.encode()).digest()).decode() in policy
    assert " style=" not in page.split("<body")[1].split("<script")[0]


def test_the_first_screen_says_what_and_how_good(page, runs):
    rmse = [Folder(runs[name]).summary()["test"]["rmse"] for name in PLAIN]
    told = re.sub(r"\s+", " ", words_of(page))
    assert "Of 2 trainings, plain is best" in told
    assert f"its rmse is {np.mean(rmse):.4f} ± {np.std(rmse, ddof=1):.4f} on" in told
    assert "best that any method can reach" in told
    alone = re.sub(r"\s+", " ", words_of(make_page(make_view([read_run(runs["private"])]))))
    assert "fed_recon was trained on planted for 24 rounds. Its rmse is" in alone
    assert "Its clients are promised epsilon" in alone


def test_runs_that_differ_in_their_seed_are_one_line_with_a_band(page, runs):
    assert [each["label"] for each in data_of(page)["groups"]] == ["plain", "private"]
    curve = chart_of(page, "training")["curves"]["0"]
    losses = np.array([[r["train"]["loss"] for r in Folder(runs[name]).records()] for name in PLAIN])
    for found, expected in zip(curve[1:], (losses.mean(0), losses.min(0), losses.max(0)), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5)
    assert chart_of(page, "validation-rmse")["curves"]["0"][0] == [6, 12, 18, 24]
    assert chart_of(page, "validation-rmse")["level"]["name"] == "best reachable on test clients"


def test_bytes_privacy_settings_and_versions_are_there(page, runs):
    records = Folder(runs["plain-0"]).records()
    sent = sum(r["bytes_down"] + r["bytes_up"] for r in records) / 1e6
    alone = make_page(make_view([read_run(runs["plain-0"])]))
    assert chart_of(alone, "bytes")["curves"]["0"][0][-1] == pytest.approx(sent, rel=1e-5)
    assert list(chart_of(page, "bytes")["curves"]) == ["0"]  # what a private run sends is not told
    told = words_of(page)
    epsilon = Folder(runs["private"]).summary()["privacy"]["epsilon"]
    assert f"{epsilon:.4f}" in told
    assert "nobody but the server sees updates" in told
    assert chart_of(page, "epsilon")["curves"]["1"][1][-1] == pytest.approx(epsilon, rel=1e-5)
    assert told.index("privacy.epsilon") < told.index("All settings")
    assert "Settings in which the runs differ" in told
    assert Folder(runs["private"]).summary()["versions"]["jax"] in told


def test_headings_are_in_order_and_tables_have_captions(page):
    body = page.split("<body")[1].split("<script")[0]
    levels = [int(level) for level in re.findall(r"<h(\d)", body)]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after <= before + 1 for before, after in itertools.pairwise(levels))
    assert body.count("<table>") == body.count("<caption>") > 8
    assert body.count('<figure class="chart"') == body.count('role="img"')


EVIL = "<img src=x onerror=document.title='evil'><script>document.title='evil'<"


def test_a_name_is_never_a_command(copy):
    evil = copy("plain-0", EVIL)
    page = make_page(make_view([read_run(evil), read_run(copy("plain-1", "'\"><b>"))]))
    assert "<img" not in page
    assert page.count("<script") == 3
    assert "&lt;img src=x" in page
    assert data_of(page)["groups"][0]["seeds"] == 2


def test_an_unfinished_run_is_shown_as_such(copy):
    folder = copy("plain-0")
    (folder / "summary.json").unlink()
    lines = (folder / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_bytes(b"".join(lines[:12]) + lines[12][:40])
    run = read_run(folder)
    assert (run.state, len(run.series.rounds)) == ("unfinished", 12)
    told = words_of(make_page(make_view([run])))
    assert "has not ended: 12 of 24 rounds are recorded" in told
    assert "no result on test clients yet" in told


def fail(folder: Folder, rounds: int) -> None:
    """Leave the folder as a training that diverged after so many rounds leaves it."""
    (folder.path / "summary.json").unlink()
    folder.replace_records(
        record | {"train": {"loss": None}, "evaluation": None} for record in folder.records()[:rounds]
    )
    folder.save_failure("the training has diverged since round 2 (mean loss nan). Train with lower rates.")


def test_a_run_that_diverged_is_shown_with_the_reason_and_charts_say_who_is_left_out(
    runs, copy, tmp_path, capsys
):
    folder = Folder(copy("plain-0", "div"))
    fail(folder, 12)
    assert main(["report", str(folder.path), str(runs["plain-1"]), "--out", str(tmp_path / "r.html")]) == 0
    assert "div failed: the training has diverged" in " ".join(capsys.readouterr().out.split())
    told = re.sub(r"\s+", " ", words_of((tmp_path / "r.html").read_text()))
    assert "div failed after 12 of 24 rounds: the training has diverged since round 2" in told
    assert "has not ended" not in told
    assert "rmse of the validation clients. Left out: div (it failed before it was evaluated)." in told
    assert "Left out: div (none of its values is finite)." in told
    with pytest.raises(
        UserError, match=r"has been evaluated yet: '.*div' failed \(the training has diverged"
    ):
        compare(folder.path)


def test_a_run_that_goes_on_after_its_end_is_unfinished(copy):
    folder = Folder(copy("plain-0"))
    folder.append([folder.records()[-1] | {"round": 25}])
    assert read_run(folder.path).state == "unfinished"


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


@pytest.mark.parametrize("name", ["config.toml", "start.json", "summary.json", "metrics.jsonl"])
@pytest.mark.parametrize("harm", ["flip", "empty", "remove"])
def test_a_damaged_run_is_shown_as_such(copy, name, harm):
    folder = copy("plain-0")
    {"flip": flip, "empty": lambda path: path.write_bytes(b""), "remove": Path.unlink}[harm](folder / name)
    if (name, harm) == ("config.toml", "remove"):
        with pytest.raises(UserError, match=r"holds no run \(there is no config.toml"):
            read_run(folder)
        return
    run = read_run(folder)
    page = make_page(make_view([run, read_run(copy("plain-1"))]))
    if (
        harm == "flip"
        or name == "start.json"
        or (name, harm) in (("config.toml", "empty"), ("summary.json", "empty"))
    ):
        assert run.state == "damaged"
        assert "plain-0 is damaged:" in re.sub(r"\s+", " ", words_of(page))
    assert len(data_of(page)["groups"]) == (1 if run.state == "finished" else 2)


def test_mistakes_are_told(runs, tmp_path, copy):
    with pytest.raises(UserError, match=r"holds no run.*runs that are there: .*plain-0"):
        report(runs["plain-0"].parent, tmp_path / "r.html")
    with pytest.raises(UserError, match="holds no run"):
        report(tmp_path / "nowhere", tmp_path / "r.html")
    with pytest.raises(UserError, match="is a folder: give a file"):
        report(runs["plain-0"], tmp_path)
    with pytest.raises(UserError, match="no run was given"):
        report([], tmp_path / "r.html")
    with pytest.raises(UserError, match="is not a folder"):
        report(runs["plain-0"] / "config.toml", tmp_path / "r.html")


def test_a_run_that_is_given_twice_is_one_seed(runs, tmp_path):
    page = report([runs["plain-0"], str(runs["plain-0"]) + "/"], tmp_path / "r.html").read_text()
    assert data_of(page)["groups"] == [{"label": "plain-0", "seeds": 1}]


def test_peaks_stay_when_a_curve_is_thinned():
    values = np.random.default_rng(0).normal(size=10_000)
    values[[1234, 8765]] = [50, -50]
    curve = thinned(Curve(np.arange(10_000.0), values, values, values), 400)
    assert len(curve.x) <= 500
    assert {1234, 8765, 0, 9999} <= set(curve.x)
    np.testing.assert_array_equal(curve.mean, values[curve.x.astype(int)])  # no point is made up
    some = values.copy()
    some[:5000] = np.nan
    assert np.isnan(thinned(Curve(np.arange(10_000.0), some, some, some), 400).mean[0])


def test_a_long_run_makes_a_small_page_that_says_what_is_left_out(copy):
    folder = Folder(copy("plain-0"))
    first = {name: value for name, value in folder.records()[0].items() if name != "serving"}
    rng = np.random.default_rng(0)
    made = [first | {"round": n, "train": {"loss": float(rng.normal())}} for n in range(1, 8_001)]
    folder.replace_records(made)
    page = make_page(make_view([read_run(folder.path)]))
    assert len(page) < 1_000_000
    assert "Of 8,000 rounds, the lowest and the highest of every stretch are drawn" in words_of(page)
    assert "points" in words_of(page)


def test_a_loss_that_is_not_finite_is_a_gap(copy):
    folder = Folder(copy("plain-0"))
    records = folder.records()
    records[3]["train"]["loss"] = None
    folder.replace_records(records)
    curve = chart_of(make_page(make_view([read_run(folder.path)])), "training")["curves"]["0"]
    assert curve[1][3] is None
    assert curve[1][4] is not None


def test_tables_of_clients_and_files_of_heat_are_used_if_they_are_there(copy):
    folder = copy("plain-0")
    page = make_page(make_view([read_run(folder)]))
    assert 'id="heat"' not in page
    rmse = np.linspace(0.2, 1.2, 11)
    told = pa.field("rmse", pa.float64(), metadata={"higher_is_better": "False"})
    schema = pa.schema([("client", pa.string()), ("judged", pa.float64()), told])
    table = pa.table([[f"c{n}" for n in range(11)], np.arange(11.0), rmse], schema=schema)
    pq.write_table(table, folder / "clients-test.parquet")
    save_heats(folder / "heat.safetensors", {"item": Heat("item", np.array([1, 1, 2, 9]), 10)})
    page = make_page(make_view([read_run(folder)]))
    assert chart_of(page, "clients-rmse")["curves"]["0"][1][50] == pytest.approx(0.7)
    assert "clients-judged" not in page  # a weight, and no metric
    assert chart_of(page, "heat-item")["curves"]["0"][:2] == [[1, 2, 4, 8, 16], [2, 1, 0, 1, 1]]
    flip(folder / "heat.safetensors")
    assert read_run(folder).state == "damaged"


def test_the_records_of_a_deployment_are_read(copy):
    folder = Folder(copy("plain-0"))
    told = {
        "seconds": 1.0,
        "clients": 8,
        "loss": 0.5,
        "broken": [],
        "missing": 2,
        "bytes_down": 10,
        "bytes_up": 5,
    }
    folder.replace_records([{"round": n, **told, "metrics": {"rmse": 1 / n, "clients": 3}} for n in (1, 2)])
    series = read_run(folder.path).series
    assert (series.losses, series.sent, series.counts["missing"]) == ([0.5, 0.5], 30, 4)
    assert [(look.round, dict(look.metrics)) for look in series.looks] == [
        (1, {"rmse": 1.0}),
        (2, {"rmse": 0.5}),
    ]


def test_trainings_of_different_tasks_are_not_compared(copy):
    other = read_run(copy("private", "other"))
    other = other._replace(settings=dict(other.settings) | {"task": "elsewhere"})
    told = re.sub(r"\s+", " ", words_of(make_page(make_view([read_run(copy("plain-0")), other]))))
    assert "2 trainings on planted, elsewhere" in told
    assert "fed_recon was trained on planted for 24 rounds. Its rmse is" in told
    assert "fed_recon was trained on elsewhere for 24 rounds. Its rmse is" in told
    assert "On planted test rmse" in told
    assert "On elsewhere test rmse" in told


def test_every_task_has_charts_and_tables_of_its_own(copy):
    first, other = read_run(copy("plain-0")), read_run(copy("private", "other"))
    other = other._replace(settings=dict(other.settings) | {"task": "elsewhere"})
    other = other._replace(summary=dict(other.summary) | {"best": {}})
    page = make_page(make_view([first, other]))
    charts = [chart_of(page, f"validation-rmse-{task}") for task in ("planted", "elsewhere")]
    assert [list(chart["curves"]) for chart in charts] == [["0"], ["1"]]
    assert [chart["level"] and chart["level"]["value"] for chart in charts] == [0.5, None]
    tables = re.findall(r'<section class="tests".*?</section>', page)
    assert ["best reachable" in words_of(table) for table in tables] == [True, False]
    ids = re.findall(r' id="([^"]*)"', page)
    assert len(set(ids)) == len(ids)


def test_runs_of_a_sweep_are_named_by_their_settings(copy):
    runs = [read_run(copy(f"plain-{seed}", f"server.rate=0.3,seed={seed + 9}")) for seed in range(3)]
    assert [group.label for group in group_runs(runs)] == ["server.rate=0.3"]
    assert [group.label for group in group_runs(runs[1:])] == ["server.rate=0.3"]  # seeds 10 and 11


def test_runs_with_other_settings_are_other_groups(copy):
    runs = [read_run(copy("plain-0")), read_run(copy("private")), read_run(copy("plain-1"))]
    assert [[run.name for run in group.runs] for group in group_runs(runs)] == [
        ["plain-0", "plain-1"],
        ["private"],
    ]


def test_the_command(runs, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["report", *(str(runs[name]) for name in PLAIN)]) == 0
    assert capsys.readouterr().out.startswith("Wrote report.html: 3 runs, ")
    assert main(["report", str(runs["private"]), "--out", "p.html", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["bytes"] == (tmp_path / "p.html").stat().st_size
    assert told["runs"] == [{"run": "private", "state": "finished", "problem": ""}]
    assert main(["report", "nowhere"]) == 2
    assert partwise.report(runs["private"], out=tmp_path / "q.html") == tmp_path / "q.html"


def test_no_jax_is_needed(runs, tmp_path):
    code = (
        "import sys; sys.modules['jax'] = sys.modules['optax'] = None\n"
        "from partwise.cli import main; sys.exit(main(sys.argv[1:]))"
    )
    save_heats(tmp_path / "heat.safetensors", {"item": Heat("item", np.array([1, 2]), 3)})
    for command in (
        ["report", str(runs["plain-0"]), "--out", "r.html"],
        ["watch", str(runs["plain-0"]), "--json"],
    ):
        done = subprocess.run(
            [sys.executable, "-c", code, *command],
            cwd=tmp_path,
            capture_output=True,
            env=os.environ,
            check=False,
        )
        assert done.returncode == 0, done.stderr.decode()


def paths_of(document, depth=4):
    """The places of all values in nested dicts."""
    for key, value in document.items():
        yield (key,)
        if isinstance(value, dict) and depth:
            yield from ((key, *rest) for rest in paths_of(value, depth - 1))


def without(document, path, value=None):
    """A copy in which a place has nothing, or is missing."""
    made = dict(document)
    if len(path) > 1:
        made[path[0]] = without(made[path[0]], path[1:], value)
    elif value is None:
        made[path[0]] = None
    else:
        del made[path[0]]
    return made


@pytest.mark.parametrize("name", ["plain-0", "private"])
def test_whatever_a_summary_or_a_record_lacks_the_page_is_made(runs, name):
    """Runs of other versions may not have everything."""
    run, records = read_run(runs[name]), Folder(runs[name]).records()
    for path in paths_of(run.summary):
        for value in (None, "missing"):
            make_page(make_view([run._replace(summary=known(without(run.summary, path, value)))]))
    for path in paths_of(records[5]):
        for value in (None, "missing"):
            if path != ("round",):
                series = Series()
                series.add(without(records[5], path, value))
                make_page(make_view([run._replace(series=series)]))
