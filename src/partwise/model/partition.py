"""Rules on parameter paths give every leaf one role: shared, keyed, local or frozen.

This is the paper's split of a model into global parameters G and local parameters L (FedRecon, section 3).
The role `keyed` is for global leaves of which a client is sent only the slices of its keys (Federated Select,
section 3). `model/roles.py` has the roles themselves.
"""

from __future__ import annotations

import fnmatch
import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from partwise import tree
from partwise.model.psi import Psi
from partwise.model.roles import Role, from_rows, neutral_twin, shared, to_rows
from partwise.model.roles import frozen as frozen  # rules are written with these
from partwise.model.roles import keyed as keyed
from partwise.model.roles import local as local
from partwise.model.spec import Model, check_metrics, named
from partwise.types import Params, UserError, nearest

DEFAULT = "default/"  # where the learned default of a local leaf lives among the shared leaves


class Description(NamedTuple):
    """One line of `describe`."""

    path: str
    shape: tuple[int, ...]
    role: str
    bytes_down: int
    bytes_up: int


@dataclass(frozen=True)
class Partition:
    """The role of every leaf, and how a model's tree is split into its parts and merged again."""

    paths: tuple[str, ...]
    roles: Mapping[str, Role]
    shapes: Mapping[str, jax.ShapeDtypeStruct]
    treedef: Any
    columns: Mapping[str, tuple[str, ...]]  # key space -> the example columns that hold its keys
    init: Callable[[jax.Array], Params] | None = field(default=None, compare=False, repr=False)

    def of(self, *kinds: str) -> tuple[str, ...]:
        """The paths whose role is one of these kinds."""
        return tuple(path for path in self.paths if self.roles[path].kind in kinds)

    @property
    def server_paths(self) -> tuple[str, ...]:
        """Leaves that the server stores, including learned defaults."""
        learned = (DEFAULT + p for p in self.of("local") if self.roles[p].initial == "learned")
        return (*self.of("shared", "keyed", "frozen"), *learned)

    @property
    def there(self) -> tuple[str, ...]:
        """Frozen leaves that clients have without being sent them."""
        return tuple(path for path in self.of("frozen") if self.roles[path].there)

    @cached_property
    def own_constants(self) -> dict[str, np.ndarray]:
        """The leaves that are `there`, from the model. Raises `UserError` if they are not always the same."""
        if not self.there or self.init is None:
            return {}
        flat = lambda rng: tree.flatten(self.init(rng))  # pyright: ignore[reportOptionalCall]
        made = [jax.jit(lambda rng: {p: flat(rng)[p] for p in self.there})(jax.random.key(i)) for i in (0, 1)]
        first, second = ({path: np.asarray(leaf) for path, leaf in each.items()} for each in made)
        for path, leaf in first.items():
            if leaf.tobytes() != second[path].tobytes():
                raise UserError(
                    f"'{path}' is frozen(there=True), and the model draws it at random, so clients would have "
                    f"other values than the server: make it a constant of the model, or leave out there=True"
                )
        return first

    def check_there(self, params: Mapping[str, Any]) -> None:
        """Raise `UserError` unless the server's leaves that clients have already are those of the model here."""
        for path, leaf in self.own_constants.items():
            if leaf.tobytes() != np.asarray(params[path]).tobytes():
                raise UserError(
                    f"'{path}' is frozen(there=True), and the server's values are not those that a client's model "
                    f"makes (they may come from the data): leave out there=True, so that they are sent"
                )

    @property
    def trained_paths(self) -> tuple[str, ...]:
        """Leaves of the server that clients train. The others are constants."""
        fixed = [p for p, role in self.roles.items() if role.kind == "frozen" or not role.trained]
        return tuple(path for path in self.server_paths if path not in fixed)

    @property
    def local_paths(self) -> tuple[str, ...]:
        """Leaves of which each client has its own: local leaves and twins."""
        return tuple(p for p in self.paths if self.roles[p].kind == "local" or self.roles[p].twin)

    @property
    def spaces(self) -> dict[str, tuple[str, ...]]:
        """Key space -> the leaves it cuts."""
        names = dict.fromkeys(self.roles[path].space for path in self.of("keyed"))
        return {name: tuple(p for p in self.of("keyed") if self.roles[p].space == name) for name in names}

    @cached_property
    def server_shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes and types of the leaves that the server stores. Keyed leaves have their rows first."""
        params = tree.unflatten(self.treedef, self.paths, self.shapes)
        return jax.eval_shape(lambda params: self.split(params)[0], params)

    @cached_property
    def digest(self) -> str:
        """A digest of all leaves, their shapes and roles, and of the values of those that clients have already. Two
        partitions with the same digest can exchange messages."""
        leaves = [
            [
                path,
                leaf.shape,
                leaf.dtype.name,
                _traits(self.roles[path]),
            ]
            for path, leaf in self.shapes.items()
        ]
        values = {
            path: hashlib.sha256(leaf.tobytes()).hexdigest() for path, leaf in self.own_constants.items()
        }
        parts = [leaves, self.columns, *([values] if values else [])]
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]

    def num_keys(self, space: str) -> int:
        """How many keys the space has."""
        path = self.spaces[space][0]
        return self.shapes[path].shape[self.roles[path].axis] // self.roles[path].block

    @property
    def all_keys(self) -> dict[str, int]:
        """Key space -> how many keys it has."""
        return {space: self.num_keys(space) for space in self.spaces}

    def is_whole(self, space: str) -> bool:
        """Whether steps work on the client's whole slice. If not, they work on the rows of the batch's ids."""
        return not self.columns[space] or any(self.roles[path].whole for path in self.spaces[space])

    def is_summed(self, space: str) -> bool:
        """Whether steps work on the sums of the rows of every example's ids."""
        return any(self.roles[path].summed for path in self.spaces[space])

    def block(self, space: str) -> int:
        """How many ids of the space's columns share a key."""
        return self.roles[self.spaces[space][0]].block if self.columns[space] else 1

    def server_leaves(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """The leaves that the server stores, taken from a larger mapping. If a learned default is missing, it
        is the leaf of the same path, or the mean over the rows of that leaf's table (users' rows, after
        FedAvg)."""
        leaves = {}
        for path in self.server_paths:
            leaf = path.removeprefix(DEFAULT)
            if path in params or leaf not in params:
                leaves[path] = params[path]
            elif jnp.shape(params[leaf]) == self.shapes[leaf].shape:
                leaves[path] = params[leaf]
            else:
                leaves[path] = jnp.mean(jnp.asarray(params[leaf]), axis=0)
        return leaves

    def split(self, params: Params) -> tuple[dict[str, Any], dict[str, Any]]:
        """Split a model's tree into (what the server stores, what a client keeps). Keyed leaves have their
        rows first. A twin is in both parts. A learned default is in the server's part, and its local leaf in
        the client's."""
        server, own = {}, {}
        for path, leaf in tree.flatten(params).items():
            role = self.roles[path]
            if role.kind == "local":
                own[path] = leaf
                if role.initial == "learned":
                    server[DEFAULT + path] = leaf
            else:
                server[path] = to_rows(role, leaf) if role.kind == "keyed" else leaf
                if role.twin:
                    own[path] = neutral_twin(role, leaf)
        return server, own

    def merge(self, server: Mapping[str, Any], own: Mapping[str, Any]) -> Params:
        """The model's tree from the server's leaves (whole or sliced) and the client's own. The inverse of
        `split`."""
        return tree.unflatten(self.treedef, self.paths, {p: self._leaf(p, server, own) for p in self.paths})

    def _leaf(self, path: str, server: Mapping[str, Any], own: Mapping[str, Any]) -> Any:
        role = self.roles[path]
        if role.kind == "local":
            return own[path]
        if role.kind == "keyed":
            return from_rows(role, server[path])
        if role.twin and path in own:
            total = server[path] + own[path]
            return total if role.twin == "add" else total / 2
        return server[path]

    def describe(self, keys_per_client: Mapping[str, float] | None = None) -> list[Description]:
        """Path, shape, role, and bytes per client and round of every leaf.

        `keys_per_client` is the mean number of keys of a client, by space (default: all keys).
        """
        keys_per_client = keys_per_client or {}
        lines = []
        for path in self.paths:
            role, leaf = self.roles[path], self.shapes[path]
            size = tree.num_bytes(leaf.shape, leaf.dtype)
            if role.kind == "keyed":
                keys = keys_per_client.get(role.space, self.num_keys(role.space))
                down, up = round(keys * self.row_bytes(path)), round(size * keys / self.num_keys(role.space))
            else:
                own = role.there or (role.kind == "local" and role.initial != "learned")
                down = 0 if own else size
                up = 0 if role.kind == "frozen" else down
            up = up if role.trained else 0
            lines.append(Description(path, leaf.shape, str(role), down, up))
        return lines

    def row_bytes(self, path: str) -> int:
        """Bytes that are sent to a client for one key of a keyed leaf."""
        role, leaf = self.roles[path], self.shapes[path]
        rows = jax.eval_shape(lambda x: to_rows(role, x), leaf)
        return role.psi.row_bytes(rows.shape[1:], leaf.dtype)


def with_psi(partition: Partition, psi: Psi) -> Partition:
    """The same partition, with this psi for all keyed leaves but constants, which are sent as they are."""
    encode = lambda role: replace(role, psi=psi) if role.kind == "keyed" and role.trained else role
    return replace(partition, roles={path: encode(role) for path, role in partition.roles.items()})


def partition(
    model: Model, rules: Mapping[str, Role], columns: Mapping[str, tuple[str, ...]] | None = None
) -> Partition:
    """Give every leaf of a model a role.

    Args:
        model: The model.
        rules: {pattern of paths: role}. Patterns are shell-style ("item/*"). Leaves that no rule matches are
            shared. A rule that matches nothing is an error, and so is a leaf that two rules match.
        columns: {key space: columns of the examples that hold its keys}; by default the column of the same
            name.

    Returns:
        The partition. Its `describe()` lists path, shape, role and bytes of every leaf.

    Raises:
        UserError: The rules or the columns do not fit the model.
    """
    shapes_tree = jax.eval_shape(
        named("init", model.init), jax.eval_shape(jax.random.key, 0)
    )  # neither starts JAX
    shapes = tree.flatten(shapes_tree)
    for path in shapes:
        if path.startswith(DEFAULT):
            raise UserError(
                f"parameter '{path}': names under '{DEFAULT}' are kept for learned defaults; rename it"
            )
    roles = {path: _role(path, rules) for path in shapes}
    for pattern in rules:
        if not any(fnmatch.fnmatchcase(path, pattern) for path in shapes):
            raise UserError(
                f"the rule '{pattern}' matches no parameter ({nearest(pattern, shapes)}). "
                f"Write a path as `describe` prints it, or a pattern such as 'item/*'."
            )
    check_metrics(model)
    for path, role in roles.items():
        if role.kind != "frozen" and not jnp.issubdtype(shapes[path].dtype, jnp.floating):
            raise UserError(
                f"parameter '{path}' has the type {shapes[path].dtype}, along which there is no gradient, so it "
                f"cannot be {role.kind}: make it frozen(), or floating-point numbers"
            )
    spaces = dict.fromkeys(role.space for role in roles.values() if role.kind == "keyed")
    columns = {space: (space,) for space in spaces} | {
        space: (names,) if isinstance(names, str) else tuple(names)
        for space, names in (columns or {}).items()
    }
    used = [name for names in columns.values() for name in names]
    for name in used:
        if used.count(name) > 1:
            raise UserError(
                f"column '{name}' holds the keys of more than one key space; give each its own column"
            )
    for space in columns:
        if space not in spaces:
            raise UserError(f"columns are given for key space '{space}', which no rule names")
    structure = jax.tree_util.tree_structure(shapes_tree)
    result = Partition(tuple(shapes), roles, shapes, structure, columns, model.init)
    if not result.trained_paths:
        raise UserError(
            f"nothing of this model is learned together: all of {', '.join(shapes)} is local or frozen. Make at "
            f"least one of them shared() or keyed(...), or let local ones start from a default that is learned, "
            f"local('learned')"
        )
    _check_spaces(result)
    return result


def _role(path: str, rules: Mapping[str, Role]) -> Role:
    matching = [pattern for pattern in rules if fnmatch.fnmatchcase(path, pattern)]
    if len(matching) > 1:
        raise UserError(
            f"parameter '{path}' is matched by {len(matching)} rules: {', '.join(map(repr, matching))}. "
            f"A parameter has one role: narrow the patterns until only one matches."
        )
    role = rules[matching[0]] if matching else shared()
    if not isinstance(role, Role):
        raise UserError(
            f"the rule '{matching[0]}' gives {role!r}, not a role such as shared() or keyed('item')"
        )
    return role


def _traits(role: Role) -> dict[str, Any]:
    """What a role says about messages. How a client computes is its own affair."""
    traits = {**asdict(role), "psi": role.psi.name}
    del traits["summed"]
    if role.trained:
        del traits["trained"]
    if not role.there:
        del traits["there"]
    return traits


def _check_summed(result: Partition, space: str) -> None:
    roles = [result.roles[path] for path in result.spaces[space]]
    plain = all(role.summed and not role.whole and role.block == 1 for role in roles)
    if not plain or len(result.columns[space]) != 1:
        raise UserError(
            f"a leaf of key space '{space}' has summed=True: then all its leaves must have it, without whole and "
            f"block ({', '.join(result.spaces[space])}), and one column must name the keys, not "
            f"{len(result.columns[space])}. Leave out summed=True"
        )


def _check_spaces(result: Partition) -> None:
    for space, paths in result.spaces.items():
        if result.is_summed(space):
            _check_summed(result, space)
        if not any(result.roles[path].trained for path in paths):
            raise UserError(
                f"no leaf of key space '{space}' is trained ({', '.join(paths)}): leave out trained=False for one "
                f"of them, or let the space of a leaf that is trained cut them"
            )
        for path in paths:
            shape, axis = result.shapes[path].shape, result.roles[path].axis
            if not -len(shape) <= axis < len(shape):
                raise UserError(
                    f"'{path}' has shape {shape} and no axis {axis} to cut by key space '{space}'"
                )
            length, block = shape[axis], result.roles[path].block
            if length % block:
                raise UserError(
                    f"'{path}' has {length} entries along axis {axis}, which blocks of {block} do not divide"
                )
        lengths = {
            path: result.shapes[path].shape[result.roles[path].axis] // result.roles[path].block
            for path in paths
        }
        if len(set(lengths.values())) > 1:
            shown = ", ".join(f"{path}: {length}" for path, length in lengths.items())
            raise UserError(
                f"key space '{space}' cuts leaves of different length, in keys ({shown}). If one key owns several "
                f"entries of a leaf, say how many with keyed(..., block=...)"
            )
        blocks = {(result.roles[path].block, result.roles[path].interleaved) for path in paths}
        if result.columns[space] and (len(blocks) > 1 or any(interleaved for _, interleaved in blocks)):
            raise UserError(
                f"the columns {', '.join(result.columns[space])} name keys of space '{space}' by id, so all its "
                f"leaves must have the same block of neighbours (or none): {', '.join(paths)}"
            )
