"""Keras models as models: rows that are cut, dropout, batch statistics, regularizers, 16 bits, loaded weights."""

from __future__ import annotations

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import partwise
from partwise.data import by_client
from partwise.testing import check_adapter
from partwise.types import UserError

os.environ["KERAS_BACKEND"] = "jax"
keras = pytest.importorskip("keras")
layers = keras.layers


def scores(num_items):
    item = keras.Input((), dtype="int32", name="item")
    x = layers.Embedding(num_items, 4, name="item_table")(item)
    x = layers.Dense(5, activation="relu", name="hidden")(x)
    return keras.Model(item, layers.Dense(1, name="out")(x)[:, 0])


def digits_model(regularizer=None, dtype=None, trainable=True):
    norm = layers.BatchNormalization(name="norm")
    norm.trainable = trainable
    return keras.Sequential(
        [
            keras.Input((4,)),
            layers.Dense(8, kernel_regularizer=regularizer, dtype=dtype),
            norm,
            layers.Activation("relu"),
            layers.Dropout(0.5),
            layers.Dense(3, dtype=dtype),
        ]
    )


class Tied(keras.Model):
    """Words in, words out, by one table."""

    def __init__(self):
        super().__init__()
        self.words = layers.ReversibleEmbedding(7, 4, name="words")

    def call(self, word):
        return self.words(self.words(word), reverse=True)


def test_a_round_is_that_of_the_plain_functions(one_round, expected_round, losses):
    model = partwise.keras(scores, losses["squared"], rows={"num_items": 30}, inputs="item")
    names = {"item": "item_table/embeddings", "hidden": "hidden/kernel", "hidden bias": "hidden/bias"}
    found = one_round(model, names | {"out": "out/kernel", "out bias": "out/bias"})
    for name, leaf in expected_round.items():
        np.testing.assert_allclose(found[name], leaf, atol=1e-5)


def test_a_model_keeps_the_contract(digits, losses):
    check_adapter(partwise.keras(digits_model, losses["crossed"], inputs="pixels"), digits)


def test_names_that_keras_makes_up_do_not_hang_on_what_was_built_before(losses):
    layers.Dense(3), layers.Dense(3)
    model = partwise.keras(digits_model, losses["crossed"])
    params = model.init(jax.random.key(0))
    norm = {f"norm/{name}" for name in ("gamma", "beta", "moving_mean", "moving_variance")}
    assert set(params) == {"dense/kernel", "dense/bias", "dense_1/kernel", "dense_1/bias"} | norm


def test_initial_values_hang_on_the_seed_and_are_as_the_initializer_says(losses):
    model = partwise.keras(digits_model, losses["crossed"])
    kernels = jax.jit(jax.vmap(lambda rng: model.init(rng)["dense/kernel"]))(
        jax.random.split(jax.random.key(0), 50)
    )
    bound = (6 / (4 + 8)) ** 0.5  # Glorot's
    assert not np.allclose(kernels[0], kernels[1])
    assert bound * 0.9 < float(jnp.abs(kernels).max()) < bound


def test_weights_that_build_sets_are_where_training_begins(tmp_path, losses):
    file = tmp_path / "digits.keras"
    made = digits_model()
    made.save(file)
    model = partwise.keras(lambda: keras.models.load_model(file), losses["crossed"])
    start = model.init(jax.random.key(0))
    last = made.weights[-2]
    np.testing.assert_array_equal(start[last.path.removeprefix(f"{made.name}/")], last)
    start["norm/gamma"].delete()  # as those who train do, to save memory
    assert model.init(jax.random.key(1))["norm/gamma"].tolist() == [1] * 8


def test_dropout_differs_from_step_to_step_and_is_off_in_use(digits, losses):
    model = partwise.keras(digits_model, losses["crossed"], inputs="pixels")
    params = model.init(jax.random.key(0))
    losses_of = jax.jit(lambda seed: model.train_loss(params, digits, jax.random.key(seed)))
    first, again, other = map(losses_of, (0, 0, 1))
    np.testing.assert_array_equal(first, again)
    assert not np.allclose(first, other)
    np.testing.assert_array_equal(*(model.predict(params, digits, jax.random.key(i)) for i in (0, 1)))


def test_statistics_are_a_running_mean_by_the_rate_of_the_step(digits, losses, one_step):
    model = partwise.keras(digits_model, losses["crossed"], inputs="pixels")
    params = model.init(jax.random.key(0))
    moved = one_step(model, params, digits, rate=0.1)
    seen = digits["pixels"] @ params["dense/kernel"]
    np.testing.assert_allclose(moved["norm/moving_mean"], 0.1 * seen.mean(0), atol=1e-6)
    np.testing.assert_allclose(moved["norm/moving_variance"], 0.9 + 0.1 * seen.var(0), rtol=1e-5)


def test_what_keras_does_not_train_stays(digits, losses, one_step):
    """A layer that is not trainable normalises by its own statistics."""
    model = partwise.keras(lambda: digits_model(trainable=False), losses["crossed"], inputs="pixels")
    params = model.init(jax.random.key(0))
    moved = one_step(model, params, digits, rate=0.1)
    for name in ("gamma", "beta", "moving_mean", "moving_variance"):
        np.testing.assert_array_equal(moved[f"norm/{name}"], params[f"norm/{name}"])
    assert not np.allclose(moved["dense/kernel"], params["dense/kernel"])


def test_a_regularizer_is_part_of_the_training_loss(digits, losses):
    plain, penalised = (
        partwise.keras(lambda given=given: digits_model(given), losses["crossed"], inputs="pixels")
        for given in (None, keras.regularizers.L2(0.1))
    )
    params, rng = plain.init(jax.random.key(0)), jax.random.key(1)
    more = penalised.train_loss(params, digits, rng) - plain.train_loss(params, digits, rng)
    np.testing.assert_allclose(more, 0.1 * jnp.square(params["dense/kernel"]).sum(), rtol=1e-4)
    np.testing.assert_array_equal(*(model.predict(params, digits, rng) for model in (plain, penalised)))


def test_tied_weights_are_one_leaf(losses):
    def build():
        model = Tied()
        model(jnp.zeros(1, jnp.int32))
        return model

    batch = {"word": jnp.array([0, 3]), "label": jnp.array([1, 2])}
    model = partwise.keras(build, losses["crossed"], inputs="word")
    params = model.init(jax.random.key(0))
    assert list(params) == ["words/embeddings"]
    table = params["words/embeddings"]
    np.testing.assert_allclose(
        model.predict(params, batch, jax.random.key(0)), table[batch["word"]] @ table.T, rtol=1e-5
    )


def test_sixteen_bits_are_for_computing_only(digits, losses, one_step):
    model = partwise.keras(lambda: digits_model(dtype="mixed_bfloat16"), losses["crossed"], inputs="pixels")
    params = model.init(jax.random.key(0))
    assert {leaf.dtype for leaf in params.values()} == {jnp.dtype("float32")}
    assert model.predict(params, digits, jax.random.key(0)).dtype == jnp.float32
    moved = one_step(model, params, digits, rate=0.1)
    assert {leaf.dtype for leaf in moved.values()} == {jnp.dtype("float32")}


def test_several_inputs_and_the_batch_by_name(losses):
    def build():
        one, two = keras.Input((2,), name="one"), keras.Input((2,), name="two")
        return keras.Model([one, two], layers.Dense(3)(layers.Concatenate()([one, two])))

    batch = {"one": jnp.ones((2, 2)), "two": jnp.zeros((2, 2)), "label": jnp.array([0, 1])}
    by_order = partwise.keras(build, losses["crossed"], inputs=("one", "two"))
    by_name = partwise.keras(
        build, losses["crossed"], inputs=lambda batch: {"one": batch["one"], "two": batch["two"]}
    )
    params, rng = by_order.init(jax.random.key(0)), jax.random.key(0)
    np.testing.assert_array_equal(by_order.predict(params, batch, rng), by_name.predict(params, batch, rng))


def test_what_cannot_be_meant_is_refused(losses):
    with pytest.raises(
        UserError, match=r"a model without weights yet: it must give a keras\.Model that is built"
    ):
        partwise.keras(Tied, losses["crossed"])
    with pytest.raises(UserError, match=r"build\(\) gave 3: it must give a keras.Model"):
        partwise.keras(lambda: 3, losses["crossed"])
    with pytest.raises(
        UserError, match=r"rows=\{'num_items': 30\}: no weight of the model has that many rows"
    ):
        partwise.keras(lambda num_items: digits_model(), losses["crossed"], rows={"num_items": 30})


def test_a_keyed_weight_needs_its_number_of_rows(make_ratings, losses):
    model = partwise.keras(lambda: scores(30), losses["squared"], inputs="item")
    roles = partwise.partition(model, {"item_table/*": partwise.keyed("item")})
    setting = partwise.Setting(model, roles, ("item", "rating"))
    task = partwise.Task("mine", *by_client(make_ratings([8] * 12, 30)), setting)
    said = r"'item_table/embeddings' is keyed.*as in rows=\{'num_items': 30\}"
    with pytest.raises(UserError, match=said):
        partwise.train(task, rounds=1, cohort__size=2, split__batch_size=2, simulation__lanes=1)


MEAN = lambda outputs, batch: jnp.mean(outputs)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (lambda: (digits_model(), MEAN, {}), r"this is a model, 'sequential.*def build\(num_items\)"),
        (lambda: (3, MEAN, {}), "this is 3: give a function that builds"),
        (lambda: (scores, MEAN, {}), "missing a required argument: 'num_items'.*rows= names"),
        (lambda: (scores, MEAN, {"rows": {"items": 3}}), "build\\(items=3\\) does not fit"),
        (lambda: (scores, MEAN, {"rows": 3}), "rows names the arguments.*not 3"),
        (lambda: (scores, MEAN, {"rows": {"num_items": "3"}}), "'num_items' is '3', and must be a whole"),
        (lambda: (scores, keras.losses.MeanSquaredError(), {}), "MeanSquaredError\\(reduction=None\\)"),
        (lambda: (lambda: 1 / 0, MEAN, {}), r"build\(\) failed \(ZeroDivisionError"),
        (lambda: (compiled, MEAN, {}), r"must not compile the model \(load_model\(..., compile=False\)\)"),
        (lambda: (lambda: keras.Sequential([keras.Input((3,)), layers.ReLU()]), MEAN, {}), "no parameters"),
    ],
)
def test_mistakes_are_told_when_the_model_is_made(given, said):
    build, loss, options = given()
    with pytest.raises(UserError, match=said) as told:
        partwise.keras(build, loss, **options)
    assert "\n" not in str(told.value)


def compiled():
    model = digits_model()
    model.compile("adam", "mse")
    return model


def test_a_model_that_was_there_before_is_refused_and_left_as_it_is(losses):
    model = digits_model()
    with pytest.raises(UserError, match=r"must build a new one every time.*clone_model"):
        partwise.keras(lambda: model, losses["crossed"])
    assert model.get_layer("norm").momentum == 0.99

    def copied():
        copy = keras.models.clone_model(model)
        copy.set_weights(model.get_weights())
        return copy

    start = partwise.keras(copied, losses["crossed"]).init(jax.random.key(0))
    np.testing.assert_array_equal(
        start[model.layers[-1].kernel.path.split("/", 1)[1]], model.layers[-1].kernel
    )


def test_a_mean_does_not_hide_in_what_is_added_to_it(digits, losses):
    model = partwise.keras(
        digits_model, lambda outputs, batch: losses["crossed"](outputs, batch).mean(), inputs="pixels"
    )
    with pytest.raises(UserError, match=r"the loss of a batch of 6 examples has shape \(\)"):
        model.train_loss(model.init(jax.random.key(0)), digits, jax.random.key(0))


def test_models_of_the_user_work_beside_it(losses):
    partwise.keras(digits_model, losses["crossed"])
    own = digits_model()
    own.compile("sgd", "sparse_categorical_crossentropy")
    own.fit(np.ones((6, 4)), np.zeros(6), verbose=0)
    assert own.predict(np.ones((2, 4)), verbose=0).shape == (2, 3)


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess:
    clean = {name: value for name, value in os.environ.items() if name != "KERAS_BACKEND"} | environment
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=clean, check=False
    )


def test_the_backend_is_jax_or_the_remedy_is_told():
    done = run_python("import partwise; partwise.keras; import keras; print(keras.backend.backend())")
    assert done.stdout.split() == ["jax"]
    done = run_python("import keras, partwise; partwise.keras", KERAS_BACKEND="numpy")
    assert "Keras runs on 'numpy', and partwise needs it on JAX" in done.stderr
    assert "os.environ['KERAS_BACKEND'] = 'jax'` at the top of the program" in done.stderr


def test_statistics_leave_out_rows_that_only_fill_up_a_batch(assert_padding_is_left_out):
    def build():
        x = keras.Input((3,), name="x")
        both = keras.layers.Concatenate()(
            [
                keras.layers.BatchNormalization()(x),
                keras.layers.Flatten()(keras.layers.BatchNormalization()(keras.layers.Reshape((3, 1))(x))),
            ]
        )
        return keras.Model(x, keras.layers.Dense(1, kernel_initializer="ones")(both))

    error = lambda outputs, batch: jnp.square(outputs[:, 0] - batch["y"])
    assert_padding_is_left_out(partwise.keras(build, error, inputs="x"))
