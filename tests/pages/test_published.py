"""The papers' figures on a page are those that `partwise reproduce` shows."""

from __future__ import annotations

import pytest

from partwise.pages.published import VOCABULARIES, WORD_ACCURACIES, WORD_METRIC, published_rows
from partwise.papers import fedrecon, fedrecon_trainings
from partwise.papers.words_protocol import WordsProtocol


@pytest.mark.parametrize("task", ["movielens", "movielens-seen"])
def test_those_of_ratings(task):
    found = {each.row: dict(each.metrics) for each in published_rows({"task": task, "data.size": "1m"})}
    assert found == {
        row.name: {"rmse": row.rmse, "accuracy": pytest.approx(row.accuracy / 100)}
        for row in fedrecon.ROWS
        if row.task == task
    }


def test_those_of_words():
    assert (WordsProtocol().vocabularies, fedrecon_trainings.METRIC) == (VOCABULARIES, WORD_METRIC)
    rows = [
        row for training in fedrecon_trainings.TRAININGS for row in training.rows if row.paper[0] is not None
    ]
    assert {row.name: tuple(row.paper) for row in rows} == WORD_ACCURACIES
    found = published_rows({"task": "next-word-lstm", "data.num_words": 5000})
    assert {each.row: each.metrics[WORD_METRIC] for each in found} == {
        row.name: pytest.approx(row.paper[1] / 100) for row in rows
    }


def test_other_data_has_none():
    assert published_rows({"task": "movielens", "data.size": "100k"}) == []
    assert published_rows({"task": "planted"}) == []
    assert published_rows({}) == []
