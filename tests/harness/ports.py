"""Ports that tests name ahead of their use.

Owns the choice only. A port that the kernel gave to bind(0) may be given to anybody else once it is closed again:
these lie below the range that it gives from, each test process begins at a place of its own, and none comes twice.
"""

from __future__ import annotations

import itertools
import os
import socket

FIRST, LAST = 10_000, 30_000
"""Below every usual `ip_local_port_range`."""
_offsets = itertools.count(os.getpid() * 97)


def free_port() -> int:
    """A port on loopback that nobody listens on."""
    while True:
        port = FIRST + next(_offsets) % (LAST - FIRST)
        try:
            socket.create_server(("127.0.0.1", port)).close()
        except OSError:
            continue
        return port
