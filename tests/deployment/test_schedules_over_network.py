"""Rates that follow a schedule: devices know the round from what the server sends, and make the plain model."""

from __future__ import annotations

import numpy as np
import pytest

from partwise.deployment.agent import run_agent
from partwise.simulation.plain import PlainSimulation
from partwise.types import UserError

SCHEDULED = {
    "reconstruct.method": "steps",
    "update.method": "steps",
    "update.schedule": "exponential:0.3",
    "reconstruct.schedule": "piecewise:1=0.1",
    "server.schedule": "linear:0.5",
    "cohort.size": 6,
}


def plain_params(run, build):
    """What the plain backend makes of the same clients, by name, as a coordinator draws them."""
    store = run.prepared.store
    store = store.take(np.argsort([str(name) for name in store.client_ids.tolist()]))
    made = (build, run.prepared.rates, store, run.prepared.recruiting)
    simulation = PlainSimulation(*made, seed=run.hub.coordinator.rules.seed)
    list(simulation.run(3))
    return simulation.state.params


@pytest.mark.parametrize("reports", ["clients", "sum"])
def test_devices_have_the_rates_of_the_round(federate, tmp_path, reports):
    run = federate("run", SCHEDULED | {"deploy.reports": reports}, quorum=6, population=24)
    (tmp_path / "all.csv").write_text("\n".join(run.lines(range(24))))
    done = list(run_agent(run.link(), str(tmp_path / "all.csv"), tmp_path / "own", most=30))
    assert all(each.accepted for each in done)
    found = run.hub.state(3).params
    for path, leaf in plain_params(run, run.prepared.build).items():
        np.testing.assert_allclose(np.asarray(found[path]), np.asarray(leaf), rtol=1e-4, atol=1e-5)


def test_stops_and_best_models_are_refused_where_nothing_reads_them(federate):
    for setting in ({"stop.metric": "rmse"}, {"stop.seconds": 60.0}, {"keep.best": "rmse"}):
        with pytest.raises(UserError, match=r"stop\.\* and keep\.\* are read by `partwise train` alone"):
            federate("refused", setting)
