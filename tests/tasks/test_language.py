"""What tasks of next-word prediction share: a loss with a gradient of its own, and accuracies."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pyarrow as pa
import pyarrow.parquet
import pytest

from partwise import train
from partwise.algorithms.registry import settings_for
from partwise.tasks import PAPER, load_task
from partwise.tasks.language import accuracy, cross_entropy
from partwise.tasks.next_word_lstm import for_long_clients
from partwise.types import UserError

TARGETS = jnp.array([[0, 3, -1, -1], [4, -1, 2, 2], [-1, -1, -1, -1]])


def by_optax(scores, targets):
    each = optax.softmax_cross_entropy_with_integer_labels(scores, jnp.maximum(targets, 0))
    return jnp.where(targets >= 0, each, 0).sum(axis=-1)


@pytest.fixture(scope="module")
def scores():
    return 3 * jax.random.normal(jax.random.key(0), (*TARGETS.shape, 5))


def test_cross_entropy_is_optaxs_where_there_is_a_target(scores):
    np.testing.assert_allclose(cross_entropy(scores, TARGETS), by_optax(scores, TARGETS), rtol=1e-6)
    assert cross_entropy(scores, TARGETS)[2] == 0


def test_so_is_its_gradient_alone_and_side_by_side(scores):
    weights = jnp.array([1.0, -2.0, 3.0])
    gradient = lambda f, s, t: jax.jit(jax.grad(lambda s: jnp.sum(weights * f(s, t))))(s)
    np.testing.assert_allclose(
        gradient(cross_entropy, scores, TARGETS), gradient(by_optax, scores, TARGETS), atol=1e-6
    )
    assert not np.any(gradient(cross_entropy, scores, TARGETS)[2])
    both = jnp.stack([scores, -scores]), jnp.stack([TARGETS, TARGETS[::-1]])
    found, expected = (
        jax.vmap(lambda s, t, f=f: gradient(f, s, t))(*both) for f in (cross_entropy, by_optax)
    )
    np.testing.assert_allclose(found, expected, atol=1e-6)


def test_large_scores_and_classes_that_are_not_there():
    """Finite, and exactly nothing for a class of no probability."""
    scores = jnp.array([[[500.0, 0.0, -1e9]]])
    for target, expected in ((0, 0.0), (1, 500.0)):
        assert cross_entropy(scores, jnp.array([[target]]))[0] == expected
        gradient = jax.grad(lambda s, t=target: cross_entropy(s, jnp.array([[t]]))[0])(scores)
        assert np.isfinite(gradient).all()
        assert gradient[0, 0, 2] == 0


def test_accuracy_counts_what_is_counted_among_what_is_allowed():
    scores = jnp.array([[[1.0, 2.0, 3.0], [3.0, 2.0, 1.0]]])
    batch = {"next": jnp.array([[1, 0]])}
    counted = lambda batch: batch["next"] >= 0
    plain = accuracy(lambda batch: batch["next"], counted)
    assert (plain.values(scores, batch).tolist(), plain.weight(batch).tolist()) == ([1], [2])
    among = accuracy(lambda batch: batch["next"], counted, lambda scores: scores[..., :2])
    assert among.values(scores, batch).tolist() == [2]
    ones = accuracy(lambda batch: batch["next"], lambda batch: batch["next"] > 0)
    assert (ones.values(scores, batch).tolist(), ones.weight(batch).tolist()) == ([0], [1])


@pytest.fixture(scope="module")
def blogs(tmp_path_factory):
    """Twenty people's sentences, as a table and as the files of the Blog Authorship Corpus."""
    folder, rng = tmp_path_factory.mktemp("said"), np.random.default_rng(0)
    users = np.repeat(np.arange(20), 6)
    said = [" ".join(f"w{k}" for k in rng.integers(0, 40, 5)) for _ in users]
    (folder / "table").mkdir()
    (folder / "corpus").mkdir()
    pyarrow.parquet.write_table(pa.table({"user": users, "text": said}), folder / "table/sentences.parquet")
    for user in range(20):
        posts = [f"<date>{k + 1},May,2004</date><post>{said[6 * user + k]}.</post>" for k in range(6)]
        (folder / "corpus" / f"{user}.male.20.Arts.Leo.xml").write_text(f"<Blog>{''.join(posts)}</Blog>")
    return folder


@pytest.mark.parametrize("form", ["table", "corpus"])
def test_blogs_are_known_by_what_a_path_holds(blogs, form):
    small = {"num_words": 30, "num_buckets": 2, "embedding": 4, "units": 4, "max_sentences": 5}
    task = load_task("next-word-lstm", str(blogs / form), **small)
    stores = (task.train, task.validation, task.test)
    assert [store.num_clients for store in stores] == [16, 2, 2]
    assert all(count == 5 for store in stores for count in store.counts)
    paper = load_task("next-word-lstm", str(blogs / form), preset=PAPER, **small)
    for algorithm in ("fed_recon", "fed_yogi"):
        for each in (task, paper):  # rates that do not diverge on long clients
            rates = settings_for(each.defaults, algorithm)
            assert (rates["server.rate"], rates["update.rate"]) == (0.03, 0.3)
    other = load_task("next-word", str(blogs / form), num_words=30, width=4, heads=1, units=4)
    assert other.train.num_clients == 16


@pytest.mark.parametrize("name", ["next-word", "next-word-lstm"])
def test_comments_are_refused_for_data_without_any_if_they_are_given(blogs, tmp_path, name):
    """Whatever the value; not by default, and not for Stack Exchange."""
    small: Any = {"data__num_words": 30, "data__units": 4, "rounds": 1, "cohort__size": 2}
    small |= {"data__width": 4, "data__heads": 1} if name == "next-word" else {"data__embedding": 4}
    small |= {"simulation__lanes": 1, "update__max_steps": 1}
    for form, value in (("table", False), ("corpus", True)):
        told = f"data.comments = {value} would have no effect: only dumps of Stack Exchange have comments"
        with pytest.raises(UserError, match=told):
            train(name, data=str(blogs / form), data__comments=value, **small)
        with pytest.raises(UserError, match=told):
            load_task(name, str(blogs / form), comments=value, num_words=30)
    assert train(name, data=str(blogs / "table"), **small).summary["rounds"] == 1
    posts = [
        f'<row Id="{k}" PostTypeId="1" CreationDate="2016-01-0{1 + k % 9}" OwnerUserId="{k % 12}" Body="a b c" />'
        for k in range(60)
    ]
    (tmp_path / "Posts.xml").write_text(f"<posts>{''.join(posts)}</posts>")
    assert train(name, data=str(tmp_path), data__comments=False, **small).summary["rounds"] == 1


@pytest.mark.parametrize(("cohort", "rate"), [(99, 0.03), (100, 0.1)])
def test_the_server_takes_larger_steps_with_many_long_clients(blogs, cohort, rate):
    task = load_task("next-word-lstm", str(blogs / "table"), num_words=30, embedding=4, units=4)
    many = for_long_clients(task._replace(defaults={**task.defaults, "cohort.size": cohort}))
    assert many.defaults["server.rate"] == rate


def test_clients_of_few_sentences_may_be_left_out(blogs):
    small = {"num_words": 30, "num_buckets": 2, "embedding": 4, "units": 4}
    with pytest.raises(
        UserError, match=r"none of the 20 clients .*has 7 sentences; the largest has 6: set data"
    ):
        load_task("next-word-lstm", str(blogs / "table"), min_sentences=7, **small)


def test_embeddings_of_buckets_may_start_from_a_learned_default(blogs):
    small = {"num_words": 30, "num_buckets": 2, "embedding": 4, "units": 4, "initial": "learned"}
    task = load_task("next-word-lstm", str(blogs / "table"), **small)
    assert "default/oov" in task.personal.partition.server_paths
    assert task.options["initial"] == "learned"
