"""Algorithms by name: each trains a small task, and what does not fit together is refused before anything runs."""

import jax.numpy as jnp
import numpy as np
import pytest

from partwise import load
from partwise.algorithms.entry import AlgorithmEntry
from partwise.algorithms.registry import ALGORITHMS, find_algorithm, prepare, recorded, settings_for
from partwise.client import update
from partwise.client.batches import Batches
from partwise.client.evaluate import evaluate
from partwise.client.split import everything
from partwise.client.state import begin
from partwise.config.parts import VALUES
from partwise.config.settings import Config
from partwise.data.heat import coefficients
from partwise.model.partition import partition
from partwise.model.spec import Metric, Model
from partwise.reports.describe import list_settings
from partwise.runs.evaluation import evaluate_run
from partwise.runs.resolve import resolve
from partwise.runs.train import train
from partwise.selection.key_heat import count_heats
from partwise.simulation.loop import Simulation
from partwise.tasks import Setting, Task, load_task
from partwise.types import RunWarning, UserError

PLANTED = {"num_clients": 40, "num_items": 20, "mean_examples": 12, "dim": 2}
SMALL = {"rounds": 2, "cohort.size": 4, "simulation.lanes": 2, "simulation.rounds_per_call": 2}


@pytest.fixture(scope="module")
def liked(liked_folder):
    return load_task("movielens-liked", str(liked_folder))


def configured(task, algorithm, **changes):
    given = settings_for(task.defaults, algorithm) | SMALL
    changes = {key.replace("__", "."): value for key, value in changes.items()}
    return Config(task=task.name).owning(find_algorithm(algorithm).own).changed(given | changes)


def prepared(task, algorithm, **changes):
    return prepare(task, configured(task, algorithm, **changes))


def test_settings_of_evaluation_without_effect_are_refused(liked, liked_folder):
    with pytest.raises(UserError, match=r"evaluation\.local = tuned says .* 'movielens-liked' has"):
        prepared(liked, "fed_avg", evaluation__local="tuned")
    seen = load_task("movielens-seen", str(liked_folder), dim=2)
    for algorithm in ("fed_avg", "fed_per", "central"):
        with pytest.raises(UserError, match=r"fine_tune\.max_steps = 3 .* judges seen ones"):
            prepared(seen, algorithm, fine_tune__max_steps=3)
    with pytest.raises(UserError, match=r"'movielens-seen' has seen ones alone"):
        prepared(seen, "fed_avg", evaluation__local="trained")
    with pytest.raises(UserError, match=r"unknown value of evaluation\.local 'kept'"):
        prepared(seen, "fed_avg", evaluation__local="kept")


@pytest.mark.parametrize(
    "algorithm", ["fed_avg", "fed_yogi", "fed_sub_avg", "fed_prox", "scaffold", "central"]
)
def test_a_choice_of_keys_without_effect_is_refused(algorithm):
    """The task's own choice is for fed_select; who asks for another is told."""
    task = load_task("tags-planted", num_clients=20, num_words=200)
    assert task.defaults["select.word"] == "top:1000"
    prepared(task, algorithm)
    with pytest.raises(
        UserError, match=rf"select\.word = top:5 chooses keys, and clients of {algorithm} have all"
    ):
        prepared(task, algorithm, select__word="top:5")
    with pytest.raises(UserError, match=r"select\.wrod = own chooses keys"):
        prepared(task, algorithm, select__wrod="own")


KEEPING = ("fed_per", "lg_fed_avg", "fed_rep")
OTHERS = (
    "fed_recon",
    "central",
    "count_heat",
    *KEEPING,
)  # for unseen clients, of one client, without a model, with something local


@pytest.mark.parametrize("algorithm", [name for name in ALGORITHMS if name not in OTHERS])
def test_every_algorithm_trains_two_rounds(liked, algorithm):
    run = train(liked, changes={**SMALL, "algorithm": algorithm, "update.max_steps": 3})
    assert [record["round"] for record in run.records] == [1, 2]
    assert all(np.isfinite(record["train"]["loss"]) for record in run.records)
    assert np.any(run.params["weights"] != 0)
    assert np.isfinite(run.test["auc"])


@pytest.mark.parametrize("algorithm", KEEPING)
def test_clients_that_keep_their_part_are_judged_with_it(liked_folder, tmp_path, algorithm):
    """A run of seen users is evaluated again with what its checkpoint holds."""
    changes = {**SMALL, "algorithm": algorithm, "data.dim": 2}
    run = train("movielens-seen", data=str(liked_folder), out=tmp_path / "run", changes=changes)
    assert set(run.params) == {"item", "item_bias", "mean", "default/user", "default/user_bias"}
    assert evaluate_run(tmp_path / "run") == run.test
    for folder in (tmp_path / "run" / "checkpoints").iterdir():
        folder.unlink()
    with pytest.raises(UserError, match=r"are evaluated with what they kept.*are gone"):
        evaluate_run(tmp_path / "run")


def of_what_was_kept(run):
    """The test RMSE, by predicting every client's test examples with what it kept."""
    errors, test = [], run.task.test
    with pytest.warns(RunWarning, match=r"had kept.*rebuilds.*was not evaluated"):
        me = run.personal
    for place, client in enumerate(test.client_ids.tolist()):
        if test.counts[place]:
            mine = test.gather(np.array([place]))
            errors.append(me.predict(run.kept(client), mine) - mine.columns["rating"])
    return np.sqrt(np.mean(np.square(np.concatenate(errors))))


@pytest.mark.parametrize("algorithm", KEEPING)
def test_what_a_client_kept_is_the_model_that_was_evaluated(liked_folder, tmp_path, algorithm):
    """Of a run at hand and of one that is opened again. Every client took part."""
    changes = {**SMALL, "algorithm": algorithm, "data.dim": 2, "cohort.size": 24}
    run = train("movielens-seen", data=str(liked_folder), out=tmp_path / "run", changes=changes)
    again = load(tmp_path / "run")
    assert of_what_was_kept(run) == pytest.approx(run.test["rmse"], rel=1e-5)
    assert of_what_was_kept(again) == pytest.approx(run.test["rmse"], rel=1e-5)
    assert again.clients("test").equals(run.clients("test"))
    with pytest.raises(UserError, match=r"client 999 is not one of the 24"):
        run.kept(999)


def ditto(task, config):
    """Every client has a second copy of all shared leaves, trained on its own data, and is evaluated with it."""
    setting = task.personal
    inner = find_algorithm("fed_avg").prepare(task, config)
    paths = setting.partition.of("shared")

    def build(rates):
        common = inner.build(rates)

        def own(client):
            start = begin(client)
            return start._replace(shared={path: client.kept[path] for path in paths})

        def client_update(client):
            step = update.by_steps(Batches(4), 0.1)
            trained = step(client, own(client), everything).progress
            return common.client(client)._replace(keep=trained.shared)

        return common._replace(
            client=client_update,
            evaluate=lambda client: evaluate(client, own(client), everything),
            keeps=paths,
            judged_with=paths,
        )

    return inner._replace(build=build, evaluation=build)


def test_who_keeps_a_model_of_its_own_is_evaluated_with_that(make_store, monkeypatch):
    monkeypatch.setitem(ALGORITHMS, "ditto", AlgorithmEntry("Ditto (Li et al., 2021)", ditto))
    rng = np.random.default_rng(3)
    store = make_store(
        [5, 3, 4, 6], x=rng.normal(size=18).astype("f4"), rating=rng.normal(size=18).astype("f4")
    )
    squared = lambda outputs, batch: jnp.square(outputs - batch["rating"])
    model = Model(
        lambda rng: {"slope": jnp.zeros(()), "base": jnp.zeros(())},
        lambda params, batch, rng: params["slope"] * batch["x"] + params["base"],
        squared,
        {"rmse": Metric(squared, jnp.sqrt)},
    )
    setting = Setting(model, partition(model, {}), ("x", "rating"))
    task = Task("lines", store, store, store, setting, setting, seen=True)
    run = train(task, changes={**SMALL, "algorithm": "ditto", "cohort.size": 4})
    assert run.test["judged"]["local"] == "as the client kept it"
    assert of_what_was_kept(run) == pytest.approx(run.test["rmse"], rel=1e-5)
    assert len({float(run.kept(client)["base"]) for client in store.client_ids.tolist()}) == 4


ON_SERVER = {"scaffold": {"scaffold.control": "server"}}  # its clients would not learn rows of their own


@pytest.mark.parametrize("algorithm", ["fed_prox", "scaffold", *KEEPING])
def test_a_task_with_a_local_part_is_evaluated_as_another_algorithm_would(tmp_path, algorithm):
    """Training has what evaluation, which rebuilds local parts, does not know: a pull, control variates."""
    changes = (
        {f"data.{name}": value for name, value in PLANTED.items()} | SMALL | ON_SERVER.get(algorithm, {})
    )
    run = train("planted", out=tmp_path / "run", changes={**changes, "algorithm": algorithm})
    assert evaluate_run(tmp_path / "run")["rmse"] == pytest.approx(run.test["rmse"], rel=1e-6)
    mine = run.task.test.gather(np.array([0])).select(("item", "rating"))
    assert set(run.personal.personalize(mine)) == {"user"}


def test_scaffold_is_evaluated_without_the_control_variates_of_clients(tmp_path):
    changes = {"data.num_clients": 30, "data.num_words": 100, "data.num_tags": 5, "algorithm": "scaffold"}
    run = train("tags-planted", out=tmp_path / "run", changes={**SMALL, **changes})
    again = evaluate_run(tmp_path / "run")
    assert again["recall_at_5"] == pytest.approx(run.test["recall_at_5"], rel=1e-6)
    assert again["loss"] == pytest.approx(run.test["loss"], rel=1e-6)


def test_scaffold_refuses_rows_that_one_client_alone_has():
    """Their gradient would be replaced by a mean over all clients, in which it is next to nothing."""
    changes = {f"data.{name}": value for name, value in PLANTED.items()} | SMALL
    with pytest.raises(UserError, match=r"mean of all 32.*key space user.*scaffold\.control = server"):
        train("planted", changes={**changes, "algorithm": "scaffold"})


@pytest.mark.parametrize(
    ("algorithm", "changes", "says"),
    [
        (
            "fed_avg",
            {"update.proximal": 0.1},
            r"is a setting of fed_prox: leave it out with fed_avg",
        ),
        ("fed_sub_avg", {"update.proximal": 0.1}, r"leave it out with fed_sub_avg, or use fed_prox"),
        ("fed_prox", {"update.method": "solve"}, r"fed_prox needs update\.method = steps, not solve"),
        ("scaffold", {"update.optimizer": "adam"}, r"scaffold needs update\.optimizer = sgd, not adam"),
        ("scaffold", {"update.method": "solve"}, r"scaffold needs update\.method = steps, not solve"),
        ("scaffold", {"server.mean": "heat"}, r"scaffold needs server\.mean = cohort, not heat"),
        ("scaffold", {"server.weighting": "examples"}, r"scaffold needs server\.weighting = uniform"),
        ("scaffold", {"scaffold.control": "both"}, r"unknown value of scaffold\.control 'both'"),
        ("fed_avg", {"server.mean": "heats"}, r"unknown value of server\.mean 'heats' \(nearest: heat"),
        (
            "fed_select",
            {"server.mean": "heat", "select.feature": "random:9"},
            r"select\.feature = random:9 they train others: use server\.mean = seen",
        ),
        ("fed_select", {"server.mean": "heat", "select.feature": "top:9"}, r"select\.feature = top"),
        ("fed_per", {}, r"clients of fed_per keep a local part, and task 'movielens-liked' has none"),
        ("fed_per", {"update.method": "solve"}, r"fed_per needs update\.method = steps, not solve"),
        ("fed_rep", {"evaluation.local": "tuned"}, r"with fed_rep it trains none: use rebuilt"),
        ("fed_rep", {"update.joint": True}, r"nothing of this task's model is local"),
    ],
)
def test_what_does_not_fit_is_refused(liked, algorithm, changes, says):
    with pytest.raises(UserError, match=says):
        train(liked, changes={**SMALL, "algorithm": algorithm, **changes})


@pytest.mark.parametrize(
    ("algorithm", "changes", "says"),
    [
        ("lg_fed_avg", {"update.joint": False}, r"lg_fed_avg trains local and shared parts together"),
        ("fed_rep", {"update.joint": True}, r"leave update\.joint = false, or use fed_per"),
        ("fed_rep", {"reconstruct.method": "skip"}, r"fed_rep needs reconstruct\.method = steps or solve"),
        (
            "scaffold",
            {},
            r"Of rows that one client alone has \(key space user\).*Use scaffold\.control = server",
        ),
    ],
)
def test_what_does_not_fit_a_task_with_a_local_part_is_refused(algorithm, changes, says):
    options = {f"data.{name}": value for name, value in PLANTED.items()}
    with pytest.raises(UserError, match=says):
        train("planted", changes={**SMALL, **options, "algorithm": algorithm, **changes})


@pytest.mark.parametrize("mean", ["heat", "seen"])
def test_a_task_without_keys_has_no_heat(mean):
    task = load_task("planted", **PLANTED)
    setting = task.stateful._replace(partition=partition(task.stateful.model, {}))  # all shared
    with pytest.raises(UserError, match=rf"server\.mean = {mean} corrects.*the task has none: use cohort"):
        prepared(task._replace(stateful=setting), "fed_avg", server__mean=mean)


@pytest.mark.parametrize("cap", ["0.5", "0", "-1"])
def test_a_cap_below_1_is_refused(cap):
    with pytest.raises(UserError, match=r"'server\.cap' must be between 1 and"):
        Config().changed({"server.cap": cap})


@pytest.mark.parametrize(("weighting", "by"), [("uniform", "clients"), ("examples", "samples")])
def test_heat_is_counted_by_what_clients_weigh_and_capped(liked, weighting, by):
    built = prepared(liked, "fed_sub_avg", server__weighting=weighting, server__cap=3)
    algorithm = built.build(built.rates)
    heat = count_heats(built.store, algorithm.partition, by)["feature"]
    carried = algorithm.aggregator.init(algorithm.partition)
    np.testing.assert_array_equal(carried["factors"]["feature"], coefficients(heat, cap=3))
    assert float(carried["factors"]["feature"].max()) == 3


def test_fed_sub_avg_is_fed_avg_with_heat(liked):
    named, said, plain = (
        prepared(liked, "fed_sub_avg"),
        prepared(liked, "fed_avg", server__mean="heat"),
        prepared(liked, "fed_avg"),
    )
    carried = [
        algorithm.aggregator.init(algorithm.partition)
        for algorithm in (each.build(each.rates) for each in (named, said, plain))
    ]
    np.testing.assert_array_equal(*(each["factors"]["feature"] for each in carried[:2]))
    assert not carried[2]


def test_central_rounds_of_so_many_batches(liked):
    """A round is the next update.max_steps batches of all examples; without it, it is an epoch."""
    whole = prepared(liked, "central")
    assert whole.store.counts.tolist() == [liked.train.num_examples]
    some = prepared(liked, "central", update__max_steps=5, update__batch_size=8)
    assert (some.recruiting.size, some.store.num_examples) == (1, liked.train.num_examples)
    assert set(some.store.counts[:-1]) == {40}
    assert 0 < some.store.counts[-1] <= 40
    alone = {key: value for key, value in SMALL.items() if key != "cohort.size"}
    run = train(
        liked, changes={**alone, "algorithm": "central", "update.max_steps": 5, "update.batch_size": 8}
    )
    assert all(record["examples"] in (40, some.store.counts[-1]) for record in run.records)
    assert np.isfinite(run.test["auc"])


@pytest.mark.parametrize(("epochs", "begin"), [(1, "first"), (None, "first"), (3, "random")])
def test_central_rounds_use_every_example_once_before_any_again(liked, epochs, begin):
    """What rounds train on, written down by the model itself: its gradient counts how often it saw an example."""
    total = liked.train.num_examples
    column = np.arange(total, dtype=np.int32)
    store = liked.train.gather().with_columns(features=column)
    model = Model(
        lambda rng: {"seen": jnp.zeros(total)},
        lambda params, batch, rng: -params["seen"][batch["features"]],
        lambda outputs, batch: outputs,
    )
    setting = Setting(model, partition(model, {}), ("features",))
    task = liked._replace(train=store, personal=setting, stateful=setting)
    batches = {"update__max_steps": 3, "update__batch_size": 7, "update__epochs": epochs}
    some = prepared(task, "central", update__rate=7.0, update__begin=begin, **batches)
    simulation = Simulation(some.build, some.rates, some.store, some.recruiting, seed=3)
    rounds = some.store.num_clients
    assert rounds == -(-total // 21)
    for number in range(1, 2 * rounds + 1):
        list(simulation.run(1))
        seen = np.asarray(simulation.state.params["seen"])
        if number % rounds == 0:
            assert (seen >= number // rounds * 0.99).all()  # the mean over a last, smaller batch is larger
        assert (seen > 0.5).sum() <= number * 21


@pytest.mark.parametrize(("epochs", "begin"), [(2, "first"), (None, "first"), (2, "random")])
def test_a_central_round_of_more_batches_than_an_epoch_has_them_all(liked, epochs, begin):
    """The model counts its own steps. A limit above two epochs is two epochs; without epochs, the limit is met."""
    model = Model(
        lambda rng: {"steps": jnp.zeros(())},
        lambda params, batch, rng: -params["steps"] + 0.0 * batch["liked"],
        lambda outputs, batch: outputs,
    )
    setting = Setting(model, partition(model, {}), ("liked",))
    task = liked._replace(personal=setting, stateful=setting)
    per_epoch = -(-liked.train.num_examples // 16)
    most = 2 * per_epoch + (5 if epochs else 0)
    batches = {
        "update__batch_size": 16,
        "update__rate": 1.0,
        "update__begin": begin,
        "update__epochs": epochs,
    }
    some = prepared(task, "central", update__max_steps=most, **batches)
    simulation = Simulation(some.build, some.rates, some.store, some.recruiting, seed=3)
    list(simulation.run(3))
    assert simulation.state.params["steps"] == pytest.approx(3 * 2 * per_epoch)


def test_a_record_of_an_older_version_had_the_settings_of_all_algorithms():
    """Those of others say nothing; the algorithm's own are read, checked and written again."""
    old = Config(algorithm="fed_prox").flat() | {"scaffold.control": "clients", "update.passes": 1}
    config = recorded(old | {"update.proximal": "0.3"})
    assert config.own == {"update.proximal": 0.3}
    assert recorded(config.flat()) == config
    assert "proximal = 0.3" in config.to_toml()
    with pytest.raises(UserError, match=r"'update\.proximal' must be between 0 and"):
        recorded(old | {"update.proximal": -1})
    with pytest.raises(UserError, match=r"unknown configuration key 'update\.proximl'"):
        resolve("planted", None, {"update.proximl": 1})


def test_an_algorithm_s_own_settings_are_listed_with_it_alone():
    listed = lambda algorithm: {line["key"] for line in list_settings("planted", algorithm)}
    assert "update.proximal" in listed("fed_prox")
    assert "update.proximal" not in listed("fed_avg")
    assert "update.passes" in listed("fed_recon")


@pytest.mark.parametrize("algorithm", sorted(ALGORITHMS))
def test_no_known_value_is_said_to_be_unknown(algorithm):
    """A value that one algorithm takes is at most one that another does not: then its error says what it needs."""
    options = {f"data.{name}": value for name, value in PLANTED.items()}
    for key, values in VALUES.items():
        for value in (*values, "nonsense"):
            told = ""
            try:
                task, config = resolve("planted", None, {**options, "algorithm": algorithm, key: value})
                made = prepare(task, config)
                made.build(made.rates)
            except UserError as error:
                told = str(error)
            if value != "nonsense":
                assert "unknown" not in told, told
            if " needs " in told:
                assert f"{key} = " in told
                assert f"not {value}: " in told
