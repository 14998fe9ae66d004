"""What a link says to the executor, bound to the formation that the link was made for.

Owns that binding, so that a late callback of an abandoned link changes nothing, and the header that both
ends of a link must agree on. Called by the executor and by the link's own thread.
"""

from __future__ import annotations

from typing import Protocol

from wavepp_proto.errors import LinkFault
from wavepp_stage.core.work import WaveWork
from wavepp_stage.engine.base import Payload, WaveHeader


class Receiver(Protocol):
    """The executor, as far as a link knows it."""

    def arrive(self, formation: int, header: WaveHeader, payload: Payload) -> None: ...

    def lose_link(self, formation: int, reason: str | LinkFault) -> None: ...


class FormationListener:
    """A LinkListener of one formation."""

    def __init__(self, receiver: Receiver, formation: int) -> None:
        self._receiver = receiver
        self._formation = formation

    def on_activation(self, header: WaveHeader, payload: Payload) -> None:
        self._receiver.arrive(self._formation, header, payload)

    def on_link_lost(self, reason: str | LinkFault) -> None:
        self._receiver.lose_link(self._formation, reason)


def wave_header(work: WaveWork, void: int, hidden: int) -> WaveHeader:
    # payload_bytes is the link's to fill in: it knows how the payload travels
    return WaveHeader(work.formation, work.ordinal, work.chunks, work.tokens, hidden, 0, void)


def check_header(header: WaveHeader, work: WaveWork, stage: int) -> None:
    """Raise LinkFault unless the payload belongs to this wave of `stage`, with these rows."""
    header.check(stage, formation=work.formation, ordinal=work.ordinal, chunks=work.chunks, tokens=work.tokens)
