"""An unseen client with its own file: rebuild the local part, store it, refresh it, use it. All of this is
offline.

FedRecon, section 4.1: "clients can perform reconstruction once and store local parameters for repeated use,
optionally refreshing them periodically"; patent claim 9.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from partwise.algorithms.fed_recon import evaluation_build
from partwise.checkpoint import digest_of, load_arrays, read_header, save_arrays
from partwise.config.judged import AS_KEPT, judged_setting
from partwise.config.settings import Config
from partwise.data.histories import History, next_examples, with_histories
from partwise.data.ids import check_listed
from partwise.data.reading import regular
from partwise.data.repeats import Kept, one_each, tell_repeats
from partwise.data.store import ClientStore
from partwise.device import Device
from partwise.model.softmax import NOTHING
from partwise.randomness import EVALUATION_ROUND, round_rng
from partwise.runs.catalogue import Catalogue
from partwise.runs.client_file import (
    ClientFile,
    Form,
    Source,
    check_from_tables,
    read_client_file,
    readable,
    tell_unknown,
    with_keys_of,
)
from partwise.runs.folder import Folder
from partwise.runs.recommend import Recommended, best, excluded_keys, some_of
from partwise.runs.resolve import settings_of
from partwise.runs.sanity import check_finite, check_fits
from partwise.server.messages import send
from partwise.tasks import Setting, Task
from partwise.types import RunWarning, UserError, unknown

RATING = "rating"  # the column of a task's data that says how an item was rated
TIME = "time"  # the column of a task's data by which events are ordered


class Personal:
    """A trained model on one client. It rebuilds and uses the client's local part offline.

    Make it from a run's folder with `Personal.open(folder)`, or from a finished run with `run.personal`.
    """

    def __init__(self, config: Config, setting: Setting, params: Mapping[str, Any], source: Source):
        setting = judged_setting(setting, config)
        self.setting, self.vocabularies, self.shapes = setting, source.vocabularies, source.shapes
        self.types = source.types
        self.names = {
            name: str(config.data.get(name, name)) for name in setting.columns
        }  # in the user's files
        self.time = str(config.data["time"]) if config.data.get("time") else ""
        self.client_column = str(config.data.get("client", source.client))
        self.dialect = {name: config.data[name] for name in ("delimiter", "encoding") if name in config.data}
        self.params = setting.partition.server_leaves(params)
        check_finite("the model", self.params)
        self.duplicates: Kept | None = config.data.get("duplicates")  # of a task of ratings
        self.latest = bool(config.data.get("seen")) or config.data.get("order") == "time"  # not the last row
        self.rng = round_rng(config.seed, EVALUATION_ROUND)
        build, rates = evaluation_build(setting, config)
        self.device = Device(build(rates))

    @classmethod
    def open(cls, run: str | Path, task: Setting | Task | str | None = None, model: str = "last") -> Personal:
        """Open the model in a run's folder. The training data is not needed.

        Args:
            run: The folder of a run.
            task: What the run was made of, unless it is a named task: the setting or the Task, or the name of a
                function that makes the Task (`module:function`).
            model: "last", or "best", the one that the run kept (`keep.best`).
        """
        folder = Folder(run)
        config, params = folder.config(), folder.model(model)
        setting = settings_of(folder, task)[0]
        check_fits(folder.path, judged_setting(setting, config), params)
        if (folder.path / "summary.json").exists():
            warn_of_kept(folder.summary())
        return cls(config, setting, params, folder.source())

    @cached_property
    def digest(self) -> str:
        """The digest of the model. A local part that was rebuilt for this model contains it."""
        return digest_of(self.params, {})

    def personalize(
        self, examples: ClientStore | ClientFile, local: Mapping[str, Any] | None = None
    ) -> dict[str, np.ndarray]:
        """Rebuild the client's local part from all of these examples.

        Args:
            examples: What `read` returned, or a store with one client and the columns that the model reads.
            local: An earlier local part, to refresh it. Without it, the part starts with initial values.

        Returns:
            The local part, {path: array}.
        """
        examples = self._read_by_model(self._one_each(examples))
        if local is not None:
            self.check_local(local)
        found = self.device.personalize(self._message(examples), examples, local=local)
        check_finite("the local part that was rebuilt", found)
        return found

    def predict(self, local: Mapping[str, Any], examples: ClientStore | ClientFile) -> np.ndarray:
        """The model's outputs.

        Args:
            local: The client's local part, as `personalize` returned it, or what `Run.kept` returned.
            examples: What `read` returned, or a store with one client. Columns that only the loss reads may be
                missing.

        Returns:
            The output of the model's `predict`. The first axis is the example.
        """
        examples = self._read_by_model(examples)
        self.check_local(local, self.setting.partition.of("shared"))
        found = self.device.predict(self._message(examples), local, examples)
        check_finite("what was predicted", {"outputs": found})
        return found

    def recommend(
        self,
        local: Mapping[str, Any],
        k: int = 10,
        exclude: ClientStore | ClientFile | Iterable[Any] | None = None,
        given: ClientStore | ClientFile | None = None,
    ) -> list[Recommended]:
        """The items of the whole catalogue with the highest scores for the client.

        A model of ratings gives the items with the highest expected ratings, and a warning: they are not the items
        that a client is likeliest to take. For these, train the task `events` on the same table.

        Args:
            local: The client's local part, as `personalize` returned it.
            k: How many; fewer if the catalogue has fewer that are not excluded.
            exclude: Items that are not wanted: a client's examples (what `read` returned, or a store), or a list of
                ids as in the training data.
            given: The client's examples, if the model reads more columns than the item's. The last example is used;
                of a model of histories, what comes after all of them.

        Returns:
            The items with the highest scores, as (id, score), the best first. Of equal ones, the first in the
                catalogue comes first.
        """
        if isinstance(k, bool) or not isinstance(k, int | np.integer) or k < 1:
            raise UserError(f"k is {k!r}: give how many items are wanted, 1 or more")
        self.check_local(local)
        if given is None and self.setting.histories:
            raise UserError(
                "this model ranks what comes after a client's events: give them, with --client FILE "
                "(given=me.read(...))"
            )
        catalogue, ids = self._catalogue
        if self.setting.expects:
            warnings.warn(_tell_expects(self.setting.expects), RunWarning, stacklevel=2)
        scores = catalogue.scores(local, None if given is None else self._asked_after(given))
        check_finite("what was predicted", {"scores": scores})
        never = np.flatnonzero(scores <= NOTHING / 2)  # the model's own word that it does not recommend them
        excluded = np.concatenate([excluded_keys(self.setting.ranks, ids, exclude), never])
        places = best(scores, int(k), excluded)
        pairs = zip(ids[places].tolist(), scores[places].tolist(), strict=True)
        return [Recommended(name, score) for name, score in pairs]

    def module(self, local: str | Path | Mapping[str, Any] | None = None) -> Any:
        """The model as a module of the framework that it was written in: a Keras model, an NNX module or a PyTorch
        module, with the trained values and the client's local part.

        Args:
            local: The local part, or the file that has it. A model without local parameters needs none.
        """
        make, partition = self.setting.model.module, self.setting.partition
        if make is None:
            raise UserError(
                "this model is plain functions of arrays, and no module of Keras, NNX or PyTorch: its parameters "
                "are setting.partition.merge(params, local), as its `predict` takes them"
            )
        sent = {path: partition.roles[path].psi.received(self.params[path]) for path in partition.of("keyed")}
        return make(partition.merge({**self.params, **sent}, self.find_local(local)))

    @property
    def ranked_column(self) -> str:
        """The column whose ids are recommended. Raises `UserError` if there is none."""
        column = self.setting.ranks
        if not column:
            raise UserError(
                "this model does not say what it ranks, so it recommends nothing: name the column of items in its "
                "setting, as in Setting(model, roles, columns, ranks='item'), and open the run with that setting "
                "(Personal.open(folder, setting)); nothing need be trained again"
            )
        if column not in self.setting.columns:
            raise unknown("column that the setting ranks", column, self.setting.columns)
        return column

    @cached_property
    def _catalogue(self) -> tuple[Catalogue, np.ndarray]:
        """What is ranked, and its source ids."""
        column, partition = self.ranked_column, self.setting.partition
        spaces = [space for space, names in partition.columns.items() if column in names]
        keys = [np.arange(partition.num_keys(space) * partition.block(space)) for space in spaces]
        ids = next(iter((*(v for name, v in self.vocabularies.items() if name == column), *keys)), None)
        if ids is None or self.shapes.get(column):
            raise UserError(
                f"the column '{column}', which the setting ranks, has no single ids: name it in ids=[...] where "
                f"the data is read"
            )
        return Catalogue(self.device.algorithm, self.params, column, len(ids), self.rng), ids

    def _read_by_model(self, examples: ClientStore | ClientFile) -> ClientStore:
        """Only the columns of the setting. Other columns, such as times, may hold values that a model cannot
        read."""
        there = self._in_keys(examples)
        histories = self._histories_of(there)
        return with_histories(there, histories) if histories else there

    def _one_each(self, given: ClientStore | ClientFile) -> ClientStore | ClientFile:
        """The examples as a training would have them: with one rating for each item, the latest if it was so."""
        examples, item = given.examples if isinstance(given, ClientFile) else given, self.setting.ranks
        if self.duplicates is None or not {RATING, item} <= set(getattr(examples, "columns", ())):
            return given
        by = TIME if self.latest and TIME in examples.columns else None
        found = one_each(examples, item, RATING, self.duplicates, by)
        if found.repeats:
            warnings.warn(tell_repeats(found, self.duplicates), RunWarning, stacklevel=3)
        return found.store

    def _asked_after(self, given: ClientStore | ClientFile) -> ClientStore:
        """The example for which items are ranked: what comes after all that are given, if the model reads histories
        and the events are there; otherwise the last that is given."""
        there = self._in_keys(given)
        histories = self._histories_of(there)
        return next_examples(there, histories) if histories else there

    def _in_keys(self, examples: ClientStore | ClientFile) -> ClientStore:
        """The examples' columns of the setting, with the model's keys also where a store has keys of its own."""
        examples = examples.examples if isinstance(examples, ClientFile) else examples
        if not isinstance(examples, ClientStore):
            raise UserError(
                f"the examples are a {type(examples).__name__}: give what `read` of the model returned for the "
                f"client's file, or a store with one client"
            )
        there = examples.select([name for name in self.setting.columns if name in examples.columns])
        found, lost = with_keys_of(self.vocabularies, there)
        for name, ids in lost.items():
            raise UserError(
                f"the examples name {name} {some_of(ids)}, which the model does not know: leave these rows out, or "
                f"read the client's file with `read` of the model, which does so"
            )
        return found

    def _histories_of(self, examples: ClientStore) -> dict[str, History]:
        """The histories that can be made of these examples."""
        known = self.setting.histories.items()
        return {name: history for name, history in known if history.of in examples.columns}

    @property
    def table_columns(self) -> tuple[str, ...]:
        """The model's columns that a client's table has: not the histories, which are made of others."""
        return tuple(name for name in self.setting.columns if name not in self.setting.histories)

    def check_local(self, local: Mapping[str, Any], more: Sequence[str] = ()) -> None:
        """Raise `UserError` if the local part does not have the paths and shapes of the model's. It may also have
        the leaves `more`."""
        if not isinstance(local, Mapping):
            raise UserError(
                f"the local part is a {type(local).__name__}: give what `personalize` returned, or load_local(FILE)"
            )
        partition = self.setting.partition
        paths = [*partition.local_paths, *(path for path in local if path in more)]
        wanted = {path: tuple(partition.shapes[path].shape) for path in paths}
        found = {path: np.shape(leaf) for path, leaf in local.items()}
        if found != wanted:
            raise UserError(
                f"this local part has {_shapes(found)}, and the model needs {_shapes(wanted)}: it was rebuilt for "
                f"another model. Rebuild it for this one (`partwise personalize`)"
            )

    def find_local(self, local: str | Path | Mapping[str, Any] | None) -> Mapping[str, Any]:
        """The local part: what `personalize` returned, or the file that has it, if it belongs to this model. None
        is enough for a model without a local part."""
        paths = self.setting.partition.local_paths
        if local is None and paths:
            raise UserError(
                f"this model has a local part ({', '.join(paths)}), without which it predicts nothing: rebuild the "
                f"client's with `partwise personalize`, and give the file with --local (local=...)"
            )
        found = local if isinstance(local, Mapping) else load_local(local) if local is not None else {}
        self.check_local(found)
        return found if local is None or isinstance(local, Mapping) else load_local(local, self.digest)

    def _message(self, examples: ClientStore) -> bytes:
        """The message that a client would be sent, made from the model at hand."""
        partition = self.setting.partition
        return send(partition, self.params, self.device.ask_whole(examples).keys, self.rng)

    def columns_in(self, path: str | Path, but: str = "") -> tuple[str, ...]:
        """The model's columns that a file has: the key columns, which it must have (`but` need not be there), and
        other columns that can be read."""
        made_of = {each.of for each in self.setting.histories.values()}
        but = "" if but in made_of else but
        must = [name for name in self.table_columns if name in self.vocabularies and name != but]
        others = [name for name in self.table_columns if name not in must]
        there = readable(
            path, [self.names[name] for name in others], self.dialect, [self.names.get(but, but)]
        )
        return tuple(n for n in self.table_columns if n in must or self.names[n] in there)

    def read(self, path: str | Path, columns: Sequence[str], client_id: str | None = None) -> ClientFile:
        """Read one client's table (CSV, Parquet, Arrow), with the ids of the source of the training data.

        Args:
            path: The file.
            columns: The columns to read, by their names in the model: ("item", "rating"). Rows of a model of
                histories must be in the order of time, unless the training data had a column of times that the
                file has too.
            client_id: Which client's rows to take, if the table has several clients.

        Returns:
            A `ClientFile`: `examples` (a store with one client), `rows` (their numbers in the file) and
                `unknown` (how many rows were left out because the model does not know an id in them, which is
                also a warning). Lists of ids have the same length as in training: only the last ids are kept.
        """
        check_listed("columns", columns)
        for name in columns:
            if name not in self.names:
                raise unknown("column of the model", name, self.names)
        check_from_tables(self.vocabularies, [name for name in columns if name in self.vocabularies])
        form = Form(
            {name: self.names[name] for name in columns},
            self.vocabularies,
            self.shapes,
            None if self.client_column in self.names.values() else self.client_column,
            self.dialect,
        )
        file = self._in_time(read_client_file(path, self._with_time(path, form), client_id))
        for name, count in file.unknown.items():
            if count:
                told = f"{tell_unknown(path, name, count)} (in Python, `rows` of what was read says which are used)"
                warnings.warn(told, RunWarning, stacklevel=2)
        return file

    def _with_time(self, path: str | Path, form: Form) -> Form:
        """The form with the column of times, if events are ordered by it, or the latest of several ratings is used,
        and the file has it. A time that cannot be read is then an error: the order that it was to give would
        be another."""
        used = self.setting.histories or (self.duplicates and self.latest)
        times = [self.time] if used and self.time else []
        if not readable(path, times, self.dialect, ids=times):
            return form
        return form._replace(names={**form.names, TIME: self.time})

    def _in_time(self, file: ClientFile) -> ClientFile:
        """The rows in the order of time, if it was read."""
        if TIME not in file.examples.columns or not self.setting.histories:
            return file
        order = np.argsort(file.examples.columns[TIME], kind="stable")
        kept = [name for name in file.examples.columns if name != TIME]
        return file._replace(examples=file.examples.reorder(by=TIME).select(kept), rows=file.rows[order])


def warn_of_kept(summary: Mapping[str, Any]) -> None:
    """Warn if the run's clients were evaluated with what they kept, which nobody else has."""
    if summary["test"].get("judged", {}).get("local") == AS_KEPT:
        warnings.warn(
            f"{summary['algorithm']} evaluated clients with the parameters that they had kept. `personalize` "
            f"rebuilds a local part with reconstruct.*, as a client without any does, and that was not evaluated. "
            f"What a training client kept: partwise.load(RUN).kept(CLIENT)",
            RunWarning,
            stacklevel=3,
        )


def _tell_expects(what: str) -> str:
    return (
        f"these items have the highest expected {what}s. They are not those that a client is likeliest to take: "
        f"what is most popular is taken more often. To rank by that, train the task 'events' on the same table "
        f"(docs/recommending.md)"
    )


def _shapes(shapes: Mapping[str, tuple[int, ...]]) -> str:
    return ", ".join(f"{path} {shape}" for path, shape in shapes.items()) or "nothing"


def save_local(path: str | Path, local: Mapping[str, Any], model: str) -> None:
    """Store a local part. It belongs to the client and should stay there. Only the owner of the file may read
    it.

    Args:
        path: The file to write. An existing file that is not a local part is not overwritten.
        local: The local part, as `Personal.personalize` returned it.
        model: The digest of the model for which it was rebuilt: `Personal.digest`.
    """
    if Path(path).exists() and Path(path).stat().st_size and not _is_local(path):
        raise UserError(
            f"'{path}' is there, and is not a local part: choose another name with --out (out=...)"
        )
    save_arrays(Path(path), local, {"model": model, "kind": "local"}, mode=0o600)


def load_local(path: str | Path, model: str | None = None) -> dict[str, np.ndarray]:
    """Load a local part that `save_local` stored, {path: array}.

    Args:
        path: The file.
        model: The digest of the model (`Personal.digest`) for which it must have been rebuilt; None accepts
            any.
    """
    if not _is_local(regular(path, "give the file that `partwise personalize` wrote")):
        raise UserError(f"'{path}' is not a local part, or is damaged: `partwise personalize` writes one")
    arrays, header = load_arrays(Path(path))
    if model is not None and header.get("model") != model:
        raise UserError(
            f"the local part in '{path}' was rebuilt for another model, and means nothing to this one: rebuild it "
            f"with `partwise personalize` (--local {path} goes on from it)"
        )
    return arrays


def _is_local(path: str | Path) -> bool:
    try:
        return read_header(Path(path)).get("kind") == "local"
    except UserError:
        return False
