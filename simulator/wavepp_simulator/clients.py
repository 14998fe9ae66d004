"""Clients of the simulated cluster: what they asked, what they were told, and that it ended once (I4).

Owns one `Asked` per submitted life of a request id, its prompt and its events in order, and the streams
to the controller. The right first token is computed here from the prompt alone, by the unsplit oracle.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from wavepp_controller.core import events as ev
from wavepp_proto.errors import ControllerUnavailable, DuplicateRequest
from wavepp_proto.terms import Admitted, Failed, Finished, PrefillEvent, PrefillRequest, RequestId
from wavepp_simulator.engine import VOCABULARY
from wavepp_simulator.ledger import Violation
from wavepp_simulator.network import Wire
from wavepp_simulator.process import Process
from wavepp_stage.engine.emulated_model import expected_first_token

if TYPE_CHECKING:
    from wavepp_simulator.controller import SimController
    from wavepp_simulator.world import World


def prompt(text: str, length: int) -> bytes:
    """Packed tokens of a prompt described as `a*64+b`: 64 tokens of stream a, then stream b to the end.

    Streams of one name are equal everywhere, so equal descriptions share their prefixes. ValueError if
    the description is longer than `length` or names no stream.
    """
    parts: list[bytes] = []
    left = length
    for piece in text.split("+"):
        name, times, count = piece.partition("*")
        tokens = int(count) if times else left
        if not name or tokens > left:
            raise ValueError(f"{text!r} does not describe {length} tokens")
        seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")
        parts.append(np.random.default_rng(seed).integers(0, VOCABULARY, tokens).astype("<i4").tobytes())
        left -= tokens
    if left:
        raise ValueError(f"{text!r} describes {length - left} of {length} tokens")
    return b"".join(parts)


@dataclass(slots=True, eq=False)
class Asked:
    """One submission."""

    request: PrefillRequest
    at: float
    controller: SimController
    """Where it was sent to."""
    wire: Wire
    """Its events travel on."""
    events: list[tuple[float, PrefillEvent]] = field(default_factory=list)

    @property
    def outcome(self) -> Finished | Failed | None:
        last = self.events[-1][1] if self.events else None
        return last if isinstance(last, Finished | Failed) else None

    @property
    def duplicate(self) -> bool:
        """Refused, because the id was alive."""
        outcome = self.outcome
        return isinstance(outcome, Failed) and outcome.error.reason == DuplicateRequest.reason

    @property
    def ended_at(self) -> float | None:
        return self.events[-1][0] if self.outcome is not None else None

    def hear(self, at: float, event: PrefillEvent) -> None:
        """Violation if anything follows the outcome, or the answer is wrong."""
        if self.outcome is not None:
            raise Violation("I4", f"{event.request_id} was told {event} after {self.outcome}")
        self.events.append((at, event))
        if isinstance(event, Finished):
            self._check(event)

    def _check(self, event: Finished) -> None:
        tokens = np.frombuffer(self.request.token_ids, dtype="<i4")
        right = expected_first_token(tokens, VOCABULARY)
        if event.first_token != right:
            raise Violation("exactness", f"{event.request_id}: first token {event.first_token}, not {right}")
        admitted = [told for _, told in self.events if isinstance(told, Admitted)]
        if not admitted or admitted[-1].endpoint != event.cached_tokens:
            raise Violation("I4", f"{event.request_id} finished with {event.cached_tokens} cached tokens: {admitted}")


class Clients:
    """Everybody who asks; one process that never fails. Each submission is a stream of its own."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._process = Process("client", world.agenda)
        self.every: list[Asked] = []
        """In order of submission."""
        self.last_told = 0.0
        """When anybody was told anything, or asked (s)."""

    @property
    def waiting(self) -> list[Asked]:
        return [asked for asked in self.every if asked.outcome is None]

    def of(self, request_id: RequestId) -> Asked:
        """The latest submission of the id that was not refused as a duplicate. KeyError if there is none."""
        for asked in reversed(self.every):
            if asked.request.request_id == request_id and not asked.duplicate:
                return asked
        raise KeyError(request_id)

    def submit(self, request: PrefillRequest) -> None:
        world, now = self._world, self._world.agenda.now
        wire = Wire(world.network, f"c>client/{request.request_id}", self._process)
        asked = Asked(request, now, world.controller, wire)
        self.every.append(asked)
        self.last_told = now
        world.note("client", f"submits {request.request_id}, {request.prompt_tokens} tokens", "client")
        self._tell(asked.controller, lambda: asked.controller.submit(asked), asked)

    def cancel(self, request_id: RequestId) -> None:
        controller = self._world.controller
        self._world.note("client", f"cancels {request_id}", "client")
        self._tell(controller, lambda: controller.post(ev.Cancel(request_id, controller.now)), None)

    def hear(self, asked: Asked, event: PrefillEvent) -> None:
        """A controller tells a client, in order, as its stream does."""
        shown = isinstance(event, Admitted | Finished | Failed)

        def arrive() -> None:
            now = self.last_told = self._world.agenda.now
            self._world.story.note(now, "client", "client" if shown else "progress", event)
            asked.hear(now, event)

        asked.wire.send(arrive)

    def lost_controller(self, controller: SimController) -> None:
        """Its process died: whoever waits for it finds its stream broken."""
        for asked in self.waiting:
            if asked.controller is controller:
                self._break(asked)

    def _break(self, asked: Asked) -> None:
        error = ControllerUnavailable("the connection to the controller broke").info()

        def arrive() -> None:
            if asked.outcome is None:
                event = Failed(asked.request.request_id, error)
                asked.events.append((self._world.agenda.now, event))
                self._world.story.note(self._world.agenda.now, "client", "client", event)

        asked.wire.send(arrive)

    def _tell(self, controller: SimController, say: Callable[[], None], asked: Asked | None) -> None:
        """To the controller that was there; if it died meanwhile, a submission's stream breaks."""
        world = self._world

        def arrive() -> None:
            if controller.process.alive:
                controller.process.run(say)
            elif asked is not None:
                self._break(asked)

        world.agenda.at(world.agenda.now + world.network.delay("client"), arrive)
