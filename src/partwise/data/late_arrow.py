"""pyarrow, imported when something of it is first used.

It takes 36 MB and a tenth of a second, and whoever reads no table needs none of it: a server, a model that is
served.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.compute as compute
    import pyarrow.csv as csv
    import pyarrow.ipc as ipc
    import pyarrow.parquet as parquet
    import pyarrow.types as kinds
else:

    class _Later:
        """A module that is not imported yet."""

        def __init__(self, name: str):
            self._name = name

        def __getattr__(self, attribute: str) -> Any:
            return getattr(importlib.import_module(self._name), attribute)

    names = ("compute", "csv", "ipc", "parquet", "types")
    compute, csv, ipc, parquet, kinds = (_Later(f"pyarrow.{name}") for name in names)
    pa = _Later("pyarrow")

__all__ = ["compute", "csv", "ipc", "kinds", "pa", "parquet"]
