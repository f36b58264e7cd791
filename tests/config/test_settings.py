"""Text from a user into a configuration: types, limits, and a meaning for every key."""

import pytest

from partwise.config.algorithms import prepare
from partwise.config.options import explain_options, read_options
from partwise.config.settings import Config, explain
from partwise.tasks import all_tasks, load_task
from partwise.types import UserError


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("seed", -1, "between 0 and 4294967295, not -1"),
        ("seed", "99999999999999999999", "between 0 and 4294967295"),
        ("rounds", "0", "at least 1, not 0"),
        ("rounds", "2.5", "a whole number, not '2.5'"),
        ("server.rate", "nan", "a number that is finite, not 'nan'"),
        ("update.rate", "inf", "a number that is finite"),
        ("reconstruct.rate", "-0.1", "between 0 and 1e+30"),
        ("server.rate", "1e300", "between 0 and 1e+30"),
        ("server.settings.epsilon", "abc", "a number, not 'abc'"),
        ("reconstruct.epochs", "-1", "at least 0"),
        ("update.max_steps", "-1", "at least 0"),
        ("split.percent", "100", "between 1 and 99"),
        ("update.batch_size", "0", "at least 1"),
        ("split.batch_size", "0", "at least 1"),
        ("cohort.size", "0", "at least 1"),
        ("cohort.over_selection", "0.5", "at least 1"),
        ("cohort.dropout", "1", "between 0 and 0.99"),
        ("simulation.lanes", "-1", "at least 0"),
        ("simulation.rounds_per_call", "0", "at least 1"),
        ("simulation.evaluate_every", "-1", "at least 0"),
        ("simulation.checkpoint_every", "-1", "at least 0"),
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
