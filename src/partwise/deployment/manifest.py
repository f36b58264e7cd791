"""The manifest of a version: which files hold its pages. docs/protocol.md has the format for other languages."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from partwise.checkpoint import FAULTS
from partwise.deployment.files import DIGITS, check_name
from partwise.model.partition import Partition
from partwise.server.messages import About, about_of, check_model_digest, read_public, read_rng, say_public
from partwise.types import UserError

FORMAT = 1
LARGEST_MANIFEST = 1 << 22  # bytes
BLOCK_PAGES = 512  # in one block of an index
RAW = DIGITS // 2  # bytes of a page's digest in an index


class PagedSpace(NamedTuple):
    """The files of one key space."""

    num_keys: int
    page_rows: int  # keys in a page; the last page may have fewer
    order: str  # the file with the keys in the order of the pages
    index: tuple[str, ...]  # the files with the digests of the pages

    @property
    def num_pages(self) -> int:
        """How many pages the space has."""
        return -(-self.num_keys // self.page_rows)

    def rows_of(self, page: int) -> int:
        """How many rows a page has."""
        return min(self.page_rows, self.num_keys - page * self.page_rows)

    def block_bytes(self, block: int) -> int:
        """The size of a block of the index."""
        return RAW * min(BLOCK_PAGES, self.num_pages - block * BLOCK_PAGES)


class Manifest(NamedTuple):
    """A version of the model as files."""

    about: About
    rng: np.ndarray  # the key data of the round's randomness
    shared: str  # the file with shared and frozen leaves
    spaces: Mapping[str, PagedSpace]
    public: Mapping[str, Any] = {}  # numbers that every client is told


def write_manifest(manifest: Manifest) -> bytes:
    """A manifest as JSON. The same manifest always gives the same bytes."""
    belongs = manifest.about
    document = {
        "format": FORMAT,
        "kind": "manifest",
        **{name: getattr(belongs, name) for name in ("run", "version", "model")},
        "rng": manifest.rng.tolist(),
        **say_public(manifest.public),
        "shared": manifest.shared,
        "spaces": {space: each._asdict() for space, each in manifest.spaces.items()},
    }
    return json.dumps(document, separators=(",", ":"), allow_nan=False).encode()


def read_manifest(partition: Partition, data: bytes) -> Manifest:
    """The inverse of `write_manifest`. Everything it says is checked against the model."""
    document = _document(data)
    belongs = about_of({**document, "task": ""})
    check_model_digest(partition, belongs)
    spaces = document.get("spaces")
    if not isinstance(spaces, dict) or set(spaces) != set(partition.spaces):
        raise UserError(f"the manifest must have the key spaces {', '.join(partition.spaces) or '(none)'}")
    paged = {space: _space(partition, space, spaces[space]) for space in partition.spaces}
    shared, public = check_name(document.get("shared")), read_public(document)
    return Manifest(belongs, read_rng(document), shared, paged, public)


def index_blocks(digests: np.ndarray) -> list[bytes]:
    """The index of a space's pages [pages, 16] in blocks."""
    return [digests[at : at + BLOCK_PAGES].tobytes() for at in range(0, len(digests), BLOCK_PAGES)]


def page_name(digest: np.ndarray) -> str:
    """The name of the page with this digest, as it is in an index."""
    return f"{digest.tobytes().hex()}.safetensors"


def files_of(partition: Partition, name: str, read: Callable[[str], bytes]) -> set[str]:
    """The names of all files of the version with this manifest, itself included: what must be kept for it."""
    manifest = read_manifest(partition, read(name))
    found = {name, manifest.shared}
    for space in manifest.spaces.values():
        digests = np.frombuffer(b"".join(map(read, space.index)), np.uint8).reshape(-1, RAW)
        found |= {space.order, *space.index, *map(page_name, digests)}
    return found


def _document(data: bytes) -> dict[str, Any]:
    try:
        document = json.loads(data)
        kind, form = document.get("kind"), document.get("format")
    except FAULTS as error:
        raise UserError(f"these {len(data)} bytes are no manifest: {error}") from None
    if kind != "manifest" or form != FORMAT:
        raise UserError(f"this must be a manifest in format {FORMAT}, and it is '{kind}' in format {form}")
    return document


def _space(partition: Partition, space: str, told: Any) -> PagedSpace:
    """What a manifest says of a space. Numbers that do not fit the model are refused before they size anything."""
    if (
        not isinstance(told, dict)
        or set(told) != set(PagedSpace._fields)
        or not isinstance(told["index"], list)
    ):
        raise UserError(f"the manifest must say {', '.join(PagedSpace._fields)} of the space '{space}'")
    names = tuple(check_name(name) for name in told["index"])
    found = PagedSpace(told["num_keys"], told["page_rows"], check_name(told["order"]), names)
    most = partition.num_keys(space)
    if type(found.num_keys) is not int or found.num_keys != most:
        raise UserError(f"the space '{space}' has {most:,} keys, and the manifest says {found.num_keys!r}")
    if type(found.page_rows) is not int or not 1 <= found.page_rows <= max(most, 1):
        raise UserError(
            f"a page of '{space}' has 1 to {most:,} rows, and the manifest says {found.page_rows!r}"
        )
    blocks = -(-found.num_pages // BLOCK_PAGES)
    if len(names) != blocks:
        raise UserError(
            f"the index of '{space}' must have {blocks} files, and the manifest names {len(names)}"
        )
    return found
