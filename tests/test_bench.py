"""Benchmarks: what a case's figures mean, and that the cases of the language model can be made."""

from __future__ import annotations

import pytest
from rich.console import Console

from partwise import bench
from partwise.algorithms.registry import prepare
from partwise.bench import benchmarks, costs, trainings
from partwise.config.settings import Config
from partwise.deployment import load
from partwise.runs.resolve import resolve
from partwise.tasks import load_task
from partwise.types import UserError

SHAPE = {"sentences": 6, "num_words": 9, "num_buckets": 3, "length": 5, "embedding": 2, "units": 3}


def rates(seconds: float, algorithm: str = "fed_avg", **changes: object) -> dict[str, float | None]:
    """Of 24 clients with 6 sentences of 5 words each."""
    task = load_task("next-word-planted", num_clients=30, **SHAPE)
    named = {f"update.{name}": value for name, value in changes.items()}
    return trainings._rates(
        task, Config().changed({"algorithm": algorithm, "cohort.size": 10, **named}), seconds
    )


def test_a_step_and_what_is_trained_in_a_second():
    """Two epochs in batches of 3: 4 steps a client, 40 of 10 clients; each trains all its 30 words twice."""
    found = rates(2.0, batch_size=3, epochs=2)
    assert found == {
        "ms_per_client_step": pytest.approx(1e3 * 2.0 / 40),
        "weight_per_second": pytest.approx(10 * 30 * 2 / 2.0),
    }


def test_steps_are_not_all_that_clients_of_reconstruction_do():
    assert set(rates(1.0, "fed_recon").values()) == {None}


def test_steps_that_end_before_the_examples_do():
    """One step of 3 of its 6 sentences: half of the words."""
    found = rates(1.0, batch_size=3, epochs=1, max_steps=1)
    assert found["ms_per_client_step"] == pytest.approx(100)
    assert found["weight_per_second"] == pytest.approx(10 * 15)


def test_batches_that_are_not_full_count_what_they_hold():
    """Two steps of 4 and 2 sentences an epoch, three in all: 10 of them."""
    found = rates(1.0, batch_size=4, epochs=2, max_steps=3)
    assert found["ms_per_client_step"] == pytest.approx(1e3 / 30)
    assert found["weight_per_second"] == pytest.approx(10 * 10 * 5)


def test_the_cases_of_the_language_model_fit_their_task():
    """Every case is a configuration that can be prepared; the task is made small here."""
    cases = bench.BENCHMARKS["next-word"].cases(True)
    assert len({case.name for case in cases}) == len(cases) == 6
    small = {f"data.{name}": value for name, value in SHAPE.items()} | {"data.num_clients": 40}
    for case in cases:
        task, config = resolve(case.task, None, {**case.changes, **small})
        assert prepare(task, config).rates["update"] > 0
        assert task.options["precision"] == config.data["precision"]
    assert [config.algorithm, cases[-1].name] == ["fed_recon", "FedRecon"]
    assert {case.task for case in cases} <= set(bench.GENERATED)


SMALL = {
    **{f"data.{name}": value for name, value in SHAPE.items()},
    "data.num_clients": 20,
    "algorithm": "fed_avg",
    "cohort.size": 4,
    "simulation.lanes": 1,
    "simulation.rounds_per_call": 1,
}


@pytest.mark.slow
def test_a_case_is_measured():
    told = bench.measure(bench.Case("small", "next-word-planted", SMALL, rounds=2), None)
    assert (told["case"], told["lanes"], told["evaluated_clients"]) == ("small", 1, 2)
    assert all(told[name] > 0 for name in ("seconds_per_round", "ms_per_client_step", "weight_per_second"))


def test_a_case_that_fails_leaves_the_others_as_they_are(monkeypatch, capsys):
    cases = [
        bench.Case("small", "next-word-planted", SMALL, rounds=2),
        bench.Case("too fast", "next-word-planted", SMALL | {"update.rate": 1e30}, rounds=2),
        bench.Case("small again", "next-word-planted", SMALL, rounds=2),
    ]
    monkeypatch.setitem(bench.BENCHMARKS, "three", bench.Benchmark("", lambda quick: cases))
    monkeypatch.setattr(benchmarks, "_alone", lambda function, *arguments: function(*arguments))
    heard = []
    result = bench.bench("three", told=heard.append)
    assert ["error" in line for line in result["results"]] == [False, True, False]
    assert "updates were not finite" in result["results"][1]["error"]
    assert [text.split(":")[0] for text in heard] == [
        "three, case 1 of 3, small",
        "three, case 2 of 3, too fast",
        "three, case 3 of 3, small again",
    ]
    bench.show_table(Console(width=80), result)
    assert "updates were not finite" in capsys.readouterr().out.split("too fast failed: ")[1]
    cases.pop(0)
    with pytest.raises(UserError, match="updates were not finite"):
        bench.bench("three")


def test_a_server_under_polling_devices(capsys):
    """Three devices of ten that are registered, on a real server; every report is counted."""
    case = bench.Case("3 polling", "planted", {"cohort.size": 3, "data.dim": 2}, rounds=5)
    told = costs._deployed(case, load.measure_polling(case.task, case.changes, case.rounds, registered=10))
    assert (told["reports"], told["lost"], told["agent_mb"]) == (15, 0, None)
    assert told["reports_per_second"] > 0
    assert told["server_mb"] > 10
    for part in ("client_round_ms", "poll_ms", "slices_ms", "report_ms"):
        assert 0 < told[part]["p50"] <= told[part]["p99"]
    bench.show_table(Console(width=80), {"name": "deployment", "results": [told]})
    shown = capsys.readouterr().out
    assert "3 polling" in shown
    assert "reports" in shown


@pytest.mark.slow
def test_an_agent_is_measured_by_name():
    [told] = [line for line in bench.bench("deployment", quick=True)["results"] if line["case"] == "1 agent"]
    assert (told["reports"], told["lost"]) == (20, 0)
    assert told["agent_mb"] > 10


def test_a_server_that_does_not_start_is_an_error(monkeypatch):
    monkeypatch.setattr("partwise.deployment.load.sys.executable", "/bin/false")
    with pytest.raises(RuntimeError, match="the server did not start"):
        load.measure_polling("planted", {"cohort.size": 3, "data.dim": 2}, rounds=5, registered=3)


def test_a_secure_sum_is_measured():
    pytest.importorskip("cryptography", reason="the extra `privacy` is not installed")
    [case] = bench.BENCHMARKS["secure-sum"].cases(True)
    told = bench.measure_sum(case._replace(changes={"n": 12, "words": 10_000}), None)
    assert told["degree"] == 11
    assert 1 < told["upload_ratio"] < 1.03
    console = Console(width=80, record=True)
    bench.show_table(console, {"name": "secure-sum", "results": [told]})
    assert "20 x 10,000 words" in console.export_text()


def test_what_a_recommendation_takes():
    result = bench.bench("recommend", quick=True)
    assert [line["case"] for line in result["results"]] == ["10,000 x 64, ratings", "10,000 x 64, two_tower"]
    for line in result["results"]:
        assert 0 < line["seconds_best"] <= line["seconds"]
        assert line["table_mb"] == pytest.approx(10_000 * 65 * 4 / 2**20)
    console = Console(record=True, width=80)
    bench.show_table(console, result)
    assert "ten best" in console.export_text()


def test_one_process_and_two_are_measured_in_turns():
    [case] = bench.BENCHMARKS["processes"].cases(True)
    told = bench.measure_processes(case, "not read, because the task is generated")
    one, two = told["seconds_per_round"], told["seconds_per_round_apart"]
    assert min(one, two) > 0
    assert told["ratios"] == [pytest.approx(two / one)]
    console = Console(record=True, width=80)
    bench.show_table(console, {"name": "processes", "results": [told]})
    assert "2 processes" in console.export_text()


def test_the_cases_of_processes_fit_their_tasks(liked_folder):
    ratings, posts = (case.changes["training"] for case in bench.BENCHMARKS["processes"].cases(False))
    few = {"data.num_clients": 60}
    for training in (ratings._replace(data=str(liked_folder)), posts._replace(changes=posts.changes | few)):
        _, config = training.resolved()
        assert config.simulation.lanes > 0
        assert training.rounds > config.simulation.rounds_per_call  # the first call is left out


def test_a_mistake_in_what_processes_train_is_told():
    case = bench.BENCHMARKS["processes"].cases(False)[0]
    with pytest.raises(UserError, match="there_is_no_such_folder"):
        bench.measure_processes(case, "there_is_no_such_folder")
