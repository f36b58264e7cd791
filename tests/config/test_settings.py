"""Text from a user into a configuration: types, limits, and a meaning for every key."""

import dataclasses
import re
from typing import get_args

import pytest

from partwise.algorithms.registry import prepare
from partwise.config.options import explain_options, read_options
from partwise.config.parts import make_server_optimizer
from partwise.config.settings import Config, explain
from partwise.runs.resolve import resolve
from partwise.tasks import all_tasks, find_task, keyword_options, load_task
from partwise.tasks.base import limits_of
from partwise.types import UserError


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("seed", -1, "between 0 and 4,294,967,295, not -1"),
        ("seed", "99999999999999999999", "between 0 and 4,294,967,295"),
        ("rounds", "0", "between 1 and 100,000,000, not 0"),
        ("rounds", "2.5", "a whole number, not '2.5'"),
        ("server.rate", "nan", "a number that is finite, not 'nan'"),
        ("update.rate", "inf", "a number that is finite"),
        ("reconstruct.rate", "-0.1", "between 0 and 1e+30"),
        ("server.rate", "1e300", "between 0 and 1e+30"),
        ("server.settings.epsilon", "abc", "a number, not 'abc'"),
        ("reconstruct.epochs", "-1", "between 0 and 10,000"),
        ("update.max_steps", "-1", "between 0 and 100,000,000"),
        ("split.percent", "100", "between 1 and 99"),
        ("update.batch_size", "0", "between 1 and 100,000"),
        ("split.batch_size", "0", "between 1 and"),
        ("cohort.size", "0", "between 1 and"),
        ("cohort.over_selection", "0.5", "between 1 and"),
        ("cohort.dropout", "1", "between 0 and 0.99"),
        ("simulation.lanes", "-1", "between 0 and"),
        ("simulation.rounds_per_call", "0", "between 1 and"),
        ("simulation.evaluate_every", "-1", "between 0 and"),
        ("simulation.checkpoint_every", "-1", "between 0 and"),
        ("update.joint", "yes", "true or false, not 'yes'"),
        ("rounds.more", "1", "'rounds' is a value"),
        ("server", "1", "is a section"),
    ],
)
def test_values_that_are_refused(key, value, says):
    with pytest.raises(UserError) as error:
        Config().changed({key: value})
    assert f"'{key}'" in str(error.value)
    assert says in str(error.value)


HUGE = "99999999999999999999"


def numbers(config):
    """(dotted key, field) of every setting that is a number."""
    for about in dataclasses.fields(config):
        part = getattr(config, about.name)
        if dataclasses.is_dataclass(part):
            yield from ((f"{about.name}.{key}", inner) for key, inner in numbers(part))
        elif {"int", "float"} & set(str(about.type).split(" | ")):
            yield about.name, about


def test_every_number_has_a_least_and_a_most():
    for key, about in numbers(Config()):
        assert about.metadata["limits"] is not None, key
        for value in (HUGE, f"-{HUGE}") if "int" in str(about.type) else ("1e300", "-1e300"):
            with pytest.raises(UserError, match=f"'{key}' must be between"):
                Config().changed({key: value})


@pytest.mark.parametrize(
    ("optimizer", "setting", "value", "says"),
    [
        ("adam", "b1", 2, "'server.settings.b1' must be between 0 and 0.9999, not 2"),
        ("yogi", "b2", 1, "'server.settings.b2' must be between 0 and 0.999999, not 1"),
        ("sgd", "momentum", -1, "'server.settings.momentum' must be between"),
        ("adagrad", "epsilon", 0, "'server.settings.epsilon' must be between"),
        ("adagrad", "b1", 0.9, "unknown setting of the optimizer 'adagrad' 'b1'"),
        ("lazy_adam", "initial_accumulator", 0.1, "unknown setting of the optimizer 'lazy_adam'"),
    ],
)
def test_optimizers_know_their_own_settings(optimizer, setting, value, says):
    config = Config().changed({"server.optimizer": optimizer, f"server.settings.{setting}": value})
    with pytest.raises(UserError) as error:
        make_server_optimizer(config, {"server": 0.1})
    assert says in str(error.value)


def test_another_optimizer_does_not_inherit_the_settings_of_the_tasks_own():
    task = load_task("planted", num_clients=20, num_items=20, mean_examples=12, dim=2)
    assert resolve(task, None, {})[1].server.settings
    assert resolve(task, None, {"server.optimizer": "sgd"})[1].server.settings == {}
    assert resolve(task, None, {"algorithm": "fed_adam"})[1].server.settings == {}


@pytest.mark.parametrize("name", list(all_tasks()))
def test_every_number_among_the_options_of_a_task_has_a_least_and_a_most(name):
    entry = find_task(name)
    for option, about in keyword_options(entry.load).items():
        kinds = set(re.findall(r"\w+", str(get_args(about.annotation)[:1])))
        if {"int", "float"} & kinds:
            assert limits_of(about) is not None, option
            with pytest.raises(UserError, match=f"'data.{option}' must be between"):
                load_task(name, "nowhere", **{option: 10**30})


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        ("planted", {"num_clients": 10**8, "mean_examples": 400}, "so many ratings would take 320 GB"),
        ("planted", {"dim": 1_000_000_000}, "'data.dim' must be between 1 and 4,096, not 1000000000"),
        ("planted", {"num_clients": 10**12}, "'data.num_clients' must be between 1 and 100,000,000"),
        ("tags-planted", {"num_clients": 10**8}, "so many posts would take"),
        ("writers", {"num_clients": 10**8}, "so many images would take"),
        ("next-word-planted", {"num_clients": 10**8}, "so many sentences would take"),
    ],
)
def test_what_no_machine_holds_is_refused(name, options, says):
    with pytest.raises(UserError) as error:
        load_task(name, **options)
    assert says in str(error.value)


def test_a_configuration_is_its_own_text():
    changes = {"seed": "4294967295", "server.rate": "1e-3", "update.epochs": "none", "rounds": "1e3"}
    config = Config().changed(changes | {"server.settings.epsilon": "1e-7", "data.dim": 3})
    assert (config.seed, config.rounds, config.update.epochs) == (4294967295, 1000, None)
    assert Config().changed(config.flat()) == config


def test_every_key_is_explained_and_can_be_set():
    lines = explain()
    assert {"rounds", "cohort.size", "evaluation_split.kind", "simulation.lanes"} <= {
        key for key, _, _ in lines
    }
    for key, value, meaning in lines:
        assert meaning
        if key != "select.SPACE":  # stands for key spaces, which tasks have
            assert Config().changed({key: value}) == Config()


def test_chosen_keys_are_explained_by_key_space():
    chosen = {
        key: value for key, value, _ in explain(Config(select={"word": "top:9@0.5,3@0.5", "unit": "all"}))
    }
    assert chosen["select.word"] == "top:9@0.5,3@0.5"
    assert chosen["select.unit"] == "all"
    assert "select.SPACE" not in chosen
    assert "select.SPACE" in dict(line[:2] for line in explain())


def test_options_of_a_task_are_read_as_its_types():
    load = all_tasks()["ratings"].load
    read = read_options(load, {"dim": "4", "biases": "true", "time": "none", "item": "7"})
    assert read == {"dim": 4, "biases": True, "time": None, "item": "7"}
    with pytest.raises(UserError, match=r"'data.dim' must be a whole number, not 'abc'"):
        read_options(load, {"dim": "abc"})
    with pytest.raises(UserError, match=r"unknown value of data.initial 'learnt' \(nearest: learned\)"):
        read_options(load, {"initial": "learnt"})


@pytest.mark.parametrize("name", ["planted", "movielens", "movielens-seen", "ratings"])
def test_every_option_of_a_task_of_ratings_is_explained(name):
    lines = explain_options(all_tasks()[name].load)
    assert "data.dim" in [key for key, _, _ in lines]
    assert all(meaning for _, _, meaning in lines)


def test_options_that_a_task_has_not_come_with_the_nearest():
    with pytest.raises(UserError, match=r"task 'planted' has no option 'num_client' \(nearest: num_clients"):
        load_task("planted", num_client=3)


def test_lazy_optimizers_are_the_servers():
    task = load_task("planted", num_clients=100, num_items=40, mean_examples=15, dim=4)
    prepare(task, Config().changed({"server.optimizer": "lazy_adam"}))
    with pytest.raises(UserError, match=r"optimizer of the server.*use adam"):
        prepare(task, Config().changed({"reconstruct.optimizer": "lazy_adam"}))
