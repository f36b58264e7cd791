"""Contract tests for what you add to partwise. Call them from your own tests.

def test_my_algorithm():
    check_algorithm(build, {"update": 0.1, "server": 1.0}, store)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from partwise import tree
from partwise.algorithm import Build
from partwise.algorithms.fed_avg import fed_avg
from partwise.client.batches import Batches
from partwise.client.check_model import check_neighbours, moved, of_each
from partwise.client.update import by_steps
from partwise.data.store import ClientStore
from partwise.metrics import zero_sums
from partwise.model.columns import masked
from partwise.model.partition import Partition, keyed, partition, shared
from partwise.model.spec import Batch, Model, Pooled, squared_error, training_losses
from partwise.optimizers import Sgd
from partwise.server.cohort import Recruiting
from partwise.server.total import (
    PUBLIC,
    Aggregator,
    Carried,
    Contribution,
    Known,
    Report,
    Total,
    add,
    zero_total,
)
from partwise.simulation.evaluator import Evaluator
from partwise.simulation.loop import Simulation
from partwise.simulation.plain import PlainSimulation
from partwise.tasks import Setting, Task, find_task, is_named
from partwise.types import Params, UserError


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
    """Check that order does not matter, that clients with weight 0 are ignored, that the mean of equal updates is
    that update, whatever their clients weigh, and that rounds run with it: compiled, with clients side by side and
    over several devices, and as bytes from client to server. These rounds have a shared leaf, and a table for every
    key space in `held`."""
    aggregator = _guarded(aggregator)
    rng = np.random.default_rng(0)
    updates = [{"x": jnp.asarray(rng.normal(size=3), jnp.float32)} for _ in range(4)]
    weights, parts = (3.0, 1.0, 2.0, 0.0), _all_shared()
    if aggregator.held:  # what it does with tables is seen in rounds
        _check_rounds(aggregator, tol)
        return
    carried = aggregator.init(parts)

    def decode(order: list[int], same: Mapping[str, jax.Array] | None = None) -> Mapping[str, jax.Array]:
        """The mean of these clients' updates, or of one update that they all have."""
        total = zero_total(aggregator, parts, {"x": jnp.zeros(3)})
        for i in order:
            report = Report(same or updates[i], jnp.asarray(weights[i]), zero_sums())
            known = (Known(carried.get(PUBLIC, {})),) if aggregator.informed else ()
            sent = aggregator.encode(report, jax.random.key(i), *known)
            assert sent.valid, "a finite update must give a valid contribution"
            before, total = total, add(parts, total, sent, {})
            assert _types(total) == _types(before), (
                "contributions must have the type that `zero` begins the sum in"
            )
        total, then = aggregator.reveal(total, carried, jax.random.key(1))
        return aggregator.decode(parts, total, then, jax.random.key(0))[0]

    everyone = decode([0, 1, 2, 3])
    for found, expected, what in (
        (decode([2, 0, 3, 1]), everyone, "the order of the reports must not matter"),
        (decode([0, 1, 2]), everyone, "a client without examples must not matter"),
        (decode([0, 1, 2], updates[1]), updates[1], "the mean of equal updates must be that update"),
        (decode([3]), {"x": jnp.zeros(3)}, "without any example the mean update must be 0"),
    ):
        _assert_close(found, expected, tol, what)
    _check_rounds(aggregator, tol)


def check_task(task: Task) -> None:
    """Check that loss and metrics have one value per example, whatever fills up its batch, that the partition fits,
    and that the options rebuild the settings."""
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

    There must be one value per example, whatever fills up its batch, the same result in every trace, alone or side
    by side, and a finite gradient for every leaf in that leaf's type.

    Args:
        model: The model.
        batch: At least one column, with ids within the whole tables.
        tol: The largest difference, absolute and relative.
    """
    rngs = jax.random.split(jax.random.key(1), 3)
    batch = masked(batch, jnp.ones(next(iter(batch.values())).shape[0], bool))
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
    columns = store.select(setting.columns).examples(position)
    batch = {name: jnp.asarray(column[:4]) for name, column in columns.items()}
    batch = masked(batch, jnp.ones(min(int(store.counts[position]), 4), bool))
    params = model.init(jax.random.key(0))
    _check_batch(model, params, batch)
    _assert_close(partition.merge(*partition.split(params)), params, 0)


def _check_batch(model: Model, params: Params, batch: dict[str, jax.Array]) -> None:
    """Check that loss, weight and metrics of a batch have one value per example, which does not depend on rows
    that only fill up the batch, and that the losses are finite."""
    size = next(iter(batch.values())).shape[0]
    outputs = jax.jit(model.predict)(params, batch, jax.random.key(1))
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

    def tell(rows: jax.Array, mask: jax.Array, rng: jax.Array) -> dict[str, jax.Array]:
        here = masked({name: column[rows] for name, column in batch.items()}, mask)
        told = of_each(model, model.predict(noisy, here, rng), here)
        return told | {"training loss": training_losses(model, noisy, here, rng)}

    noisy = moved(params, jax.random.key(3))
    check_neighbours(tell, size, jax.random.key(2))


def _guarded(aggregator: Aggregator) -> Aggregator:
    """The aggregator, with functions that say which of them cannot do what a round asks of it."""

    def encode(report: Report, *given: Any) -> Contribution:
        sent = _called("encode", aggregator.encode, report, *given)
        assert isinstance(sent, Contribution), f"encode must return a Contribution, not {_shown(sent)}"
        numbers = {"weight": sent.weight, "clients": sent.clients, "valid": sent.valid}
        for name, each in (numbers | {"loss": sent.loss[0], "loss.weight": sent.loss[1]}).items():
            assert jnp.shape(each) == (), f"encode's {name} must be one number, not {jnp.shape(each)}"
        _check_leaves("encode", sent.update, report.update)
        for path, leaf in sent.update.items():
            begun = jax.eval_shape(aggregator.zero, report.update[path]).dtype
            assert jnp.result_type(leaf) == begun, (
                f"contributions must have the type that `zero` begins the sum in: of '{path}' encode makes "
                f"{jnp.result_type(leaf)}, and zero {begun}"
            )
        return sent

    def zero(leaf: Any) -> jax.Array:
        zeros = _called("zero", aggregator.zero, leaf)
        assert zeros.shape == leaf.shape, f"zero of {leaf.shape} must have this shape, not {zeros.shape}"
        nothing = isinstance(zeros, Tracer) or not np.any(zeros)
        assert nothing, "zero must return zeros: every device begins its part of the sum there"
        return zeros

    def reveal(total: Total, carried: Carried, rng: jax.Array | None) -> tuple[Total, Carried]:
        found = _called("reveal", aggregator.reveal, total, carried, rng)
        _check_pair("reveal", "total", found)
        assert isinstance(found[0], Total), f"reveal must return a Total first, not {_shown(found[0])}"
        _check_carried("reveal", carried, found[1])
        return found

    def decode(
        partition: Partition, total: Total, carried: Carried, rng: jax.Array
    ) -> tuple[Mapping[str, jax.Array], Carried]:
        found = _called("decode", aggregator.decode, partition, total, carried, rng)
        _check_pair("decode", "mean update", found)
        _check_leaves("decode", found[0], total.update)
        _check_carried("decode", carried, found[1])
        return found

    init = lambda partition: _called("init", aggregator.init, partition)
    return aggregator._replace(encode=encode, zero=zero, reveal=reveal, decode=decode, init=init)


def _called(name: str, function: Callable[..., Any], *given: Any) -> Any:
    try:
        return function(*given)
    except Exception as error:
        lines = str(error).strip().splitlines()
        why = f"{type(error).__name__}: {lines[0] if lines else 'no reason given'}"
        traced = isinstance(error, jax.errors.ConcretizationTypeError | jax.errors.TracerArrayConversionError)
        remedy = ". It runs in compiled code, where arrays have no values yet: use jnp.where in place of `if`"
        raise AssertionError(
            f"the aggregator's {name} fails in a round ({why}){remedy if traced else ''}"
        ) from error


def _check_pair(name: str, first: str, found: Any) -> None:
    pair = type(found) is tuple and len(found) == 2  # a Total is a tuple as well
    assert pair, f"{name} must return ({first}, what it carries on), not {_shown(found)}"


def _check_leaves(name: str, found: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    assert isinstance(found, Mapping), f"{name} must give {{path: array}}, not {_shown(found)}"
    assert set(found) == set(expected), (
        f"{name} must return something for every leaf, {sorted(expected)}, not {sorted(found)}"
    )
    for path, leaf in expected.items():
        here = jnp.shape(found[path])
        assert here == leaf.shape, f"{name} gives '{path}' the shape {here}; it must stay {leaf.shape}"


def _check_carried(name: str, before: Carried, after: Carried) -> None:
    form = lambda carried: {
        path: (jnp.shape(leaf), str(jnp.result_type(leaf))) for path, leaf in tree.flatten(carried).items()
    }
    assert form(before) == form(after), (
        f"what {name} carries on must have the names, shapes and types that it was given, {form(before)}, not "
        f"{form(after)}"
    )


def _check_rounds(aggregator: Aggregator, tol: float) -> None:
    """Run rounds of small clients with an aggregator."""
    spaces = aggregator.held or ("item",)
    sizes, rng = [3, 2, 4, 1, 5], np.random.default_rng(0)
    total = sum(sizes)
    columns: dict[str, Any] = {space: rng.integers(0, 6, total) for space in spaces}
    columns["y"] = rng.normal(size=total)
    store = ClientStore.from_arrays(np.repeat(np.arange(5), sizes), ids=list(spaces), **columns)

    def init(rng: jax.Array) -> dict[str, jax.Array]:
        return {"x": jnp.ones(3)} | {space: jax.random.normal(rng, (6, 3)) for space in spaces}

    def predict(params: Params, batch: Batch, rng: jax.Array) -> jax.Array:
        return sum(params[space][batch[space]] for space in spaces) @ params["x"]

    model = Model(init, predict, lambda outputs, batch: squared_error(outputs, batch, "y"))
    parts = partition(model, {space: keyed(space) for space in spaces})
    build = lambda rates: fed_avg(
        model,
        parts,
        update=by_steps(Batches(2), rates["update"]),
        optimizer=Sgd(rates["server"]).on_server(),
        aggregator=aggregator,
    )
    try:
        check_algorithm(build, {"update": 0.1, "server": 1.0}, store, cohort=4, lanes=(2,), tol=tol)
    except UserError as error:
        raise AssertionError(f"a round with this aggregator fails: {error}") from error


def _shown(value: Any) -> str:
    return type(value).__name__


def _all_shared() -> Partition:
    shape = {"x": jax.ShapeDtypeStruct((3,), jnp.float32)}
    return Partition(("x",), {"x": shared()}, shape, jax.tree_util.tree_structure(shape), {})


def _types(values: object) -> list[object]:
    return [jnp.result_type(leaf) for leaf in jax.tree_util.tree_leaves(values)]


def _assert_close(a: object, b: object, tol: float, what: str = "") -> None:
    close = lambda x, y: np.testing.assert_allclose(x, y, rtol=tol, atol=tol, err_msg=what)
    jax.tree_util.tree_map(close, a, b)
