"""The command line: JSON for machines, and one paragraph with exit code 2 for every mistake."""

import json
import zipfile

import pytest

from partwise.cli import main

SMALL = [
    "--set",
    "data.num_clients=50",
    "--set",
    "data.num_items=25",
    "--set",
    "data.mean_examples=12",
    "--set",
    "data.dim=3",
]
SMALL += ["--set", "simulation.lanes=2", "--cohort", "5", "--rounds", "4"]
RATINGS = ["1::10::5::100", "1::11::3::101", "2::10::4::102", "2::12::1::103"]


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    out = tmp_path_factory.mktemp("cli") / "run"
    assert main(["train", "planted", *SMALL, "--out", str(out)]) == 0
    return out


def output(capsys, *arguments):
    assert main([*arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def mistake(capsys, *arguments):
    """The paragraph that a mistake gets, having checked that it is one, without a traceback."""
    capsys.readouterr()
    assert main(list(arguments)) == 2
    text = capsys.readouterr().err.strip()
    assert text.startswith("partwise: ")
    assert "Traceback" not in text
    assert "\n\n" not in text
    return " ".join(text.split())


def test_lists(capsys):
    assert "planted" in output(capsys, "tasks")["tasks"]
    assert "fed_recon" in output(capsys, "algorithms")["algorithms"]
    assert "fedrecon-movielens" in output(capsys, "bench")["benchmarks"]


def test_train_prints_its_summary_as_json(capsys, tmp_path):
    summary = output(capsys, "train", *SMALL, "--seed", "3", "--out", str(tmp_path / "run"))
    assert (summary["seed"], summary["rounds"], summary["task"]) == (3, 4, "planted")
    assert summary["test"]["rmse"] > summary["best"]["rmse"]


def test_train_shows_a_table(capsys, run_folder):
    assert main(["train", "--resume", "--out", str(run_folder)]) == 0
    text = capsys.readouterr().out
    assert "best reachable" in text
    assert "rmse" in text


def test_evaluate_and_describe(capsys, run_folder):
    assert output(capsys, "evaluate", str(run_folder), "--split", "validation")["clients"] == 5
    described = output(capsys, "describe", "planted", "--set", "data.dim=3", "--set", "data.num_items=60")
    roles = {line["path"]: line["role"] for line in described["parameters"]}
    assert roles == {"item": "keyed(item)", "user": "local(initial=learned)"}


def test_an_unseen_client_personalizes_refreshes_and_predicts(capsys, run_folder, tmp_path):
    mine, wanted, local = tmp_path / "mine.csv", tmp_path / "wanted.csv", str(tmp_path / "local.safetensors")
    mine.write_text("item,rating\n1,4.5\n2,3.0\n7,2.0\n999,5\n")
    wanted.write_text("item\n3\n999\n4\n")
    told = output(capsys, "personalize", str(run_folder), "--client", str(mine), "--out", local)
    assert (told["examples"], told["unknown"]) == (3, {"item": 1})
    again = str(tmp_path / "again.safetensors")
    output(capsys, "personalize", str(run_folder), "--client", str(mine), "--local", local, "--out", again)
    predicted = output(capsys, "predict", str(run_folder), "--local", local, "--client", str(wanted))
    assert [(row["row"], row["item"]) for row in predicted["predictions"]] == [(1, 3), (3, 4)]
    assert all(0 < row["output"] < 8 for row in predicted["predictions"])


def test_unknown_names_come_with_the_nearest(capsys):
    assert "unknown task 'movielen' (nearest: movielens" in mistake(capsys, "train", "movielen")
    assert "nearest: fed_avg" in mistake(capsys, "train", "--algorithm", "fedavg", *SMALL)
    assert "nearest: reconstruct.rate" in mistake(capsys, "train", "--set", "reconstruct.rat=1")
    assert "nearest: fedrecon-table1" in mistake(capsys, "reproduce", "fedrecon-tabel1")
    assert "fedrecon-movielens" in mistake(capsys, "bench", "fedrecon-movielns")
    assert "adagrad" in mistake(capsys, "train", *SMALL, "--set", "server.optimizer=adagrd")
    assert "'colour'" in mistake(capsys, "train", "--set", "data.colour=red")


def test_values_of_the_wrong_kind(capsys, tmp_path):
    assert "must be a number, not 'fast'" in mistake(capsys, "train", "--set", "server.rate=fast")
    assert "dotted.key=value" in mistake(capsys, "train", "--set", "server.rate")
    assert "is a section" in mistake(capsys, "train", "--set", "server=3")
    assert "could not read the configuration" in mistake(
        capsys, "train", "--config", str(tmp_path / "none.toml")
    )
    broken = tmp_path / "broken.toml"
    broken.write_text("rounds = = 3")
    assert "is not a TOML file" in mistake(capsys, "train", "--config", str(broken))
    assert "only 40" in mistake(capsys, "train", *SMALL[:-4], "--cohort", "41", "--rounds", "1")
    assert "--out DIR" in mistake(capsys, "train", "--resume")


def test_folders_that_hold_no_run(capsys, tmp_path, run_folder):
    assert "holds no run" in mistake(capsys, "evaluate", str(tmp_path))
    assert "already holds a run" in mistake(capsys, "train", *SMALL, "--out", str(run_folder))
    file = tmp_path / "file"
    file.write_text("")
    assert "could not" in mistake(capsys, "train", *SMALL, "--out", str(file / "run"))


def test_missing_and_broken_movielens_files(capsys, tmp_path, monkeypatch):
    monkeypatch.delenv("PARTWISE_DATA", raising=False)
    assert "PARTWISE_DATA" in mistake(capsys, "train", "movielens")
    assert "does not exist" in mistake(capsys, "train", "movielens", "--data", str(tmp_path / "none"))
    wrong = tmp_path / "wrong.zip"
    wrong.write_bytes(b"not a zip")
    assert "wrong.zip" in mistake(capsys, "train", "movielens", "--data", str(wrong))
    empty = tmp_path / "empty.zip"
    with zipfile.ZipFile(empty, "w") as archive:
        archive.writestr("other/readme.txt", "hello")
    assert "readme.txt" in mistake(capsys, "train", "movielens", "--data", str(empty))


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        ("2::13::4", "line 5"),
        ("2::13::nan::5", "line 5"),
        ("2::13::four::5", "line 5"),
        ("2::13::9::5", "line 5"),
        ("2::12::2::104", "line 5"),
    ],
)
def test_bad_lines_of_ratings_dat_are_named(capsys, tmp_path, bad, says):
    file = tmp_path / "ratings.dat"
    file.write_text("\n".join([*RATINGS, bad]) + "\n")
    text = mistake(capsys, "train", "movielens", "--data", str(file))
    assert "ratings.dat" in text
    assert says in text
    assert bad in text


def test_a_truncated_ratings_dat(capsys, tmp_path):
    file = tmp_path / "ratings.dat"
    file.write_text("\n".join(RATINGS) + "\n2::13::4::1")
    assert "line 5" in mistake(capsys, "train", "movielens", "--data", str(file))


def test_own_tables_with_mistakes(capsys, tmp_path):
    table = tmp_path / "table.csv"
    table.write_text("user,film,rating\na,x,3\nb,y,4\n")
    assert "film" in mistake(capsys, "train", "ratings", "--data", str(table))
    assert "--data" in mistake(capsys, "train", "ratings")
    table.write_text("user,item,rating\na,x,3\nb,y,\n")
    assert "table.csv" in mistake(capsys, "train", "ratings", "--data", str(table))
    table.write_text("user,item,rating\na,x,3\nb,y,nan\n")
    assert "table.csv" in mistake(capsys, "train", "ratings", "--data", str(table))


def test_client_files_with_mistakes(capsys, tmp_path, run_folder):
    mine, local = tmp_path / "mine.csv", str(tmp_path / "local.safetensors")
    mine.write_text("item,rating\n998,4\n999,5\n")
    arguments = ("personalize", str(run_folder), "--client", str(mine), "--out", local)
    assert "none of its 2 rows" in mistake(capsys, *arguments)
    mine.write_text("film,rating\n1,4\n")
    assert "unknown column 'item'" in mistake(capsys, *arguments)
    mine.write_text("item,rating\n1,4\n")
    model = run_folder / "model.safetensors"
    assert "not a local part" in mistake(
        capsys, "predict", str(run_folder), "--local", str(model), "--client", str(mine)
    )


def test_errors_are_json_too(capsys):
    assert main(["train", "movielen", "--json"]) == 2
    assert "nearest: movielens" in json.loads(capsys.readouterr().out)["error"]
