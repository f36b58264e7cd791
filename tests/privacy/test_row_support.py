"""Noise on touched rows alone is no privacy: whoever sees which rows moved knows who took part. The library has no
such mode, and the same attack on its doors is blind."""

from __future__ import annotations

import ast
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import norm

pytest.importorskip("dp_accounting", reason="the extra `privacy` is not installed")

import partwise
from partwise.config.protection import protection
from partwise.config.settings import Config
from partwise.deployment.server_noise import own_noise
from partwise.metrics import Sums
from partwise.model.partition import keyed, partition
from partwise.privacy.accounting import Rounds, epsilon
from partwise.server.mean import mean, uniform
from partwise.server.private_sum import Door, filtered, private
from partwise.server.total import Known, Report, add, zero_total
from partwise.tasks.matrix_factorization import matrix_factorization

ITEMS, DIM, ROWS, TRIALS = 12, 2, 3, 20_000
RARE = 9  # a row that only the client has which the attacker looks for
DELTA, SURE = 0.01, 1e-6
DOOR = Door(clip=0.5, noise=1.0, cohort=4.0)
FILTERED = DOOR._replace(rows_share=0.5, rows_above=1.0)
CLAIM = epsilon(Rounds(DOOR.noise, 100, 100, "poisson"), 1, DELTA)


@pytest.fixture(scope="module")
def parts():
    return partition(matrix_factorization(ITEMS, DIM), {"item": keyed("item")})


def summed(parts, aggregator, there: bool):
    """The sum of three clients with common rows, and of one with a rare row, if it is there."""
    start = zero_total(aggregator, parts, {"user": jnp.zeros(DIM), "item": jnp.zeros((ITEMS, DIM))})
    held = [[0, 1, 2], [1, 2, 3], [0, 2, 4]] + ([[0, 1, RARE]] if there else [])
    return jax.jit(lambda: added_up(parts, aggregator, start, held))()


def added_up(parts, aggregator, total, held):
    for number, rows in enumerate(held):
        update = {"user": jnp.zeros(DIM), "item": jnp.ones((ROWS, DIM))}
        report = Report(update, jnp.ones(()), Sums(jnp.ones(()), jnp.ones(())))
        known = Known({}, {"item": jnp.asarray(ROWS)})
        sent = aggregator.encode(report, jax.random.key(number), known)
        total = add(parts, total, sent, {"item": jnp.array(rows)})
    return total


def released(parts, aggregator) -> list[np.ndarray]:
    """What the server adds to the table in many releases of the same sum, with the client and without it:
    [trial, row, number]."""

    def one(total, rng):
        told, carried = aggregator.reveal(total, {}, rng)
        return aggregator.decode(parts, told, carried, rng)[0]["item"]

    program = jax.jit(jax.vmap(one, (None, 0)))
    keys = jax.random.split(jax.random.key(3), (2, TRIALS))
    totals = [summed(parts, aggregator, there) for there in (True, False)]
    return [np.asarray(program(total, each)) for total, each in zip(totals, keys, strict=True)]


def touched_only(parts, there: bool) -> np.ndarray:
    """What must not be: the same noise, on rows that somebody touched."""
    rows = np.asarray(summed(parts, private(mean(uniform), DOOR), there).update["item"])
    noise = DOOR.deviation * np.random.default_rng(int(there)).normal(size=(TRIALS, *rows.shape))
    return (rows + noise * rows.any(1)[:, None]) / DOOR.cohort


def moved(table: np.ndarray) -> np.ndarray:
    """The attack: whether the rare row moved."""
    return table[:, RARE].any(-1).astype(float)


def test_noise_on_touched_rows_tells_with_certainty_who_took_part(parts, epsilon_bound):
    inside, outside = (moved(touched_only(parts, there)) for there in (True, False))
    assert inside.all()
    assert not outside.any()
    assert epsilon_bound(inside, outside, DELTA, risk=SURE) > 2 * CLAIM


def test_noise_on_all_rows_leaves_the_attack_blind(parts, epsilon_bound):
    """Every row moves in every release. How far it moves tells no more than is claimed."""
    tables = released(parts, private(mean(uniform), DOOR))
    for table in tables:
        assert table.any(-1).all()
    assert epsilon_bound(*map(moved, tables), DELTA, risk=SURE) <= 0
    assert epsilon_bound(*(table[:, RARE].sum(-1) for table in tables), DELTA, risk=SURE) <= CLAIM


def test_rows_that_a_noisy_count_keeps_tell_no_more_than_is_claimed(parts, epsilon_bound):
    """The one way to leave rows alone: by counts with noise, of rows that nobody has too."""
    aggregator = filtered(private(mean(uniform), FILTERED), ("item",))
    tables = released(parts, aggregator)
    untouched = [table[:, 5:RARE].any(-1).mean() for table in tables]
    assert min(untouched) > 0.1  # noise passes
    assert max(untouched) < 0.25
    assert epsilon_bound(*map(moved, tables), DELTA, risk=SURE) <= CLAIM
    assert epsilon_bound(*(table[:, RARE].sum(-1) for table in tables), DELTA, risk=SURE) <= CLAIM


def test_the_noise_of_a_deployed_server_is_on_all_rows_too(parts):
    """It is drawn in secret, and has the size that is promised."""
    changes = {
        "privacy.clip": 0.5,
        "privacy.noise": 1.0,
        "deploy.population": 100,
        "server.weighting": "uniform",
    }
    promised = protection(Config().changed({**changes, "cohort.sampling": "poisson"}), 100)
    assert promised is not None
    noise = own_noise(promised.door)
    total = summed(parts, private(mean(uniform), DOOR), there=False)
    drawn = np.stack(
        [np.asarray(noise(total, {})[0].update["item"] - total.update["item"]) for _ in range(300)]
    )
    assert drawn[:, RARE].all()
    spread = (drawn / DOOR.deviation).std(0)
    close = (
        norm.isf(SURE / 2 / spread.size) / np.sqrt(2 * 300) + 0.02
    )  # a little more: it is not quite normal
    np.testing.assert_allclose(spread, 1, atol=close)


# Every function that draws noise for a sum of clients. A new one belongs into this list together with a test that
# its noise is in rows that nobody touched.
KNOWN_NOISE = {
    ("server/private_sum.py", "noisy"),  # here
    ("server/private_sum.py", "_simulated"),
    ("privacy/two_servers.py", "with_noise"),  # test_secret_noise
    ("privacy/secret_noise.py", "noise_words"),
    ("deployment/server_noise.py", "_secret"),  # above
    ("server/skellam_sum.py", "skellam"),  # tests/server/test_skellam_sum.py
    ("data/heat_gaussian.py", "*"),  # tests/data/test_heat_gaussian.py
    ("privacy/secret_draws.py", "normal"),  # for heat over a network
}
SOURCES = {"normal", "standard_normal", "laplace", "poisson", "secret_normals", "noise_words"}
PLACES = ("server", "privacy", "deployment", "config", "algorithms", "simulation")


def drawing(path: Path) -> set[str]:
    """The functions of a file that call a source of noise: the innermost ones."""
    found = set()

    def look(node: ast.AST, inside: str) -> None:
        if isinstance(node, ast.FunctionDef):
            inside = node.name
        if isinstance(node, ast.Call):
            called = node.func
            name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
            found.update({inside} if name in SOURCES else ())
        for child in ast.iter_child_nodes(node):
            look(child, inside)

    look(ast.parse(path.read_text()), "")
    return found


def test_no_other_code_draws_noise():
    root = Path(partwise.__file__).parent
    files = [path for place in PLACES for path in (root / place).glob("*.py")]
    files += (root / "data").glob("heat*.py")
    assert len(files) > 80
    found = {(path.relative_to(root).as_posix(), name) for path in files for name in drawing(path)}
    assert {each for each in found if (each[0], "*") not in KNOWN_NOISE} <= KNOWN_NOISE
    assert ("server/private_sum.py", "noisy") in found  # the search does find


def test_no_noise_is_drawn_for_some_rows():
    """Noise has the shape of a whole leaf: nothing is indexed, masked or scattered where it is drawn."""
    root = Path(partwise.__file__).parent
    for file, name in KNOWN_NOISE - {
        ("privacy/secret_noise.py", "noise_words"),
        ("data/heat_gaussian.py", "*"),
    }:
        module = ast.parse((root / file).read_text())
        functions = [
            node for node in ast.walk(module) if isinstance(node, ast.FunctionDef) and node.name == name
        ]
        assert functions, (file, name)
        for node in ast.walk(functions[0]):
            assert not (isinstance(node, ast.Attribute) and node.attr in {"at", "where", "nonzero", "any"})
