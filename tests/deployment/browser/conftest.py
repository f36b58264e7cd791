"""The Chromium of the system (tests/chromium.py)."""

from __future__ import annotations

import importlib.util
from pathlib import Path

_spec = importlib.util.spec_from_file_location("chromium_of_tests", Path(__file__).parents[2] / "chromium.py")
_module = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_module)
chromium = _module.chromium
