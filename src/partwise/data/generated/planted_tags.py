"""Generated posts and their tags: bags of words, and tags that depend on them through a planted linear model.

The data is similar to Stack Overflow's tag prediction (Federated Select). Words follow a Zipf distribution. A
post is about one topic and a client writes about a few topics, so it uses a small part of all words. The
score of a tag is a sum over the post's words plus the tag's own popularity. Tags are drawn without
replacement with probabilities proportional to exp(score).
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
SPARSITY = 0.1  # shape of the gamma distribution of a word's weight in a topic: few words have a large weight
BAG = 1 << 11  # number of words in a topic's bag, from which its posts draw
HABITS = 1.0  # a client's topics have a Dirichlet distribution; this is the sum of its parameters
RANK, STRENGTH = 16, 4.0  # of the planted model; the spread of the scores of a post's tags
POPULARITY = 0.5  # tag t's own score falls as -POPULARITY x log(t + 1)
MAX_COUNT = 10  # no client has more than this many times the mean number of examples
OVERDRAW = 3  # words drawn for each wanted word, because repeats are dropped
LOW = (1 << 31) - 1  # the lower half of a whole number
CHUNK = 1024  # posts at a time, for arrays with a score per tag


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
        """The width of the column `words`: a post has `words_per_example` words, plus or minus a half."""
        return self.words_per_example + self.words_per_example // 2

    @property
    def max_tags(self) -> int:
        """The width of the column `tags`: a post has 1 to this many tags, `tags_per_example` on average."""
        return 2 * self.tags_per_example - 1


class TagTruth(NamedTuple):
    """score[tag] = sum over a post's words of word_factors[word] . tag_factors[:, tag], + popularity[tag]."""

    word_factors: np.ndarray  # [words + 1, RANK] float32; the last row, for the id -1 (nothing), is 0
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
    """A store with the columns `words` int32 [N, L] and `tags` int32 [N, T]: keys without repeats, padded
    with -1.

    L and T are 1.5 x `words_per_example` and 2 x `tags_per_example` - 1. With `out`, the store is written to
    that new folder one block of clients at a time. `zipf`: the frequency of word i falls as (i + 1)^-zipf.
    `sigma`: the spread of the logarithm of the examples per client. A client's examples are in random order.
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
    """The share of these clients' tags that are among the `at` highest scores of the planted model: the best
    reachable recall.

    It is pooled over tags, not a mean over examples. `store` is any part of a store from `generate_tags`.
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
    """Every topic's bag of words [topics, BAG], in which frequent words occur many times, and its share of
    all posts [topics].

    The share is the topic's weight before its words are scaled to probabilities. So over all topics, words
    follow the Zipf distribution.
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
    """Bags of words, [n, L] int32: the first distinct words of those that were drawn."""
    spread = arguments.words_per_example // 2
    wanted = arguments.words_per_example + rng.integers(-spread, spread + 1, len(topic))
    draws = rng.integers(0, BAG, (len(topic), OVERDRAW * arguments.max_words), np.uint16)
    return _first_of_each(bags[topic[:, None], draws], wanted, arguments.max_words)


def _first_of_each(drawn: np.ndarray, wanted: np.ndarray, width: int) -> np.ndarray:
    """Each row's first `wanted` distinct values in the order in which they were drawn, padded with -1, [n,
    width] int32.

    It uses two sorts of whole numbers that hold value and place together. This is much faster than an
    argsort.
    """
    by_value = np.sort((drawn << 32) + np.arange(drawn.shape[1]), axis=1)
    value, place = by_value >> 32, by_value & LOW
    repeated = value[:, 1:] == value[:, :-1]
    place[:, 1:][repeated] = LOW
    by_place = np.sort((place << 32) + value, axis=1)[:, :width]
    empty = (by_place >> 32 == LOW) | (np.arange(width) >= wanted[:, None])
    return np.where(empty, -1, by_place & LOW).astype(np.int32)


def _draw_tags(rng: np.random.Generator, arguments: Tags, scores: np.ndarray) -> np.ndarray:
    """Tags, [n, T] int32, drawn without replacement: the tags with the smallest exponential times of rate
    exp(score)."""
    width = arguments.max_tags
    wanted = rng.integers(1, width + 1, len(scores))
    fastest = np.exp(scores.max(axis=1, keepdims=True) - scores)
    rings = rng.standard_exponential(scores.shape, np.float32) * fastest
    first = np.argpartition(rings, width - 1, axis=1)[:, :width]
    order = np.argsort(np.take_along_axis(rings, first, axis=1), axis=1)
    tags = np.take_along_axis(first, order, axis=1)
    return np.where(np.arange(width) < wanted[:, None], tags, -1).astype(np.int32)
