"""A published model on a device: fetched once, used offline, fetched again when there is a newer version.

What is fetched becomes the folder of a run, as `partwise train` writes it. So everything that works with such a
folder works with it: `partwise personalize`, `predict`, `export`.
"""

from __future__ import annotations

import dataclasses
import os
import re
from pathlib import Path

import numpy as np

from partwise.algorithms.registry import recorded
from partwise.config.settings import parse_toml
from partwise.deployment.federation import algorithm_with, only_known
from partwise.deployment.http_link import HttpLink
from partwise.runs.client_file import Source
from partwise.runs.folder import Folder
from partwise.server.messages import about, read_slices
from partwise.types import UserError


def fetch_run(link: HttpLink, out: str | Path) -> tuple[Folder, int]:
    """Fetch the newest version of a run's model into a folder, and return it and the version.

    Args:
        link: The way to the server.
        out: The folder. An older version of the same run in it is replaced; another run is not.
    """
    offer = link.offer()
    config = recorded(parse_toml(offer.config))
    source = Source(
        {name: np.asarray(ids) for name, ids in offer.vocabularies.items()},
        {name: tuple(shape) for name, shape in offer.shapes.items()},
        offer.client,
        offer.types,
    )
    partition = algorithm_with(config, offer.options, only_known(source)).partition
    keys = {space: np.arange(count) for space, count in partition.all_keys.items()}
    message = link.model(keys)
    params, version = read_slices(partition, message, keys).params, about(message).version
    folder = Folder(out)
    begun = {"data": {}, "lanes": 0, "fetched": link.url, "of": offer.run}
    with folder.held():
        if folder.exists():
            _check_same(folder, offer.run)
            folder.save_config(dataclasses.replace(config, rounds=max(version, 1)))
        else:
            folder.start(dataclasses.replace(config, rounds=max(version, 1)), offer.options, source, begun)
        folder.save_model(params, {"round": max(version, 1)})
    return folder, version


def place_of(url: str) -> Path:
    """The folder on this device where the model of a server is kept."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "partwise" / "models" / re.sub(r"[^\w.-]", "_", url.partition("://")[2].strip("/"))


def _check_same(folder: Folder, run: str) -> None:
    if folder.begun().get("of") != run:
        raise UserError(
            f"'{folder.path}' has the model of another run ({folder.run}): move it away, and fetch again"
        )
