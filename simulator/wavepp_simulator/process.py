"""One operating-system process of the simulated cluster: it may stop, go on, or die.

Everything a process does enters through `run` or `after`: while it is paused (SIGSTOP) it piles up and
happens, in order, when it goes on; once it is dead it never happens. Knows nothing of what it runs.
"""

from __future__ import annotations

from collections.abc import Callable

from wavepp_simulator.agenda import Agenda, Work


class Process:
    def __init__(self, name: str, agenda: Agenda) -> None:
        self.name = name
        self.alive = True
        self.paused = False
        self._agenda = agenda
        self._backlog: list[Work] = []
        self._mourners: list[Callable[[], None]] = []

    def run(self, work: Work) -> None:
        """Something arrived, or a timer rang."""
        if not self.alive:
            return
        if self.paused:
            self._backlog.append(work)
        else:
            work()

    def after(self, seconds: float, work: Work, *, background: bool = False) -> None:
        """A timer of this process."""
        self._agenda.at(self._agenda.now + seconds, lambda: self.run(work), background=background)

    def on_death(self, work: Callable[[], None]) -> None:
        """What the kernel tells others when this process dies."""
        self._mourners.append(work)

    def pause(self) -> None:
        self.paused = True

    def resume(self) -> None:
        """Whatever piled up happens now, in order; some of it may end the process."""
        self.paused = False
        backlog, self._backlog = self._backlog, []
        for work in backlog:
            self.run(work)

    def kill(self) -> None:
        self.alive = self.paused = False
        self._backlog.clear()
        mourners, self._mourners = self._mourners, []
        for tell in mourners:
            tell()
