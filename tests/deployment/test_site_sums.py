"""Devices of many clients that report sums: the model is the plain backend's, whoever is left out."""

from __future__ import annotations

import json
import threading

import numpy as np
import pytest

from partwise.checkpoint import from_bytes, to_bytes
from partwise.deployment.agent import Agent, run_agent
from partwise.deployment.book import TaskRow
from partwise.deployment.coordinator import Job, Work
from partwise.deployment.http_link import HttpLink
from partwise.deployment.journal import Journal, found_journal
from partwise.deployment.link import read_answer, write_answer
from partwise.deployment.own_store import opened
from partwise.deployment.rules import make_rules
from partwise.runs.resolve import resolve
from partwise.server.messages import About, Invitation
from partwise.server.report_form import ReportForm
from partwise.server.round import Accepted
from partwise.simulation.plain import PlainSimulation
from partwise.simulation.site import Site
from partwise.types import UserError

ROUNDS, COHORT, CLIENTS = 3, 10, 24  # of 30 clients 24 train
HALVES = np.array_split(np.arange(CLIENTS), 2)
SUM = {"deploy.reports": "sum", "cohort.size": COHORT}


def plain_params(run):
    """What the plain backend makes of the same clients, by name, as a coordinator draws them."""
    store = run.prepared.store
    store = store.take(np.argsort([str(name) for name in store.client_ids.tolist()]))
    made = (run.prepared.build, run.prepared.rates, store, run.prepared.recruiting)
    simulation = PlainSimulation(*made, seed=run.hub.coordinator.rules.seed)
    for _ in simulation.run(ROUNDS):
        pass
    return simulation.state.params


def trained(run, folder):
    """What two agents with half of the clients each have done, with tables and stores of their own."""
    folder.mkdir()
    done = []

    def work(number):
        table = folder / f"{number}.csv"
        table.write_text("\n".join(run.lines(HALVES[number])))
        done.extend(run_agent(run.link(), str(table), folder / f"own {number}", most=3))

    agents = [threading.Thread(target=work, args=(number,)) for number in (0, 1)]
    for agent in agents:
        agent.start()
    for agent in agents:
        agent.join()
    return done


def together(federate, folder, **settings):
    """A run that two agents have trained: itself, what they did, and the records of its rounds."""
    run = federate(folder.name, SUM | settings, quorum=COHORT, population=CLIENTS)
    done = trained(run, folder.with_suffix(".devices"))
    return run, done, run.hub.records()


def assert_close(found, wanted):
    for path, leaf in wanted.items():
        np.testing.assert_allclose(np.asarray(found[path]), np.asarray(leaf), rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"server.mean": "holders"},
        {"server.mean": "holders", "serving.way": "pregenerated"},
        {"algorithm": "fed_per"},
        {"server.mean": "heat"},
    ],
    ids=lambda settings: " ".join(settings.values()) or "as it is",
)
def test_sums_of_two_agents_make_the_plain_backends_model(federate, tmp_path, settings):
    run, done, records = together(federate, tmp_path / "sums", **settings)
    assert all(each.accepted for each in done)
    assert len(done) == sum(record["reports"] for record in records) <= 2 * ROUNDS
    assert [(record["invited"], record["clients"]) for record in records] == [(COHORT, COHORT)] * ROUNDS
    assert_close(run.hub.state(ROUNDS).params, plain_params(run))


@pytest.mark.slow
@pytest.mark.parametrize(("algorithm", "kind"), [("fed_recon", "local"), ("fed_per", "kept")])
def test_sums_have_fewer_bytes_and_clients_keep_what_they_would_alone(federate, tmp_path, algorithm, kind):
    _, _, sums = together(federate, tmp_path / "sums", algorithm=algorithm)
    alone, each, records = together(
        federate, tmp_path / "each", **{"deploy.reports": "clients", "algorithm": algorithm}
    )
    assert [record["reports"] for record in records] == [COHORT] * ROUNDS
    size = lambda rounds: sum(record["bytes_up"] for record in rounds)
    assert size(sums) < 0.7 * size(records)
    for number in (0, 1):
        held = []
        for folder in ("sums", "each"):
            with opened(tmp_path / f"{folder}.devices" / f"own {number}") as own:
                own.belong(*json.loads((own.place("belongs.json")).read_bytes()).values())
                names = alone.prepared.store.gather(HALVES[number]).client_ids.tolist()
                held.append({str(name): own.get(kind, str(name)) for name in names})
        ours, theirs = ({name: each for name, each in some.items() if each} for some in held)
        assert set(ours) == set(theirs) == {each.client for each in each} & set(held[0])
        for name, found in ours.items():
            assert found.said["version"] == theirs[name].said["version"]
            assert_close(found.arrays, theirs[name].arrays)


@pytest.mark.parametrize("here", [1, 3])
def test_clients_that_are_gone_are_left_out_of_the_sum(federate, here, caplog):
    """The device has said that it has more clients than it has now. One alone says who holds its rows, too."""
    settings = SUM | {"server.mean": "holders", "rounds": 1, "cohort.size": here + 2}
    run = federate(settings=settings)
    link, store = run.link(), run.prepared.store.gather(np.arange(here))
    link.join(["ann", "bob"])
    [done] = Agent(link, run.prepared.build(run.prepared.rates), store).run()
    assert (done.accepted, done.client) == (True, f"{here + 2} clients")
    [record] = run.hub.records()
    assert (record["invited"], record["clients"], record["empty"], record["missing"]) == (
        here + 2,
        here,
        2,
        0,
    )
    assert (
        "2 clients of a task: not here any more, or with too few examples, and not in its sum" in caplog.text
    )


# Devices that lie


def changed(report, **arrays):
    found, told = from_bytes(report)
    return to_bytes({**found, **arrays}, told)


def first(array, value):
    """An array with another first value."""
    return np.concatenate([np.array([value], array.dtype), array[1:]])


def without(report, name):
    arrays, told = from_bytes(report)
    return to_bytes({each: array for each, array in arrays.items() if each != name}, told)


HELD = "#held:item"
FORGERIES = {
    "more clients than the task has": (
        lambda report, arrays: changed(report, **{"#sums": arrays["#sums"] + np.float32([0, 1, 0, 0])}),
        "weight",
    ),
    "half a client": (
        lambda report, arrays: changed(report, **{"#sums": arrays["#sums"] - np.float32([0, 0.5, 0, 0])}),
        "weight",
    ),
    "held by less than nothing": (
        lambda report, arrays: changed(report, **{HELD: first(arrays[HELD], -1)}),
        "weight",
    ),
    "held by more than the whole": (
        lambda report, arrays: changed(report, **{HELD: first(arrays[HELD], 1e6)}),
        "weight",
    ),
    "held by NaN": (
        lambda report, arrays: changed(report, **{HELD: first(arrays[HELD], np.nan)}),
        "not finite",
    ),
    "held by nobody": (lambda report, arrays: without(report, HELD), "malformed"),
    "held by too few": (lambda report, arrays: changed(report, **{HELD: arrays[HELD][:-1]}), "malformed"),
}


def test_forged_sums_are_refused_by_name_and_change_nothing(federate):
    run = federate(settings=SUM | {"server.mean": "holders", "cohort.size": 5})
    link, store = run.link(), run.prepared.store
    names = [str(name) for name in store.client_ids.tolist()]
    link.join(names)
    while not isinstance(given := link.poll(True, 10), Work):  # the round opens a moment later
        pass
    [job] = given.jobs
    assert (job.invitation.client, len(job.clients)) == ("", 5)
    site = Site(run.prepared.build, run.prepared.rates, store)
    asked = site.ask([names.index(each) for each in job.clients], job.invitation.seed, job.invitation.round)
    total = site.total(link.slices(job.invitation.about.task, asked.keys), asked)
    form = ReportForm(site.algorithm.aggregator, site.algorithm.partition)
    honest = form.write(job.invitation.about, total.sent)
    tasks = lambda: run.hub.clerk.do(lambda book: book.tasks("train", 0, 0))
    before = tasks()
    for what, (forge, reason) in FORGERIES.items():
        found = link.report(forge(honest, from_bytes(honest)[0]))
        assert getattr(found, "reason", None) == reason, what
        assert tasks() == before, what
    assert link.report(honest) == Accepted("", valid=True)
    assert link.report(honest) == Accepted("", valid=True)  # it may not have heard


# Servers that lie


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda job: job._replace(clients=job.clients * 2), "malformed"),
        (lambda job: job._replace(kind="evaluate"), "malformed"),
        (lambda job: job._replace(clients=("eve", "mallory")), "client"),
        (lambda job: job._replace(clients=()), "client"),
    ],
    ids=["twice", "evaluate", "not here", "nobody"],
)
def test_tasks_of_several_that_make_no_sense_are_declined(federate, change, reason):
    class Bent(HttpLink):
        def poll(self, *said):
            given = super().poll(*said)
            return (
                Work([change(job) for job in given.jobs], given.lease) if isinstance(given, Work) else given
            )

    run = federate(settings=SUM | {"cohort.size": 5})
    link = Bent(run.url, run.key(), hold=0.2)
    agent = Agent(link, run.prepared.build(run.prepared.rates), run.prepared.store, sleep=lambda _: None)
    done = next(iter(agent.run()))
    assert (done.accepted, done.reason) == (False, reason)


def test_the_clients_of_a_task_are_in_the_answer_to_a_poll():
    job = Job("train", Invitation(About("run", 1, "task", "model"), "", 3, 1), "file", ("ann", "bob"))
    answer = write_answer(Work([job], 5.0))
    assert read_answer(answer) == Work([job], 5.0)
    for wrong in ("ann", [1, 2], None, {"ann": 1}):
        told = json.loads(answer)
        told["tasks"][0]["clients"] = wrong
        with pytest.raises(UserError, match="clients are not a list of names"):
            read_answer(json.dumps(told).encode())


# Settings


def test_what_sums_cannot_do_is_refused():
    _, config = resolve("planted", None, {"deploy.reports": "sum", "deploy.buffer": 4})
    with pytest.raises(
        UserError, match=r"deploy.reports = sum needs rounds: a buffer of 4 .* deploy.buffer to 0"
    ):
        make_rules(config)
    _, config = resolve("planted", None, {"deploy.reports": "some"})
    with pytest.raises(UserError, match=r"deploy.reports"):
        make_rules(config)


def test_tasks_of_a_journal_from_before_there_were_sums_are_of_one_client(tmp_path):
    url, row = f"sqlite:///{tmp_path}/journal.db", TaskRow("id", "train", 0, 0, 0, "ann", "device")
    journal = found_journal(url, "run")
    with journal.transaction() as book:
        book.put_tasks([row])
        for column in ("tasks DROP COLUMN clients", "round DROP COLUMN stage", "round DROP COLUMN staged"):
            book.connection.exec_driver_sql(f"ALTER TABLE {column}")
        book.connection.exec_driver_sql("UPDATE about SET tables = 2")
    journal.close()
    journal = Journal(url, "run")
    with journal.transaction() as book:
        assert book.tasks("train", 0, 0) == [row]
        assert book.tally("train", 0, 0, -1.0) == (1, 0, 0)
    journal.close()
