"""Recommendation as ranking: scores of all items that a client holds, losses with negatives that are drawn anew in
every step, and metrics of the place of the right item.

A model's outputs are scores [B, n] of the n items of the client's slice: of all K items if it is evaluated, of its
own and some others while it trains (`selection.choose.with_random`). Rows of a slice that are only padding have the
score `NOTHING`, and so has an item that shall not be recommended.

Losses of an example with the score s of the right item and scores s_j of others:

* full softmax: log(exp(s) + sum exp(s_j)) - s, over all that the client holds;
* sampled softmax: the same with n drawn items for all others (Bengio and Senecal, 2008), `sampled_losses`;
* BPR: -log sigmoid(s - s_j), the mean over n drawn items (Rendle et al., 2009), `bpr_losses`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from partwise.metrics import share_of_catalogue
from partwise.model.softmax import NOTHING
from partwise.model.spec import Batch, Metric, Pooled
from partwise.types import UserError

PLACES = (5, 10)  # the k of metrics at k
Rank = Callable[[jax.Array, Batch], jax.Array]
Never = Callable[[Batch], jax.Array]  # batch -> [B]: whether the right item is one that is not recommended


class Negatives(NamedTuple):
    """Items that were drawn for every example: their positions [B, n], and the logarithm of the chance of each."""

    positions: jax.Array
    log_chance: jax.Array


def draw(rng: jax.Array, bias: jax.Array, shape: tuple[int, int], popular: bool) -> Negatives:
    """Draw items of the slice, with replacement: uniformly, or in proportion to exp(bias).

    The bias of an item is what a model learns of its popularity. So popular items are drawn more often, without
    anybody counting what clients have. Padding has the bias `NOTHING` and is never drawn.
    """
    held = bias > NOTHING / 2
    if not popular:  # the rows that are held come first, so a number below theirs is one of them
        number = jnp.maximum(held.sum(), 1)
        positions = jnp.minimum((jax.random.uniform(rng, shape) * number).astype(jnp.int32), number - 1)
        return Negatives(positions, jnp.broadcast_to(-jnp.log(number.astype(jnp.float32)), shape))
    weights = jnp.where(held, jnp.exp(bias - bias.max()), 0.0)
    ends = jnp.cumsum(weights)
    at = jax.random.uniform(rng, shape) * ends[-1]
    positions = jnp.minimum(jnp.searchsorted(ends, at, side="right"), held.sum() - 1)
    return Negatives(positions, jnp.log(jnp.maximum(weights[positions] / ends[-1], 1e-30)))


def sampled_losses(score: jax.Array, others: jax.Array, drawn: Negatives, target: jax.Array) -> jax.Array:
    """The sampled softmax: [B], [B, n] -> [B]. Every drawn item stands for 1 / (n * its chance) items, so the mean
    of exp over the drawn is right. The right item among them stands for itself alone."""
    counted = others - drawn.log_chance - jnp.log(others.shape[-1])
    counted = jnp.where(drawn.positions == target[:, None], NOTHING, counted)
    return jnp.logaddexp(score, jax.nn.logsumexp(counted, axis=-1)) - score


def bpr_losses(score: jax.Array, others: jax.Array, drawn: Negatives, target: jax.Array) -> jax.Array:
    """Bayesian personalised ranking: [B], [B, n] -> [B]. The right item is no negative of itself."""
    other = drawn.positions != target[:, None]
    losses = jnp.where(other, jax.nn.softplus(others - score[:, None]), 0)
    return losses.sum(axis=-1) / jnp.maximum(other.sum(axis=-1), 1)


def full_losses(scores: jax.Array, target: jax.Array) -> jax.Array:
    """The full softmax: [B, n] and [B] -> [B]."""
    return jax.nn.logsumexp(scores, axis=-1) - score_of(scores, target)


def score_of(scores: jax.Array, target: jax.Array) -> jax.Array:
    """The score of each example's right item. If it is not in the slice (-1), `NOTHING`."""
    found = jnp.take_along_axis(scores, jnp.maximum(target, 0)[:, None], axis=1)[:, 0]
    return jnp.where(target >= 0, found, NOTHING)


class Loss(NamedTuple):
    """How a model of scores is trained: softmax (over all that is held), sampled or bpr with so many negatives."""

    name: str
    negatives: int = 0


def parse_loss(text: str) -> Loss:
    """Read `softmax`, `sampled:100` or `bpr:10`."""
    name, colon, number = str(text).partition(":")
    if name == "softmax" and not colon:
        return Loss(name)
    if name in ("sampled", "bpr") and number.isdecimal() and 1 <= int(number) <= 10**6:
        return Loss(name, int(number))
    raise UserError(
        f"the loss is '{text}': give softmax (all items that a client holds), or sampled:N or bpr:N with a number "
        f"of negatives from 1 to 1,000,000, such as sampled:100"
    )


def rank_of(target: Callable[[Batch], jax.Array], never: Never | None = None) -> Rank:
    """(scores [B, n], batch) -> [B]: the place of the right item, 1 for the best. Of equal scores, the right item
    has the middle place, so that a model that scores all alike gains nothing by it. A score that is not a number
    ranks last, and so does a right item that is `never` recommended."""

    def rank(scores: jax.Array, batch: Batch) -> jax.Array:
        own = score_of(scores, target(batch))[:, None]
        before = jnp.sum(scores > own, axis=-1)
        equal = jnp.maximum(jnp.sum(scores == own, axis=-1) - 1, 0)
        last = jnp.isnan(own[:, 0]) if never is None else jnp.isnan(own[:, 0]) | never(batch)
        return jnp.where(last, scores.shape[-1], 1 + before + equal / 2)

    return rank


def hit(rank: Rank, k: int) -> Metric:
    """HitRate@k: how often the right item is among the first k. For a client with several held-out items, its mean
    is the client's recall@k."""
    return Metric(lambda scores, batch: (rank(scores, batch) <= k) * 1.0, higher_is_better=True)


def ndcg(rank: Rank, k: int) -> Metric:
    """NDCG@k with one right item: 1 / log2(1 + its place), 0 after place k."""

    def gain(scores: jax.Array, batch: Batch) -> jax.Array:
        place = rank(scores, batch)
        return jnp.where(place <= k, 1 / jnp.log2(1 + place), 0)

    return Metric(gain, higher_is_better=True)


def mrr(rank: Rank) -> Metric:
    """Mean reciprocal rank, over the whole catalogue."""
    return Metric(lambda scores, batch: 1 / rank(scores, batch), higher_is_better=True)


def first(scores: jax.Array, k: int) -> jax.Array:
    """[B, n] -> [B, k]: the items with the highest scores, the best first; of equal scores, the first in the
    catalogue. -1 where no more can be recommended."""
    most = min(k, scores.shape[-1])
    found, items = jax.lax.top_k(scores, most)
    items = jnp.where(found > NOTHING / 2, items, -1)
    return jnp.pad(items, ((0, 0), (0, k - most)), constant_values=-1)


def coverage(
    target: Callable[[Batch], jax.Array], num_items: int, k: int, never: Never | None = None
) -> Pooled:
    """Coverage@k: the share of the catalogue that is among the first k of at least one example. It is no mean over
    examples, and says nothing of what is right: a model that recommends the same k items to all covers k / K."""

    def listed(scores: jax.Array, batch: Batch) -> jax.Array:
        if never is None:
            return first(scores, k)
        hidden = never(batch)[:, None] & (jnp.arange(scores.shape[-1]) == target(batch)[:, None])
        return first(jnp.where(hidden, NOTHING, scores), k)

    return Pooled(
        listed,
        target,
        lambda items, right: share_of_catalogue(items, num_items),
        each=jax.ShapeDtypeStruct((k,), jnp.int32),
    )


def sampled(rank: Rank, k: int, negatives: int, gain: Callable[[Any], Any]) -> Metric:
    """A metric at k among the right item and `negatives` others that are drawn uniformly, with replacement. It is
    computed from the place r in the full ranking, as its mean over all draws: the number of drawn items before the
    right one is binomial with the chance (r - 1) / (n - 1).

    Such metrics are biased: they may order models otherwise than full rankings do (Krichene and Rendle, 2020). They
    are here only to be compared with published ones.
    """

    def mean_gain(scores: jax.Array, batch: Batch) -> jax.Array:
        others = jnp.maximum(jnp.sum(scores > NOTHING / 2, axis=-1) - 1, 1)
        chance = jnp.clip((rank(scores, batch) - 1) / others, 0, 1)[:, None]
        place = jnp.arange(min(k, negatives + 1))  # drawn items before the right one
        log_choose = (
            jax.lax.lgamma(negatives + 1.0)
            - jax.lax.lgamma(place + 1.0)
            - jax.lax.lgamma(negatives - place + 1.0)
        )
        log_chance = jax.scipy.special.xlogy(place, chance) + jax.scipy.special.xlog1py(
            negatives - place, -chance
        )
        return jnp.sum(jnp.exp(log_choose + log_chance) * gain(1.0 + place), axis=-1)

    return Metric(mean_gain, higher_is_better=True)


def ranking_metrics(
    target: Callable[[Batch], jax.Array], num_items: int, negatives: int = 0, never: Never | None = None
) -> Mapping[str, Metric | Pooled]:
    """The usual metrics of a ranking of all items. With `negatives`, also those of sampled ranking, labelled as
    biased. A right item that is `never` recommended is not found."""
    rank = rank_of(target, never)
    full: dict[str, Metric | Pooled] = {f"ndcg@{k}": ndcg(rank, k) for k in reversed(PLACES)}
    full |= {f"hit@{k}": hit(rank, k) for k in reversed(PLACES)} | {"mrr": mrr(rank)}
    full |= {"coverage@10": coverage(target, num_items, 10, never)}
    if not negatives:
        return full
    gains = {"ndcg": lambda place: 1 / jnp.log2(1 + place), "hit": jnp.ones_like}
    label = f"among {negatives} sampled, biased"
    return full | {f"{name}@10 {label}": sampled(rank, 10, negatives, gain) for name, gain in gains.items()}
