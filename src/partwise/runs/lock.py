"""One writer at a time for a folder. The kernel releases the lock when its holder ends, for whatever reason.

This module imports nothing large, so that the command line can refuse a second writer before JAX starts.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import socket
import stat
import warnings
from collections.abc import Iterator
from pathlib import Path

from partwise.types import RunWarning, UserError

FILE = ".partwise.lock"
ATTEMPTS = 100  # tries for a lock that others take and release at the same time
UNSUPPORTED = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL)  # some network file systems


class HeldError(UserError):
    """Another process is writing to a folder."""


def check_place(path: str | Path) -> Path:
    """Return the path. Raises `UserError` if there is no folder and there cannot be one."""
    if not str(path):
        raise UserError("the folder's name is empty: say where it is, as in --out runs/mine (out=...)")
    try:
        found = Path(path).stat()
    except (FileNotFoundError, NotADirectoryError):
        return Path(path)
    except (OSError, ValueError) as error:  # a name that is too long, or has a null character
        raise cannot(path, getattr(error, "strerror", None) or str(error)) from None
    if not stat.S_ISDIR(found.st_mode):
        raise cannot(path, "it is there, and is not a folder")
    return Path(path)


def cannot(path: str | Path, reason: str) -> UserError:
    """Return the error for a path that cannot be a run's folder."""
    name = str(path) if len(str(path)) <= 200 else f"{str(path)[:80]}... ({len(str(path))} characters)"
    return UserError(f"could not use '{name}' as a folder: {reason}. Choose another with --out (out=...)")


def refuse_if_held(path: str | Path) -> None:
    """Raise `HeldError` if another process is writing to this folder now. Creates no files."""
    file = check_place(path) / FILE
    with contextlib.suppress(OSError):
        handle = os.open(file, os.O_RDWR | os.O_CLOEXEC)
        try:
            _take(handle, Path(path))
        finally:
            os.close(handle)


def has_writer(path: str | Path) -> bool:
    """Whether a process seems to be writing to this folder, by what its lock file says. The lock is not touched, so
    that a run that begins just now is not refused."""
    try:
        who = json.loads((Path(path) / FILE).read_bytes())
        if who["host"] != socket.gethostname():
            return True
        os.kill(int(who["pid"]), 0)
    except PermissionError:
        return True
    except (OSError, ValueError, LookupError, TypeError):
        return False
    return True


@contextlib.contextmanager
def held(path: str | Path) -> Iterator[None]:
    """Hold the folder for this writer alone. It is created if needed, and removed again if it stays empty."""
    path = check_place(path)
    missing = [each for each in (path, *path.parents) if not each.exists()]
    handle = _open(path)
    try:
        os.truncate(handle, 0)
        os.pwrite(handle, json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode(), 0)
        yield
    finally:
        with contextlib.suppress(OSError):
            (path / FILE).unlink()
        os.close(handle)
        with contextlib.suppress(OSError):  # folders that are not empty stay
            for folder in missing:
                folder.rmdir()


def _open(path: Path) -> int:
    """Open and lock the lock file, and make sure that it is still the file in the folder."""
    for _ in range(ATTEMPTS):
        with contextlib.suppress(FileNotFoundError):  # its last holder has just removed it
            handle = _created(path)
            try:
                _take(handle, path)
                if os.path.samestat(os.fstat(handle), os.stat(path / FILE)):
                    return handle
            except BaseException:
                os.close(handle)
                raise
            os.close(handle)
    raise cannot(path, "it cannot be made, or is removed again at once")


def _created(path: Path) -> int:
    try:
        path.mkdir(parents=True, exist_ok=True)
        return os.open(path / FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as error:
        if isinstance(error, FileNotFoundError) and path.parent.exists():
            raise
        raise cannot(path, error.strerror or str(error)) from None


def _take(handle: int, path: Path) -> None:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise HeldError(
            f"another run is writing to '{path}' ({_holder(handle)}): wait until it ends, stop it, or choose "
            f"another folder with --out (out=...)"
        ) from None
    except OSError as error:
        if error.errno not in UNSUPPORTED:
            raise
        warnings.warn(
            f"'{path}' is on a file system without locks ({error.strerror}): see to it that no second run "
            f"writes there",
            RunWarning,
            stacklevel=2,
        )


def _holder(handle: int) -> str:
    try:
        who = json.loads(os.pread(handle, 1000, 0))
        return f"process {who['pid']} on {who['host']}"
    except (OSError, ValueError, LookupError, TypeError):
        return "a process that has just begun"
