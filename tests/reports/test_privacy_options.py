"""`partwise privacy`: the sizes are those of real messages, and every option says who sees what."""

from __future__ import annotations

import json

import numpy as np
import pytest

pytest.importorskip("numba", reason="the extra `privacy` is not installed")
pytest.importorskip("dp_accounting", reason="the extra `privacy` is not installed")

from partwise.privacy.buckets import layout_shape, make_layout
from partwise.privacy.masked_letters import letter_sizes
from partwise.privacy.masked_round import NO_DROPS, default_settings, masked_letters
from partwise.privacy.masked_server import deliveries, directories, survivors
from partwise.privacy.retrieval import make_query
from partwise.privacy.sealing import new_sealing_key
from partwise.privacy.sum_words import SumWords
from partwise.privacy.two_servers import make_parts
from partwise.reports import privacy_options
from partwise.reports.privacy_facts import gather_facts
from partwise.reports.privacy_options import OPTIONS, compare_options, retrieval_bytes, tell_crossing
from partwise.reports.serving_costs import compare_serving
from partwise.runs.resolve import resolve
from partwise.server.messages import About, open_message
from partwise.server.private_slices import ask_privately
from partwise.types import UserError

PLANTED = {"data.num_clients": 60, "data.num_items": 400, "data.mean_examples": 12, "data.dim": 4}
PLANTED |= {"cohort.size": 6, "rounds": 3}
NO_KEYS = {"data.num_clients": 30, "cohort.size": 4, "rounds": 2}


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """What is told of the small task, and the folder."""
    out = tmp_path_factory.mktemp("privacy") / "out"
    return compare_options("planted", None, PLANTED, out), out


@pytest.fixture(scope="module")
def facts():
    return gather_facts(*resolve("planted", None, PLANTED))


def row(told, name):
    return next(option for option in told["options"] if option["name"].startswith(name))


def test_what_is_told(told):
    result, out = told
    assert [option["name"] for option in result["options"]] == [option.name for option in OPTIONS]
    for option in result["options"]:
        assert option["epsilon"] == result["differential_privacy"]["epsilon"] > 0
        assert option["bytes_down"] > 0 < option["bytes_up"]
        assert (option["seconds_client"] > 0) == (option["seconds_server"] > 0)
        assert (option["seconds_client"] > 0) == (option["settings"]["privacy.sums"] != "plain")
    assert row(result, "two")["sees"]["both together"] == "everything"
    assert result["left_out"] == []
    assert json.loads((out / "privacy.json").read_text()) == result
    assert (out / "privacy.png").read_bytes().startswith(b"\x89PNG")


def test_clients_that_add_the_noise_are_told_of():
    settings = {"privacy.mechanism": "skellam", "privacy.sums": "masked", "privacy.clip": 1.0}
    more = {"privacy.noise": 1.0, "server.weighting": "uniform", "cohort.sampling": "fixed"}
    told = compare_options("planted", None, {**PLANTED, **settings, **more})
    masked, two = row(told, "masked"), row(told, "two")
    assert masked["sees"]["server"] == "nothing but the sum of a round, with the noise of its clients"
    assert masked["settings"]["privacy.mechanism"] == "skellam"
    assert two["settings"]["privacy.mechanism"] == "independent"


def test_the_most_keys_are_those_of_a_client_unless_they_are_set(told, facts):
    keys = told[0]["keys"]["item"]
    assert keys["most"] == facts.counts["item"].max()
    assert "privacy.keys" in keys["bounded_by"]
    fewer = gather_facts(*resolve("planted", None, {**PLANTED, "privacy.keys": 5}))
    assert (fewer.agreement.tables["item"].most, fewer.bounded_by["item"]) == (5, "privacy.keys")
    assert fewer.counts["item"].max() == 5


def test_two_servers_have_the_bytes_of_real_messages(told, facts):
    agreement, (_, public) = facts.agreement, new_sealing_key()
    keys = {"item": np.array([3, 7])}
    question = open_message("private", ask_privately(agreement, public, About(task="a"), keys).message)[0]
    words = SumWords(np.zeros(agreement.num_dense, np.uint32), {"item": np.zeros((2, 4), np.uint32)})
    parts = make_parts(agreement, public, 0, "a", words, keys)
    report = parts.masked.nbytes + len(parts.sealed)
    report += sum(len(each) for part in (parts.writes, parts.roots) for each in part.values())
    assert row(told[0], "two")["bytes_up"] == report + sum(each.nbytes for each in question.values())
    answer = len(make_query(agreement.layout("item"), keys["item"]).to_second)
    assert row(told[0], "two")["bytes_down"] == facts.sizes.fixed + facts.sizes.answer > answer


def test_masked_sums_have_the_bytes_of_real_letters(told, facts):
    number, words, context = facts.cohort, facts.num_words, b"round"
    vectors = {str(each): np.zeros(words, np.uint32) for each in range(number)}
    settings = default_settings(vectors, context)
    letters = masked_letters(vectors, context, NO_DROPS, settings)
    assert row(told[0], "masked")["bytes_up"] == sum(len(sent["0"]) for sent in letters)
    advertised, shared, masked, _ = letters
    answers = [
        directories(context, advertised, settings),
        deliveries(context, advertised, shared, settings),
        survivors(context, advertised, shared, masked, settings),
    ]
    whole = row(told[0], "plain sums, broadcast")["bytes_down"]
    assert row(told[0], "masked")["bytes_down"] == whole + sum(len(sent["0"]) for sent in answers)
    sizes = letter_sizes(settings.degree, words)
    assert [*sizes.down.values()] == [len(sent["0"]) for sent in answers]


def test_plain_bytes_are_those_of_a_round_with_all_clients(told):
    lines = compare_serving("planted", None, {**PLANTED, "cohort.size": 48}, rounds=1)["lines"]
    for option, way in zip(told[0]["options"], ("on_demand", "broadcast"), strict=False):
        line = next(each for each in lines if (each["way"], each["encoding"]) == (way, "take"))
        assert option["bytes_down"] == pytest.approx(line["down_per_client"])
        assert option["bytes_up"] == pytest.approx(line["up_per_client"])


def test_where_private_retrieval_and_broadcast_cross(facts):
    crossing = tell_crossing(facts, "item")
    up_to, table = crossing["private_up_to"], 400 * 16
    assert crossing["broadcast"] == table
    assert 0 < up_to < 400
    assert retrieval_bytes(400, up_to, 16) < table <= retrieval_bytes(400, up_to + 1, 16)
    layout = make_layout(400, up_to, b"")
    assert layout_shape(400, up_to) == (layout.num_buckets, layout.size)
    curve = crossing["curve"]
    assert [each["most"] for each in curve] == sorted({each["most"] for each in curve})


def test_noise_and_signals(told):
    noise, (signal,) = told[0]["differential_privacy"], told[0]["signals"]
    needed = [each["noise"] for each in noise["needed"]]
    assert needed == sorted(needed, reverse=True)
    assert noise["epsilon"] > noise["needed_epsilon"]  # cohorts of one size, against Poisson ones
    reference = signal["signal_to_noise"][0]
    spread = np.sqrt(signal["keys_of_a_client"] * signal["row_words"])
    assert reference["hottest"] == pytest.approx(signal["clients_on_a_row"]["hottest"] / spread)
    assert reference["hottest"] > reference["median"] > 0


def test_a_task_without_keys_where_noise_cannot_be_accounted_for(monkeypatch):
    def missing(facts):
        raise UserError("a package is missing")

    monkeypatch.setattr(privacy_options, "tell_noise", missing)
    told = compare_options("next-word-planted", None, NO_KEYS)
    assert [option["settings"]["serving.way"] for option in told["options"]] == ["broadcast", "broadcast"]
    noise, *others = told["left_out"]
    assert noise == {"name": "differential privacy", "why": "a package is missing"}
    assert [each["name"] for each in others] == [OPTIONS[0].name, OPTIONS[3].name]
    assert all("keyed" in each["why"] for each in others)
    assert told["crossings"] == told["signals"] == []
    assert {option["epsilon"] for option in told["options"]} == {None}
    assert row(told, "plain")["sees"] == {"server": "every client's update"}


def test_a_cohort_of_one_has_no_sum_to_hide_in(facts):
    alone = facts._replace(config=facts.config.changed({"cohort.size": 1}))
    with pytest.raises(UserError, match="at least 2 clients"):
        OPTIONS[2].traffic(alone)


def test_mistakes():
    with pytest.raises(UserError, match="unknown task"):
        compare_options("plantd")
    with pytest.raises(UserError, match="a round asks 61 clients"):
        compare_options("planted", None, {**PLANTED, "cohort.size": 61})
