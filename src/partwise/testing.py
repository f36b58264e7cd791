"""Contract tests for what you add to partwise. Call them from your own tests.

def test_my_algorithm():
    check_algorithm(build, {"update": 0.1, "server": 1.0}, store)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from partwise import tree
from partwise.algorithm import Build
from partwise.data.store import ClientStore
from partwise.metrics import zero_sums
from partwise.model.partition import Partition, shared
from partwise.model.spec import Model, Pooled, training_losses
from partwise.server.cohort import Recruiting
from partwise.server.total import Aggregator, Report, add, zero_total
from partwise.simulation.evaluator import Evaluator
from partwise.simulation.loop import Simulation
from partwise.simulation.plain import PlainSimulation
from partwise.tasks import Setting, Task, find_task, is_named
from partwise.types import Params


def check_algorithm(
    build: Build,
    rates: Mapping[str, float],
    store: ClientStore,
    *,
    cohort: int = 5,
    rounds: int = 2,
    lanes: Sequence[int] | None = None,
    tol: float = 1e-5,
) -> None:
    """Check that the compiled cohort equals the plain loop with bytes for every number of lanes, and that a
    second call does not compile.

    Args:
        build: {name of a rate: rate} -> algorithm.
        rates: The rates.
        store: Some clients.
        cohort: Clients in a round.
        rounds: How many rounds are run.
        lanes: The numbers of lanes to try (default: 1, and the size of the cohort).
        tol: The largest difference, absolute and relative.
    """
    recruiting = Recruiting(min(cohort, store.num_clients))
    plain = PlainSimulation(build, rates, store, recruiting, seed=1)
    expected = [record for call in plain.run(rounds) for record in call]
    for number in lanes or (1, cohort):
        compiled = Simulation(build, rates, store, recruiting, seed=1, lanes=number, rounds_per_call=1)
        records = [record for call in compiled.run(rounds) for record in call]
        assert compiled._rounds._cache_size() <= 1, (
            "the second call compiled again"
        )  # 0 if the cache dropped it for other programs
        assert [r.clients for r in records] == [r.clients for r in expected]
        assert [r.serving for r in records] == [r.serving for r in expected], "costs of serving differ"
        _assert_close(compiled.state.params, plain.state.params, tol)
        _assert_close(compiled.kept_of(store.client_ids), plain.kept_of(store.client_ids), tol)
    sums = Evaluator(build, rates, store, seed=1).sums(plain.state.params, kept=plain.kept_of)
    for name, total in sums.items():
        assert total.weight.shape == (store.num_clients,), f"metric '{name}' has no value per client"


def check_aggregator(aggregator: Aggregator, tol: float = 1e-5) -> None:
    """Check that order does not matter, that clients with weight 0 are ignored, and that the mean of equal
    updates is that update, whatever their clients weigh."""
    rng = np.random.default_rng(0)
    updates = [{"x": jnp.asarray(rng.normal(size=3), jnp.float32)} for _ in range(4)]
    weights, parts = (3.0, 1.0, 2.0, 0.0), _all_shared()

    def decode(order: list[int], same: Mapping[str, jax.Array] | None = None) -> Mapping[str, jax.Array]:
        """The mean of these clients' updates, or of one update that they all have."""
        total = zero_total(aggregator, parts, {"x": jnp.zeros(3)})
        for i in order:
            report = Report(same or updates[i], jnp.asarray(weights[i]), zero_sums())
            sent = aggregator.encode(report, jax.random.key(i))
            assert sent.valid, "a finite update must give a valid contribution"
            assert jnp.shape(sent.weight) == (), f"a weight must be one number, not {jnp.shape(sent.weight)}"
            before, total = total, add(parts, total, sent, {})
            assert _types(total) == _types(before), (
                "contributions must have the type that `zero` begins the sum in"
            )
        total, carried = aggregator.reveal(total, aggregator.init(parts), jax.random.key(1))
        found = aggregator.decode(parts, total, carried, jax.random.key(0))
        assert isinstance(found, tuple), "decode must return (mean update, what it carries on)"
        assert set(found[0]) == {"x"}, f"decode must return a mean for every leaf, not {sorted(found[0])}"
        return found[0]

    everyone = decode([0, 1, 2, 3])
    for found, expected, what in (
        (decode([2, 0, 3, 1]), everyone, "the order of the reports must not matter"),
        (decode([0, 1, 2]), everyone, "a client without examples must not matter"),
        (decode([0, 1, 2], updates[1]), updates[1], "the mean of equal updates must be that update"),
        (decode([3]), {"x": jnp.zeros(3)}, "without any example the mean update must be 0"),
    ):
        _assert_close(found, expected, tol, what)


def check_task(task: Task) -> None:
    """Check that loss and metrics have one value per example, that the partition fits, and that the options
    rebuild the settings."""
    for setting in (task.personal, task.stateful):
        if setting is not None:
            _check_setting(setting, task.train)
    for name in ("train", "validation", "test"):
        assert getattr(task, name).num_clients > 0, f"the {name} part has no clients"
    if is_named(task.name):
        rebuilt = find_task(task.name).settings(**task.options)[0]
        assert rebuilt.partition.shapes == task.personal.partition.shapes
        assert rebuilt.partition.roles == task.personal.partition.roles


def check_adapter(model: Model, batch: Mapping[str, jax.Array], tol: float = 1e-5) -> None:
    """Check that a model from another framework is pure functions.

    There must be one value per example, the same result in every trace, alone or side by side, and a finite
    gradient for every leaf in that leaf's type.

    Args:
        model: The model.
        batch: At least one column, with ids within the whole tables.
        tol: The largest difference, absolute and relative.
    """
    batch, rngs = dict(batch), jax.random.split(jax.random.key(1), 3)
    params = model.init(jax.random.key(0))
    _check_batch(model, params, batch)
    mean = lambda params, rng: jnp.mean(training_losses(model, params, batch, rng))
    alone = jax.jit(jax.value_and_grad(mean))
    together = jax.jit(jax.vmap(jax.value_and_grad(mean), (None, 0)))(params, rngs)
    for i, rng in enumerate(rngs):
        _assert_close(jax.tree_util.tree_map(lambda x, i=i: x[i], together), alone(params, rng), tol)
    for path, leaf in tree.flatten(alone(params, rngs[0])[1]).items():
        assert leaf.dtype == tree.flatten(params)[path].dtype, f"the gradient of '{path}' is {leaf.dtype}"
        assert bool(jnp.isfinite(leaf).all()), f"the gradient of '{path}' is not finite"
    outputs = jax.jit(lambda params: model.predict(params, batch, rngs[0]))(params)
    _assert_close(jax.jit(lambda params: model.predict(params, batch, rngs[0]))(params), outputs, tol)
    other = model.init(jax.random.key(0))
    _assert_close(other, params, 0)
    jax.tree_util.tree_map(lambda leaf: leaf.delete(), other)  # training does this to save memory
    _assert_close(model.init(jax.random.key(0)), params, 0)


def _check_setting(setting: Setting, store: ClientStore) -> None:
    model, partition = setting.model, setting.partition
    position = int(np.argmax(store.counts))
    batch = {
        name: jnp.asarray(column[:4])
        for name, column in store.select(setting.columns).examples(position).items()
    }
    params = model.init(jax.random.key(0))
    _check_batch(model, params, batch)
    _assert_close(partition.merge(*partition.split(params)), params, 0)


def _check_batch(model: Model, params: Params, batch: dict[str, jax.Array]) -> None:
    """Check that loss, weight and metrics of a batch have one value per example, and that the losses are
    finite."""
    outputs = jax.jit(model.predict)(params, batch, jax.random.key(1))
    size = next(iter(batch.values())).shape[0]
    assert model.loss(outputs, batch).shape == (size,), "the loss must have one value per example"
    training = jax.jit(partial(training_losses, model))(params, batch, jax.random.key(1))
    assert bool(jnp.isfinite(training).all()), f"the training loss is not finite: {training}"
    assert model.weight(batch).shape == (size,), "the weight must have one value per example"
    for name, metric in model.metrics.items():
        if isinstance(metric, Pooled):
            scores, found = metric.scores(outputs, batch), metric.labels(batch)
            expected = (size, *metric.each.shape)
            assert scores.shape == expected, f"the scores of metric '{name}' must have shape {expected}"
        else:
            found = metric.values(outputs, batch)
        assert found.shape == (size,), f"metric '{name}' must have one value per example"


def _all_shared() -> Partition:
    shape = {"x": jax.ShapeDtypeStruct((3,), jnp.float32)}
    return Partition(("x",), {"x": shared()}, shape, jax.tree_util.tree_structure(shape), {})


def _types(values: object) -> list[object]:
    return [jnp.result_type(leaf) for leaf in jax.tree_util.tree_leaves(values)]


def _assert_close(a: object, b: object, tol: float, what: str = "") -> None:
    close = lambda x, y: np.testing.assert_allclose(x, y, rtol=tol, atol=tol, err_msg=what)
    jax.tree_util.tree_map(close, a, b)
