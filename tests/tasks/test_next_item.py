"""Named tasks of events, and a client with its own file: journeys on small files."""

from __future__ import annotations

import json
import zipfile

import numpy as np
import pytest

import partwise as pw
from partwise.cli import main
from partwise.data.generated.planted_events import planted_events
from partwise.papers.reproduce import reproduce
from partwise.runs.resolve import resolve

FEW = [
    "--set",
    "data.dim=4",
    "--set",
    "data.length=4",
    "--set",
    "cohort.size=8",
    "--set",
    "simulation.lanes=4",
]


def lines_of(num_clients: int, num_items: int) -> str:
    store = planted_events(num_clients, num_items, num_groups=3, mean_events=8, seed=2)
    listed = [" ".join(map(str, store.examples(c)["item"] + 1)) for c in range(store.num_clients)]
    return "".join(f"{client + 1} {items}\n" for client, items in enumerate(listed))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Data of both kinds, as they are published."""
    root = tmp_path_factory.mktemp("data")
    (root / "sequences").mkdir()
    with zipfile.ZipFile(root / "sequences" / "some_sequences.zip", "w") as archive:
        archive.writestr("Beauty.txt", lines_of(40, 20))
        archive.writestr("Yelp.txt", lines_of(30, 15))
    (root / "foursquare-nyc").mkdir()
    store = planted_events(30, 15, num_groups=3, mean_events=8, seed=4)
    rows = [
        f"{client},{item},{time}"
        for client in range(30)
        for time, item in enumerate(store.examples(client)["item"])
    ]
    import pyarrow.csv
    import pyarrow.parquet

    (root / "check_ins.csv").write_text("\n".join(["user,poi,minute", *rows]))
    table = pyarrow.csv.read_csv(root / "check_ins.csv")
    pyarrow.parquet.write_table(table, root / "foursquare-nyc" / "foursquare_nyc_stan.parquet")
    return root


def test_files_of_sequences_are_named_by_an_option(folder):
    beauty, _ = resolve("next-item", str(folder), {})
    yelp, config = resolve("next-item", str(folder), {"data.file": "Yelp"})
    assert (beauty.train.num_clients, yelp.train.num_clients) == (40, 30)
    assert config.data["file"] == "Yelp"
    assert "On this CPU the model is two_tower" in yelp.notes[0]
    with pytest.raises(pw.UserError, match=r"give a zip with Toys.txt in it"):
        resolve("next-item", str(folder), {"data.file": "Toys"})
    check_ins, _ = resolve("check-ins", str(folder), {})
    assert check_ins.options["again"] is True


def test_one_file_of_sequences_has_its_own_name(tmp_path):
    (tmp_path / "mine.txt").write_text(lines_of(30, 15))
    for options in ({}, {"data.file": "mine"}):
        mine, _ = resolve("next-item", str(tmp_path / "mine.txt"), options)
        assert (mine.train.num_clients, mine.train.info["source"]) == (30, "sequences mine")
    with pytest.raises(pw.UserError, match=r"data.file = Beauty would have no effect: .*file=mine"):
        resolve("next-item", str(tmp_path / "mine.txt"), {"data.file": "Beauty"})


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run on a user's own table, whose rows are not in the order of time."""
    place = tmp_path_factory.mktemp("run")
    store = planted_events(30, 12, num_groups=3, mean_events=8, seed=5)
    rows = [
        f"u{client},m{item},{time}"
        for client in range(30)
        for time, item in enumerate(store.examples(client)["item"])
    ]
    np.random.default_rng(0).shuffle(rows)
    (place / "events.csv").write_text("\n".join(["who,what,when", *rows]))
    named = ["--set", "data.client=who", "--set", "data.item=what", "--set", "data.time=when"]
    given = [
        "train",
        "events",
        "--data",
        str(place / "events.csv"),
        "--out",
        str(place / "run"),
        "--rounds",
        "4",
    ]
    assert main([*given, *named, *FEW, "--quiet"]) == 0
    return place


def test_a_client_recommends_from_its_own_file_in_any_order(run, capsys):
    """Its events are read in the order of time, as the training data was."""
    (run / "sorted.csv").write_text("what,when\nm3,1\nm7,2\nm9,3\n")
    (run / "mixed.csv").write_text("what,when\nm9,3\nm3,1\nm7,2\n")
    (run / "other.csv").write_text("what,when\nm9,1\nm7,2\nm3,3\n")
    found = {}
    for name in ("sorted", "mixed", "other"):
        local = str(run / f"{name}.safetensors")
        file = ["--client", str(run / f"{name}.csv")]
        assert main(["personalize", str(run / "run"), *file, "--out", local]) == 0
        capsys.readouterr()
        assert main(["recommend", str(run / "run"), "--local", local, *file, "-k", "12", "--json"]) == 0
        found[name] = json.loads(capsys.readouterr().out)["recommended"]
    assert found["sorted"] == found["mixed"]
    assert len({each["id"] for each in found["sorted"]}) == 12  # all items, as clients take some again
    me = pw.Personal.open(run / "run")
    mine = me.read(run / "mixed.csv", ("item",))
    assert mine.rows.tolist() == [1, 2, 0]
    assert me.vocabularies["item"][mine.examples.columns["item"]].tolist() == ["m3", "m7", "m9"]


def test_what_comes_next_is_what_predict_says_after_all_events(run):
    """recommend(given=events) equals predict for an example whose history is all events."""
    (run / "three.csv").write_text("what,when\nm3,1\nm7,2\nm9,3\nm1,4\n")
    me = pw.Personal.open(run / "run")
    four = me.read(run / "three.csv", ("item",)).examples
    local = me.personalize(four)
    three = four.narrow(np.zeros(1, int), np.array([3]))
    expected = me.predict(local, four)[-1]  # after the first three, for the fourth
    found = me.recommend(local, k=12, given=three)
    scores = dict(found)
    ids = me.vocabularies["item"].tolist()
    np.testing.assert_allclose([scores[each] for each in ids], expected, rtol=1e-4, atol=1e-6)


def test_items_of_the_history_are_never_recommended_unless_clients_take_them_again(tmp_path):
    once = pw.ClientStore.from_arrays(
        np.repeat(np.arange(12), 4),
        item=[f"m{(c + 2 * i) % 9}" for c in range(12) for i in range(4)],
        ids=["item"],
    )
    task = pw.events_task(once, model="two_tower", dim=4, length=4)
    run = pw.train(task, rounds=1, cohort__size=4, simulation__lanes=2)
    me, mine = run.personal, task.test.gather([0])
    taken = set(once.vocabularies["item"][mine.columns["item"]])
    offered = me.recommend(me.personalize(mine), k=9, given=mine)
    assert {each.id for each in offered} == set(once.vocabularies["item"]) - taken


@pytest.mark.slow
def test_the_comparison_with_centralised_training_runs(folder, tmp_path):
    result = reproduce("next-items", str(folder), tmp_path / "out", quick=True)
    rows = {(row["row"], row["metric"]): row for row in result["rows"]}
    assert len(rows) == len(result["rows"])
    assert all(0 <= row["ours"] <= 1 for row in rows.values())
    assert ("Beauty, two-tower, own part rebuilt", "ndcg@10") in rows
    assert ("New York, most taken by the client", "hit@10") in rows
    assert (tmp_path / "out" / "next-items.png").exists()
