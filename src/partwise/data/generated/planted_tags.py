"""Posts and their tags made up: bags of words, and tags that depend on them through a planted linear model.

In the manner of Stack Overflow's tag prediction (Federated Select). Words follow a Zipf law. A post is about
one topic and a client writes about a few, so it uses a small part of all words. The score of a tag is a sum
over the post's words plus the tag's own popularity; tags are drawn without replacement with chances
exp(score).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from partwise.data.build import join_blocks, write_store
from partwise.data.generated.streams import check_numbers, cut_block, draw_each, log_normal_counts, stream
from partwise.data.ragged import owners
from partwise.data.store import ClientStore
from partwise.data.store_folder import Block
from partwise.types import UserError

BLOCK_CLIENTS = 64  # clients that share one random stream
TOPICS, SCORES, POSTS = 20, 21, 22  # what a random stream is for
SPARSITY = 0.1  # shape of the gamma law of a word's weight in a topic: few words are much in use there
BAG = 1 << 11  # a topic is a bag of so many words, from which its posts draw
HABITS = 1.0  # a client's topics follow a Dirichlet law; this is the sum of its parameters
RANK, STRENGTH = 16, 4.0  # of the planted model; how far the scores of a post's tags lie apart
POPULARITY = 0.5  # tag t's own score falls as -POPULARITY x log(t + 1)
MAX_COUNT = 10  # no client has more than so many times the mean of examples
OVERDRAW = 3  # words drawn for one that is wanted, because repeats are dropped
LOW = (1 << 31) - 1  # the lower half of a whole number
CHUNK = 1024  # posts at a time where there is a score per tag


@dataclasses.dataclass(frozen=True)
class Tags:
    """The arguments of `generate_tags`."""

    num_clients: int
    num_words: int
    num_tags: int
    mean_examples: float
    words_per_example: int
    tags_per_example: int
    num_topics: int
    zipf: float
    sigma: float
    min_examples: int
    seed: int

    def __post_init__(self):
        check_numbers(dataclasses.asdict(self), set(self.__dict__) - {"zipf", "sigma", "seed"})
        if self.mean_examples < self.min_examples:
            raise UserError(
                f"mean_examples is {self.mean_examples}: give at least min_examples ({self.min_examples})"
            )
        for kind, wanted, there in (
            ("words", self.max_words, self.num_words),
            ("tags", self.max_tags, self.num_tags),
        ):
            if wanted > there:
                raise UserError(
                    f"{kind}_per_example needs up to {wanted} different {kind}, but num_{kind} is {there}: "
                    f"give more {kind}, or fewer per example"
                )

    @property
    def max_words(self) -> int:
        """The width of the column `words`: a post has `words_per_example` give or take a half."""
        return self.words_per_example + self.words_per_example // 2

    @property
    def max_tags(self) -> int:
        """The width of the column `tags`: a post has 1 to so many, `tags_per_example` on average."""
        return 2 * self.tags_per_example - 1


class TagTruth(NamedTuple):
    """score[tag] = sum over a post's words of word_factors[word] . tag_factors[:, tag], + popularity[tag]."""

    word_factors: np.ndarray  # [words + 1, RANK] float32; the last row is 0, and -1 (nothing) names it
    tag_factors: np.ndarray  # [RANK, tags] float32
    popularity: np.ndarray  # [tags] float32


def generate_tags(
    num_clients: int = 1000,
    num_words: int = 10_000,
    num_tags: int = 500,
    mean_examples: float = 100,
    words_per_example: int = 60,
    tags_per_example: int = 3,
    seed: int = 0,
    *,
    num_topics: int = 100,
    zipf: float = 1.0,
    sigma: float = 0.8,
    min_examples: int = 5,
    out: str | Path | None = None,
) -> ClientStore:
    """Columns `words` int32 [N, L] and `tags` int32 [N, T], keys without repeats, then -1 for nothing.

    L and T are 1.5 x `words_per_example` and 2 x `tags_per_example` - 1. With `out`, the store is written to that
    new folder a block of clients at a time. `zipf`: the frequency of word i falls as (i + 1)^-zipf. `sigma`: the
    spread of the logarithm of examples per client. A client's examples are in random order.
    """
    arguments = Tags(
        num_clients,
        num_words,
        num_tags,
        mean_examples,
        words_per_example,
        tags_per_example,
        num_topics,
        zipf,
        sigma,
        min_examples,
        seed,
    )
    vocabularies = {"words": np.arange(num_words), "tags": np.arange(num_tags)}
    info = {"source": "generated tags", "arguments": dataclasses.asdict(arguments)}
    blocks = _blocks(arguments)
    if out is None:
        return join_blocks(blocks, vocabularies, info)
    return write_store(out, blocks, vocabularies, info)


def best_recall(store: ClientStore, at: int = 5) -> float:
    """Of all tags of these clients, the share among the `at` best of whoever knows the planted model.

    Pooled over tags, not a mean over examples. `store` is any part of what `generate_tags` made.
    """
    if store.info.get("source") != "generated tags":
        raise UserError("the store was not made by generate_tags: its planted model is not known")
    truth = plant_tags(Tags(**store.info["arguments"]))
    found = total = 0
    for block in store.blocks(CHUNK):
        best = np.argpartition(-tag_scores(truth, block.columns["words"]), at - 1, axis=1)[:, :at]
        tags = block.columns["tags"]
        found += int(np.sum(tags[:, :, None] == best[:, None, :]))
        total += int(np.sum(tags >= 0))
    return found / max(total, 1)


def plant_tags(arguments: Tags) -> TagTruth:
    rng = stream(arguments.seed, SCORES)
    words = rng.standard_normal((arguments.num_words + 1, RANK), np.float32)
    words /= np.sqrt(arguments.words_per_example)
    words[-1] = 0
    tags = rng.standard_normal((RANK, arguments.num_tags), np.float32) * np.float32(STRENGTH / np.sqrt(RANK))
    popularity = -POPULARITY * np.log(np.arange(1, arguments.num_tags + 1))
    return TagTruth(words, tags, popularity.astype(np.float32))


def tag_scores(truth: TagTruth, words: np.ndarray) -> np.ndarray:
    """The planted scores of all tags, [N, tags] float32."""
    return truth.word_factors[words].sum(axis=1) @ truth.tag_factors + truth.popularity


def _blocks(arguments: Tags) -> Iterator[Block]:
    truth, (bags, shares) = plant_tags(arguments), _topics(arguments)
    median = arguments.mean_examples * np.exp(-(arguments.sigma**2) / 2)
    limits = (arguments.min_examples, int(MAX_COUNT * arguments.mean_examples))
    for block in range(-(-arguments.num_clients // BLOCK_CLIENTS)):
        rng = stream(arguments.seed, POSTS, block)
        counts = log_normal_counts(rng, BLOCK_CLIENTS, median, arguments.sigma, limits)
        habits = rng.gamma(HABITS * shares, size=(BLOCK_CLIENTS, len(shares))) + 1e-12
        topic = draw_each(rng, habits, owners(counts))
        parts = []
        for first in range(0, len(topic), CHUNK):
            words = _draw_words(rng, arguments, bags, topic[first : first + CHUNK])
            parts.append((words, _draw_tags(rng, arguments, tag_scores(truth, words))))
        words, tags = (np.concatenate(part) for part in zip(*parts, strict=True))
        yield cut_block(block, counts, {"words": words, "tags": tags}, arguments.num_clients)


def _topics(arguments: Tags) -> tuple[np.ndarray, np.ndarray]:
    """Every topic's bag of words, frequent ones many times, [topics, BAG], and its share of all posts [topics].

    The share is the topic's weight before its words are scaled to chances, so that over all topics words
    follow the Zipf law.
    """
    rng = stream(arguments.seed, TOPICS)
    popularity = np.arange(1, arguments.num_words + 1, dtype=float) ** -arguments.zipf
    bags = np.empty((arguments.num_topics, BAG), np.int64)
    weights = np.empty(arguments.num_topics)
    for k, bag in enumerate(bags):
        ends = np.cumsum(popularity * (rng.gamma(SPARSITY, size=arguments.num_words) + 1e-9))
        bag[:] = np.searchsorted(ends / ends[-1], rng.random(BAG), side="right")
        weights[k] = ends[-1]
    return bags, weights / weights.sum()


def _draw_words(rng: np.random.Generator, arguments: Tags, bags: np.ndarray, topic: np.ndarray) -> np.ndarray:
    """Bags of words, [n, L] int32: the first so many different ones of those drawn."""
    spread = arguments.words_per_example // 2
    wanted = arguments.words_per_example + rng.integers(-spread, spread + 1, len(topic))
    draws = rng.integers(0, BAG, (len(topic), OVERDRAW * arguments.max_words), np.uint16)
    return _first_of_each(bags[topic[:, None], draws], wanted, arguments.max_words)


def _first_of_each(drawn: np.ndarray, wanted: np.ndarray, width: int) -> np.ndarray:
    """Each row's first `wanted` different values in the order drawn, then -1, [n, width] int32.

    Two sorts of whole numbers that carry value and place together; this is much faster than an argsort.
    """
    by_value = np.sort((drawn << 32) + np.arange(drawn.shape[1]), axis=1)
    value, place = by_value >> 32, by_value & LOW
    repeated = value[:, 1:] == value[:, :-1]
    place[:, 1:][repeated] = LOW
    by_place = np.sort((place << 32) + value, axis=1)[:, :width]
    empty = (by_place >> 32 == LOW) | (np.arange(width) >= wanted[:, None])
    return np.where(empty, -1, by_place & LOW).astype(np.int32)


def _draw_tags(rng: np.random.Generator, arguments: Tags, scores: np.ndarray) -> np.ndarray:
    """Tags, [n, T] int32, drawn without replacement: whose exponential clock of rate exp(score) rings first."""
    width = arguments.max_tags
    wanted = rng.integers(1, width + 1, len(scores))
    fastest = np.exp(scores.max(axis=1, keepdims=True) - scores)
    rings = rng.standard_exponential(scores.shape, np.float32) * fastest
    first = np.argpartition(rings, width - 1, axis=1)[:, :width]
    order = np.argsort(np.take_along_axis(rings, first, axis=1), axis=1)
    tags = np.take_along_axis(first, order, axis=1)
    return np.where(np.arange(width) < wanted[:, None], tags, -1).astype(np.int32)
