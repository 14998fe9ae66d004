"""How messages travel between processes: latency, order, broken and silent connections, and calls.

Owns `Wire` (one direction of one stream) and `Network.call` (a unary RPC). A wire keeps its order, as
gRPC does, unless `wire_faults` says otherwise. A message reaches the process that it was sent to; if that
process is dead, its sender hears of a broken connection. Does not own what the messages mean.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import TypeVar

from wavepp_proto.errors import StageLost, WaveppError
from wavepp_simulator.agenda import Agenda, Work
from wavepp_simulator.process import Process
from wavepp_simulator.wire_faults import Strike, WireFaults, covers

T = TypeVar("T")
HOLD_BACK_S = 0.05
"""A message that waits to be overtaken goes alone after that."""


class Network:
    def __init__(
        self, agenda: Agenda, latency_s: float, jitter: float, rng: Random, tell: Callable[[str], None]
    ) -> None:
        """A hop takes `latency_s`, or up to `jitter` times as much on top, drawn from `rng`."""
        self.agenda = agenda
        self._latency_s = latency_s
        self._jitter = jitter
        self._rng = rng
        self.slow: dict[str, float] = {}
        """Seconds on top, by wire name or by a prefix of it that ends at a slash."""
        self.faults = WireFaults(rng, tell)
        self._silent: dict[str, list[Work]] = {}
        """Partitioned wires by name or prefix, with what was sent meanwhile: it is sent again when they heal."""

    def delay(self, name: str) -> float:
        """How long the next message on the wire `name` takes."""
        extra = sum(seconds for slow, seconds in self.slow.items() if covers(slow, name)) if self.slow else 0.0
        spread = self._rng.random() * self._jitter if self._jitter else 0.0
        return self._latency_s * (1.0 + spread) + extra

    @property
    def partitioned(self) -> bool:
        return bool(self._silent)

    def silent(self, wire: str) -> bool:
        return wire in self._silent

    def silence(self, wire: str) -> None:
        """Nothing that is sent on it from now on arrives before `heal`; what is under way does."""
        self._silent.setdefault(wire, [])

    def heal(self, wire: str) -> None:
        """TCP sends again what was not acknowledged, in order."""
        for send in self._silent.pop(wire, ()):
            send()

    def heal_all(self) -> None:
        for wire in list(self._silent):
            self.heal(wire)

    def holds(self, name: str, send: Work) -> bool:
        """True if the wire is silent now: `send` is called again once it heals."""
        for wire, sent in self._silent.items():
            if covers(wire, name):
                sent.append(send)
                return True
        return False

    def call(
        self,
        caller: Process,
        callee: Callable[[], Process],
        there: str,
        ask: Callable[[Callable[[T | WaveppError], None]], None],
        answered: Callable[[T | WaveppError], None],
        timeout_s: float,
        *,
        faulty: bool = True,
    ) -> None:
        """A unary RPC on the wire `there`, `a>b/control`. `callee` is resolved on arrival: a restarted process
        answers at the old address.

        `ask` runs in the callee and is handed the way to answer; `answered` runs in the caller, once. A call that
        is repeated by the network runs twice, the second answer reaches nobody.
        """
        sides, _, rest = there.partition("/")
        back = ">".join(reversed(sides.split(">"))) + "/" + rest
        pending = [True]

        def answer(result: T | WaveppError) -> None:
            self._carry(back, lambda: caller.run(lambda: finish(result)), faulty=faulty)

        def finish(result: T | WaveppError) -> None:
            if pending:
                pending.clear()
                answered(result)

        def arrive(reply: Callable[[T | WaveppError], None] = answer) -> None:
            process = callee()
            if not process.alive:
                reply(StageLost(f"{process.name} refuses connections"))
                return
            process.on_death(lambda: reply(StageLost(f"{process.name} closed the connection")) if pending else None)
            process.run(lambda: ask(reply))

        self._carry(there, arrive, lambda: arrive(lambda _: None), faulty=faulty)
        late = StageLost(f"{there} was not answered within {timeout_s:g} s")
        caller.after(timeout_s, lambda: finish(late), background=True)

    def _carry(self, name: str, arrive: Work, again: Work | None = None, *, faulty: bool) -> None:
        """One leg of a call; `again` is what a repetition does."""
        if self.holds(name, lambda: self._carry(name, arrive, again, faulty=faulty)):
            return
        strike = self.faults.strike(name) if faulty else None
        if strike is Strike.DROP:
            return
        self.agenda.at(self.agenda.now + self.delay(name), arrive)
        if strike is Strike.DUPLICATE and again is not None:
            self.agenda.at(self.agenda.now + self.delay(name), again)


class Wire:
    """One direction of one stream between two processes; messages arrive in the order sent."""

    def __init__(self, network: Network, name: str, to: Process) -> None:
        self._network, self._to = network, to
        self.name = name
        self.open = True
        self._last = 0.0
        self._back: list[Callable[[], None]] = []
        """Messages that wait to be overtaken."""

    def send(self, deliver: Work, *, background: bool = False, faulty: bool = False) -> None:
        """`deliver` runs in the receiver, unless the wire was cut before it arrived. Only a `faulty` message can
        be lost, repeated or swapped on its own."""
        if not self.open:
            return
        network = self._network
        if network.holds(self.name, lambda: self.send(deliver, background=background)):
            return
        strike = network.faults.strike(self.name) if faulty else None
        if strike is Strike.DROP:
            return
        if strike is Strike.REORDER:
            self._hold_back(lambda: self._carry(deliver, background))
            return
        self._carry(deliver, background)
        if strike is Strike.DUPLICATE:
            self._carry(deliver, background)
        if self._back:
            self._let_go()

    def cut(self) -> None:
        """Whatever is still under way is lost."""
        self.open = False

    def _carry(self, deliver: Work, background: bool) -> None:
        agenda = self._network.agenda
        self._last = max(self._last, agenda.now + self._network.delay(self.name))
        agenda.at(self._last, lambda: self._to.run(lambda: self._arrive(deliver)), background=background)

    def _hold_back(self, carry: Callable[[], None]) -> None:
        self._back.append(carry)
        agenda = self._network.agenda
        agenda.at(agenda.now + HOLD_BACK_S, lambda: self._let_go() if carry in self._back else None)

    def _let_go(self) -> None:
        back, self._back = self._back, []
        for carry in back:
            carry()

    def _arrive(self, deliver: Work) -> None:
        if self.open:
            deliver()
