"""Flax NNX modules as models: dropout, batch statistics, tied weights, 16 bits, slices."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import partwise
from partwise.testing import check_adapter
from partwise.tree import flatten
from partwise.types import UserError

nnx = pytest.importorskip("flax.nnx")
linen = pytest.importorskip("flax.linen")


class Scores(nnx.Module):
    def __init__(self, rngs):
        self.item = nnx.Embed(30, 4, rngs=rngs)
        self.hidden = nnx.Linear(4, 5, rngs=rngs)
        self.out = nnx.Linear(5, 1, rngs=rngs)

    def __call__(self, item):
        return self.out(jax.nn.relu(self.hidden(self.item(item))))[:, 0]


class Digits(nnx.Module):
    """Somebody's classifier, with all that differs between training and use."""

    def __init__(self, rngs, dtype=None):
        self.first = nnx.Linear(4, 8, rngs=rngs, dtype=dtype)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)
        self.out = nnx.Linear(8, 3, rngs=rngs, dtype=dtype)

    def __call__(self, x):
        return self.out(self.drop(jax.nn.relu(self.norm(self.first(x)))))


class Tied(nnx.Module):
    """Words in, words out, by one table."""

    def __init__(self, rngs):
        self.words = nnx.Embed(7, 4, rngs=rngs)
        self.again = self.words

    def __call__(self, word):
        return self.again.attend(self.words(word))


def test_a_round_is_that_of_the_plain_functions(one_round, expected_round, losses):
    model = partwise.nnx(Scores, losses["squared"], inputs="item")
    names = {"item": "item/embedding", "hidden": "hidden/kernel", "hidden bias": "hidden/bias"}
    found = one_round(model, names | {"out": "out/kernel", "out bias": "out/bias"})
    for name, leaf in expected_round.items():
        np.testing.assert_allclose(found[name], leaf, atol=1e-5)


def test_a_module_keeps_the_contract(digits, losses):
    check_adapter(partwise.nnx(Digits(nnx.Rngs(0)), losses["crossed"], inputs="pixels"), digits)


def test_dropout_differs_from_step_to_step_and_is_off_in_use(digits, losses):
    model = partwise.nnx(Digits, losses["crossed"], inputs="pixels")
    params = model.init(jax.random.key(0))
    losses_of = jax.jit(lambda seed: model.train_loss(params, digits, jax.random.key(seed)))
    first, again, other = map(losses_of, (0, 0, 1))
    np.testing.assert_array_equal(first, again)
    assert not np.allclose(first, other)
    used = [model.predict(params, digits, jax.random.key(i)) for i in (0, 1)]
    np.testing.assert_array_equal(*used)


def test_two_layers_of_dropout_do_not_drop_the_same(losses):
    class Twice(nnx.Module):
        def __init__(self, rngs):
            self.scale, self.parts = (
                nnx.Param(jnp.ones(64)),
                nnx.List([nnx.Dropout(0.5, rngs=rngs) for _ in range(2)]),
            )

        def __call__(self, x):
            return jnp.stack([part(self.scale * x) for part in self.parts], axis=-1)

    model = partwise.nnx(
        Twice, lambda outputs, batch: jnp.abs(outputs[..., 0] - outputs[..., 1]).sum(-1), inputs="x"
    )
    differ = model.train_loss(model.init(jax.random.key(0)), {"x": jnp.ones((2, 64))}, jax.random.key(3))
    assert float(differ.min()) > 0


def test_statistics_are_a_running_mean_by_the_rate_of_the_step(digits, losses, one_step):
    """What a module in training mode does with momentum 1 - rate."""
    module = Digits(nnx.Rngs(3))
    model = partwise.nnx(module, losses["crossed"], inputs="pixels")
    moved = one_step(model, model.init(jax.random.key(0)), digits, rate=0.1)
    module.norm.momentum = 0.9
    module.train()
    module(digits["pixels"])
    np.testing.assert_allclose(moved["norm/mean"], module.norm.mean[...], rtol=1e-5)
    np.testing.assert_allclose(moved["norm/var"], module.norm.var[...], rtol=1e-5)


def test_fixed_statistics_stay_and_normalise(digits, losses, one_step):
    model = partwise.nnx(Digits, losses["crossed"], inputs="pixels", statistics="fixed")
    params = model.init(jax.random.key(0))
    moved = one_step(model, params, digits, rate=0.1)
    np.testing.assert_array_equal(moved["norm/mean"], params["norm"]["mean"])
    assert not np.allclose(moved["norm/scale"], params["norm"]["scale"])
    far = {**params, "norm": {**params["norm"], "mean": params["norm"]["mean"] + 3}}
    losses_of = lambda values: model.train_loss(values, digits, jax.random.key(0))
    assert not np.allclose(losses_of(far), losses_of(params))


def test_the_loss_is_that_of_the_outputs_whatever_statistics_do(digits, losses):
    """What moves statistics adds a gradient, and no value."""
    module = Digits(nnx.Rngs(0))
    module.drop.rate = 0.0
    model = partwise.nnx(module, losses["crossed"], inputs="pixels")
    found = model.train_loss(model.init(jax.random.key(0)), digits, jax.random.key(0))
    module.train()
    np.testing.assert_allclose(found, losses["crossed"](module(digits["pixels"]), digits), rtol=1e-6)


def test_tied_weights_are_one_leaf(losses):
    batch = {"word": jnp.array([0, 3]), "label": jnp.array([1, 2])}
    model = partwise.nnx(Tied, losses["crossed"], inputs="word")
    params = model.init(jax.random.key(0))
    assert len(flatten(params)) == 1
    table = next(iter(flatten(params).values()))
    np.testing.assert_allclose(
        model.predict(params, batch, jax.random.key(0)), table[batch["word"]] @ table.T, rtol=1e-5
    )


def test_sixteen_bits_are_for_computing_only(digits, losses, one_step):
    model = partwise.nnx(lambda rngs: Digits(rngs, jnp.bfloat16), losses["crossed"], inputs="pixels")
    params = model.init(jax.random.key(0))
    assert {leaf.dtype for leaf in flatten(params).values()} == {jnp.dtype("float32")}
    assert model.predict(params, digits, jax.random.key(0)).dtype == jnp.float32
    moved = one_step(model, params, digits, rate=0.1)
    assert {leaf.dtype for leaf in moved.values()} == {jnp.dtype("float32")}


def test_a_function_starts_from_the_seed_and_a_module_from_its_values(losses):
    random = partwise.nnx(Digits, losses["crossed"])
    kernel = lambda model, seed: model.init(jax.random.key(seed))["out"]["kernel"]
    assert not np.allclose(kernel(random, 0), kernel(random, 1))
    module = Digits(nnx.Rngs(5))
    trained = partwise.nnx(module, losses["crossed"])
    np.testing.assert_array_equal(kernel(trained, 0), module.out.kernel[...])
    np.testing.assert_array_equal(kernel(trained, 0), kernel(trained, 1))


def test_state_of_another_kind_is_refused(losses):
    class Cached(nnx.Module):
        def __init__(self, rngs):
            self.kernel, self.seen = nnx.Param(jnp.ones(3)), nnx.Cache(jnp.zeros(3))

    with pytest.raises(UserError, match=r"'seen' is a Cache. Build it without, or make it an nnx.Param"):
        partwise.nnx(Cached, losses["crossed"])


def test_what_cannot_be_meant_is_refused(digits, losses):
    with pytest.raises(UserError, match=r"unknown statistics of a module 'none' \(known: batch, fixed\)"):
        partwise.nnx(Digits, losses["crossed"], statistics="none")
    model = partwise.nnx(Digits, losses["crossed"], inputs="pixel")
    with pytest.raises(UserError, match=r"unknown column .*inputs= names.* 'pixel' \(nearest: pixels"):
        model.predict(model.init(jax.random.key(0)), digits, jax.random.key(0))
    with pytest.raises(UserError, match="this module has no parameters"):
        partwise.nnx(lambda rngs: nnx.Dropout(0.5, rngs=rngs), losses["crossed"])


class Wide(nnx.Module):
    def __init__(self, units, *, rngs):
        self.out = nnx.Linear(units, 1, rngs=rngs)


MEAN = lambda outputs, batch: jnp.mean(outputs)


@pytest.mark.parametrize(
    ("module", "options", "said"),
    [
        (
            Wide,
            {},
            r"missing a required argument: 'rngs'. Write a function: lambda rngs: Wide\(..., rngs=rngs\)",
        ),
        (lambda: Digits(nnx.Rngs(0)), {}, r"called as module\(rngs\), but .* too many positional arguments"),
        (lambda rngs: 3, {}, "the function gave 3, and not an nnx.Module"),
        (3, {}, "this is 3: give an nnx.Module, or a function"),
        (linen.Dense(3), {}, "modules of flax.linen are another kind"),
        (Digits, {"loss": None}, r"loss is None: give a function, loss\(outputs, batch\)"),
        (Digits, {"loss": lambda outputs: outputs}, r"loss\(outputs, batch\), but the loss that was given"),
        (Digits, {"train_loss": MEAN}, r"train_loss\(module, batch, rng\), but"),
        (Digits, {"weight": MEAN}, r"weight\(batch\), but"),
        (Digits, {"inputs": 3}, "inputs is 3: give a column's name"),
        (Digits, {"metrics": {"error": MEAN}}, "'error' is <function"),
        (Digits, {"metrics": [MEAN]}, "metrics are a dict of names"),
    ],
)
def test_mistakes_are_told_when_the_model_is_made(module, options, said):
    with pytest.raises(UserError, match=said) as told:
        partwise.nnx(module, **{"loss": MEAN, **options})
    assert "\n" not in str(told.value)


def test_a_mean_does_not_hide_in_what_is_added_to_it(digits, losses):
    mean = lambda outputs, batch: losses["crossed"](outputs, batch).mean()
    own = lambda module, batch, rng: mean(module(batch["pixels"]), batch)
    for model in (
        partwise.nnx(Digits, mean, inputs="pixels"),
        partwise.nnx(Digits, losses["crossed"], inputs="pixels", train_loss=own),
    ):
        with pytest.raises(UserError, match=r"the loss of a batch of 6 examples has shape \(\)"):
            model.train_loss(model.init(jax.random.key(0)), digits, jax.random.key(0))


def test_statistics_leave_out_rows_that_only_fill_up_a_batch(assert_padding_is_left_out):
    class Normalised(nnx.Module):
        def __init__(self, rngs):
            self.norm, self.out = nnx.BatchNorm(3, rngs=rngs), nnx.Linear(3, 1, rngs=rngs)
            self.each = nnx.BatchNorm(1, rngs=rngs)  # of three values of an example

        def __call__(self, x):
            return self.out(self.norm(x))[:, 0] + self.each(x.reshape(-1, 1)).reshape(-1, 3) @ jnp.arange(3.0)

    error = lambda outputs, batch: jnp.square(outputs - batch["y"])
    assert_padding_is_left_out(partwise.nnx(Normalised, error, inputs="x"))
