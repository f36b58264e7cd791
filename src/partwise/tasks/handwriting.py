"""Handwritten characters by writer (Federated Select, section 5.3): the CNN and the 2NN of McMahan et al.
(2017).

Clients choose filters of the second convolution, or units of the first dense layer, at random. A key owns a
filter, its bias, and the part of the next layer that uses the filter.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from partwise.data import holdout
from partwise.data.checks import check_memory
from partwise.data.generated.writers import generate_writers
from partwise.data.loaders import femnist
from partwise.data.loaders.mnist_writers import load_emnist, load_mnist_by_writer
from partwise.data.store import ClientStore
from partwise.model.convolution import SIZE, convolve, pool
from partwise.model.nnx import nnx_model
from partwise.model.partition import keyed, partition
from partwise.model.spec import Batch, Metric
from partwise.tasks.base import (
    COUNTS,
    PAPER,
    SEEDS,
    SELECT_DEFAULTS,
    Entry,
    OwnRows,
    Setting,
    Task,
    fitted,
    on_accelerator,
    refuse_data,
)
from partwise.types import Limits, UserError, unknown

Name = Literal["cnn", "2nn"]
Network = Annotated[
    Name | None, "the model: cnn, 2nn; none: cnn, or on a CPU 2nn, which is fifty times faster"
]
Seed = Annotated[int, "of the cut, or of what is generated", SEEDS]
SELECTED = {
    **SELECT_DEFAULTS,
    "update.rate": 0.1,
    "update.batch_size": 20,
    "server.optimizer": "sgd",
    "server.rate": 1.0,
    "select.filter": "random:16",  # a quarter of the filters; of the 2nn's units, 50
}
DEFAULTS = {**SELECTED, "central": {"update.max_steps": 50}}  # an epoch of all writers would take minutes
PRESETS = {PAPER: {**SELECTED, "data.network": "cnn"}}
EXAMPLE = {"num_classes": 2}
NARROW = (
    "On this CPU the model is the 2nn, 784-200-200; the CNN, which an accelerator gets, takes about fifty times as "
    "long: --set data.network=cnn, or --preset paper."
)


class Convolution(nnx.Module):
    """A 5 x 5 convolution, a bias, relu, and the largest of every 2 x 2 block. Bias and relu leave the largest the
    largest, so they come last, where there is a quarter to do."""

    def __init__(self, inputs: int, filters: int, rngs: nnx.Rngs):
        init = nnx.initializers.glorot_uniform()
        self.kernel = nnx.Param(init(rngs.params(), (SIZE, SIZE, inputs, filters)))
        self.bias = nnx.Param(jnp.zeros(filters))

    def __call__(self, x: jax.Array) -> jax.Array:
        return jax.nn.relu(pool(convolve(x, self.kernel[...])) + self.bias[...])


class Dense(nnx.Module):
    """A dense layer that takes its sizes from its arrays."""

    def __init__(self, inputs: int, units: int, rngs: nnx.Rngs):
        self.kernel = nnx.Param(nnx.initializers.glorot_uniform()(rngs.params(), (inputs, units)))
        self.bias = nnx.Param(jnp.zeros(units))

    def __call__(self, x: jax.Array) -> jax.Array:
        return x @ self.kernel[...] + self.bias[...]


class CNN(nnx.Module):
    """5x5x32, pool, 5x5x64, pool, 512, classes: 1,690,046 parameters with 62 classes."""

    def __init__(self, num_classes: int, rngs: nnx.Rngs):
        self.first = Convolution(1, 32, rngs)
        self.second = Convolution(32, 64, rngs)
        self.hidden = Dense(7 * 7 * 64, 512, rngs)
        self.out = Dense(512, num_classes, rngs)

    def __call__(self, batch: Batch) -> jax.Array:
        x = self.second(self.first(_pixels(batch)[..., None]))
        x = x.reshape(x.shape[0], -1, x.shape[-1])  # [B, pixels, filters]
        kernel = self.hidden.kernel[...].reshape(*x.shape[1:], -1)
        # A filter owns rows of this kernel, so it is stored by filter. Products in that order need no other copy.
        x = x.swapaxes(1, 2).reshape(x.shape[0], -1) @ kernel.swapaxes(0, 1).reshape(-1, kernel.shape[-1])
        return self.out(jax.nn.relu(x + self.hidden.bias[...]))


class TwoLayers(nnx.Module):
    """784-200-200-classes."""

    def __init__(self, num_classes: int, rngs: nnx.Rngs, units: int = 200):
        self.first = Dense(784, units, rngs)
        self.second = Dense(units, units, rngs)
        self.out = Dense(units, num_classes, rngs)

    def __call__(self, batch: Batch) -> jax.Array:
        x = _pixels(batch).reshape(batch["pixels"].shape[0], -1)
        return self.out(jax.nn.relu(self.second(jax.nn.relu(self.first(x)))))


def _pixels(batch: Batch) -> jax.Array:
    return batch["pixels"].astype(jnp.float32) / 255


def _losses(logits: jax.Array, batch: Batch) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])


def _right(logits: jax.Array, batch: Batch) -> jax.Array:
    return (jnp.argmax(logits, axis=-1) == batch["label"]) * 1.0


NETWORKS = {
    "cnn": (
        CNN,
        {
            "second/kernel": keyed("filter", axis=3),
            "second/bias": keyed("filter"),
            "hidden/kernel": keyed("filter", block=7 * 7, interleaved=True),
        },
    ),
    "2nn": (
        TwoLayers,
        {
            "first/kernel": keyed("filter", axis=1),
            "first/bias": keyed("filter"),
            "second/kernel": keyed("filter"),
        },
    ),
}


def settings(num_classes: int, network: Name = "cnn") -> tuple[Setting, Setting]:
    """One setting, used for both, because nothing is local."""
    if network not in NETWORKS:
        raise unknown("network", network, NETWORKS)
    module, rules = NETWORKS[network]
    metrics = {"accuracy": Metric(_right, higher_is_better=True)}
    model = nnx_model(lambda rngs: module(num_classes, rngs), _losses, metrics)
    setting = Setting(model, partition(model, rules, columns={"filter": ()}), ("pixels", "label"))
    return setting, setting


def load(data: str | None = None, *, network: Network = None, seed: Seed = 0) -> Task:
    """MNIST by writer. The test writers are not the training writers. A tenth of the training writers are for
    validation."""
    train, test = load_mnist_by_writer(data)
    train, validation = holdout.by_client(train, (0.9, 0.1), seed=seed)
    return handwriting_task("handwriting", train, validation, test, network, 10)


def load_federated_emnist(
    data: str | None = None,
    *,
    network: Network = None,
    only_digits: Annotated[bool, "ten classes instead of 62"] = False,
    seed: Seed = 0,
) -> Task:
    """TFF's federated EMNIST. The test examples are from the training writers. A fifth of these writers are
    for validation (as in the paper)."""
    train, test = load_emnist(data, only_digits=only_digits)
    train, validation = holdout.by_client(train, (0.8, 0.2), seed=seed)
    return handwriting_task("emnist", train, validation, test, network, 10 if only_digits else 62)


def load_femnist(
    data: str | None = None,
    *,
    network: Network = None,
    min_images: Annotated[int, "images of a writer, at least", COUNTS] = 50,
    seed: Seed = 0,
) -> Task:
    """LEAF's FEMNIST, cut as TFF's EMNIST: a tenth of every writer's images are for the test (or LEAF's own test
    part), and a fifth of the writers are for validation, of whom no image trains."""
    train, test = femnist.load(data, min_images, seed)
    train, validation = holdout.by_client(train, (0.8, 0.2), seed=seed)
    return handwriting_task("femnist", train, validation, test, network, femnist.NUM_CLASSES)


def load_generated(
    data: str | None = None,
    *,
    network: Network = None,
    num_clients: Annotated[int, "writers that are generated", COUNTS] = 3400,
    median: Annotated[float, "images of a writer, in the middle", COUNTS] = 180,
    num_classes: Annotated[int, "different characters", Limits(2, 1000)] = 62,
    seed: Seed = 0,
) -> Task:
    """Generated writers, at any size."""
    refuse_data("writers", data)
    check_memory(784.0 * num_clients * median, "so many images", "lower data.num_clients or data.median")
    store = generate_writers(num_clients, median, num_classes, seed=seed)
    train, validation, test = holdout.by_client(store, (0.9, 0.05, 0.05), seed=seed)
    task = handwriting_task("writers", train, validation, test, network, num_classes)
    return task._replace(presets={})


def handwriting_task(
    name: str,
    train: ClientStore,
    validation: ClientStore,
    test: ClientStore,
    network: Name | None,
    num_classes: int,
) -> Task:
    """A task from stores with the columns `pixels` and `label`. If `network` is None, the network that suits
    the device."""
    chosen = network or ("cnn" if on_accelerator() else "2nn")
    options = {"num_classes": num_classes, "network": chosen}
    personal, stateful = settings(**options)
    keys = {"select.filter": f"random:{personal.partition.num_keys('filter') // 4}"}
    presets = {preset: fitted(each, train) | keys for preset, each in PRESETS.items()}
    task = Task(name, train, validation, test, personal, stateful, options, fitted(DEFAULTS, train) | keys)
    notes = (NARROW,) if network is None and chosen == "2nn" else ()
    return task._replace(loaded={"network": chosen}, presets=presets, notes=notes)


def own_rows(store: ClientStore, options: Mapping[str, Any]) -> ClientStore:
    """Raises `UserError`: which of a writer's images are for training depends on the files."""
    raise UserError(
        "the task 'femnist' trains on nine tenths of each writer's images, or on LEAF's training part, and a table "
        "of images does not say which these are: give the training rows as a store, --data store:FOLDER "
        "(`ClientStore.save` writes one)"
    )


MNIST = Entry("MNIST by writer", load, settings, DEFAULTS, PRESETS, EXAMPLE)
EMNIST = Entry("TFF's federated EMNIST", load_federated_emnist, settings, DEFAULTS, PRESETS, EXAMPLE)
FEMNIST = Entry(
    "LEAF's FEMNIST", load_femnist, settings, DEFAULTS, PRESETS, EXAMPLE, OwnRows(prepare=own_rows)
)
WRITERS = Entry("generated handwriting", load_generated, settings, DEFAULTS, example=EXAMPLE)
