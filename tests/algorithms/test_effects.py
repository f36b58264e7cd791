"""A setting that somebody wrote and that nothing reads is refused, with the reason."""

from __future__ import annotations

from dataclasses import fields
from fnmatch import fnmatch

import pytest

from partwise.algorithms.effects import JUDGING, RULES, check_judging
from partwise.algorithms.registry import ALGORITHMS, all_algorithms, find_algorithm, prepare
from partwise.cli import main
from partwise.config.settings import Config, is_record, read_toml
from partwise.runs.resolve import resolve
from partwise.tasks import load_task, movielens
from partwise.types import UserError

TINY = {"num_clients": 40, "num_items": 20, "mean_examples": 12, "dim": 2}


@pytest.fixture(scope="module")
def ratings():
    return load_task("planted", **TINY)


@pytest.fixture(scope="module")
def tags():
    return load_task("tags-planted", num_clients=20, num_words=200, num_tags=5, mean_examples=5)


def refused(task, **changes) -> str:
    dotted = {key.replace("__", "."): value for key, value in changes.items()}
    with pytest.raises(UserError) as error:
        resolve(task, None, dotted)
    return str(error.value)


@pytest.mark.parametrize(
    ("key", "value", "others", "says"),
    [
        ("reconstruct.rate", 0.7, {}, "reconstruct.method = solve takes no steps"),
        ("reconstruct.optimizer", "adam", {"reconstruct.method": "skip"}, "= skip takes no steps"),
        ("reconstruct.max_steps", 7, {}, "takes no steps"),
        ("reconstruct.epochs", 7, {}, "takes no steps"),
        ("reconstruct.batch_size", 7, {}, "takes no steps"),
        ("reconstruct.pull", 7.0, {"reconstruct.method": "skip"}, "reconstruct.method = skip"),
        ("update.pull", 3.0, {}, "update.method = steps does not read it"),
        ("update.rate", 3.0, {"update.method": "solve"}, "update.method = solve takes no steps"),
        ("update.joint", True, {"algorithm": "fed_avg"}, "with fed_avg all parameters are the server's"),
        ("split.percent", 20, {"split.kind": "alternate"}, "split.kind = alternate has no percent"),
        ("split.batch_size", 2, {"split.kind": "halves"}, "halves has no batches"),
        (
            "split.batch_size",
            2,
            {"evaluation_split.kind": "halves"},
            "split.kind is none, and evaluation_split",
        ),
        (
            "split.kind",
            "halves",
            {"algorithm": "fed_avg", "evaluation_split.kind": "none"},
            "evaluation_split.kind",
        ),
        ("split.kind", "random", {"algorithm": "fed_avg"}, "only judged clients are split, and these in one"),
        ("evaluation_split.percent", 20, {}, "evaluation_split.kind = same does not read it"),
        ("evaluation_split.batch_size", 2, {"evaluation_split.kind": "halves"}, "= halves does not read it"),
        ("fine_tune.rate", 0.5, {}, "fine_tune.max_steps = 0 tunes nothing"),
        ("server.cap", 5.0, {}, "server.mean = cohort has no factors to bound"),
        (
            "server.weighting",
            "uniform",
            {"algorithm": "central"},
            "with central there is one client, and no mean",
        ),
        ("split.count", 2, {}, "has no count"),
        ("evaluation_split.count", 2, {"evaluation_split.kind": "halves"}, "= halves does not read it"),
        ("cohort.size", 5, {"algorithm": "central"}, "with central all examples are in one place"),
        ("privacy.mechanism", "blt", {}, "promised nothing without a clip"),
        ("privacy.clip_rate", 0.5, {"privacy.clip": 1.0}, "the clip stays with privacy.clip_quantile = 0"),
        ("privacy.buffers", 3, {"privacy.clip": 1.0}, "independent takes no noise back"),
        ("privacy.rows_share", 0.3, {"privacy.clip": 1.0}, "privacy.rows = all counts no holders"),
        ("deploy.concurrency", 5, {}, "deploy.buffer = 0 makes rounds"),
        ("deploy.staleness", 0.1, {}, "deploy.buffer = 0 makes rounds"),
        ("deploy.stalest", 5, {}, "deploy.buffer = 0 makes rounds"),
    ],
)
def test_what_nothing_reads_is_refused(ratings, key, value, others, says):
    with pytest.raises(UserError) as error:
        resolve(ratings, None, {**others, key: value})
    assert str(error.value).startswith(f"{key} = {value} would have no effect")
    assert says in str(error.value)
    assert "Leave it out." in str(error.value)


WITHOUT_CLIP = ("clip", "sums", "keys", "heat_epsilon", "heat_noise")  # these promise nothing by themselves
WORDS = {"mechanism": "blt", "rows": "filtered", "heat": "gaussian"}


@pytest.mark.parametrize(
    "name", [each.name for each in fields(Config().privacy) if each.name not in WITHOUT_CLIP]
)
def test_no_setting_of_a_promise_is_taken_where_nothing_is_promised(ratings, name):
    """Whoever writes one of them would believe that clients are promised something."""
    value = WORDS.get(name) or (getattr(Config().privacy, name) or 0) + 1
    with pytest.raises(UserError, match=r"needs a clip|would have no effect|must be"):
        prepare(*resolve(ratings, None, {f"privacy.{name}": value}))


def test_what_a_promise_reads_is_taken(ratings):
    private = {"privacy.clip": 1.0, "privacy.noise": 1.0, "server.weighting": "uniform"}
    for changes in (
        {"privacy.delta": 1e-3, "privacy.share": 0.2, "privacy.loss_bound": 3.0},
        {"privacy.clip_quantile": 0.5, "privacy.clip_rate": 0.5},
        {"privacy.rows": "filtered", "privacy.rows_share": 0.3, "privacy.rows_threshold": 1.0},
        {"privacy.mechanism": "blt", "privacy.buffers": 3, "cohort.sampling": "apart:3", "cohort.size": 5},
        {
            "server.mean": "heat",
            "privacy.heat": "gaussian",
            "privacy.heat_noise": 3.0,
            "privacy.heat_keys": 5,
        },
        {"server.mean": "heat", "privacy.heat": "response", "privacy.heat_epsilon": 2.0},
    ):
        prepare(*resolve(ratings, None, private | changes))
    count = {"algorithm": "count_heat", "privacy.epsilon": 2.0, "privacy.delta": 1e-3, "privacy.heat_keys": 5}
    prepare(*resolve(ratings, None, count))
    resolve(
        ratings,
        None,
        {"deploy.buffer": 5, "deploy.concurrency": 9, "deploy.stalest": 5, "deploy.staleness": 1.0},
    )


def test_a_setting_of_another_algorithm_is_refused(ratings):
    with pytest.raises(
        UserError, match=r"scaffold.control is a setting of scaffold: leave it out with fed_recon"
    ):
        resolve(ratings, None, {"scaffold.control": "server"})
    with pytest.raises(
        UserError, match=r"update.passes is a setting of fed_recon: leave it out with fed_avg"
    ):
        resolve(ratings, None, {"update.passes": 2, "algorithm": "fed_avg"})


@pytest.mark.parametrize(
    "key", ["reconstruct.rate", "reconstruct.method", "split.kind", "evaluation_split.kind"]
)
def test_nor_is_what_a_task_has_no_use_for(tags, key):
    value = {"rate": 0.5, "method": "solve", "kind": "halves"}[key.split(".")[1]]
    assert f"{key} = {value} would have no effect" in refused(tags, **{key: value})


@pytest.mark.parametrize("name", ["seen_users", "keyed_nothing"])
def test_other_facts_of_tasks(name, liked_folder):
    if name == "seen_users":
        task = load_task("movielens-seen", str(liked_folder))
        assert "not split" in refused(task, algorithm="fed_avg", evaluation_split__kind="halves")
        return
    task = load_task("next-word-planted", num_clients=20, num_words=20, units=4, embedding=4)
    assert "nothing of this task's model is keyed" in refused(task, serving__way="broadcast")
    assert "nothing of this task's model is keyed" in refused(task, server__mean="holders")


def test_what_is_read_is_taken(ratings, tags):
    for changes in (
        {"reconstruct.method": "steps", "reconstruct.rate": 0.3, "split.kind": "halves", "split.percent": 30},
        {"evaluation_split.kind": "alternate", "evaluation_split.batch_size": 2},
        {"server.mean": "heat", "server.cap": 9, "update.joint": True, "update.passes": 2},
        {"algorithm": "fed_avg", "reconstruct.pull": 2.0, "split.kind": "halves"},
        {"algorithm": "fed_avg", "fine_tune.max_steps": 3, "fine_tune.rate": 0.2, "fine_tune.joint": True},
        {"algorithm": "scaffold", "scaffold.control": "server"},
        {"algorithm": "central", "update.batch_size": 7},
    ):
        _, config = resolve(ratings, None, changes)
        assert {key: config.flat()[key] for key in changes} == changes
    resolve(tags, None, {"fine_tune.max_steps": 3, "evaluation_split.kind": "halves"})


def test_defaults_and_records_are_not_written(ratings):
    """A run's config.toml says everything, read or not; on it, another method may be tried."""
    _, config = resolve(ratings, None, {"reconstruct.method": "steps", "reconstruct.rate": 0.7})
    assert is_record(config.flat())
    _, other = resolve(ratings, None, {"reconstruct.method": "solve"}, recorded=config.flat())
    assert (other.reconstruct.method, other.reconstruct.rate) == ("solve", 0.7)
    changes = {"reconstruct.method": "solve", "reconstruct.rate": 0.5}
    with pytest.raises(UserError, match=r"reconstruct.rate = 0.5 would have no effect"):
        resolve(ratings, None, changes, recorded=config.flat())
    resolve(ratings, None, {"reconstruct.rate": Config().reconstruct.rate})  # what it is anyway


def test_every_rule_is_about_a_known_key_and_every_algorithm_says_what_it_reads():
    keys = [*Config().flat(), "server.settings.b1", *(f"data.{name}" for name in movielens.MORE)]
    assert all(any(fnmatch(key, pattern) for key in keys) for pattern, _ in RULES)
    for name, entry in all_algorithms().items():
        assert entry.unread is not None, f"{name} must say what it leaves unread"
        assert all(any(fnmatch(key, pattern) for key in keys) for pattern in entry.unread)


def test_an_algorithm_of_ones_own_may_read_all(ratings, monkeypatch):
    monkeypatch.setitem(ALGORITHMS, "mine", find_algorithm("fed_avg")._replace(unread=None))
    resolve(ratings, None, {"algorithm": "mine", "update.joint": True})


@pytest.mark.parametrize("key", ["server.rate", "update.rate", "cohort.size", "rounds", "simulation.lanes"])
def test_a_trained_model_is_not_judged_by_settings_of_training(key):
    with pytest.raises(UserError, match=f"{key} = 3 would have no effect: it is a setting of training"):
        check_judging({key: 3})
    check_judging(dict.fromkeys(["reconstruct.rate", "seed", "data.path", "fine_tune.max_steps"], 1))
    assert not any(fnmatch(key, pattern) for pattern in JUDGING)


def test_on_the_command_line(tmp_path, capsys):
    """Refused before anything runs; the record of a run is not, and evaluation goes by the same rule."""
    small = [f"--set=data.{key}={value}" for key, value in TINY.items()]
    train = ["train", "planted", "--rounds", "2", "--cohort", "4", *small, "--json", "--out"]
    assert main([*train, str(tmp_path / "bad"), "--set", "reconstruct.rate=0.5"]) == 2
    assert "reconstruct.rate = 0.5 would have no effect" in capsys.readouterr().err
    assert not (tmp_path / "bad").exists()
    steps = ["--set", "reconstruct.method=steps", "--set", "reconstruct.rate=0.5"]
    assert main([*train, str(tmp_path / "one"), *steps]) == 0
    record = str(tmp_path / "one" / "config.toml")
    again = ["train", "--config", record, "--set", "reconstruct.method=skip", "--json", "--out"]
    assert main([*again, str(tmp_path / "two")]) == 0
    assert read_toml(tmp_path / "two" / "config.toml")["reconstruct.rate"] == 0.5
    partial = tmp_path / "some.toml"
    partial.write_text("[reconstruct]\nrate = 0.5\n")
    assert main([*train, str(tmp_path / "bad"), "--config", str(partial)]) == 2
    assert main(["evaluate", str(tmp_path / "one"), "--set", "server.rate=2"]) == 2
    assert "setting of training" in capsys.readouterr().err


def test_judged_clients_are_not_split_at_random(ratings):
    prepared = prepare(*resolve(ratings, None, {"evaluation_split.kind": "random"}))
    with pytest.raises(UserError, match=r"an evaluation needs evaluation_split\.kind = .*, not random"):
        prepared.build(prepared.rates)
