"""Runs any command so that it dies with the process that started it, SIGKILL of that one included.

`child_argv` wraps an argv; this file is then executed as a script: it asks the kernel for a signal at
its parent's death, checks that the parent is still the one that asked, and becomes the command (same
pid). It imports nothing but the standard library, so it starts in a few milliseconds anywhere.
Used by `etcd_server.py` and by `wavepp up` for controller and stages.

The kernel means the parent THREAD: start children from a thread that lives as long as they shall
(the main thread, or the event loop's). Systems other than Linux lack the call: there the command
simply runs.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from typing import Final

_PR_SET_PDEATHSIG: Final = 1
EXIT_ORPHANED: Final = 125
EXIT_NOT_RUN: Final = 127


def child_argv(argv: Sequence[str], death_signal: signal.Signals = signal.SIGKILL) -> list[str]:
    """`argv` wrapped so that it gets `death_signal` when THIS process ends; start it from this process."""
    # -I -S: neither the environment nor site-packages can change or slow down the wrapper.
    return [sys.executable, "-I", "-S", os.path.abspath(__file__), str(os.getpid()), str(int(death_signal)), *argv]


def module_argv(module: str, arguments: Sequence[str] = ()) -> list[str]:
    """`python -m module arguments` with this interpreter, to which files in the current folder are no modules."""
    return [sys.executable, "-P", "-m", module, *arguments]


def main(arguments: Sequence[str]) -> int:
    """Become the command. Returns an exit status only if that failed."""
    parent, death_signal, *argv = arguments
    if sys.platform == "linux":
        _die_with_parent(int(death_signal))
        if os.getppid() != int(parent):
            # It died before the kernel knew our wish.
            return EXIT_ORPHANED
    try:
        os.execvp(argv[0], argv)
    except OSError as error:
        sys.stderr.write(f"cannot run {argv[0]}: {error.strerror}\n")
        return EXIT_NOT_RUN


def _die_with_parent(death_signal: int) -> None:
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, death_signal, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
