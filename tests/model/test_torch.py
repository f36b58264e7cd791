"""PyTorch modules as models, where PyTorch and torchax are installed (docs/torch.md says how)."""

from __future__ import annotations

import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import partwise
from partwise.testing import check_adapter
from partwise.types import UserError

torch = pytest.importorskip("torch")
if importlib.util.find_spec("torchax") is None:
    pytest.skip("torchax is not installed", allow_module_level=True)
nn = torch.nn
RNG = jax.random.key(0)


class Scores(nn.Module):
    def __init__(self):
        super().__init__()
        self.item, self.hidden, self.out = nn.Embedding(30, 4), nn.Linear(4, 5), nn.Linear(5, 1)

    def forward(self, item):
        return self.out(torch.relu(self.hidden(self.item(item))))[:, 0]


class Tied(nn.Module):
    """Words in, words out, by one table."""

    def __init__(self):
        super().__init__()
        self.words, self.out = nn.Embedding(7, 4), nn.Linear(4, 7, bias=False)
        self.out.weight = self.words.weight

    def forward(self, word):
        return self.out(self.words(word))


class Sequence(nn.Module):
    """Recurrence, attention and a convolution over sentences."""

    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(3, 4, batch_first=True)
        self.attention = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
        self.convolution = nn.Conv1d(4, 3, 2)

    def forward(self, x):
        return self.convolution(self.attention(self.lstm(x)[0]).transpose(1, 2)).mean(-1)


def digits_module():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 3))


def as_torch(array):
    return torch.from_numpy(np.array(array))


def test_a_round_is_that_of_the_plain_functions(one_round, expected_round, losses):
    model = partwise.torch(Scores(), losses["squared"], inputs="item")
    names = {"item": "item/weight", "hidden": "hidden/weight", "hidden bias": "hidden/bias"}
    names |= {"out": "out/weight", "out bias": "out/bias"}
    found = one_round(model, names, turned=("hidden", "out"))
    for name, leaf in expected_round.items():
        np.testing.assert_allclose(found[name], leaf, atol=1e-5)


def test_a_module_keeps_the_contract(digits, losses):
    check_adapter(partwise.torch(digits_module(), losses["crossed"], inputs="pixels"), digits)


def test_outputs_and_gradients_are_those_of_torch(losses):
    module = Sequence().eval()
    batch = {"x": jax.random.normal(RNG, (5, 2, 3)), "label": jnp.array([0, 1, 2, 0, 1])}
    model = partwise.torch(module, losses["crossed"], inputs="x")
    params = model.init(RNG)
    outputs = module(as_torch(batch["x"]))
    np.testing.assert_allclose(jax.jit(model.predict)(params, batch, RNG), outputs.detach(), atol=1e-5)
    nn.functional.cross_entropy(outputs, as_torch(batch["label"]).long()).backward()
    mean = lambda values: losses["crossed"](model.predict(values, batch, RNG), batch).mean()
    found = jax.jit(jax.grad(mean))(params)
    for name, leaf in module.named_parameters():
        np.testing.assert_allclose(found[name.replace(".", "/")], leaf.grad, atol=1e-5)


def test_dropout_differs_from_step_to_step_and_is_off_in_use(digits, losses):
    model = partwise.torch(digits_module(), losses["crossed"], inputs="pixels")
    params = model.init(RNG)
    losses_of = jax.jit(lambda seed: model.train_loss(params, digits, jax.random.key(seed)))
    first, again, other = map(losses_of, (0, 0, 1))
    np.testing.assert_array_equal(first, again)
    assert not np.allclose(first, other)
    np.testing.assert_array_equal(*(model.predict(params, digits, jax.random.key(i)) for i in (0, 1)))


def test_statistics_are_a_running_mean_by_the_rate_of_the_step(digits, losses, one_step):
    """What PyTorch does with momentum 0.1, its default, and a rate of 0.1."""
    module = digits_module()
    model = partwise.torch(module, losses["crossed"], inputs="pixels")
    moved = one_step(model, model.init(RNG), digits, rate=0.1)
    module.train()(as_torch(digits["pixels"]))
    np.testing.assert_allclose(moved["1/running_mean"], module[1].running_mean, atol=1e-6)
    np.testing.assert_allclose(moved["1/running_var"], module[1].running_var, rtol=1e-5)


def test_fixed_statistics_stay(digits, losses, one_step):
    model = partwise.torch(digits_module(), losses["crossed"], inputs="pixels", statistics="fixed")
    moved = one_step(model, model.init(RNG), digits, rate=0.1)
    np.testing.assert_array_equal(moved["1/running_mean"], model.init(RNG)["1/running_mean"])
    assert not np.allclose(moved["1/weight"], model.init(RNG)["1/weight"])


def test_tied_weights_are_one_leaf_that_can_be_cut(losses):
    batch = {"word": jnp.array([0, 3]), "label": jnp.array([1, 2])}
    model = partwise.torch(Tied(), losses["crossed"], inputs="word")
    params = model.init(RNG)
    assert list(params) == ["words/weight"]
    cut = {"words/weight": params["words/weight"][:4]}
    np.testing.assert_allclose(
        model.predict(cut, batch, RNG), model.predict(params, batch, RNG)[:, :4], rtol=1e-5
    )


def test_what_torch_does_not_train_stays(digits, losses, one_step):
    module = digits_module()
    module[0].requires_grad_(False)
    model = partwise.torch(module, losses["crossed"], inputs="pixels")
    moved = one_step(model, model.init(RNG), digits, rate=0.1)
    np.testing.assert_array_equal(moved["0/weight"], model.init(RNG)["0/weight"])
    assert not np.allclose(moved["4/weight"], model.init(RNG)["4/weight"])


def test_sixteen_bits_are_for_computing_only(digits, losses, one_step):
    class Half(nn.Module):
        def __init__(self):
            super().__init__()
            self.out = nn.Linear(4, 3)

        def forward(self, x):
            return nn.functional.linear(x.bfloat16(), self.out.weight.bfloat16(), self.out.bias.bfloat16())

    model = partwise.torch(Half(), losses["crossed"], inputs="pixels")
    params = model.init(RNG)
    assert model.predict(params, digits, RNG).dtype == jnp.float32
    moved = one_step(model, params, digits, rate=0.1)
    assert {leaf.dtype for leaf in moved.values()} == {jnp.dtype("float32")}


def test_the_users_module_is_left_alone(digits, losses):
    module = digits_module().eval()
    model = partwise.torch(module, losses["crossed"], inputs="pixels")
    model.train_loss(model.init(RNG), digits, RNG)
    assert not module.training
    assert not module[1].training


MEAN = lambda outputs, batch: jnp.mean(outputs)


@pytest.mark.parametrize(
    ("module", "loss", "said"),
    [
        (Scores, MEAN, r"this is the class Scores: give a module of it, Scores\(...\)"),
        (lambda: Scores(), MEAN, "if it is a function, what it returns"),
        (nn.Linear(1, 1), nn.MSELoss(), "the loss is PyTorch's MSELoss, and losses are of JAX arrays"),
        (nn.Linear(1, 1), lambda outputs: outputs, r"called as loss\(outputs, batch\)"),
        (nn.Linear(1, 1).bfloat16(), MEAN, "'weight' of this module holds torch.bfloat16.*module.float"),
        (nn.ReLU(), MEAN, "this module has no parameters"),
    ],
)
def test_mistakes_are_told_when_the_model_is_made(module, loss, said):
    with pytest.raises(UserError, match=said):
        partwise.torch(module, loss)


def test_a_mean_does_not_hide_in_what_is_added_to_it(digits, losses):
    mean = lambda outputs, batch: losses["crossed"](outputs, batch).mean()
    model = partwise.torch(digits_module(), mean, inputs="pixels")
    with pytest.raises(UserError, match=r"the loss of a batch of 6 examples has shape \(\)"):
        model.train_loss(model.init(RNG), digits, RNG)


def test_statistics_leave_out_rows_that_only_fill_up_a_batch(assert_padding_is_left_out):
    class Normalised(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.each, self.out = (
                nn.BatchNorm1d(3),
                nn.BatchNorm1d(1, affine=False),
                nn.Linear(3, 1),
            )

        def forward(self, x):
            return self.out(self.norm(x))[:, 0] + 2 * self.each(x[:, None, :])[:, 0, 1]

    error = lambda outputs, batch: jnp.square(outputs - batch["y"])
    assert_padding_is_left_out(partwise.torch(Normalised(), error, inputs="x"))
