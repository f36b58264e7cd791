"""What a result may depend on besides its settings: versions of Python and of the packages below."""

from __future__ import annotations

import platform
from importlib import metadata

from partwise import __version__

PACKAGES = ("jax", "jaxlib", "optax", "numpy", "pyarrow", "safetensors")


def versions() -> dict[str, str]:
    """{name: version}. A package that runs from its source is not installed; its version is "unknown"."""
    found = {"python": platform.python_version(), "partwise": __version__}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "unknown"
    return found
