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
    assert roles == {"item": "keyed(item)", "user": "local(initial=learned)", "default/user": "shared"}
    sizes = {line["path"]: line["bytes_down"] for line in described["parameters"]}
    assert (sizes["user"], sizes["default/user"]) == (0, 3 * 4)


def test_serving_shows_the_trade_off(capsys):
    small = ["serving", "planted", *SMALL[:8], "--set", "cohort.size=5", "--rounds", "2"]
    told = output(capsys, *small)
    assert (told["task"], told["rounds"], told["keys"], len(told["lines"])) == ("planted", 2, {"item": 25}, 9)
    whole = {line["down_per_client"] for line in told["lines"] if line["way"] == "broadcast"}
    assert whole == {25 * 3 * 4 + 3 * 4}
    assert main(small) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "pregenerated float16" in text
    assert "Keys stay private with broadcast alone" in text
    assert "at least 1 round" in mistake(capsys, *small[:-1], "0")
    assert "nearest: on_demand" in mistake(capsys, "train", *SMALL, "--set", "serving.way=ondemand")


def test_heat_shows_who_holds_what(capsys, tmp_path):
    small = ["heat", "planted", *SMALL[:8]]
    told = output(capsys, *small, "--split", "all")
    assert [(each["space"], each["total"]) for each in told["spaces"]] == [("item", 50), ("user", 50)]
    assert main([*small, "--by", "samples", "--out", str(tmp_path / "heat")]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "samples of holders" in text
    assert "25 of 25 keys are held" in text
    assert {path.name for path in (tmp_path / "heat").iterdir()} == {
        "heat.png",
        "heat.json",
        "heat.safetensors",
    }
    assert "unknown unit of heat 'sample' (nearest: samples" in mistake(capsys, *small, "--by", "sample")


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


def test_a_table_of_several_clients_asks_which_one_is_meant(capsys, run_folder, tmp_path):
    table, local = tmp_path / "table.csv", str(tmp_path / "local.safetensors")
    table.write_text("item,rating,user\n1,4.5,ann\n2,3.0,bob\n7,2.0,ann\n999,1.0,bob\n")
    arguments = ("personalize", str(run_folder), "--client", str(table), "--out", local)
    text = mistake(capsys, *arguments)
    assert "holds rows of 2 clients (column 'user')" in text
    assert "--id ann" in text
    assert "unknown client 'anne' (nearest: ann)" in mistake(capsys, *arguments, "--id", "anne")
    told = output(capsys, *arguments, "--id", "bob")
    assert (told["examples"], told["unknown"]) == (1, {"item": 1})
    predict = ("predict", str(run_folder), "--local", local, "--client", str(table))
    assert "--id ann" in mistake(capsys, *predict)
    assert [row["row"] for row in output(capsys, *predict, "--id", "ann")["predictions"]] == [1, 3]
    table.write_text("item,rating\n1,4.5\n")
    assert "has no column 'user'" in mistake(capsys, *arguments, "--id", "ann")


def test_a_local_part_of_another_model_is_refused(capsys, run_folder, tmp_path):
    import numpy as np

    from partwise.experiments.personal import save_local

    mine, local = tmp_path / "mine.csv", tmp_path / "local.safetensors"
    mine.write_text("item,rating\n1,4.5\n")
    save_local(local, {"user": np.zeros(5, np.float32)}, "other")
    both = ("--local", str(local), "--client", str(mine))
    for command in (["predict"], ["personalize", "--out", str(tmp_path / "new")]):
        text = mistake(capsys, command[0], str(run_folder), *both, *command[1:])
        assert "has user (5,), and the model needs user (3,)" in text


def test_evaluating_with_settings_that_change_the_model_is_refused(capsys, run_folder):
    assert "'default/user' of shape (3,), and these settings make it (4,)" in mistake(
        capsys, "evaluate", str(run_folder), "--set", "data.dim=4"
    )
    assert "other ids" in mistake(capsys, "evaluate", str(run_folder), "--set", "data.num_items=30")
    assert "must be one of train, validation, test" in mistake(
        capsys, "evaluate", str(run_folder), "--split", "tset"
    )


def test_unknown_names_come_with_the_nearest(capsys):
    assert "unknown task 'movielen' (nearest: movielens" in mistake(capsys, "train", "movielen")
    assert "nearest: fed_avg" in mistake(capsys, "train", "--algorithm", "fedavg", *SMALL)
    assert "nearest: reconstruct.rate" in mistake(capsys, "train", "--set", "reconstruct.rat=1")
    assert "nearest: fedrecon-table1" in mistake(capsys, "reproduce", "fedrecon-tabel1")
    assert "fedrecon-movielens" in mistake(capsys, "bench", "fedrecon-movielns")
    assert "adagrad" in mistake(capsys, "train", *SMALL, "--set", "server.optimizer=adagrd")
    assert "'colour'" in mistake(capsys, "train", "--set", "data.colour=red")
    assert "nearest: fed_avg" in mistake(capsys, "settings", "--algorithm", "fedavg")
    assert "client optimizer 'adamm' (nearest: adam" in mistake(
        capsys, "train", *SMALL, "--set", "update.optimizer=adamm"
    )
    assert "value of evaluation_split.kind 'halfs' (nearest: halves" in mistake(
        capsys, "train", *SMALL, "--set", "evaluation_split.kind=halfs"
    )


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


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--rounds", "-5"], "'rounds' must be at least 1, not -5"),
        (["--rounds", "0"], "'rounds' must be at least 1"),
        (["--rounds", "many"], "'rounds' must be a whole number, not 'many'"),
        (["--seed", "-1"], "'seed' must be between 0 and"),
        (["--seed", "99999999999999999999"], "'seed' must be between 0 and"),
        (["--cohort", "0"], "'cohort.size' must be at least 1"),
        (["--set", "simulation.lanes=-1"], "'simulation.lanes' must be at least 0"),
        (["--set", "simulation.rounds_per_call=0"], "'simulation.rounds_per_call' must be at least 1"),
        (["--set", "data.num_clients=abc"], "'data.num_clients' must be a whole number, not 'abc'"),
        (["--set", "data.num_clients=-3"], "num_clients"),
        (["--set", "data.dim=0"], "dim is 0"),
        (
            ["--set", "data.nope=3"],
            "task 'planted' has no option 'nope' (nearest: noise); `partwise settings planted`",
        ),
        (["--set", "cohort.over_selection=1e9"], "Lower cohort.over_selection"),
        (["planted", "--set", "task=movielens"], "two tasks were given"),
    ],
)
def test_values_out_of_range(capsys, tmp_path, monkeypatch, arguments, says):
    monkeypatch.chdir(tmp_path)
    assert says in mistake(capsys, "train", *arguments)
    assert not list(tmp_path.iterdir())


def test_the_task_may_be_set_as_any_other_key(capsys, tmp_path, monkeypatch):
    monkeypatch.delenv("PARTWISE_DATA", raising=False)
    monkeypatch.chdir(tmp_path)
    assert "PARTWISE_DATA" in mistake(capsys, "train", "--set", "task=movielens")
    assert "unknown algorithm 'fed_avgg'" in mistake(capsys, "train", *SMALL, "--set", "algorithm=fed_avgg")
    assert "but the settings say 'planted'" in mistake(
        capsys, "describe", "movielens", "--set", "task=planted"
    )


def test_every_client_broken_is_a_mistake(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = mistake(capsys, "train", *SMALL, "--set", "update.rate=1e30")
    assert "no client counted in 4 rounds" in text
    assert "20 updates that were not finite" in text
    assert not list((tmp_path / "runs").iterdir())


def test_resuming_what_is_not_there_or_is_another_task(capsys, tmp_path, run_folder):
    assert "holds no run to go on with" in mistake(capsys, "train", "--resume", "--out", str(tmp_path / "no"))
    assert not (tmp_path / "no").exists()
    text = mistake(capsys, "train", "movielens", "--resume", "--out", str(run_folder))
    assert "is of task 'planted', not 'movielens'" in text
    assert "already has 4 rounds" in mistake(
        capsys, "train", "--resume", "--out", str(run_folder), "--rounds", "3"
    )
    assert "neither longer nor shorter" in mistake(
        capsys, "train", "--resume", "--out", str(run_folder), "--rounds", "9"
    )


def test_settings_are_listed_with_the_values_of_a_task(capsys):
    lines = {line["key"]: line for line in output(capsys, "settings")["settings"]}
    assert lines["server.rate"]["value"] == 1.0
    lines = {line["key"]: line for line in output(capsys, "settings", "movielens")["settings"]}
    assert (lines["cohort.size"]["value"], lines["data.dim"]["value"]) == (100, 50)
    averaged = output(capsys, "settings", "movielens", "--algorithm", "fed_avg")["settings"]
    assert {line["key"]: line["value"] for line in averaged}["update.rate"] == 0.1
    assert all(line["meaning"] for line in averaged)
    assert main(["settings", "planted"]) == 0
    assert "simulation.lanes" in capsys.readouterr().out


def test_version(capsys):
    with pytest.raises(SystemExit) as done:
        main(["--version"])
    assert done.value.code == 0
    assert capsys.readouterr().out.startswith("partwise 0.")


def test_a_bug_says_that_it_is_one(capsys, monkeypatch):
    def broken(*_):
        raise ZeroDivisionError("oh")

    monkeypatch.setattr("partwise.experiments.describe.list_settings", broken)
    monkeypatch.delenv("PARTWISE_DEBUG", raising=False)
    assert main(["settings", "my task"]) == 1
    text = " ".join(capsys.readouterr().err.split())
    assert "this is a bug in partwise" in text
    assert "ZeroDivisionError: oh" in text
    assert "`partwise settings 'my task'`" in text
    assert "Traceback" not in text
    assert main(["settings", "--debug"]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_an_interrupted_run_says_how_to_go_on(capsys, tmp_path, monkeypatch):
    out = tmp_path / "my run"

    def interrupt(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("partwise.experiments.folder.Folder.save_checkpoint", interrupt)
        assert main(["train", *SMALL, "--out", str(out)]) == 130
    text = " ".join(capsys.readouterr().err.split())
    assert f"partwise train --resume --out '{out}'" in text
    assert main(["train", "--resume", "--out", str(out), "--quiet"]) == 0
    with monkeypatch.context() as patch:
        patch.setattr("partwise.experiments.run.prepare", interrupt)
        assert main(["train", *SMALL, "--out", str(tmp_path / "other")]) == 130
    assert "nothing was recorded" in capsys.readouterr().err


def test_where_there_is_no_terminal_every_evaluation_is_a_line(capsys, tmp_path):
    arguments = ["train", *SMALL, "--set", "simulation.evaluate_every=2"]
    assert main([*arguments, "--out", str(tmp_path / "a")]) == 0
    captured = capsys.readouterr()
    assert [line.split(",")[0] for line in captured.err.splitlines()] == [
        "planted: round 2 of 4",
        "planted: round 4 of 4",
    ]
    assert "5 test clients" in captured.out
    assert main([*arguments, "--quiet", "--out", str(tmp_path / "b")]) == 0
    assert capsys.readouterr().err == ""


def test_the_bar_shows_the_whole_total_on_a_narrow_terminal(monkeypatch):
    import io

    from rich.console import Console

    from partwise.cli import progress
    from partwise.experiments.run import Status

    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=60)
    monkeypatch.setattr(progress, "err", console)
    with progress._bar() as bar:
        show = progress._on_bar(bar, "movielens")
        show(Status(123456, 654321, 0.1234, {"rmse": 0.9876}))
        bar.refresh()
    assert "123456/654321" in screen.getvalue()
    assert "rmse 0.9876" in screen.getvalue()


def test_what_is_told_at_the_end_of_a_run(capsys):
    from partwise.cli import show

    spread = {"clients": 28, "mean": float("nan"), "p5": 1.0, "p95": 2.0}
    test = {
        "rmse": float("nan"),
        "clients": 28,
        "clients_without_examples": 2,
        "over_clients": {"rmse": spread},
    }
    told = {"task": "t", "algorithm": "a", "rounds": 3, "test": test, "best": {}, "not_finite": ["rmse"]}
    told |= {"broken": 4, "empty": 0, "dropped": 1, "too_small": 0, "lanes": 1, "device": "1 x cpu"}
    told |= dict.fromkeys(("bytes_down_per_client", "bytes_up_per_client", "seconds_per_round"), 1.0)
    show.summary(told | {"seconds_compile": 1.0, "seconds_total": 2.0}, "runs/x")
    text = capsys.readouterr().out
    assert "30 test clients (2 without examples to test on)" in text
    assert "Left out over all rounds: 4 updates that were not finite, 1 clients that never reported." in text
    assert "rmse of the test clients is not a finite number" in text


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
