"""The server of the secure sum, as pure functions of the letters that it has collected: a journal can hold
the letters, and a server that was killed can go on.

    directories(...)   after `advertise`: to each client, its neighbours' keys
    deliveries(...)    after `share`:     to each client, what its neighbours sent to it
    survivors(...)     after `mask`:      to each who uploaded, who else did and who dropped out
    unmasked_sum(...)  after `unmask`:    the sum over those who uploaded, modulo 2^32

`masked_sum` adds up the uploads one by one, and `unmasked` opens such a sum: together, they are `unmasked_sum`.

Clients who advertised and did not share have left, and nobody masks with them. Clients who shared and did not
upload have dropped out, and their masks are removed with the help of their neighbours. Once `survivors` has
been sent, no more uploads may be taken: clients answer one list only. The functions named `check_...` refuse
a bad letter when it comes. Below the threshold, or with fewer clients than `settings.least`, there is
`TooFewError`, and no sum.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

import numpy as np

from partwise.privacy import masks
from partwise.privacy.graphs import MaskSettings
from partwise.privacy.masked_client import commitment
from partwise.privacy.masked_cohort import (
    Letters,
    MaskedCohort,
    advertised_cohort,
    opened_keys,
    opened_share,
    opened_unmasking,
    opened_vector,
    sharing_cohort,
    survivors_letter,
    uploaded_cohort,
)
from partwise.privacy.masked_letters import STAMP_BYTES, TooFewError, number_bytes, stamped
from partwise.privacy.sharing import combine, share_from_bytes
from partwise.types import UserError

Shares = dict[int, dict[int, bytes]]  # of a client's secret: {its position: {position of the holder: share}}


def directories(context: bytes, advertised: Letters, settings: MaskSettings) -> dict[str, bytes]:
    """What each client is answered after stage 0."""
    cohort = advertised_cohort(context, advertised, settings)
    listed = [number_bytes(position) + keys for position, keys in enumerate(cohort.keys)]
    answers = {}
    for position, name in enumerate(cohort.names):
        head = number_bytes(settings.threshold) + number_bytes(position)
        body = head + b"".join(listed[other] for other in cohort.neighbours[position])
        answers[name] = stamped(context, "directory", name, body)
    return answers


def deliveries(
    context: bytes, advertised: Letters, shared: Letters, settings: MaskSettings
) -> dict[str, bytes]:
    """What each client who shared is answered after stage 1."""
    cohort = sharing_cohort(context, advertised, shared, settings)
    boxes: dict[int, list[bytes]] = {position: [] for position in cohort.sharing}
    for sender in sorted(cohort.sharing):
        name, neighbours = cohort.names[sender], cohort.neighbours[sender]
        _, sealed = opened_share(context, name, shared[name], len(neighbours))
        for other, data in zip(neighbours, sealed, strict=True):
            if other in boxes:
                boxes[other].append(number_bytes(sender) + data)
    named = {cohort.names[position]: b"".join(box) for position, box in boxes.items()}
    return {name: stamped(context, "deliver", name, body) for name, body in named.items()}


def survivors(
    context: bytes,
    advertised: Letters,
    shared: Letters,
    uploaded: Collection[str],
    settings: MaskSettings,
) -> dict[str, bytes]:
    """What each client who uploaded is answered after stage 2."""
    cohort = uploaded_cohort(context, advertised, shared, uploaded, settings)
    return {cohort.names[p]: survivors_letter(cohort, p) for p in sorted(cohort.uploaded)}


def unmasked_sum(
    context: bytes,
    advertised: Letters,
    shared: Letters,
    masked: Letters,
    unmasking: Letters,
    settings: MaskSettings,
) -> np.ndarray:
    """The sum of the vectors of all who uploaded (`masked`), uint32, modulo 2^32."""
    first = next(iter(masked.values()), bytes(STAMP_BYTES))
    total = masked_sum(context, masked.items(), (len(first) - STAMP_BYTES) // 4)
    return unmasked(context, advertised, shared, masked, total, unmasking, settings)


def masked_sum(context: bytes, masked: Iterable[tuple[str, bytes]], num_words: int) -> np.ndarray:
    """The sum of the vectors of all who uploaded, under their masks. Their letters may come one by one."""
    total = np.zeros(num_words, masks.WORD)
    for name, letter in masked:
        total += opened_vector(context, name, letter, num_words)
        del letter
    return total


def unmasked(
    context: bytes,
    advertised: Letters,
    shared: Letters,
    uploaded: Collection[str],
    total: np.ndarray,
    unmasking: Letters,
    settings: MaskSettings,
) -> np.ndarray:
    """What `masked_sum` has added up, without masks; `total` is overwritten."""
    cohort = uploaded_cohort(context, advertised, shared, uploaded, settings)
    shares = _shares(cohort, unmasking)
    add: list[bytes] = []
    subtract: list[bytes] = []
    for position in sorted(shares):
        secret = _secret(cohort, position, shares[position])
        if position in cohort.uploaded:
            subtract.append(_own_seed(cohort, position, secret, shared))
        else:
            _add_pair_seeds(cohort, position, secret, add, subtract)
    masks.apply_masks(total, add, subtract)
    return total


def _shares(cohort: MaskedCohort, unmasking: Letters) -> Shares:
    """The shares of every secret that is needed: of all who uploaded, and of those who dropped out and have a
    mask with one of them."""
    shares: Shares = {
        position: {} for p in cohort.uploaded for group in cohort.asked(p) for position in group
    }
    answering = cohort.positions(unmasking, "has sent shares to unmask")
    if early := sorted(answering - cohort.uploaded):
        raise UserError(f"client '{cohort.names[early[0]]}' has sent shares to unmask, but has not uploaded")
    for holder in sorted(answering):
        name = cohort.names[holder]
        parts = opened_unmasking(cohort.context, name, unmasking[name], survivors_letter(cohort, holder))
        uploaded, dropped = cohort.asked(holder)
        for position, data in zip([*uploaded, *dropped], parts, strict=True):
            shares[position][holder] = data
    return shares


def _secret(cohort: MaskedCohort, position: int, shares: dict[int, bytes]) -> bytes:
    """A client's secret, from the first shares that are enough. In a complete graph they are of the same
    holders for all clients."""
    threshold, name = cohort.settings.threshold, cohort.names[position]
    if len(shares) < threshold:
        raise TooFewError(
            f"only {len(shares)} shares of client '{name}' have come, and {threshold} are needed: the round stops "
            f"without a sum. Start it again, with more clients or more time"
        )
    first = sorted(shares)[:threshold]
    try:
        return combine({holder + 1: share_from_bytes(shares[holder]) for holder in first})
    except UserError as error:
        raise _forged(name, str(error)) from None


def _own_seed(cohort: MaskedCohort, position: int, secret: bytes, shared: Letters) -> bytes:
    """The seed of the own mask of a client who uploaded."""
    name = cohort.names[position]
    promised, _ = opened_share(cohort.context, name, shared[name], len(cohort.neighbours[position]))
    if commitment(secret, cohort.context) != promised:
        raise _forged(name, "they do not give the secret that it committed to")
    return masks.self_seed(secret, cohort.context)


def _add_pair_seeds(
    cohort: MaskedCohort, position: int, secret: bytes, add: list[bytes], subtract: list[bytes]
) -> None:
    """The seeds of the masks that neighbours of a client who dropped out have with it."""
    own, key = cohort.keys[position], masks.mask_key(secret, cohort.context)
    public = masks.public_bytes(key)
    if public != own[: masks.PUBLIC_BYTES]:
        raise _forged(cohort.names[position], "they do not give the key that it advertised")
    for other in cohort.neighbours[position]:
        if other in cohort.uploaded:
            keys = cohort.keys[other]
            seed = masks.pair_seed(key, public, keys[: masks.PUBLIC_BYTES], cohort.context)
            (subtract if keys < own else add).append(seed)  # the one with the smaller keys has added it


def _forged(name: str, why: str) -> UserError:
    return UserError(
        f"the shares of client '{name}' do not fit together ({why}): a neighbour, or the client itself, has sent "
        f"wrong ones. The round stops without a sum"
    )


def check_advertised(context: bytes, name: str, letter: bytes) -> None:
    """Refuse a letter of stage 0 that is not the client's in this round."""
    opened_keys(context, name, letter)


def check_shared(
    context: bytes, name: str, letter: bytes, num_advertised: int, settings: MaskSettings
) -> None:
    """Refuse a letter of stage 1 that is not the client's in this round."""
    opened_share(context, name, letter, min(settings.degree, num_advertised - 1))


def check_masked(context: bytes, name: str, letter: bytes, num_words: int) -> None:
    """Refuse a letter of stage 2 that is not the client's in this round, or has another number of words."""
    opened_vector(context, name, letter, num_words)


def check_unmasking(context: bytes, name: str, letter: bytes, asked: bytes) -> None:
    """Refuse a letter of stage 3 that does not answer `asked`, the client's letter of `survivors`."""
    for share in opened_unmasking(context, name, letter, asked):
        share_from_bytes(share)
