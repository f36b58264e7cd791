"""Parts: reading and writing them, their errors, and the places where JAX meets them."""

from __future__ import annotations

import copy
import dataclasses
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.tree_util import tree_map, tree_structure

sys.path.insert(0, str(Path(__file__).parent))

from kinds import (
    Adagrad,
    Cohort,
    Cosine,
    FedRecon,
    Heat,
    Optimizer,
    Own,
    Plan,
    Reconstruct,
    Schedule,
    Server,
    Sgd,
    Solve,
    Steps,
    Stop,
    Top,
    Values,
)

from partwise.parts import part, rate
from partwise.parts.declare import names, rates_of, with_rates
from partwise.parts.text import (
    assignments,
    changed,
    differences,
    digest,
    fixed_differences,
    flat,
    from_toml,
    listing,
    schema,
    to_toml,
)
from partwise.types import UserError

WANTED = Plan(
    algorithm=FedRecon(reconstruct=Solve(l2=0.5)),
    server=Server(Adagrad(0.5, schedule=Cosine())),
    cohort=Cohort(100),
    select={"item": Top(10), "word": Own()},
    rounds=1000,
)
TEXT = [
    "reconstruct=solve",
    "reconstruct.l2=0.5",
    "server=adagrad",
    "server.learning_rate=0.5",
    "server.schedule=cosine",
    "cohort=100",
    "select.item=top",
    "select.item.count=10",
    "select.word=own",
    "rounds=1000",
]
TOML = """
rounds = 1000
cohort = 100
[algorithm.reconstruct]
part = "solve"
[server.optimizer]
part = "adagrad"
learning_rate = 0.5
schedule = "cosine"
[select]
word = "own"
[select.item]
part = "top"
count = 10
"""


def set_to(base, *given):
    return changed(base, assignments(given))


def test_text_toml_and_objects_make_the_same_plan():
    for order in (TEXT, TEXT[::-1]):
        assert set_to(Plan(), *order) == WANTED
    assert from_toml(Plan, TOML) == WANTED
    assert from_toml(Plan, to_toml(WANTED)) == WANTED
    some = {"reconstruct": Solve(0.5), "server": Adagrad(0.5), "server.schedule": Cosine(), "cohort": 100}
    assert changed(Plan(rounds=1000), some | {"select": {"item": Top(10), "word": "own"}}) == WANTED
    assert changed(Plan(), flat(WANTED)) == WANTED


@pytest.mark.parametrize("value", [None, 1, 0.25, True, "rmse"])
def test_what_is_written_is_read(value):
    stop = Stop() if isinstance(value, str) else None
    plan = Plan(
        algorithm=FedRecon(
            Steps(l2=None if value is None else float(value) if not stop else 0.5, joint=value is True)
        ),
        server=Server(Sgd(schedule=Values((1.0, 0.5))), Heat(None if value != 1 else 5.0)),
        stop=stop,
    )
    assert from_toml(Plan, to_toml(plan)) == plan
    assert changed(Plan(), flat(plan)) == plan


ERRORS = {
    "reconstruct=solve reconstruct.learning_rate=1": "algorithm.reconstruct: solve has no learning_rate (steps has "
    "optimizer.learning_rate); solve has: l2",
    "reconstruct.learning_rate=1": "algorithm.reconstruct: steps has no learning_rate (nearest: "
    "optimizer.learning_rate); steps has: optimizer, batch_size, epochs, max_steps, l2, joint",
    "server.epsilon=1": "server.optimizer: sgd has no epsilon (adagrad has); sgd has: learning_rate, momentum, "
    "schedule",
    "server.mean.max_factor=2": "server.mean: cohort has no max_factor (heat has); cohort has: no settings",
    "reconstruct=slove": "unknown reconstruct 'slove' (nearest: solve)",
    "reconstruct=solve reconstruct.l2=abc": "'algorithm.reconstruct.l2' must be a number, not 'abc'",
    "reconstruct=solve reconstruct.l2=nan": "'algorithm.reconstruct.l2' must be a number that is finite, not nan",
    "reconstruct=solve reconstruct.l2=-1": "'algorithm.reconstruct.l2' must be between 0 and 1e+30, not -1",
    "cohort=1.5": "'cohort.size' must be a whole number, not 1.5",
    "cohort=all": "'cohort.size' must be a whole number, not 'all'",
    "reconstruct.joint=maybe": "'algorithm.reconstruct.joint' must be true or false, not 'maybe'",
    "backend=fast": "unknown value of backend 'fast' (known: compiled, plain)",
    "reconstruct.epochs=none reconstruct.max_steps=none": "algorithm.reconstruct: steps need epochs, max_steps or "
    "both; without either they would never end",
    "evaluated.l2=3": "'algorithm.evaluated' is none: choose one first, algorithm.evaluated=skip|solve|steps",
    "round=5": "algorithm: fed_recon has no round (nearest: rounds); fed_recon has: reconstruct, evaluated, passes",
    "rounds.x=1": "'rounds' is a value and has no 'x'",
    "select=top": "'select' has parts by name: give one of them, select.NAME=own|top",
    "select.item=own select.item.count=3": "select.item: own has no count (top has); own has: no settings",
    "rounds": "--set takes name=value, not 'rounds'",
}


@pytest.mark.parametrize("settings", ERRORS)
def test_errors_name_what_there_is(settings):
    with pytest.raises(UserError) as error:
        set_to(Plan(), *settings.split())
    assert str(error.value) == ERRORS[settings]


def test_objects_are_checked_when_they_are_made():
    for wrong in (
        lambda: Solve(-1),
        lambda: Solve("a"),
        lambda: FedRecon(reconstruct=Sgd()),
        lambda: Cohort(0),
    ):  # pyright: ignore
        with pytest.raises(UserError):
            wrong()
    assert type(Solve(1).l2) is float  # an int would be another program


def test_a_new_choice_begins_with_its_own_defaults_and_the_same_one_keeps_its_values():
    plan = set_to(Plan(), "server=adagrad", "server.learning_rate=2")
    assert set_to(plan, "server.epsilon=1").server.optimizer == Adagrad(2.0, 1.0)
    assert set_to(plan, "server=adagrad").server.optimizer == Adagrad(2.0)
    assert set_to(plan, "server=sgd").server.optimizer == Sgd()
    assert changed(plan, {"server": Adagrad()}).server.optimizer == Adagrad()


def test_a_field_without_a_part_gets_one_when_one_of_its_fields_is_set():
    assert set_to(Plan(), "stop.patience=3").stop == Stop(patience=3)
    assert set_to(Plan(stop=Stop()), "stop=none").stop is None
    assert set_to(WANTED, "select.item=none").select == {"word": Own()}


def test_what_a_part_lacks_is_left_out_if_that_is_wanted():
    settings = {"reconstruct": "solve", "reconstruct.l2": 2, "unknown.name": 1, "server.mean.max_factor": 3}
    assert changed(Plan(), settings, lenient=True).algorithm == FedRecon(Solve(2.0))


def test_listing_differences_digest_and_what_stays():
    shown = {each.name: (each.value, each.meaning) for each in listing(WANTED)}
    assert shown["algorithm.reconstruct.l2"] == (0.5, "strength of the pull")
    assert shown["algorithm.reconstruct"] == ("solve", "R: how the local part is rebuilt: skip, solve, steps")
    assert shown["select.item"] == ("top", "keys that a client asks for, by key space: own, top")
    assert shown["stop"][0] is None
    assert "server" not in shown  # one sort of server: nothing to choose
    other = set_to(WANTED, "server.learning_rate=1", "rounds=2000", "backend=plain")
    assert [name for name, *_ in differences(WANTED, other)] == [
        "server.optimizer.learning_rate",
        "rounds",
        "backend",
    ]
    assert digest(WANTED) == digest(set_to(WANTED, "backend=plain")) != digest(other)
    assert fixed_differences(WANTED, other, lambda about: about.declared.resume) == [
        "server.optimizer.learning_rate",
        "backend",
    ]
    assert digest(Plan()) == digest(from_toml(Plan, ""))


def test_a_schema_takes_what_is_written_and_refuses_what_is_not():
    jsonschema = pytest.importorskip("jsonschema")
    known = schema(Plan)
    import tomllib

    for plan in (Plan(), WANTED, Plan(stop=Stop(), server=Server(Sgd(schedule=Values((1.0,)))))):
        jsonschema.validate(tomllib.loads(to_toml(plan)), known)
    for wrong in ({"round": 5}, {"rounds": 0}, {"algorithm": {"part": "fed_recon", "passes": 0}}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(wrong, known)
    json.dumps(known)


def test_a_users_part_is_recorded_by_module_and_name(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(
        "from kinds import Reconstruct\nfrom partwise.parts import part, rate\n\n\n"
        "@part()\nclass Halved(Reconstruct):\n    l2: float = rate(1.0, 'twice the pull')\n\n\n"
        "class Plain: ...\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    plan = set_to(Plan(), "reconstruct=mine:Halved", "reconstruct.l2=3")
    assert rates_of(plan.algorithm) == {"reconstruct.l2": 3.0}
    assert 'part = "mine:Halved"' in to_toml(plan)
    assert from_toml(Plan, to_toml(plan)) == plan
    assert "mine:Halved" not in names(Reconstruct)  # a list of names is of those that all have
    with pytest.raises(UserError, match="'mine:Plain' is not a reconstruct: it must be a class with @part"):
        set_to(Plan(), "reconstruct=mine:Plain")
    with pytest.raises(UserError, match="is not an optimizer"):
        set_to(Plan(), "server=mine:Halved")
    with pytest.raises(UserError, match="'mine:Other' could not be imported"):
        set_to(Plan(), "reconstruct=mine:Other")


def test_a_part_of_a_script_is_recorded_by_the_name_of_its_file(tmp_path):
    script = (
        "from kinds import FedRecon, Plan, Skip\nfrom partwise.parts import part\n"
        "from partwise.parts.text import to_toml\n"
        "@part()\nclass Own(Skip): ...\n"
        "if __name__ == '__main__': print(to_toml(Plan(algorithm=FedRecon(reconstruct=Own()))))"
    )
    (tmp_path / "own_script.py").write_text(script)
    where = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, str(tmp_path / "own_script.py")]
    told = subprocess.run(command, capture_output=True, text=True, check=True, env=where).stdout
    assert 'part = "own_script:Own"' in told


def test_jax_puts_anything_where_rates_are():
    assert tree_map(lambda x: -x, Solve(0.5)).l2 == -0.5  # gradients, which limits would refuse
    assert tree_map(lambda x: 0, FedRecon()).reconstruct.optimizer.learning_rate == 0  # axes of a vmap
    assert jax.grad(lambda part: -(part.l2**2))(Solve(0.5)).l2 == -1
    assert jax.jit(lambda part: dataclasses.replace(part, l2=2 * part.l2))(Solve(0.5)).l2 == 1


def test_another_rate_compiles_nothing_and_another_constant_does():
    traced = []
    move = jax.jit(lambda server: traced.append(1) or server.optimizer.learning_rate)
    for learning_rate in (0.1, 0.2, 3.0):
        move(Server(Sgd(learning_rate, schedule=Cosine())))
    assert len(traced) == 1
    move(Server(Sgd(0.1, schedule=Cosine(0.5))))
    move(Server(Sgd(0.1, schedule=Cosine()), Heat()))
    assert len(traced) == 3


def test_a_branch_on_a_rate_is_an_error_that_names_it():
    @part("branching")
    class Branching(Reconstruct):
        l2: float = rate(0.5, "pull")

        def __call__(self, value):
            return value if self.l2 > 0 else 0

    try:
        with pytest.raises(jax.errors.TracerBoolConversionError, match=r"argument learned\.reconstruct\.l2"):
            jax.jit(lambda learned: learned.reconstruct(1.0))(FedRecon(reconstruct=Branching()))
    finally:
        del Reconstruct._known["branching"]


def test_none_is_another_structure_and_zero_is_not():
    assert tree_structure(Steps(l2=None)) != tree_structure(Steps(l2=0.0))
    assert tree_structure(Steps(l2=0.1)) == tree_structure(Steps(l2=0.0))
    assert (
        len({tree_structure(each) for each in (Solve(0.1), Solve(0.2), Steps())}) == 2
    )  # what can be stacked


def test_a_static_part_is_no_argument_of_a_compiled_function():
    with pytest.raises(TypeError, match="as an abstract array"):
        jax.jit(lambda plan: 1)(Plan())
    with pytest.raises(TypeError, match="parts of its kind are static"):

        @part("rated")
        class Rated(Schedule):
            end: float = rate(0.5, "a rate")


def test_stacked_rates_run_side_by_side():
    stacked = tree_map(lambda *leaves: jnp.stack(leaves), Solve(0.1), Solve(0.2))
    assert np.allclose(jax.vmap(lambda part: part(3.0))(stacked), [0.3, 0.6])


def test_copies_and_equality():
    stacked = tree_map(lambda *leaves: jnp.stack(leaves), Solve(0.1), Solve(0.2))
    for each in (WANTED, stacked):
        assert pickle.loads(pickle.dumps(each)) == each == copy.deepcopy(each)
    assert Solve(0.5) == Solve(float(np.float32(0.5))) != Solve(0.2)
    assert hash(WANTED) == hash(changed(WANTED, {}))
    assert changed(WANTED, {"select.item.count": 11}) != WANTED


def test_rates_by_their_names():
    learned = FedRecon(Solve(0.5))
    assert rates_of(learned) == {"reconstruct.l2": 0.5}
    assert with_rates(learned, {"reconstruct.l2": 2.0}) == FedRecon(Solve(2.0))
    assert rates_of((learned, Sgd(0.3))) == {"0.reconstruct.l2": 0.5, "1.learning_rate": 0.3}


def test_every_field_is_declared():
    with pytest.raises(TypeError, match="needs a declaration"):

        @part("undeclared")
        class Undeclared(Reconstruct):
            function: object = Sgd

    with pytest.raises(TypeError, match="not the name part"):

        @part("badly_named")
        class BadlyNamed(Optimizer):
            part: float = rate(0.1, "a rate")


def test_parts_may_be_imported_when_they_are_used(tmp_path, monkeypatch):
    (tmp_path / "far.py").write_text(
        "import kinds_of_far\nfrom partwise.parts import part\n@part('far')\nclass Far(kinds_of_far.Kind): ...\n"
    )
    (tmp_path / "kinds_of_far.py").write_text(
        "from partwise.parts import Part\nclass Kind(Part, lazily={'far': 'far:Far'}): ...\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    import kinds_of_far  # pyright: ignore[reportMissingImports]

    from partwise.parts.declare import find

    assert names(kinds_of_far.Kind) == ["far"]
    assert "far" not in sys.modules
    assert find(kinds_of_far.Kind, "far").__name__ == "Far"
    assert names(kinds_of_far.Kind) == ["far"]
