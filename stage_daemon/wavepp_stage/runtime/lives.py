"""Numbers that name lives: of a daemon (its incarnation), and of an engine that is loaded together with others.

Owns how they are drawn. A later one of the same daemon is larger: controllers take the largest for the living one.
"""

from __future__ import annotations

import secrets

from wavepp_proto.terms import Incarnation


def new_incarnation(after: int | None = None) -> Incarnation:
    """Of a process, or the next one of the same: random, and larger than the one before."""
    return Incarnation(secrets.randbits(62) | 1 if after is None else after + 1 + secrets.randbits(32))


def new_life() -> int:
    """Of an engine; never 0, which says that it loads alone."""
    return secrets.randbits(62) | 1
