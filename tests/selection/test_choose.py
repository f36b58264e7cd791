"""Which keys clients ask for: structured, random, in classes; the same wherever and with whomever they run."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from partwise.data.ragged import offsets
from partwise.selection import choose
from partwise.selection.choose import Asking, parse_choice, streams
from partwise.selection.classes import classes
from partwise.selection.keys import OwnKeys
from partwise.types import UserError

K = 40


def asking(clients, seed=0, round_number=3, numbers=None, num_keys=K, space="word"):
    """Clients as dicts of key -> uses."""
    counts = np.array([len(c) for c in clients], int)
    keys = np.array([k for c in clients for k in sorted(c)], np.int32)
    uses = np.array([c[k] for c in clients for k in sorted(c)], int)
    numbers = np.asarray(np.arange(len(clients)) if numbers is None else numbers, np.uint64)
    drawn = streams(space, seed, np.full(len(clients), round_number), numbers)
    return Asking(OwnKeys(keys, offsets(counts), counts, uses), num_keys, numbers, *drawn)


def of(chosen, client):
    return chosen.keys[chosen.starts[client] : chosen.starts[client] + chosen.counts[client]].tolist()


CLIENTS = [{1: 5, 4: 9, 7: 9, 30: 1}, {}, {2: 1}, {k: k + 1 for k in range(20)}]
CHOICES = ["own", "all", "top:3", "sample:3", "sample_top:3", "random:5", "same:5", "random:5@0.5,2@0.5"]
populations = st.lists(
    st.dictionaries(st.integers(0, K - 1), st.integers(1, 9), max_size=12), min_size=1, max_size=6
)


def test_top_takes_the_most_used_and_of_equals_the_smaller_key():
    chosen = choose.top(2).choose(asking(CLIENTS))
    assert [of(chosen, c) for c in range(4)] == [[4, 7], [], [2], [18, 19]]
    assert of(choose.top(1).choose(asking(CLIENTS)), 0) == [4]
    assert chosen.place[:4].tolist() == [-1, 0, 1, -1]


def test_own_and_everything_leave_nothing_out():
    chosen = choose.own().choose(asking(CLIENTS))
    assert [of(chosen, c) for c in range(4)] == [sorted(c) for c in CLIENTS]
    chosen = choose.everything().choose(asking(CLIENTS))
    assert of(chosen, 2) == list(range(K))
    assert chosen.place[:4].tolist() == [1, 4, 7, 30]


@pytest.mark.parametrize("text", CHOICES)
@given(populations, st.integers(0, 5))
def test_places_point_at_the_keys(text, clients, round_number):
    given_ = asking(clients, round_number=round_number)
    chosen = parse_choice(text).choose(given_)
    most = parse_choice(text).most(int(given_.own.counts.max()), K)
    for c in range(len(clients)):
        mine = of(chosen, c)
        assert mine == sorted(set(mine))
        assert len(mine) <= most
        own = sorted(clients[c])
        for key, place in zip(own, chosen.place[given_.own.starts[c] :][: len(own)], strict=True):
            assert place == (mine.index(key) if key in mine else -1)
        if text.startswith(("top", "sample")):
            assert len(mine) == min(3, len(own))
            assert set(mine) <= set(own)


@pytest.mark.parametrize("text", ["sample:3", "sample_top:3", "random:5"])
def test_a_clients_draw_does_not_depend_on_the_others(text):
    everyone = parse_choice(text).choose(asking(CLIENTS))
    alone = parse_choice(text).choose(asking(CLIENTS[3:], numbers=[3]))
    assert of(alone, 0) == of(everyone, 3)
    later = parse_choice(text).choose(asking(CLIENTS[3:], numbers=[3], round_number=4))
    assert of(later, 0) != of(alone, 0)


def test_sample_top_stays_in_the_top_2m():
    client = {k: 20 - k for k in range(20)}
    seen = {
        k for t in range(60) for k in of(choose.sample_top(3).choose(asking([client], round_number=t)), 0)
    }
    assert seen == set(range(6))


def test_the_same_keys_for_all_of_a_round():
    chosen = choose.same(5).choose(asking(CLIENTS))
    assert len({tuple(of(chosen, c)) for c in range(4)}) == 1
    independent = choose.random(5).choose(asking(CLIENTS))
    assert len({tuple(of(independent, c)) for c in range(4)}) == 4


@pytest.mark.parametrize("num_keys", [40, 100_000], ids=["few keys", "many keys"])
def test_random_keys_are_uniform(num_keys):
    """Every key in turn: over many clients each tenth of the keys is asked for equally often."""
    m = 20
    chosen = choose.random(m).choose(asking([{}] * 2000, num_keys=num_keys))
    assert chosen.counts.tolist() == [m] * 2000
    tenth = np.bincount(chosen.keys // (num_keys // 10), minlength=10) / len(chosen.keys)
    assert np.abs(tenth - 0.1).max() < 0.01


@pytest.mark.parametrize("num_keys", [K, 100_000], ids=["few keys", "many keys"])
def test_own_keys_with_random_others_are_each_sent_once(num_keys):
    asked = asking(CLIENTS, num_keys=num_keys)
    choice, own = parse_choice("with_random:9"), choose.own().choose(asked)
    chosen, drawn = choice.choose(asked), choose.random(9).choose(asked)
    for client in range(len(CLIENTS)):
        mine, keys = of(own, client), of(chosen, client)
        assert keys == sorted({*mine, *of(drawn, client)})
        first, count = asked.own.starts[client], asked.own.counts[client]
        places = chosen.place[first : first + count]
        assert [keys[place] for place in places] == mine
    assert choice.complete
    assert choice.every_round
    assert choice.most(4, 100) == 13
    assert choice.most(95, 100) == 100


def test_device_classes_have_their_own_numbers_of_keys():
    sizes, numbers = classes({10: 0.25, 3: 0.75}), np.arange(4000, dtype=np.uint64)
    assert set(sizes.of(numbers)) == {3, 10}
    assert abs((sizes.of(numbers) == 10).mean() - 0.25) < 0.03
    for name in ("top", "sample", "sample_top", "random", "same"):
        choice = parse_choice(f"{name}:10@0.25,3@0.75")
        assert choice.name == f"{name}:10@0.25,3@0.75"
        chosen = choice.choose(asking([CLIENTS[3]] * 50, numbers=numbers[:50]))
        assert chosen.counts.tolist() == sizes.of(numbers[:50]).tolist()
        assert choice.most(20, K) == 10


def test_of_the_same_keys_small_devices_have_a_part():
    chosen = parse_choice("same:10@0.5,3@0.5").choose(asking(CLIENTS * 10))
    asked = [of(chosen, c) for c in range(40)]
    assert len({tuple(keys) for keys in asked}) == 2
    small, large = sorted({tuple(keys) for keys in asked}, key=len)
    assert (len(small), len(large)) == (3, 10)
    assert set(small) < set(large)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tpo:3", "unknown choice of keys 'tpo'.*nearest: top"),
        ("top", "needs a number of keys"),
        ("top:0", "at least 1"),
        ("own:3", "takes no number"),
        ("top:10@0.5,3", "as in 1000@0.8,100@0.2, not '10@0.5,3'"),
        ("top:10,3", "numbers of keys with their shares"),
        ("top:ten@1", "not 'ten@1'"),
        ("top:10@0.5,10@0.5", "one number of keys twice"),
        ("top:0@0.5,10@0.5", "at least 1"),
        ("random:10@-1,3@2", "shares above 0"),
        ("random:10@nan", "shares above 0"),
        ("own:10@1", "takes no number"),
        ("top:5@0.5", "add up to 0.5 "),
        ("top:5@0.5,3@0.6", "add up to 1.1 .*add up to 1, as in"),
        ("top:300@80,50@0.2", "add up to 80.2 "),
    ],
)
def test_choices_that_cannot_be_meant(text, message):
    with pytest.raises(UserError, match=message):
        parse_choice(text)


def test_more_keys_than_there_are():
    with pytest.raises(UserError, match="cannot choose 41 of 40 keys"):
        choose.random(41).most(3, K)
    with pytest.raises(UserError, match="cannot choose 41 of 40 keys"):
        parse_choice("same:41@0.1,4@0.9").most(3, K)
    assert choose.top(100).most(7, K) == 7


@pytest.mark.parametrize("text", ["random:5", "same:5", "sample:3"])
def test_key_spaces_of_one_size_draw_different_keys(text):
    drawn = [parse_choice(text).choose(asking(CLIENTS, space=space)) for space in ("word", "unit")]
    assert of(drawn[0], 3) != of(drawn[1], 3)
    assert of(drawn[0], 3) == of(parse_choice(text).choose(asking(CLIENTS, space="word")), 3)
