"""Serving as accounting and as a choice: of a run, of the plain loop, and before any run."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from partwise.algorithm import init_params
from partwise.algorithms.registry import prepare
from partwise.device import Device
from partwise.randomness import INIT_ROUND, round_rng
from partwise.reports.serving_costs import compare_serving
from partwise.runs.resolve import resolve
from partwise.runs.train import train
from partwise.selection.serving import KEY_BYTES, WAYS, serve, sizes_of
from partwise.server.cohort import Recruiting, recruit
from partwise.server.messages import open_message, read_invitation
from partwise.server.report_form import SUMS
from partwise.server.round import Accepted, Server
from partwise.server.step import init_state
from partwise.server.total import Aggregator, Contribution
from partwise.simulation.loop import Simulation
from partwise.simulation.plain import PlainSimulation, plain_round
from partwise.types import UserError

PLANTED = {"data.num_clients": 60, "data.num_items": 30, "data.mean_examples": 12, "data.dim": 4}
PLANTED |= {"cohort.size": 6, "rounds": 3, "simulation.lanes": 3}
TAGS = {"data.num_clients": 40, "data.num_words": 60, "data.num_tags": 8, "data.mean_examples": 6}
TAGS |= {"data.words_per_example": 10, "cohort.size": 5, "select.word": "sample:9"}
WRITERS = {"data.num_clients": 20, "data.median": 20, "data.network": "2nn", "cohort.size": 4}
NUMBERS = "seconds", "evaluation", "train", "norms"  # of training, which differ in the last digits


def run(**changes):
    return train("planted", changes={**PLANTED, **changes})


@pytest.fixture(scope="module")
def runs():
    """The same run, compiled and plain."""
    return run(), run(**{"simulation.backend": "plain"})


def test_compiled_and_plain_records_tell_the_same(runs):
    for compiled, plain in zip(*(each.records for each in runs), strict=True):
        assert compiled.keys() == plain.keys()
        alike = [{name: each[name] for name in each if name not in NUMBERS} for each in (compiled, plain)]
        assert alike[0] == alike[1]
        assert compiled["norms"] == pytest.approx(plain["norms"], rel=1e-5)
        assert set(compiled["serving"]) == set(WAYS)


def test_the_command_counts_what_a_run_counts(runs):
    told = compare_serving("planted", None, PLANTED, rounds=3)
    lines = {line["way"]: line for line in told["lines"] if line["encoding"] == "take"}
    for way, line in lines.items():
        of_run = [record["serving"][way] for record in runs[0].records]
        assert line["bytes_per_round"] * 3 == sum(each["bytes_down"] + each["bytes_up"] for each in of_run)
        assert line["peak"] == max(each["peak"] for each in of_run)
    assert runs[0].summary["bytes_down_per_client"] == lines["on_demand"]["down_per_client"]


@pytest.mark.parametrize("way", WAYS)
def test_the_way_says_whose_bytes_are_told(runs, way):
    other = run(**{"serving.way": way, "rounds": 1})
    (record,), first = other.records, runs[0].records[0]
    assert record["bytes_down"] == first["serving"][way]["bytes_down"]
    assert record["bytes_up"] == first["serving"][way]["bytes_up"]
    assert record["train"] == pytest.approx(first["train"])
    assert other.summary["serving"] == way


@pytest.mark.parametrize("psi", ["take", "int8"])
def test_messages_are_what_is_counted_but_for_their_headers(psi):
    from partwise.model.partition import with_psi
    from partwise.model.psi import PSIS

    task, config = resolve("planted", None, PLANTED)
    prepared = prepare(task, config)
    algorithm = prepared.build(prepared.rates)
    algorithm = algorithm._replace(partition=with_psi(algorithm.partition, PSIS[psi]))
    rng = round_rng(0, INIT_ROUND)
    state = init_state(algorithm.partition, algorithm.optimizer, init_params(algorithm, rng))
    done = plain_round(Server(algorithm), Device(algorithm), state, prepared.store, [0, 1, 2], rng).closed
    served = serve(sizes_of(algorithm.partition), 3, done.demands)["on_demand"]
    assert 0 < done.bytes_down - served.bytes_down < 3 * 600
    assert 0 < done.bytes_up - (served.bytes_up - KEY_BYTES * served.requests) < 3 * 600


BINS = 64


def histograms():
    """How many clients moved each number by how much, in bins: the mean is that of the bins' middles."""
    middles = jnp.linspace(-1, 1, BINS)

    def binned(change):
        return jax.nn.one_hot(jnp.searchsorted(middles, change), BINS)

    def encode(report, rng):
        used = (report.weight > 0) * 1.0
        update = {path: used * binned(leaf) for path, leaf in report.update.items()}
        return Contribution(update, used, used, report.loss, jnp.asarray(True))

    def decode(partition, total, carried, rng):
        return {path: bins @ middles / total.clients for path, bins in total.update.items()}, carried

    return Aggregator(encode, decode, zero=lambda leaf: jnp.zeros((*leaf.shape, BINS) if leaf.shape else ()))


@pytest.mark.parametrize("backend", [Simulation, PlainSimulation])
def test_an_aggregator_that_sends_more_is_billed_for_more(backend):
    """What is recorded is the size of the arrays in the reports."""
    task, config = resolve("planted", None, PLANTED)
    prepared = prepare(task, config)
    build = lambda rates: prepared.build(rates)._replace(aggregator=histograms())
    simulation = backend(build, prepared.rates, prepared.store, Recruiting(3), seed=0)
    record = next(iter(simulation.run(1)))[0]
    sizes, algorithm, rng = [], simulation.algorithm, round_rng(0, INIT_ROUND)
    state = init_state(algorithm.partition, algorithm.optimizer, init_params(algorithm, rng))
    server, device = Server(algorithm), Device(algorithm)
    names = prepared.store.client_ids[recruit(Recruiting(3), prepared.store.counts, 0, 0).clients].tolist()
    now = server.begin(state, 0, rng, 0)
    for name, data in zip(names, now.invite(names), strict=True):
        examples, invitation = prepared.store.gather([prepared.store.find(name)]), read_invitation(data)
        asked = device.ask(examples, 0, 0)
        report = device.report(now.serve(invitation.about.task, asked.keys), examples, asked)
        assert isinstance(now.accept(report), Accepted)
        arrays = open_message("report", report)[0]
        sizes.append(sum(each.nbytes for path, each in arrays.items() if path != SUMS))
        sizes.append(sum(each.nbytes for each in asked.keys.values()))
    assert record.bytes_up == sum(sizes)
    plain = serve(sizes_of(algorithm.partition), 3, now.close().demands)["on_demand"]
    assert record.bytes_up > BINS * (plain.bytes_up - KEY_BYTES * plain.requests)


def test_private_messages_are_what_is_counted_but_for_their_headers():
    pytest.importorskip("numba", reason="the extra `privacy` is not installed")
    from partwise.privacy.sealing import new_sealing_key
    from partwise.privacy.two_servers import Agreement, TableForm
    from partwise.server.messages import About
    from partwise.server.private_slices import (
        ask_privately,
        bucketed,
        helper_answer,
        plain_rows,
        read_question,
        row_bytes,
        write_joined,
    )

    task, config = resolve("planted", None, {**PLANTED, "privacy.keys": 7})
    prepared = prepare(task, config)
    algorithm = prepared.build(prepared.rates)
    partition, rng = algorithm.partition, round_rng(0, INIT_ROUND)
    params = init_params(algorithm, rng)
    agreement = Agreement("run", 1, 0, {"item": TableForm(30, 7, 4, row_bytes(partition, "item"))})
    private, public = new_sealing_key()
    question = ask_privately(agreement, public, About(task="one"), {"item": np.array([3, 5])})
    tables = bucketed(agreement, 0, plain_rows(partition, params))
    sizes = sizes_of(partition, algorithm.choose)
    arrays = open_message("private", question.message)[0]
    asked = read_question(agreement, question.message)
    theirs = helper_answer(agreement, private, tables, 0, "one", asked.public, asked.sealed)
    answer = write_joined(agreement, partition, params, tables, asked, theirs, rng, About(task="one"))
    assert sum(each.nbytes for each in arrays.values()) == sizes.seeds + sizes.to_both + sizes.sealed
    assert (
        sum(each.nbytes for each in open_message("slices", answer)[0].values()) == sizes.fixed + sizes.answer
    )


@pytest.mark.parametrize(("task", "changes"), [("tags-planted", TAGS), ("writers", WRITERS)])
def test_other_tasks(task, changes):
    told = compare_serving(task, None, changes, rounds=2)
    assert [(line["way"], line["encoding"]) for line in told["lines"][:4]] == [
        ("broadcast", "take"),
        ("broadcast", "float16"),
        ("broadcast", "int8"),
        ("on_demand", "take"),
    ]
    assert told["best"]["down"] == [("on_demand", "int8"), ("pregenerated", "int8")]
    assert told["best"]["work"] == ["broadcast"]
    assert told["best"]["private"] == ["broadcast", "private"]
    assert told["best"]["work_per_round"]["pregenerated"] == sum(told["keys"].values())


def test_mistakes():
    with pytest.raises(UserError, match="at least 1 round must be drawn, not 0"):
        compare_serving("planted", rounds=0)
    with pytest.raises(UserError, match=r"serving.way.*'cdn' \(known: broadcast, on_demand, pregenerated"):
        run(**{"serving.way": "cdn"})
