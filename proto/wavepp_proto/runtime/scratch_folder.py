"""A temporary folder that outlives nobody: removed on close, or by the next one after a SIGKILL.

The owner holds a lock on a file inside; the kernel drops it at the owner's death, whatever the
cause. Whoever makes a folder first removes those of the same kind whose lock is free.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path
from typing import Final

from wavepp_proto.errors import InvalidRequest

_LOCK: Final = "owner.lock"


class ScratchFolder:
    """`path` is a new, private folder named `{kind}-*` under `base` (the system's temporary folder).

    Raises InvalidRequest if none can be made there."""

    def __init__(self, kind: str, base: Path | None = None) -> None:
        try:
            base = base or Path(tempfile.gettempdir())
            remove_abandoned(kind, base)
            self.path = Path(tempfile.mkdtemp(prefix=f"{kind}-", dir=base))
        except OSError as error:
            message = f"no folder for temporary files, which {kind} needs: {error.strerror}; set TMPDIR to one"
            raise InvalidRequest(message, field="TMPDIR", value=str(base or os.environ.get("TMPDIR", ""))) from error
        # Locked before it has its name: nobody ever sees an unlocked file of a living owner.
        unnamed = self.path / f"{_LOCK}.new"
        self._descriptor = os.open(unnamed, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        unnamed.rename(self.path / _LOCK)

    def close(self) -> None:
        """Remove the folder and all in it. Idempotent."""
        if self._descriptor >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._descriptor)
            self._descriptor = -1


def remove_abandoned(kind: str, base: Path) -> list[Path]:
    """Remove the folders of `kind` under `base` that are ours and whose owner is dead; returns them."""
    removed = []
    for lock in base.glob(f"{kind}-*/{_LOCK}"):
        with contextlib.suppress(OSError):
            if lock.stat().st_uid != os.getuid():
                continue
            descriptor = os.open(lock, os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(lock.parent, ignore_errors=True)
                removed.append(lock.parent)
            finally:
                os.close(descriptor)
    return removed
