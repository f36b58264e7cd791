"""Whose code a recorded run may run.

A run of a task of the user's own (`module:function`) records that name. Whoever opens the run later runs that code.
So the name is believed only in runs that this user made on this machine. Their folders carry a signature, made with
a key that lies in the user's own files and nowhere else. For any other folder the user must name the code.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from partwise.types import UserError

KEY_BYTES = 32
SIGNED = "signed"  # in start.json
SETTINGS = "settings"  # in start.json: the digest of settings and data, if the run has another name


def settings_digest(begun: Mapping[str, Any]) -> str:
    """The digest of a run's settings and data, of which start.json says `begun`."""
    return str(begun.get(SETTINGS, begun.get("run")))


def sign(run: str) -> str:
    """The signature of a run's digest by this user; empty if no key can be kept here."""
    key = _key(make=True)
    return _signature(key, run) if key else ""


def check_own(path: Path, task: str, begun: Mapping[str, Any]) -> None:
    """Raise `UserError` unless this user made the run in a folder, whose start.json says `begun`."""
    key, found = _key(make=False), str(begun.get(SIGNED, ""))
    if not key or not hmac.compare_digest(_signature(key, settings_digest(begun)), found):
        raise UserError(
            f"the run in '{path}' is of '{task}', which is code, and the run was not made by you on this machine. "
            f"Opening it would run that code. If you trust the code that this name finds here, name it yourself: "
            f"--task {task} (in Python, task={task!r})"
        )


def _signature(key: bytes, run: str) -> str:
    return hmac.new(key, run.encode(), hashlib.sha256).hexdigest()


def _key(make: bool) -> bytes:
    """The user's key; empty if there is none."""
    home = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    path = Path(home) / "partwise" / "run-key"
    try:
        if make and not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(path, "xb", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
                file.write(secrets.token_bytes(KEY_BYTES))
    except OSError:  # another process was first, or nothing can be written here
        pass
    try:
        found = path.read_bytes()
    except OSError:
        return b""
    return found if len(found) == KEY_BYTES else b""
