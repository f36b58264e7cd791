"""A curious server and one client's update. In plain, the items that the client rated and its ratings can be read
off (Chai et al., 2019). From masked and sealed reports, the same attack learns nothing."""

from __future__ import annotations

import jax
import numpy as np
import pytest

pytest.importorskip("numba", reason="the extra `privacy` is not installed")
from partwise import optimizers
from partwise.algorithms.fed_avg import fed_avg
from partwise.client import update
from partwise.client.batches import Batches
from partwise.deployment.helper import Helper, write_reports
from partwise.model.partition import keyed, partition
from partwise.privacy.graphs import MaskSettings
from partwise.privacy.masked_letters import STAMP_BYTES
from partwise.privacy.masked_round import NO_DROPS, masked_letters, masked_sum
from partwise.privacy.sealing import new_sealing_key
from partwise.privacy.sum_words import added
from partwise.privacy.two_servers import (
    Agreement,
    TableForm,
    first_share,
    for_helper,
    helper_share,
    make_parts,
)
from partwise.server.encoding import fixed_point
from partwise.server.mean import mean, uniform
from partwise.server.word_form import WordForm
from partwise.tasks.matrix_factorization import matrix_factorization
from partwise.types import UserError

ITEMS, DIM, RATED = 60, 3, 12
RATE, BITS, TRIALS, VERSION = 0.5, 20, 40, 1
PRIVATE, PUBLIC = new_sealing_key()


class Victim:
    """A client that rated some items of a matrix factorisation, and one step of its training."""

    def __init__(self, make_client, make_store):
        rng = np.random.default_rng(5)
        self.items = np.sort(rng.permutation(ITEMS)[:RATED])
        self.ratings = rng.integers(1, 6, RATED).astype(np.float32)
        store = make_store([RATED], item=self.items.astype(np.int32), rating=self.ratings)
        model = matrix_factorization(ITEMS, DIM, scale=0.5)
        self.params = model.init(jax.random.key(1))
        parts = partition(model, {"item": keyed("item")})
        algorithm = fed_avg(
            model,
            parts,
            update=update.by_steps(Batches(RATED), RATE),
            optimizer=optimizers.Sgd(1.0).on_server(),
            aggregator=fixed_point(mean(uniform), BITS),
        )
        client = make_client(model, parts, self.params, store)
        encode, form = algorithm.aggregator.encode, WordForm(algorithm.aggregator, parts)
        self.words = form.of(jax.jit(lambda: encode(algorithm.client(client), jax.random.key(0)))())
        self.num_dense = form.num_dense
        self.rated = np.isin(np.arange(ITEMS), self.items)

    def table(self) -> np.ndarray:
        """Its words in the whole table, as a dense secure sum adds them."""
        whole = np.zeros((ITEMS, DIM), np.uint32)
        whole[self.items] = self.words.tables["item"]
        return whole


@pytest.fixture(scope="module")
def victim(make_client, make_store):
    return Victim(make_client, make_store)


def agreed(victim, least=1) -> Agreement:
    return Agreement("run", victim.num_dense, 2, {"item": TableForm(ITEMS, RATED, DIM, 4 * DIM)}, least=least)


def sealed(victim, number=0, least=1):
    words, keys = victim.words, {"item": victim.items}
    return make_parts(agreed(victim, least), PUBLIC, VERSION, f"task {number}", words, keys)


def suspected(table: np.ndarray) -> np.ndarray:
    """The attack on items: how far each row moved."""
    return np.abs(table.view(np.int32).astype(np.float64)).sum(-1)


def stolen_ratings(victim, table: np.ndarray) -> np.ndarray:
    """The attack on ratings. A row moves by (2 rate / n) (rating - user . row) user: the rest is known."""
    user, rows = (np.asarray(victim.params[path], np.float64) for path in ("user", "item"))
    change = table.view(np.int32).astype(np.float64) / 2**BITS
    return rows @ user + change @ user * RATED / (2 * RATE * user @ user)


def test_a_plain_update_is_an_open_book(victim, success):
    table = victim.table()
    assert np.flatnonzero(suspected(table)).tolist() == victim.items.tolist()
    np.testing.assert_allclose(stolen_ratings(victim, table)[victim.items], victim.ratings, atol=1e-3)
    assert success(suspected(table)[None], victim.rated)[0] == 1


def masked_view(victim, number: int) -> np.ndarray:
    """What the server gets of the victim in a round of secure aggregation."""
    vectors = {name: victim.table().reshape(-1) for name in ("victim", "ben", "cas", "dan", "eve")}
    letters = masked_letters(vectors, b"round %d" % number, NO_DROPS, MaskSettings(b"seed", 4, 4, 4))
    return np.frombuffer(letters.masked["victim"][STAMP_BYTES:], "<u4").reshape(ITEMS, DIM)


def first_view(victim, number: int) -> np.ndarray:
    """What the first of two servers makes of the victim's sealed report alone."""
    return first_share(agreed(victim), VERSION, [sealed(victim, number)]).tables["item"]


def helper_view(victim, number: int) -> np.ndarray:
    """What the helper makes of it alone, which opens its box."""
    share, refused = helper_share(agreed(victim), PRIVATE, VERSION, [for_helper(sealed(victim, number))])
    assert not refused
    return share.tables["item"]


@pytest.mark.parametrize("view", [masked_view, first_view, helper_view])
def test_no_single_party_finds_items_or_ratings(victim, success, view):
    """Also if it were told which items were rated, it could not tell high ratings from low ones."""
    tables = [view(victim, number) for number in range(TRIALS)]
    assert len({table.tobytes() for table in tables}) == TRIALS
    right, close = success(np.array([suspected(table) for table in tables]), victim.rated)
    assert abs(right - 0.5) < close < 0.2
    ratings = np.array([stolen_ratings(victim, table)[victim.items] for table in tables])
    right, close = success(ratings, victim.ratings >= 3)
    assert abs(right - 0.5) < close < 0.3


def test_the_sum_of_one_client_is_that_client(victim):
    """Masks and shares hide who added what to a sum. With one client, there is nothing to hide among."""
    parts = sealed(victim)
    share, _ = helper_share(agreed(victim), PRIVATE, VERSION, [for_helper(parts)])
    total = added(first_share(agreed(victim), VERSION, [parts]), share)
    np.testing.assert_array_equal(total.tables["item"], victim.table())
    np.testing.assert_allclose(
        stolen_ratings(victim, total.tables["item"])[victim.items], victim.ratings, atol=1e-3
    )


def test_so_sums_of_too_few_are_refused(victim, tmp_path):
    """By the helper, whatever the first server asks for, and by every client of a secure sum."""
    helper = Helper(tmp_path / "helper", least=2)
    agreement = agreed(victim, least=2)
    helper.agree(agreement.to_json().encode())
    report = make_parts(agreement, helper.public, VERSION, "task", victim.words, {"item": victim.items})
    with pytest.raises(UserError, match="too few"):
        helper.share("run", VERSION, write_reports(agreement, [for_helper(report)]))
    helper.close()
    with pytest.raises(UserError):
        masked_sum({"victim": victim.table().reshape(-1)}, b"round")
