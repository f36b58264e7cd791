"""The README's second example and the code of the pages in docs/, run as they are written."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from partwise.data import planted_ratings
from partwise.runs.train import evaluate_run
from partwise.types import UserError

ROOT = Path(__file__).parent.parent


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
    assert len(printed[-1].strip("[]").split()) == 5
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
    _, ours = parts(f"docs/{framework}.md")
    assert len([line for line in ours.splitlines() if line.strip()]) <= 15
    judged, own = run(blocks(f"docs/{framework}.md"), tmp_path).strip().split("\n", 1)
    value = float(judged.split()[-1])
    assert value < 0.6 if framework == "keras" else value > 0.7
    assert own.startswith(kept)


def test_the_code_of_the_page_on_data_runs(tmp_path):
    printed = run(blocks("docs/data.md"), tmp_path)
    assert "ClientStore(7 clients, 100 examples: pixels int64[2, 2], label int64)" in printed
    assert float(re.findall(r"loss on unseen clients: (\S+)", printed)[0]) < 0.1
    assert float(re.findall(r"next words of unseen clients: (\S+)", printed)[0]) > 0.5
    assert printed.endswith("after the beginning comes: i\n")
