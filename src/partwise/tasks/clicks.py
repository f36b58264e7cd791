"""Does a user like the next item? The deep interest network (Zhou et al., 2018) on Amazon ratings, as in
Federated Submodel Averaging, section 5.1; or on sequences of items, with negatives that are drawn.

A small network sees each item of a user's history together with the target item, and gives it a weight. The
weighted sum is the user's interest in the target. User vectors are keyed by user. Item vectors are keyed by
item, for targets and histories. The networks are shared.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from partwise.data import holdout
from partwise.data.loaders import amazon_clicks, sequence_clicks, sequences
from partwise.data.store import ClientStore
from partwise.model.partition import keyed, partition
from partwise.model.spec import Batch, Metric, Model, auc, lookup
from partwise.tasks.base import (
    COUNTS,
    PAPER,
    SEEDS,
    SIZES,
    SUBMODEL_DEFAULTS,
    Entry,
    OwnRows,
    Setting,
    Task,
    fitted,
    noting_unread,
)
from partwise.types import Limits, UserError

ATTENTION = 36  # hidden units of the attention network (Zhou et al., Figure 2)
HIDDEN = (80, 40)
SCALE = 0.05  # the scale of the initial vectors
DEFAULTS = {**SUBMODEL_DEFAULTS, "cohort.size": 100}
PRESETS = {PAPER: DEFAULTS}
OF_RATINGS = ("min_ratings", "split_time")  # options that raw ratings alone read
OF_SEQUENCES = ("max_judged", "seed")
EXAMPLE = {"num_users": 2, "num_items": 2, "dim": 1}


def deep_interest_network(num_users: int, num_items: int, dim: int = 18) -> Model:
    """The model. Its outputs are logits."""
    widths = (3 * dim, *HIDDEN, 1)
    layers = [str(i) for i in range(len(widths) - 1)]

    def init(rng: jax.Array) -> dict[str, Any]:
        user, item, first, last, *others = jax.random.split(rng, 4 + len(layers))
        glorot = jax.nn.initializers.glorot_uniform()
        vectors = lambda rng, rows: jax.random.uniform(rng, (rows, dim), jnp.float32, -SCALE, SCALE)
        return {
            "user": vectors(user, num_users),
            "item": vectors(item, num_items),
            "attention": {
                "kernel": glorot(first, (4 * dim, ATTENTION)),
                "bias": jnp.zeros(ATTENTION),
                "out": glorot(last, (ATTENTION, 1))[:, 0],
                "out_bias": jnp.zeros(()),
            },
            "layers": {
                name: {"kernel": glorot(own, (inputs, units)), "bias": jnp.zeros(units)}
                for name, own, inputs, units in zip(layers, others, widths[:-1], widths[1:], strict=True)
            },
        }

    def predict(params: Any, batch: Batch, rng: jax.Array) -> jax.Array:
        target = lookup(params["item"], batch["item"])
        history = lookup(params["item"], batch["history"])  # zeros where there is no item
        weights = attend(params["attention"], history, target)
        interest = jnp.einsum("bl,bld->bd", weights, history)
        x = jnp.concatenate([lookup(params["user"], batch["user"]), target, interest], axis=-1)
        for name in layers[:-1]:
            x = jax.nn.relu(_dense(params["layers"][name], x))
        return _dense(params["layers"][layers[-1]], x)[:, 0]

    def losses(logits: jax.Array, batch: Batch) -> jax.Array:
        return optax.sigmoid_binary_cross_entropy(logits, batch["label"])

    def right(logits: jax.Array, batch: Batch) -> jax.Array:
        return ((logits > 0) == (batch["label"] > 0)) * 1.0

    return Model(
        init, predict, losses, {"auc": auc("label"), "accuracy": Metric(right, higher_is_better=True)}
    )


def _dense(layer: Any, x: jax.Array) -> jax.Array:
    return x @ layer["kernel"] + layer["bias"]


def attend(params: Any, history: jax.Array, target: jax.Array) -> jax.Array:
    """The weight of every item of the history: [B, L, d] and [B, d] -> [B, L]. The network sees the item, the
    target, their difference and their product. Weights are not normalised (Zhou et al., section 4.3).

    The first layer of [h, t, h - t, h * t] is linear in h. So it is one product of h with a matrix that
    depends on the target. This needs a quarter of the arithmetic of the product with all four.
    """
    of_item, of_target, of_difference, of_product = jnp.split(params["kernel"], 4)
    kernels = of_item + of_difference + target[:, :, None] * of_product  # [B, d, units]
    biases = target @ (of_target - of_difference) + params["bias"]
    hidden = jax.nn.relu(jnp.einsum("bld,bdu->blu", history, kernels) + biases[:, None])
    return hidden @ params["out"] + params["out_bias"]


def settings(num_users: int, num_items: int, dim: int = 18) -> tuple[Setting, Setting]:
    """One setting, used for both, because nothing is local."""
    model = deep_interest_network(num_users, num_items, dim)
    roles = {"user": keyed("user"), "item": keyed("item")}
    parts = partition(model, roles, columns={"item": ("item", "history")})
    setting = Setting(model, parts, ("user", "item", "history", "label"), ranks="item")
    return setting, setting


def load(
    data: str | None = None,
    *,
    length: Annotated[int, "items of a history, the last ones", SIZES] = 50,
    dim: Annotated[int, "size of the vectors", Limits(1, 4096)] = 18,
    min_ratings: Annotated[int, "ratings of a user, at least (raw ratings)", Limits(0, 10**8)] = 40,
    split_time: Annotated[int, "the last second of training (raw ratings)", Limits(0, 2**62)] = 1_385_000_000,
    file: Annotated[str | None, "a file of sequences: Yelp, Beauty or another; none: Amazon ratings"] = None,
    max_judged: Annotated[int, "users that are judged, at most (sequences)", COUNTS] = 5000,
    seed: Annotated[int, "of the negatives, and of who is judged (sequences)", SEEDS] = 0,
) -> Task:
    """Seen users, split by time. For `amazon_train.tsv`, the first 80 % of each user's rows are for training.
    For raw ratings (a CSV file), it is the rows up to `split_time`. Of a user's later rows, the first half is
    for validation, the second for the test.

    For a `file` of sequences, the last item of each user is for the test, the one before it for validation, each
    with its negative."""
    if file is not None:
        store = sequence_clicks.load(data, sequences.name_in(data, file, file), length, seed)
        train, *held_out = sequence_clicks.hold_out_last(store)
        drawn = np.sort(np.random.default_rng(seed).permutation(store.num_clients)[:max_judged])
        validation, test = (part.take(drawn) for part in held_out)
        train = noting_unread(train, OF_RATINGS, "it is read for raw ratings, and these are sequences")
        return clicks_task(train, validation, test, dim=dim)
    store = amazon_clicks.load(data, length, min_ratings)
    if "time" in store.columns:
        train, later = holdout.by_value(store, "time", split_time)
        validation, test = holdout.by_order(later, (0.5, 0.5), by=None)
    else:
        train, validation, test = holdout.by_order(store, by=None)
        train = noting_unread(train, OF_RATINGS, "it is read for raw ratings, and these are examples")
    train = noting_unread(train, OF_SEQUENCES, "it is read for sequences (data.file)")
    return clicks_task(train, validation, test, dim=dim)


def clicks_task(train: ClientStore, validation: ClientStore, test: ClientStore, dim: int = 18) -> Task:
    """A task from stores with the columns `user`, `item`, `history` and `label`."""
    options = {"num_users": train.num_keys("user"), "num_items": train.num_keys("item"), "dim": dim}
    personal, stateful = settings(**options)
    presets = {name: fitted(each, train) for name, each in PRESETS.items()}
    given = fitted(DEFAULTS, train)
    task = Task("clicks", train, validation, test, personal, stateful, options, given, seen=True)
    return task._replace(presets=presets)


def own_rows(store: ClientStore, options: Mapping[str, Any]) -> ClientStore:
    """Raises `UserError`: which of a user's rows are for training depends on the file that the histories were made
    of."""
    raise UserError(
        "the task 'clicks' trains on the first part of each user's rows, and a table of examples does not say "
        "which these are: give the training rows as a store, --data store:FOLDER (`ClientStore.save` writes one)"
    )


CLICKS = Entry("clicks", load, settings, DEFAULTS, PRESETS, EXAMPLE, OwnRows(prepare=own_rows))
