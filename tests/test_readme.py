"""The README's example and the code of the pages in docs/, run as they are written; their commands, as far as the
command line reads them."""

import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from partwise.cli.parser import make_parser
from partwise.data import planted_ratings
from partwise.papers.reproduce import REPRODUCTIONS
from partwise.runs.evaluation import evaluate_run
from partwise.types import UserError

ROOT = Path(__file__).parent.parent
PAGES = sorted(str(path.relative_to(ROOT)) for path in (*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")))
PAGES_OF_CODE = (
    "adding clients comparing data debugging deployment devices diverges events export exporting fleet"
)
PAGES_OF_CODE += " following heat keras looking nnx recommending remote reopening seeds sweeping torch"
NOT_RUN = {"docs/reproduction_select.md"}  # what its figures were made with, which takes too long


def parts(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.S)


def blocks(page: str) -> str:
    return "\n".join(parts(page))


def run(code: str, folder: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, env=os.environ, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.fixture
def tables(tmp_path):
    """ratings.csv of many users; the ratings of one more, five of them held back."""
    store = planted_ratings(num_clients=200, num_items=40, rank=3, noise=0.2, mean_examples=25, seed=1).store
    lines = ["user,item,rating"]
    for client in range(199):
        rows = store.examples(client)
        lines += [f"u{client},m{i},{r:.3f}" for i, r in zip(rows["item"], rows["rating"], strict=True)]
    (tmp_path / "ratings.csv").write_text("\n".join(lines) + "\n")
    rows = store.examples(199)
    mine = [f"m{i},{r:.3f}" for i, r in zip(rows["item"], rows["rating"], strict=True)]
    (tmp_path / "my_ratings.csv").write_text("\n".join(["item,rating", *mine[5:]]) + "\n")
    (tmp_path / "unseen.csv").write_text(
        "\n".join(["item", *(line.split(",")[0] for line in mine[:5])]) + "\n"
    )
    return tmp_path


def test_the_readmes_example_runs_in_at_most_15_lines(tables):
    code = blocks("README.md")
    assert len([line for line in code.splitlines() if line.strip()]) <= 15
    printed = run(code, tables).splitlines()
    assert float(printed[0].split()[0]) < 1.2
    rows, best = printed[-15:-10], printed[-10:]
    assert [line.split()[0] for line in rows] == ["0", "1", "2", "3", "4"]  # of unseen.csv
    assert all(-5 < float(line.split()[1]) < 5 for line in rows)
    scores = [float(line.split()[1]) for line in best]
    assert scores == sorted(scores, reverse=True)
    mine = (tables / "my_ratings.csv").read_text()
    assert not any(f"{line.split()[0]}," in mine for line in best)  # what it has rated is left out
    summary = json.loads((tables / "runs" / "mine" / "summary.json").read_text())
    again = evaluate_run(tables / "runs" / "mine", data=str(tables / "ratings.csv"))
    assert again["rmse"] == pytest.approx(summary["test"]["rmse"], rel=1e-6)
    with pytest.raises(UserError, match="needs a table: --data"):
        evaluate_run(tables / "runs" / "mine")
    other = tables / "other.csv"
    other.write_text((tables / "ratings.csv").read_text().replace(",m1,", ",m1b,"))
    with pytest.raises(UserError, match=r"column 'item' of the data has other ids.*--data"):
        evaluate_run(tables / "runs" / "mine", data=str(other))


def test_the_code_of_the_page_on_adding_runs(tmp_path):
    run(blocks("docs/adding.md"), tmp_path)


def test_the_code_of_the_page_on_deployment_runs(tmp_path):
    printed = run(blocks("docs/deployment.md"), tmp_path)
    assert printed.count("took part in round") == 3 * 6
    assert printed.splitlines()[-1].startswith("ended")


def test_the_code_of_the_page_on_heat_runs_and_tells_what_the_page_tells(tmp_path):
    printed = run(blocks("docs/heat.md"), tmp_path)
    for told in (
        "FedAvg after 40 rounds: w_1 = 3.843, w_2 = 0.044",
        "FedSubAvg after 40 rounds: w_1 = 0.059, w_2 = 0.044",
        "[  1 100] 100 100.0",
        "condition number 100, corrected 1",
    ):
        assert told in printed


@pytest.mark.parametrize(
    ("framework", "packages", "kept"),
    [
        ("nnx", ("flax",), "['norm/bias', 'norm/mean', 'norm/scale', 'norm/var']"),
        ("keras", ("keras",), "['user_bias/embeddings', 'user_vector/embeddings']"),
        ("torch", ("torch", "torchax"), "['head/bias', 'head/weight']"),
    ],
)
def test_the_page_of_a_framework_goes_from_a_model_to_a_personal_one_in_15_lines(
    framework, packages, kept, tmp_path
):
    if not all(importlib.util.find_spec(package) for package in packages):
        pytest.skip(f"{' and '.join(packages)} not installed")
    _, ours, again = parts(f"docs/{framework}.md")
    assert len([line for line in ours.splitlines() if line.strip()]) <= 15
    assert len([line for line in again.splitlines() if line.strip()]) <= 10
    judged, own = run(blocks(f"docs/{framework}.md"), tmp_path).strip().split("\n", 1)
    value = float(judged.split()[-1])
    assert value < 0.6 if framework == "keras" else value > 0.7
    assert own.startswith(kept)
    assert own.endswith("as Personal predicts: True")


def test_the_code_of_the_page_on_data_runs(tmp_path):
    printed = run(blocks("docs/data.md"), tmp_path)
    assert "ClientStore(7 clients, 100 examples: pixels int64[2, 2], label int64)" in printed
    assert float(re.findall(r"loss on unseen clients: (\S+)", printed)[0]) < 0.1
    assert float(re.findall(r"next words of unseen clients: (\S+)", printed)[0]) > 0.5
    assert printed.endswith("after the beginning comes: i\n")


def test_the_code_of_the_page_on_object_stores_runs(tmp_path):
    printed = run(blocks("docs/remote.md"), tmp_path).splitlines()
    assert printed == ["True", "ClientStore(3 clients, 24 examples: item int32, rating float64)"]


def test_the_code_of_the_page_on_devices_runs(tmp_path):
    assert run(blocks("docs/devices.md"), tmp_path) == "2 x cpu with 4 lanes\n"


def test_the_code_of_the_page_on_seeds_runs(tmp_path):
    told = [line.split(": ")[1] for line in run(blocks("docs/seeds.md"), tmp_path).splitlines()]
    assert told == ["True", "False", "True"]


def test_the_code_of_the_page_on_looking_writes_a_report(tmp_path):
    assert run(blocks("docs/looking.md"), tmp_path) == "report.html\n"
    assert "with 2 seeds" in (tmp_path / "report.html").read_text()


def test_the_code_of_the_page_on_divergence_names_the_client(tmp_path):
    assert run(blocks("docs/diverges.md"), tmp_path).startswith("broken: {99}\n")


def test_the_code_of_the_page_on_debugging_prints_numbers_and_names_the_function(tmp_path):
    printed = run(blocks("docs/debugging.md"), tmp_path)
    assert re.search(r"^loss of \[-?[\d.]+ ", printed, re.M)  # of an evaluation
    assert re.search(r"^loss of GradTracer\(primal=\[-?[\d.]+ ", printed, re.M)  # of a step
    assert "JitTracer" not in printed
    moves = [float(x) for x in re.findall(r"^client \d+ moves the slope by (\S+)$", printed, re.M)]
    assert abs(moves[0]) > 100 * abs(moves[1])
    *_, told, cause = printed.splitlines()
    assert told.startswith("the model's predict failed in <string>, line ")
    assert "x float32[4]" in told
    assert cause == "TypeError"


def test_the_code_of_the_page_on_trained_models_runs(tmp_path):
    printed = run(blocks("docs/exporting.md"), tmp_path)
    assert "{'user': (8,)}" in printed
    assert "default/user (8,) float32" in printed
    assert printed.endswith("as Personal predicts: True\n")


def test_the_code_of_the_page_on_export_runs(tmp_path):
    printed = run(blocks("docs/export.md"), tmp_path)
    assert printed.startswith("{'item': {'shape': [], 'type': 'int32', 'column': 'item', 'ids': True}}")
    assert printed.endswith("as Personal predicts: True\n")


def test_the_code_of_the_page_on_fleets_runs(tmp_path):
    told, first = run(blocks("docs/fleet.md"), tmp_path).splitlines()
    assert re.fullmatch(r"\d+ versions a day, reports are \d\.\d versions old, at most \d+", told)
    assert first.count(".") == 3


def test_the_code_of_the_page_on_events_runs(tmp_path):
    rows = [f"u{user},i{(user + 3 * step) % 9},{step}" for user in range(30) for step in range(6)]
    (tmp_path / "events.csv").write_text("\n".join(["user,item,time", *rows]))
    ndcg, hit = map(float, run(blocks("docs/events.md"), tmp_path).split())
    assert 0 < ndcg <= hit <= 1


def test_the_code_of_the_page_on_recommending_runs(tmp_path):
    printed = run(blocks("docs/recommending.md"), tmp_path)
    assert len(re.findall(r"^m\d\d -?\d", printed, re.M)) == 5
    assert "of those, seen: 0" in printed
    assert len(re.findall(r"'m\d\d'", printed)) == 3


def test_the_code_of_the_page_on_reopening_runs(tmp_path):
    (module,) = re.findall(r"```py\n(.*?)```", (ROOT / "docs/reopening.md").read_text(), re.S)
    (tmp_path / "films.py").write_text(module)
    printed = run(blocks("docs/reopening.md"), tmp_path)
    assert "the same again: True" in printed
    assert "with its setting: True" in printed


def test_the_code_of_the_page_on_following_runs(tmp_path):
    why, rounds, schedule, stopped = run(blocks("docs/following.md"), tmp_path).splitlines()
    assert why.startswith("rmse got no better than")
    assert int(rounds.split()[1]) <= int(rounds.split()[3]) < 400
    assert (schedule, stopped) == ("values:1.0,1.0,1.", "stopped: good enough")


def test_the_code_of_the_page_on_clients_runs(tmp_path):
    printed = run(blocks("docs/clients.md"), tmp_path)
    assert printed.startswith(
        "['client', 'examples', 'judged', 'group', 'rmse', 'accuracy', 'loss']\nworst tenth"
    )


def test_the_code_of_the_page_on_comparing_runs(tmp_path):
    settings, means, told = run(blocks("docs/comparing.md"), tmp_path).splitlines()
    assert settings == "{'server.rate': [0.1, 0.3]}"
    assert means.count(",") == 1
    assert "paired by 3 seeds" in told
    assert (tmp_path / "comparison" / "compare.png").exists()


def test_the_code_of_the_page_on_sweeping_runs(tmp_path):
    pytest.importorskip("optuna")
    printed = run(blocks("docs/sweeping.md"), tmp_path)
    assert printed.startswith("{'server.rate': 0.3}")
    assert "{'server.rate': " in printed.splitlines()[-1]
    assert (tmp_path / "sweeps" / "rates" / "best.toml").exists()


def test_every_page_with_code_is_run_by_a_test():
    run_here = {"README.md", *(f"docs/{name}.md" for name in PAGES_OF_CODE.split())}
    assert {page for page in PAGES if parts(page)} - NOT_RUN == run_here


def test_the_summary_of_reproductions_has_all_of_them():
    named = set(re.findall(r"`([\w-]+)`", (ROOT / "docs/reproduction.md").read_text()))
    assert set(REPRODUCTIONS) <= named


def commands(page: str) -> list[str]:
    """The lines of a page that begin with `partwise`, without comments; those with [options] are a summary."""
    text = "\n".join(re.findall(r"```\n(.*?)```", (ROOT / page).read_text(), re.S)).replace("\\\n", " ")
    lines = re.findall(r"^(?:\w+=\S+ |taskset \S+ \S+ )*partwise (.*)$", text, re.M)
    return [line.split("#")[0].strip() for line in lines if "[" not in line and "..." not in line]


@pytest.mark.parametrize("page", [page for page in PAGES if commands(page)])
def test_the_commands_of_a_page_are_known(page):
    for line in commands(page):
        options = make_parser().parse_args(shlex.split(line))
        assert callable(options.run), line
