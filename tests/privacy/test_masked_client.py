"""What a client of a secure sum refuses: a second answer, both secrets of a neighbour, too few, and bad letters."""

from __future__ import annotations

import numpy as np
import pytest

from partwise.types import UserError

pytest.importorskip("cryptography", reason="the extra `privacy` is not installed")
from partwise.privacy import masked_server
from partwise.privacy.graphs import MaskSettings
from partwise.privacy.masked_client import MaskedClient
from partwise.privacy.masked_letters import TooFewError, number_bytes, positions_bytes, stamped

CONTEXT = b"round 7"
NAMES = ["ann", "ben", "cas", "dan", "eve"]
KNOWN = MaskSettings(b"seed", 4, 4, 4)  # all pairs; four of five must stay
VECTOR = np.arange(6, dtype=np.uint32)


class Parties:
    """Five clients and the letters so far. Ann is at position 0."""

    def __init__(self, context: bytes = CONTEXT):
        self.context = context
        self.clients = {name: MaskedClient(context, name) for name in NAMES}
        self.advertised = {name: client.advertise() for name, client in self.clients.items()}
        self.directories = masked_server.directories(context, self.advertised, KNOWN)

    def share(self):
        self.shared = {name: self.clients[name].share(letter) for name, letter in self.directories.items()}
        self.boxes = masked_server.deliveries(self.context, self.advertised, self.shared, KNOWN)
        return self

    def mask(self):
        self.share()
        self.masked = {name: self.clients[name].mask(self.boxes[name], VECTOR) for name in NAMES}
        return self

    def survivors(self, *dropped: str):
        left = set(NAMES) - set(dropped)
        return masked_server.survivors(self.context, self.advertised, self.shared, left, KNOWN)


def listed(uploaded: list[int], dropped: list[int], name: str = "ann") -> bytes:
    body = number_bytes(len(uploaded)) + positions_bytes([*uploaded, *dropped])
    return stamped(CONTEXT, "survivors", name, body)


def directory(threshold: int, own: int, entries: dict[int, bytes]) -> bytes:
    body = number_bytes(threshold) + number_bytes(own)
    body += b"".join(number_bytes(position) + keys for position, keys in entries.items())
    return stamped(CONTEXT, "directory", "ann", body)


def keys_of(parties: Parties) -> dict[int, bytes]:
    return {at: parties.advertised[name][16:] for at, name in enumerate(NAMES) if at}


def test_every_step_is_answered_once():
    parties = Parties().mask()
    ann, asked = parties.clients["ann"], parties.survivors("eve")["ann"]
    with pytest.raises(UserError, match="'ann' was asked to share, but its next step is 'unmask'"):
        ann.share(parties.directories["ann"])
    with pytest.raises(UserError, match="answered once"):
        ann.mask(parties.boxes["ann"], VECTOR + np.uint32(1))
    ann.unmask(asked)
    for letter in (asked, parties.survivors("dan")["ann"]):
        with pytest.raises(UserError, match="its next step is 'end'"):
            ann.unmask(letter)
    with pytest.raises(UserError, match="answered once"):
        ann.advertise()


def test_steps_have_an_order():
    with pytest.raises(UserError, match="next step is 'advertise'"):
        MaskedClient(CONTEXT, "ann").share(b"")


@pytest.mark.parametrize(
    ("uploaded", "dropped", "error"),
    [
        ([0, 1, 2, 3], [3, 4], "listed twice; both of its secrets are never given"),
        ([0, 1, 2, 3, 3], [4], "listed twice"),
        ([0, 1, 2, 3, 9], [4], "holds no share of position 9"),
        ([1, 2, 3, 4], [0], "it has uploaded, and is said to have dropped out"),
        ([1, 2, 3, 4], [], "it has uploaded"),
    ],
)
def test_lists_that_a_client_does_not_answer(uploaded, dropped, error):
    ann = Parties().mask().clients["ann"]
    with pytest.raises(UserError, match=error):
        ann.unmask(listed(uploaded, dropped))
    assert len(ann.unmask(listed([0, 1, 2, 3], [4]))) == 16 + 16 + 5 * 17  # to the right one it does


def test_too_few_uploads():
    ann = Parties().mask().clients["ann"]
    with pytest.raises(TooFewError, match="3 of it and its neighbours have uploaded, and 4 are needed"):
        ann.unmask(listed([0, 1, 2], [3, 4]))


def test_too_few_shares():
    parties = Parties()
    shared = {name: parties.clients[name].share(parties.directories[name]) for name in NAMES}
    few = {name: shared[name] for name in NAMES[:3]}
    boxes = masked_server.deliveries(CONTEXT, parties.advertised, few, KNOWN._replace(threshold=3, least=3))
    with pytest.raises(TooFewError, match="3 of it and its neighbours are left"):
        parties.clients["ann"].mask(boxes["ann"], VECTOR)


def test_it_holds_nothing_of_those_who_left_before_the_masks():
    parties = Parties()
    parties.shared = {n: parties.clients[n].share(parties.directories[n]) for n in NAMES[:4]}
    boxes = masked_server.deliveries(CONTEXT, parties.advertised, parties.shared, KNOWN)
    ann = parties.clients["ann"]
    ann.mask(boxes["ann"], VECTOR)
    with pytest.raises(UserError, match="no share of position 4"):
        ann.unmask(listed([0, 1, 2, 3], [4]))


def test_directories_that_are_refused():
    parties = Parties()
    ann, keys = parties.clients["ann"], keys_of(parties)
    own = parties.advertised["ann"][16:]
    bad = {
        "two keys of the directory are the same": directory(4, 0, keys | {3: keys[2]}),
        "two keys of the directory": directory(4, 0, keys | {3: own}),
        "two keys of": directory(4, 0, keys | {3: keys[2][:32] + keys[3][32:]}),
        "open with 2 shares of 5: more than half": directory(2, 0, keys),
        "open with 6 shares of 5": directory(6, 0, keys),
        "its own neighbour": directory(4, 1, keys),
        "has no neighbour": directory(1, 0, {}),
        "position 1 after 2": directory(4, 0, {2: keys[2], 1: keys[1]}),
        "gives no secret": directory(4, 0, keys | {3: keys[3][:32] + bytes(32)}),
        "a multiple of 68": stamped(CONTEXT, "directory", "ann", bytes(9)),
        "at least 8": stamped(CONTEXT, "directory", "ann", bytes(7)),
    }
    for error, letter in bad.items():
        with pytest.raises(UserError, match=error):
            ann.share(letter)
    ann.share(directory(4, 0, keys))


def test_boxes_that_are_refused():
    parties = Parties().share()
    ann, box = parties.clients["ann"], parties.boxes["ann"][16:]
    swapped = box[:4] + box[58:108] + box[54:58] + box[4:54] + box[108:]
    bad = {
        "from position 1 were changed": stamped(CONTEXT, "deliver", "ann", swapped),
        "position 77, which is no neighbour": stamped(
            CONTEXT, "deliver", "ann", box[:-54] + number_bytes(77) + box[-50:]
        ),
        "a multiple of 54": stamped(CONTEXT, "deliver", "ann", box[:-1]),
        "position 1 after 1": stamped(CONTEXT, "deliver", "ann", box[:54] + box),
    }
    for error, letter in bad.items():
        with pytest.raises(UserError, match=error):
            ann.mask(letter, VECTOR)
    ann.mask(parties.boxes["ann"], VECTOR)


def test_lengths_of_lists():
    ann = Parties().mask().clients["ann"]
    for body in (b"", bytes(3), number_bytes(5) + positions_bytes([0, 1]), number_bytes(1) + bytes(5)):
        with pytest.raises(UserError, match="the letter 'survivors' has"):
            ann.unmask(stamped(CONTEXT, "survivors", "ann", body))


@pytest.mark.parametrize("vector", [VECTOR.astype(np.int64), VECTOR[None], VECTOR[:0]])
def test_vectors_that_are_refused(vector):
    parties = Parties().share()
    with pytest.raises(UserError, match="one line of uint32, not"):
        parties.clients["ann"].mask(parties.boxes["ann"], vector)


def test_letters_of_others_are_refused():
    """Of another client, stage or round; cut; with any one bit changed; or no bytes at all."""
    parties, other = Parties().mask(), Parties(b"round 8").mask()
    good = parties.survivors("eve")["ann"]
    bad = [parties.survivors("eve")["ben"], parties.boxes["ann"], other.survivors("eve")["ann"]]
    bad += [good[:-1], good[:15], b"", good + b"\0"]
    bad += [good[:at] + bytes([good[at] ^ 1 << at % 8]) + good[at + 1 :] for at in range(len(good))]
    for letter in bad:
        with pytest.raises(UserError, match="not the letter 'survivors' of this client in this round"):
            parties.clients["ann"].unmask(letter)
    with pytest.raises(UserError, match="a letter is bytes, not str"):
        parties.clients["ann"].unmask("ann")  # type: ignore[arg-type]


def test_the_same_secrets_in_another_round_give_another_vector():
    """Even if a client's generator were to repeat itself."""
    found = []
    for context in (b"round 1", b"round 2"):
        random = np.random.default_rng(0)
        clients = {name: MaskedClient(context, name, lambda n, r=random: r.bytes(n)) for name in NAMES}
        advertised = {name: client.advertise() for name, client in clients.items()}
        answers = masked_server.directories(context, advertised, KNOWN)
        shared = {name: clients[name].share(answers[name]) for name in NAMES}
        boxes = masked_server.deliveries(context, advertised, shared, KNOWN)
        letter = clients["ann"].mask(boxes["ann"], np.zeros(10_000, np.uint32))
        found.append(np.frombuffer(letter[16:], "<u4"))
    assert (found[0] == found[1]).mean() < 0.01
