"""What commands print: JSON for machines, tables and sentences for people."""

from __future__ import annotations

import json

import pytest

from partwise.cli import main, show


def test_lists(output):
    assert "planted" in output("tasks")["tasks"]
    assert "fed_recon" in output("algorithms")["algorithms"]
    assert "fedrecon-movielens" in output("bench")["benchmarks"]


def test_train_prints_its_summary_as_json(output, small, tmp_path):
    summary = output("train", *small, "--seed", "3", "--out", str(tmp_path / "run"))
    assert (summary["seed"], summary["rounds"], summary["task"]) == (3, 4, "planted")
    assert summary["test"]["rmse"] > summary["best"]["rmse"]


def test_train_shows_a_table(capsys, run_folder):
    assert main(["train", "--resume", "--out", str(run_folder)]) == 0
    text = capsys.readouterr().out
    assert "best reachable" in text
    assert "rmse" in text


def test_long_names_of_metrics_are_told_in_full(capsys, monkeypatch, output, small, tmp_path):
    from rich.console import Console

    summary = output("train", *small, "--out", str(tmp_path / "run"))
    names = ("accuracy_no_oov_or_eos", "accuracy_among_words")
    test = summary["test"] | dict.fromkeys(names, 0.5)
    test |= {"over_clients": {name: {"mean": 0.5, "p5": 0.25, "p95": 0.75} for name in names}}
    monkeypatch.setattr(show, "out", Console(width=80))
    show.summary(summary | {"test": test, "best": {}}, "here")
    text = capsys.readouterr().out
    assert all(name in text for name in names)
    assert "0.250 .. 0.750" in text
    assert "best reachable" not in text


def test_the_table_of_a_benchmark_fits_80_characters(capsys):
    from rich.console import Console

    from partwise.bench import show_table

    line = {"case": "bfloat16, 200 lanes", "seconds_per_round": 12.34567, "ms_per_client_step": 17.4}
    line |= {"weight_per_second": 4_123_456.0, "lanes": 200, "seconds_compile": 123.4, "device": "2 x cpu"}
    line |= {"seconds_evaluation": 12.345, "evaluated_clients": 500, "peak_memory_mb": 12345.6}
    show_table(Console(width=80), {"name": "next-word", "results": [line]})
    text = capsys.readouterr().out
    cells = ("bfloat16, 200 lanes", "12345.67", "17.4", "4,123,456", "123.4", "12.345 (500)", "12346")
    assert all(cell in text for cell in cells)


def test_evaluate_and_describe(output, run_folder):
    assert output("evaluate", str(run_folder), "--split", "validation")["clients"] == 5
    described = output("describe", "planted", "--set", "data.dim=3", "--set", "data.num_items=60")
    roles = {line["path"]: line["role"] for line in described["parameters"]}
    assert roles == {"item": "keyed(item)", "user": "local(initial=learned)", "default/user": "shared"}
    sizes = {line["path"]: line["bytes_down"] for line in described["parameters"]}
    assert (sizes["user"], sizes["default/user"]) == (0, 3 * 4)


def test_serving_shows_the_trade_off(output, mistake, small, capsys):
    asked = ["serving", "planted", *small[:8], "--set", "cohort.size=5", "--rounds", "2"]
    told = output(*asked)
    assert (told["task"], told["rounds"], told["keys"], len(told["lines"])) == (
        "planted",
        2,
        {"item": 25},
        12,
    )
    whole = {line["down_per_client"] for line in told["lines"] if line["way"] == "broadcast"}
    assert whole == {25 * 3 * 4 + 3 * 4}
    assert main(asked) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "pregenerated float16" in text
    assert "Keys stay private with broadcast and private alone (* unless both servers" in text
    assert "at least 1 round" in mistake(*asked[:-1], "0")
    assert "nearest: on_demand" in mistake("train", *small, "--set", "serving.way=ondemand")


def test_the_task_may_be_set_as_any_other_key(mistake, small, tmp_path, monkeypatch):
    monkeypatch.delenv("PARTWISE_DATA", raising=False)
    monkeypatch.chdir(tmp_path)
    assert "PARTWISE_DATA" in mistake("train", "--set", "task=movielens")
    assert "unknown algorithm 'fed_avgg'" in mistake("train", *small, "--set", "algorithm=fed_avgg")
    assert "but the settings say 'planted'" in mistake("describe", "movielens", "--set", "task=planted")


def test_settings_are_listed_with_the_values_of_a_task(output, capsys):
    lines = {line["key"]: line for line in output("settings")["settings"]}
    assert (lines["task"]["value"], lines["rounds"]["value"]) == ("planted", 1000)  # what `train` would run
    lines = {line["key"]: line for line in output("settings", "movielens")["settings"]}
    assert (lines["cohort.size"]["value"], lines["data.dim"]["value"]) == (100, 10)
    lines = {line["key"]: line for line in output("settings", "movielens", "--preset", "paper")["settings"]}
    assert (lines["server.optimizer"]["value"], lines["data.dim"]["value"]) == ("sgd", 50)
    averaged = output("settings", "movielens", "--preset", "paper", "--algorithm", "fed_avg")["settings"]
    assert {line["key"]: line["value"] for line in averaged}["update.rate"] == 0.1
    assert all(line["meaning"] for line in averaged)
    assert main(["settings", "planted"]) == 0
    assert "simulation.lanes" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("asked", "keys"),
    [
        (["movielens"], {"select.item": "own"}),
        (["movielens", "--algorithm", "fed_avg"], {"select.item": "own", "select.user": "own"}),
        (["tags"], {"select.word": "top:1000"}),
        (["tags", "--algorithm", "fed_avg"], {"select.word": "own"}),
        (["handwriting"], {"select.filter": "random:16"}),
        (["next-word"], {"select.word": "own", "select.unit": "all"}),
        (["next-word-lstm"], {"select.SPACE": "own or all"}),
    ],
)
def test_settings_show_which_keys_really_are_asked_for(output, asked, keys):
    lines = {line["key"]: line["value"] for line in output("settings", *asked)["settings"]}
    assert {key: value for key, value in lines.items() if key.startswith("select.")} == keys


def test_versions_for_a_report(capsys):
    assert main(["--version", "--json"]) == 0
    assert {"python", "partwise", "jax", "numpy"} <= json.loads(capsys.readouterr().out).keys()


def test_version(capsys):
    with pytest.raises(SystemExit) as done:
        main(["--version"])
    assert done.value.code == 0
    assert capsys.readouterr().out.startswith("partwise 0.")


def test_what_is_told_at_the_end_of_a_run(capsys):
    from partwise.cli import show

    spread = {"clients": 28, "mean": float("nan"), "p5": 1.0, "p95": 2.0}
    test = {
        "rmse": float("nan"),
        "clients": 28,
        "clients_without_examples": 2,
        "over_clients": {"rmse": spread},
        "judged": {"clients": "unseen", "local": "rebuilt", "others": "as trained", "weights": "examples"},
    }
    told = {"task": "t", "algorithm": "a", "rounds": 3, "test": test, "best": {}, "not_finite": ["rmse"]}
    told |= {"broken": 4, "empty": 0, "dropped": 1, "too_small": 0, "lanes": 1, "device": "1 x cpu"}
    told |= dict.fromkeys(("bytes_down_per_client", "bytes_up_per_client", "seconds_per_round"), 1.0)
    told |= {"fewer": {"num_words": (10_000, 812)}}
    told |= {
        "examples": {
            "used": 60,
            "there": 1_100,
            "left_out": {"data.max_examples": 1_000, "update.max_steps": 40},
        }
    }
    told |= {"validation": {"metric": "loss", "best": 0.5, "round": 2, "end": 0.75}}
    show.summary(told | {"seconds_compile": 1.0, "seconds_total": 2.0}, "runs/x")
    text = capsys.readouterr().out
    assert "30 test clients (2 without examples to test on)" in text
    assert "Evaluated on unseen clients. Local parameters: rebuilt. Other parameters: as trained." in text
    assert "Left out over all rounds: 4 updates that were not finite, 1 client that never reported." in text
    assert "The data have fewer than asked for: num_words = 812, not 10,000." in text
    left = (
        "60 of 1,100 training examples are used; left out: 1,000 by data.max_examples, 40 by update.max_steps"
    )
    assert f"{left} (with update.begin = random, rounds take turns at them)." in text
    assert "Validation loss: best 0.5000 after round 2, and 0.7500 at the end." in text


def test_where_there_is_no_terminal_every_evaluation_is_a_line(small, capsys, tmp_path):
    arguments = ["train", *small, "--set", "simulation.evaluate_every=2"]
    assert main([*arguments, "--out", str(tmp_path / "a")]) == 0
    captured = capsys.readouterr()
    assert [line.split(",")[0] for line in captured.err.splitlines() if "round" in line] == [
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
    from partwise.runs.train import Status

    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=60)
    monkeypatch.setattr(progress, "err", console)
    with progress._bar() as bar:
        show = progress._on_bar(bar, "movielens", 0.0)
        show(Status(123456, 654321, 0.1234, {"rmse": 0.9876, "over_clients": {"rmse": {}}}))
        bar.refresh()
    assert "123456/654321" in screen.getvalue()
    assert "validation rmse 0.9876" in screen.getvalue()


def test_privacy_shows_the_options(capsys, mistake, small, tmp_path, monkeypatch):
    pytest.importorskip("numba", reason="the extra `privacy` is not installed")
    monkeypatch.setattr("partwise.reports.privacy_noise.TARGETS", (8.0,))
    asked = ["privacy", "planted", *small[:8], "--set", "cohort.size=5", "--set", "rounds=2"]
    assert main([*asked, "--json", "--out", str(tmp_path / "privacy")]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["task"], len(told["options"]), told["keys"]["item"]["keys"]) == ("planted", 4, 25)
    assert {path.name for path in (tmp_path / "privacy").iterdir()} == {"privacy.png", "privacy.json"}
    assert main(asked) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "- two servers, private retrieval: the server: nothing but the sum" in text
    assert "both together: everything" in text
    assert "Private retrieval of 'item' never has fewer bytes" in text
    assert "for epsilon 8 (poisson)" in text
    assert "Signal to noise of a row of 'item'" in text
    assert "unknown task 'plantd'" in mistake("privacy", "plantd")


def test_heat_shows_who_holds_what(capsys, output, mistake, small, tmp_path):
    small = ["heat", "planted", *small[:8]]
    told = output(*small, "--split", "all")
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
    assert "unknown unit of heat 'sample' (nearest: samples" in mistake(*small, "--by", "sample")


def test_without_a_command_they_are_listed(capsys):
    assert main([]) == 2
    told = capsys.readouterr().err
    assert "personalize" in told
    assert "which protection a task's clients can have" in " ".join(told.split())
    assert "list the algorithms" in told


def test_settings_can_be_searched(output):
    keys = [line["key"] for line in output("settings", "ratings", "Rating")["settings"]]
    assert "data.rating" in keys
    assert "update.rate" not in keys
