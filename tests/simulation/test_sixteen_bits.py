"""Parameters of 16 bits: every procedure keeps their type, and sums are made in 32."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from partwise import optimizers, tree
from partwise.algorithms.fed_per import fed_per
from partwise.algorithms.fed_prox import fed_prox
from partwise.algorithms.fed_recon import fed_recon
from partwise.algorithms.scaffold import scaffold
from partwise.client import reconstruct, split, update
from partwise.client.batches import Batches
from partwise.client.through import Through
from partwise.model.partition import keyed, local, partition, shared
from partwise.parts.declare import find
from partwise.server.cohort import Recruiting
from partwise.simulation.evaluator import Evaluator
from partwise.simulation.loop import Simulation
from partwise.testing import check_algorithm

RATES = {"reconstruct": 0.1, "update": 0.1, "server": 0.5, "pull": 1.0}
WAYS = {
    "steps": lambda rates: reconstruct.by_steps(Batches(4), rates["reconstruct"], 0.1 * rates["pull"]),
    "solve": lambda rates: reconstruct.by_solving(rates["pull"]),
}


def build_for(model, way, optimizer):
    parts = partition(model, {"user": local("learned"), "item/*": keyed("item")})

    def build(rates):
        client = optimizers.Adam(rates["update"]).on_client() if optimizer else rates["update"]
        return fed_recon(
            model,
            parts,
            split=split.alternate(2),
            reconstruct=WAYS[way](rates),
            update=update.by_steps(Batches(4), client),
            optimizer=find(optimizers.Optimizer, optimizer or "sgd")(rates["server"]).on_server(),
        )

    return build


def narrow(model, dtype):
    """The same model with all its parameters in a type."""
    cast = lambda params: jax.tree_util.tree_map(lambda x: x.astype(dtype), params)
    return model._replace(init=lambda rng: cast(model.init(rng)))


@pytest.mark.parametrize(("way", "optimizer"), [("steps", None), ("solve", "adam")])
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_training_in_16_bits_is_training_in_32_but_for_rounding(
    biased_model, make_ratings, dtype, way, optimizer
):
    store = make_ratings([5, 9, 12, 3, 7], 12, seed=1)
    rounded = []
    for kind in (dtype, jnp.float32):
        build = build_for(narrow(biased_model(12, 3), kind), way, optimizer)
        simulation = Simulation(build, RATES, store, Recruiting(4), lanes=2)
        records = [record for call in simulation.run(4) for record in call]
        assert all(record.clients == 4 and not record.broken for record in records)
        assert {leaf.dtype for leaf in simulation.state.params.values()} == {jnp.dtype(kind)}
        found = Evaluator(build, RATES, store)(simulation.state.params)
        rounded.append(({p: np.asarray(v, np.float32) for p, v in simulation.state.params.items()}, found))
    for path, leaf in (
        rounded[0][0].items() if not optimizer else ()
    ):  # Adam turns small differences into steps
        np.testing.assert_allclose(leaf, rounded[1][0][path], atol=0.1)
    assert rounded[0][1]["rmse"] == pytest.approx(rounded[1][1]["rmse"], rel=0.1)


def procedures(rates):
    """All ways to train and rebuild that have arithmetic of their own, as (local part, what the client does)."""
    schedule, adam = Batches(4), optimizers.Adam(rates["update"]).on_client()
    pulled = lambda optimizer: reconstruct.by_steps(schedule, optimizer, rates["pull"])
    solved = reconstruct.by_solving(rates["pull"])
    steps = update.by_steps(schedule, rates["update"])
    return {
        "pulled Adam": (local("zero"), fed_recon, {"reconstruct": pulled(adam), "update": steps}),
        "joint": (local("learned"), fed_recon, {"reconstruct": reconstruct.skip(), "update": joint(rates)}),
        "through": (local("zero"), fed_recon, {"reconstruct": solved, "update": through(rates)}),
        "solved": (local("zero"), fed_recon, {"reconstruct": solved, "update": update.by_solving(1.0)}),
        "twin": (shared(twin="average"), fed_recon, {"reconstruct": pulled(0.1), "update": steps}),
        "kept": (local("random"), fed_per, {"update": joint(rates)}),
        "prox": (shared(), fed_prox, {"mu": rates["pull"], "schedule": schedule, "client_optimizer": 0.1}),
        "prox with Adam": (
            shared(),
            fed_prox,
            {"mu": rates["pull"], "schedule": schedule, "client_optimizer": adam},
        ),
        "scaffold": (shared(), scaffold, {"schedule": schedule, "rate": rates["update"], "num_clients": 5}),
    }


def joint(rates):
    return update.by_steps(Batches(4), rates["update"], joint=True)


def through(rates):
    return Through(rates["pull"], rates["update"])


@pytest.mark.parametrize("name", procedures(RATES))
def test_every_procedure_works_in_16_bits(biased_model, make_ratings, name):
    store, found = make_ratings([5, 9, 12, 3, 7], 12, seed=1), []
    for kind in (jnp.bfloat16, jnp.float32):
        model = narrow(biased_model(12, 3), kind)

        def build(rates, model=model):
            role, make, given = procedures(rates)[name]
            parts = partition(model, {"user": role, "item/*": keyed("item")})
            more = {"split": split.alternate(2)} if make is fed_recon else {}
            return make(model, parts, optimizer=optimizers.Sgd(rates["server"]).on_server(), **given, **more)

        simulation = Simulation(build, RATES, store, Recruiting(4), lanes=2)
        list(simulation.run(2))
        params = simulation.state.params
        assert {leaf.dtype for leaf in params.values()} == {jnp.dtype(kind)}
        found.append({path: np.asarray(leaf, np.float32) for path, leaf in params.items()})
    for path, leaf in found[0].items():
        np.testing.assert_allclose(leaf, found[1][path], atol=0.1)


def test_plain_and_compiled_agree_in_16_bits(biased_model, make_ratings):
    store = make_ratings([5, 9, 4], 12, seed=1)
    build = build_for(narrow(biased_model(12, 3), jnp.float16), "steps", None)
    check_algorithm(build, RATES, store, cohort=3, lanes=(2,), tol=2e-2)


def test_many_numbers_of_16_bits_are_finite():
    assert tree.all_finite({"x": jnp.ones(100_000, jnp.float16)})
    assert not tree.all_finite({"x": jnp.ones(100_000, jnp.float16).at[7].set(jnp.inf)})
    assert not tree.all_finite({"x": jnp.ones(10, jnp.bfloat16).at[7].set(jnp.nan)})
