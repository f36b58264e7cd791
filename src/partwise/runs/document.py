"""Values in the form that JSON can express."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np


def to_json(value: Any) -> bytes:
    """A JSON document."""
    return (json.dumps(to_plain(value), indent=1) + "\n").encode()


def to_plain(value: Any) -> Any:
    """A value for JSON. JSON has no NaN, so numbers that are not finite become null."""
    if isinstance(value, Mapping):
        return {name: to_plain(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain(inner) for inner in value]
    if isinstance(value, float | np.floating):
        return float(value) if np.isfinite(value) else None
    return value.item() if isinstance(value, np.generic) else value
