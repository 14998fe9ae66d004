"""How messages travel between processes: latency, order, broken connections and calls.

Owns `Wire` (one direction of one stream: in order, as gRPC keeps it) and `Network.call` (a unary RPC).
A message reaches the process that it was sent to; if that process is dead, its sender hears of a
broken connection. Does not own what the messages mean.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import TypeVar

from wavepp_proto.errors import StageLost, WaveppError
from wavepp_simulator.agenda import Agenda, Work
from wavepp_simulator.process import Process

T = TypeVar("T")


class Network:
    def __init__(self, agenda: Agenda, latency_s: float, jitter: float, rng: Random) -> None:
        """A hop takes `latency_s`, or up to `jitter` times as much on top, drawn from `rng`."""
        self.agenda = agenda
        self._latency_s = latency_s
        self._jitter = jitter
        self._rng = rng
        self.slow: dict[str, float] = {}
        """Seconds on top, by wire name or by a prefix of it that ends at a slash."""

    def delay(self, name: str) -> float:
        """How long the next message on the wire `name` takes."""
        extra = sum(seconds for slow, seconds in self.slow.items() if name == slow or name.startswith(slow + "/"))
        spread = self._rng.random() * self._jitter if self._jitter else 0.0
        return self._latency_s * (1.0 + spread) + extra

    def call(
        self,
        caller: Process,
        callee: Callable[[], Process],
        name: str,
        ask: Callable[[Callable[[T | WaveppError], None]], None],
        answered: Callable[[T | WaveppError], None],
        timeout_s: float,
    ) -> None:
        """A unary RPC. `callee` is resolved on arrival: a restarted process answers at the old address.

        `ask` runs in the callee and is handed the way to answer; `answered` runs in the caller, once.
        """
        pending = [True]

        def answer(result: T | WaveppError) -> None:
            self.agenda.at(self.agenda.now + self.delay(name), lambda: caller.run(lambda: finish(result)))

        def finish(result: T | WaveppError) -> None:
            if pending:
                pending.clear()
                answered(result)

        def arrive() -> None:
            process = callee()
            if not process.alive:
                answer(StageLost(f"{process.name} refuses connections"))
                return
            process.on_death(lambda: answer(StageLost(f"{process.name} closed the connection")) if pending else None)
            process.run(lambda: ask(answer))

        self.agenda.at(self.agenda.now + self.delay(name), arrive)
        late = StageLost(f"{name} was not answered within {timeout_s:g} s")
        caller.after(timeout_s, lambda: finish(late), background=True)


class Wire:
    """One direction of one stream between two processes; messages arrive in the order sent."""

    def __init__(self, network: Network, name: str, to: Process) -> None:
        self._network, self._to = network, to
        self.name = name
        self.open = True
        self._last = 0.0

    def send(self, deliver: Work, *, background: bool = False) -> None:
        """`deliver` runs in the receiver, unless the wire was cut before it arrived."""
        if not self.open:
            return
        agenda = self._network.agenda
        self._last = max(self._last, agenda.now + self._network.delay(self.name))
        agenda.at(self._last, lambda: self._to.run(lambda: self._arrive(deliver)), background=background)

    def _arrive(self, deliver: Work) -> None:
        if self.open:
            deliver()

    def cut(self) -> None:
        """Whatever is still under way is lost."""
        self.open = False
