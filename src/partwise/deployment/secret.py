"""What a device needs so that no server can read its reports: neither of two, or the one that there is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from partwise.algorithm import Algorithm
from partwise.algorithms.registry import recorded
from partwise.config.protection import protection
from partwise.config.secure_sums import noise_share
from partwise.config.settings import parse_toml
from partwise.deployment.link import Link, Offer
from partwise.deployment.pair import make_agreement
from partwise.model.partition import Partition
from partwise.privacy.two_servers import Agreement
from partwise.server.masked_form import MaskingForm
from partwise.server.messages import About, Slices
from partwise.server.private_slices import ask_privately, read_privately
from partwise.server.refusals import Refused
from partwise.server.sealed_form import SealingForm
from partwise.server.word_form import WordForm
from partwise.types import UserError


class Secret(NamedTuple):
    """Two servers, as a device sees them."""

    agreement: Agreement
    helper_key: bytes
    sealing: SealingForm
    privately: bool  # whether slices are fetched so that nobody learns the keys

    def slices(
        self, link: Link, partition: Partition, here: About, keys: Mapping[str, np.ndarray]
    ) -> Slices | Refused:
        """The slices of keys that neither server learns."""
        question = ask_privately(self.agreement, self.helper_key, here, keys)
        message = link.private(here.task, question.message)
        if isinstance(message, Refused):
            return message
        return read_privately(self.agreement, partition, here, message, question, keys)


def secret_of(offer: Offer, algorithm: Algorithm, pinned: str | None = None) -> Secret | None:
    """What the settings of a run ask for; None if the server reads reports.

    `pinned` is the helper's public key in hex, as its operator told it: then the server cannot give another one.
    """
    if offer.settings["privacy.sums"] != "two_servers":
        if pinned:
            raise UserError(
                "the helper's key was given, and this run has no helper: its server reads every report"
            )
        return None
    if pinned and pinned.lower() != offer.helper:
        raise UserError(
            f"the server names the helper's key {offer.helper[:16]}..., and {pinned[:16]}... was given: do not "
            f"take part, or ask the helper's operator for its key"
        )
    key, agreement = bytes.fromhex(offer.helper), make_agreement(algorithm, offer.run)
    words = WordForm(algorithm.aggregator, algorithm.partition)
    privately = offer.settings["serving.way"] == "private"
    return Secret(agreement, key, SealingForm(agreement, words, key), privately)


def masking_of(offer: Offer, algorithm: Algorithm) -> MaskingForm | None:
    """How reports are written if they are masked; None if they are not."""
    if offer.settings["privacy.sums"] != "masked":
        return None
    config = recorded(parse_toml(offer.config))
    promised = protection(config, config.deploy.population)
    share = noise_share(promised) if promised else None
    return MaskingForm(WordForm(algorithm.aggregator, algorithm.partition), share)
