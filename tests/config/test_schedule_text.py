"""Schedules of rates: what their texts mean, and what is said of wrong ones."""

import numpy as np
import optax
import pytest

from partwise.config.schedule_text import read_schedule, spans_rounds, written
from partwise.config.settings import Config
from partwise.types import UserError

KEY = "update.schedule"


def factors(text: str, rounds: int = 10) -> list[float]:
    found = read_schedule(KEY, text, rounds)
    assert found is not None
    schedule = found.factor()
    return [float(schedule(number)) for number in range(rounds)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("cosine", [0.5 * (1 + np.cos(np.pi * t / 10)) for t in range(10)]),
        ("cosine:0.2", [0.2 + 0.8 * 0.5 * (1 + np.cos(np.pi * t / 10)) for t in range(10)]),
        ("linear", [1 - t / 10 for t in range(10)]),
        ("linear:0.5", [1 - t / 20 for t in range(10)]),
        ("polynomial:2", [(1 - t / 10) ** 2 for t in range(10)]),
        ("exponential:0.9", [0.9**t for t in range(10)]),
        ("warmup:4", [min((t + 1) / 5, 1) for t in range(10)]),
        ("piecewise:3=0.1,6=0.5", [1.0] * 3 + [0.1] * 3 + [0.05] * 4),
        ("values:1,0.5,0.25", [1, 0.5] + [0.25] * 8),
    ],
)
def test_a_schedule_gives_the_factors_of_its_formula(text, expected):
    np.testing.assert_allclose(factors(text), expected, rtol=1e-5, atol=1e-7)


def test_a_warmup_rises_to_the_rate_and_then_falls():
    found = factors("warmup_cosine:4")
    np.testing.assert_allclose(found[:5], [0.2, 0.4, 0.6, 0.8, 1.0], rtol=1e-5)
    assert found[4:] == sorted(found[4:], reverse=True)
    assert 0 < found[-1] < 0.1


def test_a_constant_rate_has_no_schedule():
    assert read_schedule(KEY, "constant", 10) is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("cosin", r"unknown value of update.schedule 'cosin' \(nearest: cosine"),
        ("exponential", "should have 1 number, as in exponential:0.99"),
        ("constant:1", "should have no numbers"),
        ("cosine:0:1", "should have 0 to 1 numbers"),
        ("cosine:much", "'update.schedule' must be a number, not 'much'"),
        ("cosine:-1", "must be between 0 and 1e\\+06"),
        ("warmup_cosine:10", "leaves nothing of the run's 10"),
        ("piecewise:5", "should have ROUND=FACTOR"),
        ("piecewise:0=2", "must be between 1 and"),
    ],
)
def test_a_wrong_schedule_is_refused_by_its_key(text, message):
    with pytest.raises(UserError, match=message):
        read_schedule(KEY, text, 10)


def test_a_function_is_written_as_its_values():
    told = written({KEY: optax.exponential_decay(1.0, 1, 0.5), "rounds": 4}, 4)
    assert told == {KEY: "values:1.0,0.5,0.25,0.125", "rounds": 4}
    assert factors(told[KEY], 4) == [1, 0.5, 0.25, 0.125]


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda number: -1.0, r"gives -1.0 in round 0; expected a factor of at least 0"),
        (lambda number: float("nan"), "gives nan in round 0"),
        (lambda: 1.0, "must be a function of the round that gives a number"),
    ],
)
def test_a_wrong_function_is_refused(function, message):
    with pytest.raises(UserError, match=message):
        written({KEY: function}, 3)
    with pytest.raises(UserError, match="give a schedule by name"):
        written({KEY: function}, 10**6)


def test_only_some_schedules_depend_on_the_number_of_rounds():
    fixed = Config().changed({"server.schedule": "warmup:3", "update.schedule": "exponential:0.9"})
    assert spans_rounds(fixed) == []
    assert spans_rounds(fixed.changed({"update.schedule": "warmup_cosine:2"})) == ["update.schedule"]
    assert spans_rounds(fixed.changed({"reconstruct.schedule": "values:1"})) == ["reconstruct.schedule"]
