"""Several runs side by side: each equals the run that a simulation makes of its rates and its seed."""

from __future__ import annotations

import numpy as np
import pytest

from partwise import optimizers
from partwise.algorithms.fed_recon import fed_recon
from partwise.client import reconstruct, split, update
from partwise.client.batches import Batches
from partwise.model.partition import keyed, local, partition
from partwise.server.cohort import Recruiting, poisson
from partwise.simulation.loop import Simulation
from partwise.simulation.many_runs import Sweep
from partwise.tasks.matrix_factorization import matrix_factorization
from partwise.types import UserError

COUNTS = [6, 2, 9, 4, 0, 11]
RECRUITING, POISSON = Recruiting(4), Recruiting(3, sampling=poisson())
RUNS = [
    ({"update": 0.1, "server": 1.0}, 0),
    ({"update": 0.4, "server": 0.5}, 7),
    ({"update": 0.1, "server": float("inf")}, 7),
]


@pytest.fixture(scope="module")
def build():
    model = matrix_factorization(12, 2, scale=0.5)
    parts = partition(model, {"user": local(), "item": keyed("item")})
    return lambda rates: fed_recon(
        model,
        parts,
        split=split.alternate(2),
        reconstruct=reconstruct.by_steps(Batches(2, 2), 0.2),
        update=update.by_steps(Batches(2), rates["update"]),
        optimizer=optimizers.Adagrad(rates["server"]).on_server(),
    )


@pytest.mark.parametrize("recruiting", [RECRUITING, POISSON], ids=["fixed", "poisson"])
def test_each_run_equals_its_own_simulation(build, make_ratings, monkeypatch, recruiting):
    """Five rounds in calls of two; a run that diverges is marked, and harms no other. Room grows with cohorts."""
    monkeypatch.setattr(Recruiting, "room", lambda self, num_clients: self.most or 1)
    store = make_ratings(COUNTS, 12, seed=2)
    rates, seeds = zip(*RUNS, strict=True)
    sweep = Sweep(build, rates, seeds, store, recruiting, rounds_per_call=2)
    calls = list(sweep.run(5))
    assert [(len(call), len(call[0])) for call in calls] == [(3, 2), (3, 2), (3, 1)]
    assert sweep.round == 5
    assert list(sweep.errors) == [2]
    assert "no longer finite after round 1" in str(sweep.errors[2])
    for number, (rate, seed) in enumerate(RUNS[:2]):
        alone = Simulation(build, rate, store, recruiting, seed=seed, lanes=2, rounds_per_call=5)
        records = [record for call in alone.run(5) for record in call]
        np.testing.assert_allclose(
            sweep.params(number)["item"], alone.state.params["item"], rtol=1e-4, atol=1e-5
        )
        beside = [record for call in calls for record in call[number]]
        for ours, other in zip(beside, records, strict=True):
            assert ours.loss == pytest.approx(other.loss, rel=1e-4, nan_ok=True)
            assert ours._replace(seconds=0, loss=0) == other._replace(seconds=0, loss=0)


def test_a_sweep_needs_as_many_seeds_as_rates(build, make_ratings):
    for rates, seeds in (([{"update": 0.1}], [0, 1]), ([], [])):
        with pytest.raises(UserError, match=f"not {len(rates)} and {len(seeds)}"):
            Sweep(build, rates, seeds, make_ratings(COUNTS, 12), RECRUITING)
