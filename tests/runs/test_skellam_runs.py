"""Runs in which clients add the noise: they train, they keep a budget, they go on, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("dp_accounting", reason="the extra `privacy` is not installed")

from partwise.config.protection import protection
from partwise.config.secure_sums import bits_for, noise_share
from partwise.privacy.accounting import epsilon
from partwise.runs.folder import Folder
from partwise.runs.resolve import resolve
from partwise.runs.train import RunWarning, train
from partwise.types import UserError

SKELLAM = {
    "data.num_clients": 200,
    "data.num_items": 30,
    "data.mean_examples": 12,
    "data.dim": 2,
    "cohort.size": 20,
    "cohort.sampling": "poisson:50",
    "rounds": 4,
    "simulation.evaluate_every": 2,
    "simulation.checkpoint_every": 2,
    "simulation.lanes": 4,
    "server.weighting": "uniform",
    "server.schedule": "constant",
    "privacy.clip": 0.5,
    "privacy.noise": 1.0,
    "privacy.sums": "masked",
    "privacy.mechanism": "skellam",
}


def promised_of(**changes):
    task, config = resolve("planted", None, SKELLAM | changes)
    found = protection(config, task.train.num_clients)
    assert found is not None
    return found


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    out = tmp_path_factory.mktemp("skellam") / "run"
    return train("planted", out=out, changes=SKELLAM), Folder(out)


def test_every_record_has_its_epsilon_and_the_summary_says_what_it_rests_on(run):
    done, folder = run
    promised = promised_of()
    assert promised.rounds.grid is not None
    records, promise = folder.records(), done.summary["privacy"]
    assert records[3]["privacy"]["epsilon"] == epsilon(promised.rounds, 4, promised.ledger.delta)
    assert records[0]["privacy"]["epsilon"] < records[3]["privacy"]["epsilon"] == promise["epsilon"]
    assert promise["ledger"][0]["mechanism"] == "Skellam, Poisson cohorts, by Rényi divergences"
    assert promise["relation"] == "one client added or removed"
    said = " ".join(promise["rests_on"])
    assert "at least 10 clients of a sum add their share of the noise, one part in 50" in said
    assert "keep it secret" in said


def test_a_simulated_run_goes_on_bit_for_bit(run, tmp_path):
    done, _ = run
    train("planted", out=tmp_path / "run", changes=SKELLAM | {"rounds": 2})
    resumed = train(out=tmp_path / "run", resume=True, rounds=4)
    for path, leaf in done.params.items():
        assert (resumed.params[path] == leaf).all()
    assert Folder(tmp_path / "run").records()[-1]["privacy"] == done.records[-1]["privacy"]


@pytest.mark.slow  # a loop over clients
def test_the_plain_loop_is_the_same(run):
    """Sums are exact. Noise may differ by a step of the grid, as float32 is rounded in another order."""
    done, _ = run
    plain = train("planted", changes=SKELLAM | {"simulation.backend": "plain"})
    for path, leaf in done.params.items():
        np.testing.assert_allclose(plain.params[path], leaf, atol=1e-6)


@pytest.mark.slow  # trains once more
def test_on_a_fine_grid_it_is_gaussian_noise_but_for_rounding(run):
    """Simulations draw both kinds from the same normal numbers, so that one can be compared with the other."""
    done, _ = run
    gaussian = train("planted", changes=SKELLAM | {"privacy.mechanism": "independent"})
    for path, leaf in done.params.items():
        np.testing.assert_allclose(gaussian.params[path], leaf, atol=1e-6)
        assert not np.array_equal(gaussian.params[path], leaf)
    assert gaussian.summary["privacy"]["epsilon"] < done.summary["privacy"]["epsilon"]


def test_the_budget_ends_a_run_of_skellam_noise():
    spent = promised_of().ledger.epsilon(2)
    with pytest.warns(RunWarning, match="ends the run after 2 of 4 rounds"):
        done = train("planted", changes=SKELLAM | {"privacy.epsilon": spent + 1e-6})
    assert done.summary["rounds"] == 2


@pytest.mark.parametrize("sampling", ["poisson:50", "fixed"])
def test_the_noise_is_found_from_the_budget_of_skellam_noise(sampling):
    found = promised_of(**{"privacy.noise": None, "privacy.epsilon": 4.0, "cohort.sampling": sampling})
    assert 3.9 < found.ledger.epsilon(4) <= 4.0
    assert found.most_rounds(4) == 4


def test_shares_add_up_to_the_noise_that_is_promised():
    found = promised_of()
    share, steps = noise_share(found), 2.0 ** bits_for(found)
    assert share is not None
    assert share.most == 50
    assert np.sqrt(share.most * share.update) == pytest.approx(found.door.deviation * steps)
    assert np.sqrt(share.most * share.numbers) == pytest.approx(found.door.count_deviation * steps)
    assert 50 * 1.0 * steps + 10 * np.sqrt(share.most * share.numbers) < 2**31  # there is room for all of it
    assert noise_share(promised_of(**{"cohort.sampling": "fixed"})).most == 20  # pyright: ignore
    assert noise_share(promised_of(**{"privacy.mechanism": "independent"})) is None


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"privacy.sums": "plain"}, "set privacy.sums=masked"),
        ({"privacy.sums": "two_servers"}, "set privacy.sums=masked"),
        ({"cohort.sampling": "apart:3"}, "poisson:MOST or fixed"),
        ({"cohort.sampling": "poisson"}, r"cohort.sampling=poisson:[3-5]\d or more instead of poisson,"),
        ({"cohort.sampling": "poisson:22"}, r"cohort.sampling=poisson:[3-5]\d or more instead of poisson:22"),
        ({"privacy.noise_cohort": 40}, "leave one of them out"),
        ({"privacy.clip_quantile": 0.5}, "leave out privacy.clip_quantile"),
        ({"privacy.clip": None, "privacy.noise": None}, "privacy.clip"),
    ],
)
def test_what_skellam_noise_cannot_have_is_refused(changes, words):
    with pytest.raises(UserError, match=words):
        train("planted", changes=SKELLAM | changes)


def test_the_number_that_an_error_names_is_enough():
    with pytest.raises(UserError) as raised:
        promised_of(**{"cohort.sampling": "poisson"})
    enough = str(raised.value).partition("cohort.sampling=")[2].split()[0]
    found = promised_of(**{"cohort.sampling": enough})
    assert 4 * found.rounds.cut <= 0.01 * found.ledger.delta
