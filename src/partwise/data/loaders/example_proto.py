"""`tf.train.Example` read with protobuf alone.

Example {Features features = 1}      Features {map<string, Feature> feature = 1}
Feature {oneof: BytesList bytes_list = 1, FloatList float_list = 2, Int64List int64_list = 3}
each list {repeated value = 1}
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from partwise.types import UserError, unknown

KINDS = {"bytes_list": "BytesList", "float_list": "FloatList", "int64_list": "Int64List"}
TYPES = {"float_list": np.float32, "int64_list": np.int64}


def import_tff(module: str) -> Any:
    """Import a module of the extra `tff`."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UserError(
            f"files of TensorFlow Federated need {module.partition('.')[0].replace('google', 'protobuf')} "
            f"({error}): pip install partwise[tff]"
        ) from error


class Decoder:
    """Reads serialised examples into columns."""

    def __init__(self):
        self._example = example_class()
        self._error = import_tff("google.protobuf.message").DecodeError

    def decode(self, blobs: Sequence[bytes], names: Sequence[str] | None, where: str) -> dict[str, Any]:
        """One client's columns, {feature: one entry per blob}; `where` is for messages."""
        messages = [self._parse(blob, f"{where}, example {k}") for k, blob in enumerate(blobs)]
        if names is None:
            names = sorted(messages[0]) if messages else []
        return {name: _column(messages, name, where) for name in names}

    def _parse(self, blob: Any, where: str) -> Any:
        """The map from names to features."""
        try:
            return self._example.FromString(blob).features.feature
        except (self._error, TypeError) as error:
            raise UserError(
                f"{where}: not a tf.train.Example ({error}); the file is damaged, download it again"
            ) from error


def _values(features: Any, name: str, where: str, index: int) -> tuple[str | None, Any]:
    """The kind of list and its values. (Looking up a missing name in a protobuf map would add it.)"""
    if name not in features:
        raise UserError(f"{where}, example {index}: {unknown('feature', name, features)}")
    feature = features[name]
    kind = feature.WhichOneof("kind")
    return kind, getattr(feature, kind).value if kind else ()


def _column(messages: Sequence[Any], name: str, where: str) -> list | np.ndarray:
    found = [_values(features, name, where, k) for k, features in enumerate(messages)]
    kinds, lists = {kind for kind, _ in found if kind}, [entries for _, entries in found]
    if len(kinds) > 1:
        raise UserError(f"{where}: feature '{name}' is of several types, {', '.join(sorted(kinds))}")
    widths = {len(entries) for entries in lists}
    dtype = TYPES.get(*kinds) if kinds else None
    if dtype is None:
        return [entries[0] if widths == {1} else list(entries) for entries in lists]
    arrays = [np.array(entries, dtype) for entries in lists]
    if len(widths) > 1:
        return arrays
    return np.concatenate(arrays) if widths == {1} else np.stack(arrays)


@functools.cache
def example_class() -> Any:
    """The message class. Its descriptor is in a separate pool, so that it does not conflict with
    TensorFlow's."""
    descriptors = import_tff("google.protobuf.descriptor_pb2")
    pool = import_tff("google.protobuf.descriptor_pool").DescriptorPool()
    pool.Add(_describe(descriptors))
    factory = import_tff("google.protobuf.message_factory")
    return factory.GetMessageClass(pool.FindMessageTypeByName("tensorflow.Example"))


def _describe(descriptors: Any) -> Any:
    kind = descriptors.FieldDescriptorProto
    file = descriptors.FileDescriptorProto(name="example.proto", package="tensorflow", syntax="proto3")

    def add(message: Any, name: str, number: int, type_: int, refers: str | None = None, **more: Any) -> None:
        label = more.pop("label", kind.LABEL_OPTIONAL)
        type_name = f".tensorflow.{refers}" if refers else None
        message.field.add(name=name, number=number, type=type_, type_name=type_name, label=label, **more)

    value_types = (kind.TYPE_BYTES, kind.TYPE_FLOAT, kind.TYPE_INT64)
    for name, type_ in zip(KINDS.values(), value_types, strict=True):
        add(file.message_type.add(name=name), "value", 1, type_, label=kind.LABEL_REPEATED)
    feature = file.message_type.add(name="Feature")
    feature.oneof_decl.add(name="kind")
    for number, (name, refers) in enumerate(KINDS.items(), start=1):
        add(feature, name, number, kind.TYPE_MESSAGE, refers, oneof_index=0)
    features = file.message_type.add(name="Features")
    entry = features.nested_type.add(name="FeatureEntry")
    entry.options.map_entry = True
    add(entry, "key", 1, kind.TYPE_STRING)
    add(entry, "value", 2, kind.TYPE_MESSAGE, "Feature")
    of_entries = {"refers": "Features.FeatureEntry", "label": kind.LABEL_REPEATED}
    add(features, "feature", 1, kind.TYPE_MESSAGE, **of_entries)
    add(file.message_type.add(name="Example"), "features", 1, kind.TYPE_MESSAGE, "Features")
    return file
