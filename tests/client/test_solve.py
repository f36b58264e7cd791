"""The closed form against ridge regression written out, and against gradient steps."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from partwise.algorithms.fed_avg import fed_avg
from partwise.algorithms.fed_recon import fed_recon
from partwise.client import reconstruct, solve, update
from partwise.client.batches import Batches
from partwise.client.split import alternate, everything, none
from partwise.client.state import anchor, begin, get_parts, local_values, with_deltas
from partwise.model.partition import keyed, local, partition
from partwise.model.spec import Model, bag
from partwise.optimizers import Sgd
from partwise.server.cohort import Recruiting
from partwise.simulation.loop import Simulation
from partwise.tasks.matrix_factorization import matrix_factorization
from partwise.types import UserError

NUM_ITEMS, DIM, PULL = 6, 3, 0.7
COUNT = 11


@pytest.fixture(scope="module")
def model(biased_model):
    return biased_model(NUM_ITEMS, DIM)


@pytest.fixture(scope="module")
def params(model):
    return model.init(jax.random.key(3))


@pytest.fixture(scope="module")
def store(make_ratings):
    return make_ratings([COUNT], NUM_ITEMS - 1, seed=4)  # the last item is nobody's


@pytest.fixture(scope="module")
def clients(model, params, store, make_client):
    """The same client, its vector starting from chance, from zero or from a learned default."""

    def make(initial):
        parts = partition(model, {"user": local(initial=initial), "item/*": keyed("item")})
        return make_client(model, parts, params, store)

    return {initial: make(initial) for initial in ("random", "zero", "learned")}


def ridge(features, targets, pull, towards):
    """argmin |features x - targets|^2 + pull |x - towards|^2."""
    gram = features.T @ features + pull * np.eye(features.shape[1])
    return np.linalg.solve(gram, features.T @ targets + pull * towards)


def user_problem(params, store):
    items = store.columns["item"]
    table, offset = (np.asarray(params["item"][name], np.float64) for name in ("table", "offset"))
    return table[items], store.columns["rating"] - offset[items] - float(params["base"][0])


@pytest.mark.parametrize("initial", ["random", "zero", "learned"])
@pytest.mark.parametrize("batch_size", [4, 32])
def test_local_part_is_ridge_regression(clients, params, store, initial, batch_size):
    """Wherever it starts, it ends at the minimum; the pull is towards the learned default, or zero."""
    client = clients[initial]
    found = jax.jit(lambda p: reconstruct.by_solving(PULL, batch_size)(client, p, everything))(begin(client))
    towards = np.asarray(params["user"]) if initial == "learned" else np.zeros(DIM)
    expected = ridge(*user_problem(params, store), PULL, towards)
    np.testing.assert_allclose(found.local["user"], expected, rtol=1e-4, atol=1e-5)
    assert found.shared is not None
    np.testing.assert_array_equal(found.shared["base"], params["base"])
    assert not found.keyed


def test_only_the_support_set_counts(clients, params, store):
    client, chosen = clients["zero"], [0, 1, 4, 5, 8, 9]
    found = jax.jit(lambda p: reconstruct.by_solving(PULL)(client, p, alternate(2).support))(begin(client))
    features, targets = user_problem(params, store)
    expected = ridge(features[chosen], targets[chosen], PULL, np.zeros(DIM))
    np.testing.assert_allclose(found.local["user"], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("initial", ["random", "learned"])
def test_gradient_steps_end_where_the_closed_form_is(clients, initial):
    client = clients[initial]
    steps = reconstruct.by_steps(Batches(COUNT, None, 4000), 0.3, pull=PULL)
    walked = jax.jit(lambda p: steps(client, p, everything))(begin(client))
    solved = jax.jit(lambda p: reconstruct.by_solving(PULL)(client, p, everything))(begin(client))
    np.testing.assert_allclose(walked.local["user"], solved.local["user"], rtol=1e-3, atol=1e-4)


def item_problem(client, params, store):
    """Features of one unknown change per (own row, dimension), per own offset, and of the base."""
    items, ratings = store.columns["item"], store.columns["rating"]
    user = np.asarray(begin(client).local["user"], np.float64)
    table, offset = (np.asarray(params["item"][name], np.float64) for name in ("table", "offset"))
    own, position = np.unique(items, return_inverse=True)
    features = np.zeros((len(items), len(own) * (DIM + 1) + 1))
    for row, p in zip(features, position, strict=True):
        row[p * DIM : (p + 1) * DIM] = user
        row[len(own) * DIM + p] = 1
        row[-1] = 1
    return features, ratings - table[items] @ user - offset[items] - float(params["base"][0]), len(own)


@pytest.mark.parametrize("most_dense", [512, 0], ids=["dense", "conjugate gradients"])
def test_shared_and_keyed_part_is_ridge_regression(clients, params, store, monkeypatch, most_dense):
    """The global half of alternating minimisation, pulled to what was received; both ways of solving."""
    monkeypatch.setattr(solve, "MOST_DENSE", most_dense)
    client = clients["random"]
    trained = jax.jit(lambda p: update.by_solving(PULL)(client, p, everything))(begin(client))
    features, targets, num_own = item_problem(client, params, store)
    change = ridge(features, targets, PULL, np.zeros(features.shape[1]))
    table = change[: num_own * DIM].reshape(num_own, DIM)
    np.testing.assert_allclose(trained.progress.keyed["item/table"], table, rtol=1e-3, atol=2e-4)
    np.testing.assert_allclose(
        trained.progress.keyed["item/offset"], change[num_own * DIM : -1], rtol=1e-3, atol=2e-4
    )
    np.testing.assert_allclose(
        trained.progress.shared["base"], params["base"] + change[-1:], rtol=1e-3, atol=2e-4
    )
    np.testing.assert_array_equal(trained.progress.local["user"], begin(client).local["user"])


def test_without_examples_the_part_is_where_it_is_pulled_to(model, params, make_store, make_client):
    parts = partition(model, {"user": local(initial="learned"), "item/*": keyed("item")})
    nobody = make_store([0], item=np.zeros(0, np.int32), rating=np.zeros(0, np.float32))
    client = make_client(model, parts, params, nobody)
    started = begin(client)._replace(local={"user": jnp.ones(DIM)})
    found = reconstruct.by_solving(PULL)(client, started, everything)
    np.testing.assert_allclose(found.local["user"], params["user"], rtol=1e-5)


def test_a_neighbours_broken_value_does_not_reach_an_empty_client(clients):
    client = clients["zero"]
    poisoned = {"item": jnp.zeros(1, jnp.int32), "rating": jnp.full(1, jnp.nan)}
    examples = client.examples._replace(
        columns=poisoned,
        positions={"item": jnp.zeros(1, jnp.int32)},
        count=jnp.asarray(0),
        longest=jnp.asarray(5),
    )
    client = client._replace(examples=examples)
    found = jax.jit(lambda p: reconstruct.by_solving(PULL)(client, p, everything))(begin(client))
    np.testing.assert_array_equal(found.local["user"], np.zeros(DIM))


def test_alternating_minimisation_never_goes_up(clients):
    """Each half minimises one objective over its own part: the loss, the pull on l, and the pull on g."""
    client = clients["random"]

    def objective(progress):
        progress = with_deltas(client, progress)
        at = anchor(client, progress)
        pulls = [
            jnp.sum(jnp.square(a - b))
            for a, b in zip(
                jax.tree_util.tree_leaves(get_parts(progress, ("shared", "keyed", "local"))),
                jax.tree_util.tree_leaves(get_parts(at, ("shared", "keyed", "local"))),
                strict=True,
            )
        ]
        return total(progress) + PULL * sum(pulls)

    def total(progress):
        examples = client.examples
        rows = {
            path: table.at[examples.keys["item"].rows].add(progress.keyed[path])
            for path, table in client.received.tables.items()
        }
        merged = client.partition.merge({**progress.shared, **rows}, local_values(client, progress))
        batch = {**examples.columns, "item": examples.keys["item"].rows[examples.positions["item"]]}
        outputs = client.model.predict(merged, batch, client.rng)
        return jnp.sum(client.model.loss(outputs, batch))

    @jax.jit
    def passes(progress):
        values = [objective(progress)]
        for _ in range(4):
            progress = reconstruct.by_solving(PULL)(client, progress, everything)
            values.append(objective(progress))
            progress = update.by_solving(PULL)(client, progress, everything).progress
            values.append(objective(progress))
        return jnp.stack(values)

    values = np.asarray(passes(begin(client)))
    assert (np.diff(values) <= 1e-4 * values[:-1]).all(), values
    assert values[-1] < 0.7 * values[0]
    assert values[-1] < values[2] * 0.999  # passes after the first still help


def test_a_local_table_of_which_rows_are_added_up_is_ridge_regression(make_store, make_client):
    """Sums of rows have no derivative forwards."""
    model = Model(
        init=lambda rng: {"own": jax.random.normal(rng, (NUM_ITEMS, 1)), "base": jnp.ones(1)},
        predict=lambda params, batch, rng: bag(params["own"], batch["tags"])[:, 0] + params["base"][0],
        loss=lambda outputs, batch: jnp.square(outputs - batch["rating"]),
    )
    draw = np.random.default_rng(0)
    tags = draw.integers(-1, NUM_ITEMS, (COUNT, 3)).astype(np.int32)
    rating = draw.normal(size=COUNT).astype(np.float32)
    parts = partition(model, {"own": local("zero")})
    client = make_client(
        model, parts, model.init(jax.random.key(0)), make_store([COUNT], tags=tags, rating=rating)
    )
    found = jax.jit(lambda: reconstruct.by_solving(PULL)(client, begin(client), everything))()
    occurs = (tags[:, :, None] == np.arange(NUM_ITEMS)).sum(axis=1)
    expected = ridge(occurs, rating - 1.0, PULL, np.zeros(NUM_ITEMS))
    np.testing.assert_allclose(found.local["own"][:, 0], expected, rtol=1e-4, atol=1e-5)
    assert solve.curvature(client, begin(client), everything, PULL, 4).shape == (NUM_ITEMS, NUM_ITEMS)


@pytest.mark.parametrize(
    ("loss", "groups"),
    [
        (lambda outputs, batch: jnp.square(outputs - batch["rating"]) ** 2, ("local",)),
        (lambda outputs, batch: jnp.square(jnp.tanh(outputs) - batch["rating"]), ("local",)),
        (lambda outputs, batch: jnp.square(outputs - batch["rating"]), ("local", "keyed")),
    ],
    ids=["fourth power", "squashed", "both factors at once"],
)
def test_losses_without_a_closed_form_are_refused(clients, loss, groups):
    client = clients["random"]
    client = client._replace(model=client.model._replace(loss=loss))
    words = (
        r"least squares in the " + " and ".join(groups) + r" part, but this loss is not.*Use gradient steps"
    )
    with pytest.raises(UserError, match=words):
        solve.check_quadratic(client, groups)


def test_losses_with_a_gradient_of_their_own_are_refused_too(clients):
    """They have no second derivative; that the closed form does not fit is what should be said."""
    loss = jax.custom_vjp(lambda outputs, rating: (outputs - rating) ** 4)
    loss.defvjp(lambda a, b: ((a - b) ** 4, a - b), lambda kept, g: (4 * g * kept**3, -4 * g * kept**3))
    client = clients["random"]
    client = client._replace(model=client.model._replace(loss=lambda out, batch: loss(out, batch["rating"])))
    with pytest.raises(UserError, match="least squares in the local part, but this loss is not"):
        reconstruct.check_solvable(client)


def test_least_squares_is_accepted(clients):
    assert reconstruct.check_solvable(clients["learned"]) is None
    assert solve.check_quadratic(clients["zero"], ("shared", "keyed")) is None


def test_closed_form_update_with_a_learned_default_is_refused(clients):
    """The default moves the local vector, which multiplies the rows: that is not least squares in both."""
    client = clients["learned"]
    with pytest.raises(UserError, match="learned"):
        update.by_solving(PULL)(client, begin(client), everything)


def test_a_negative_pull_is_refused():
    with pytest.raises(UserError, match="must not be negative, not -1"):
        reconstruct.by_solving(-1)


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
@pytest.mark.parametrize("count", [0, 1, 4, 9, 60])
def test_without_a_pull_there_is_no_step_where_examples_tell_nothing(make_ratings, make_client, scale, count):
    """Fewer ratings than numbers in a vector: the shortest vector that explains them, on any scale; none: none."""
    model = matrix_factorization(40, dim=20)
    params = {
        "user": jnp.zeros(20),
        "item": scale * jax.random.normal(jax.random.key(1), (40, 20)),
    }
    parts = partition(model, {"user": local("zero"), "item": keyed("item")})
    client = make_client(model, parts, params, make_ratings([count], 40, seed=2))
    found = jax.jit(lambda p: reconstruct.by_solving(0.0)(client, p, everything))(begin(client)).local["user"]
    columns = make_ratings([count], 40, seed=2).columns
    rows, ratings = np.asarray(params["item"], np.float64)[columns["item"]], columns["rating"]
    expected = np.linalg.pinv(rows, rcond=1e-2) @ ratings if count else np.zeros(20)
    np.testing.assert_allclose(found, expected, atol=0.03 * max(np.abs(expected).max(), 1e-6))


MANY = 600  # parameters, more than `MOST_DENSE`


def regression():
    """y ~ features . weights + shift."""
    return Model(
        lambda rng: {"weights": jnp.zeros(MANY), "shift": jnp.zeros(1)},
        lambda params, batch, rng: batch["x"] @ params["weights"] + params["shift"][0],
        lambda outputs, batch: (outputs - batch["y"]) ** 2,
    )


@pytest.fixture(scope="module")
def badly_scaled(make_store):
    """Two clients; the features' sizes go from 1 down to 1/1000."""
    rng, count = np.random.default_rng(0), 900
    scales = np.geomspace(1, 1e-3, MANY)
    x = rng.normal(size=(2 * count, MANY)) * scales
    y = x @ (rng.normal(size=MANY) / scales) / 10 + rng.normal(size=2 * count)
    return make_store([count, count], x=x.astype(np.float32), y=y.astype(np.float32)), scales


def local_weights(model):
    return partition(model, {"weights": local(initial="zero")})


@pytest.mark.parametrize("pull", [0.0, 1e-3, 1.0])
def test_many_parameters_of_different_sizes_are_solved_for(badly_scaled, make_client, pull):
    """The prediction, and the parameters in units of their features, are those of ridge regression."""
    store, scales = badly_scaled
    model = regression()
    parts = local_weights(model)
    client = make_client(model, parts, model.init(jax.random.key(0)), store)
    found = jax.jit(lambda p: reconstruct.by_solving(pull)(client, p, everything))(begin(client))
    rows = store.examples(0)
    expected = ridge(rows["x"].astype(float), rows["y"].astype(float), pull, np.zeros(MANY))
    error = (np.asarray(found.local["weights"]) - expected) * scales
    assert np.linalg.norm(error) < 1e-3 * np.linalg.norm(expected * scales)


def test_products_find_what_the_matrix_does(badly_scaled, make_client, monkeypatch):
    store, _ = badly_scaled
    model = regression()
    client = make_client(model, local_weights(model), model.init(jax.random.key(0)), store)
    by_products = jax.jit(lambda p: reconstruct.by_solving(1.0)(client, p, everything))(begin(client))
    monkeypatch.setattr(solve, "MOST_DENSE", MANY)
    monkeypatch.setattr(solve, "RIDGE", 0.0)
    dense = jax.jit(lambda p: reconstruct.by_solving(1.0)(client, p, everything))(begin(client))
    np.testing.assert_allclose(by_products.local["weights"], dense.local["weights"], rtol=1e-2, atol=1e-3)


def test_a_client_whose_minimum_is_not_found_is_named(badly_scaled, monkeypatch):
    store, _ = badly_scaled
    model = regression()
    build = lambda rates: fed_recon(
        model,
        local_weights(model),
        split=none(),
        reconstruct=reconstruct.by_solving(0.0),
        update=update.by_steps(Batches(50), 0.1),
        optimizer=Sgd(1.0).on_server(),
    )
    broken = []
    for steps in (solve.STEPS, 0.005):
        monkeypatch.setattr(solve, "STEPS", steps)
        simulation = Simulation(build, {}, store, Recruiting(2), lanes=2)
        (records,) = simulation.run(1)
        broken.append(records[0].broken)
    assert (len(broken[0]), sorted(broken[1])) == (0, store.client_ids.tolist())


@pytest.mark.parametrize("outputs", [1, 3])
def test_the_scale_of_parameters_is_found_from_single_examples(outputs):
    """Exactly that of the matrix for one residual; for several, no more than it, and not nothing."""
    rng = np.random.default_rng(1)
    features = jnp.asarray(rng.normal(size=(20, outputs, 7)) * np.geomspace(1, 1e-3, 7), jnp.float32)
    x0 = jnp.zeros(7)
    losses = [lambda x, a=a: jnp.sum((a @ x - 1) ** 2) for a in features]
    along = lambda f, v: jax.grad(lambda x: jnp.vdot(jax.grad(f)(x), v))(x0)
    found = sum(solve._diagonal(along, x0, f) for f in losses)
    exact = 2 * jnp.sum(features**2, axis=(0, 1))
    if outputs == 1:
        np.testing.assert_allclose(found, exact, rtol=1e-3)
    else:
        assert ((found <= exact * 1.001) & (found > exact / 10)).all()


def drifting(update_of, store, rounds):
    """Where training ends, for y = slope x and clients whose own minima differ."""
    model = Model(
        lambda rng: {"slope": jnp.full(1, 0.5)},
        lambda params, batch, rng: params["slope"][0] * batch["x"],
        lambda outputs, batch: (outputs - batch["y"]) ** 2,
    )
    build = lambda rates: fed_avg(
        model, partition(model, {}), update=update_of, optimizer=Sgd(1.0).on_server()
    )
    simulation = Simulation(build, {}, store, Recruiting(store.num_clients), lanes=2, rounds_per_call=rounds)
    list(simulation.run(rounds))
    return float(simulation.state.params["slope"][0])


def test_solving_for_what_is_shared_ends_beside_the_minimum(make_store):
    """The example of docs/concepts.md: half of the clients have x = 2 and y = 0, half have x = 1/2 and y = x. A
    step of every client's gradient ends where the loss of all examples is least; whole solutions do not, because a
    client goes to its own minimum whatever that is worth to it."""
    each, sizes, ends = 10, np.array([2.0, 0.5]), np.array([0.0, 1.0])
    x = np.repeat(sizes, each).astype(np.float32)
    store = make_store([each, each], x=x, y=x * np.repeat(ends, each).astype(np.float32))
    curvature = each * sizes**2
    least = np.sum(curvature * ends) / np.sum(curvature)
    assert least == pytest.approx(1 / 17)
    walked = drifting(update.by_steps(Batches(each), 0.2), store, 200)
    assert walked == pytest.approx(least, abs=1e-4)
    found = []
    for pull in (1.0, 10.0, 100.0):
        share = curvature / (curvature + pull)  # of its way to its own minimum that a client goes
        found.append(drifting(update.by_solving(pull), store, 400))
        assert found[-1] == pytest.approx(np.sum(share * ends) / np.sum(share), abs=1e-3)
    assert found == pytest.approx([0.423, 0.2, 0.079], abs=1e-3)
