"""Files that a device keeps on its disk, by content: what did not change between rounds is not fetched again.

Which pages a device has tells what its keys are, so only its own user may read the folder. Several processes may
use one folder.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path

from partwise.deployment.files import NAME, fits, remove_abandoned

logger = logging.getLogger("partwise")


class FileCache:
    """A bounded folder of files. What was not used for longest goes first.

    A cache that cannot be written (a full disk) is no error: the device goes on without it, and says so once.

    Args:
        folder: Where the files are; it is made if need be.
        most: Bytes that the files may have together.
    """

    def __init__(self, folder: str | Path, most: int = 256 << 20):
        self.folder, self.most = Path(folder), most
        remove_abandoned(self.folder)
        self._works = True

    def get_many(self, names: Iterable[str]) -> dict[str, bytes]:
        """Those of these files that are here and sound. A damaged one is removed."""
        found = {}
        for name in names:
            path = self.folder / name
            try:
                data = path.read_bytes()
                if fits(name, data):
                    found[name] = data
                    os.utime(path)
                else:
                    path.unlink()
                    logger.warning("the cached file '%s' was damaged; it is fetched anew", path)
            except OSError:  # not here, or another process removed it just now
                continue
        return found

    def put_many(self, files: Mapping[str, bytes]) -> None:
        """Keep files, and drop others if there are too many bytes now."""
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            for name, data in files.items():
                if len(data) <= self.most:
                    self._put(name, data)
            self._trim()
        except OSError as error:
            if self._works:
                logger.warning(
                    "the cache '%s' cannot be written (%s): going on without it", self.folder, error
                )
            self._works = False
        else:
            self._works = True

    def _put(self, name: str, data: bytes) -> None:
        """Complete or not at all. It need not survive a loss of power: what is read is checked."""
        beside = self.folder / f".{name}.{os.getpid()}.{threading.get_ident()}.tmp"
        try:
            handle = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with open(handle, "wb") as file:
                file.write(data)
            os.replace(beside, self.folder / name)
        except OSError:
            with contextlib.suppress(OSError):
                beside.unlink()
            raise

    def _trim(self) -> None:
        """Remove the files that were not used for longest, until the others fit."""
        kept = []
        with os.scandir(self.folder) as entries:
            for entry in entries:
                with contextlib.suppress(OSError):
                    if NAME.fullmatch(entry.name):
                        about = entry.stat()
                        kept.append((about.st_mtime_ns, about.st_size, entry.path))
        total = sum(size for _, size, _ in kept)
        for _, size, path in sorted(kept):
            if total <= self.most:
                return
            with contextlib.suppress(OSError):
                os.unlink(path)
            total -= size
