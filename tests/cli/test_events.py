"""From a table of events to a new client's recommendations, as a user goes."""

from __future__ import annotations

import numpy as np
import pytest

from partwise.cli import main
from partwise.runs.personal import Personal, save_local

SMALL = {
    "data.time": "time",
    "data.dim": 2,
    "data.length": 3,
    "data.model": "two_tower",
    "simulation.lanes": 2,
}
SMALL |= {
    "data.loss": "softmax",
    "data.dropout": 0,
    "simulation.evaluate_every": 0,
    "rounds": 2,
    "cohort.size": 3,
}


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> str:
    """A run on events of twelve clients, in no order, each of five of ten things."""
    folder, rng = tmp_path_factory.mktemp("events"), np.random.default_rng(3)
    rows = [
        f"u{client},thing {item},{time}"
        for client in range(12)
        for time, item in enumerate(rng.permutation(10)[:5])
    ]
    (folder / "events.csv").write_text("\n".join(["user,item,time", *rng.permutation(rows)]))
    changes = [word for key, value in SMALL.items() for word in ("--set", f"{key}={value}")]
    out = str(folder / "run")
    assert main(["train", "events", "--data", str(folder / "events.csv"), *changes, "--out", out]) == 0
    return out


@pytest.fixture
def table(tmp_path):
    """A function that writes a client's table, and a place for its local part."""

    def write(*lines: str) -> tuple[str, str]:
        (tmp_path / "mine.csv").write_text("\n".join(lines) + "\n")
        return str(tmp_path / "mine.csv"), str(tmp_path / "local.safetensors")

    return write


def test_a_new_clients_events_give_its_next_items(run, output, table):
    mine, local = table("item,time", "thing 3,5", "thing 9,2", "moon,4", "thing 1,9")
    told = output("personalize", run, "--client", mine, "--out", local)
    assert (told["examples"], told["unknown"]) == (3, {"item": 1})
    found = output("recommend", run, "--local", local, "--client", mine, "-k", "5")
    ids = [each["id"] for each in found["recommended"]]
    assert len(ids) == 5
    assert not {"thing 1", "thing 3", "thing 9", "moon"} & set(ids)  # nobody takes a thing twice
    more, _ = table("item,time", "thing 3,5", "thing 9,2", "thing 0,11", "thing 1,9")
    rows = output("predict", run, "--local", local, "--client", more)["predictions"]
    assert [(each["row"], each["item"]) for each in rows[1:]] == [
        (1, "thing 3"),
        (4, "thing 1"),
        (3, "thing 0"),
    ]
    best = np.argsort(-np.array(rows[-1]["output"]), kind="stable")  # after the three, before the fourth
    assert ids == [f"thing {place}" for place in best[:5]]


def test_one_event_is_enough(run, table):
    me, (mine, _) = Personal.open(run), table("item,time", "thing 3,5")
    client = me.read(mine, me.table_columns)
    found = me.recommend(me.personalize(client), k=20, given=client)
    assert sorted(each.id for each in found) == [f"thing {k}" for k in range(10) if k != 3]


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        (["item,time"], "has no rows: give at least one client with one example"),
        (["item,time", "moon,1", "mars,2"], "of its 2 rows none names anything that the model knows"),
        (["thing,time", "thing 3,1"], "unknown column 'item'"),
        (["item,time", "thing 3,1", "thing 4,"], "line 3, column 'time': ''; expected a finite number"),
        (["item,time", "thing 3,soon"], "line 2, column 'time': 'soon'; expected a finite number"),
        (["item,time", "thing 3,nan"], "line 2, column 'time': 'nan'; expected a finite number"),
    ],
)
def test_tables_that_are_no_events(run, mistake, table, lines, told):
    mine, local = table(*lines)
    assert told in mistake("personalize", run, "--client", mine, "--out", local)


def test_what_comes_next_needs_what_came_before(run, mistake, table):
    mine, local = table("item", "thing 3", "thing 4")
    me = Personal.open(run)
    assert me.read(mine, me.table_columns).rows.tolist() == [0, 1]  # without times: in the order of the table
    save_local(local, {"user": np.zeros(2, np.float32)}, me.digest)
    assert "ranks what comes after a client's events: give them, with --client FILE" in mistake(
        "recommend", run, "--local", local
    )
    assert "without which it predicts nothing" in mistake("recommend", run, "--client", mine)
