"""What a scenario may command: build a cluster, ask, wait, break things, look.

Owns the command words, but for faults (`fault_commands`). One console has one world. Output is gathered and
taken a stanza at a time: what the story tells of the kinds that are switched on, and what `show` prints.
`expect` is a check that no renewal of the golden output can lose.
"""

from __future__ import annotations

from collections.abc import Callable

from wavepp_proto.terms import Failed, Finished, PipelineId, PrefillRequest, RequestId
from wavepp_simulator import mishaps, outcomes
from wavepp_simulator.clients import prompt
from wavepp_simulator.fault_commands import FAULTS
from wavepp_simulator.options import seconds, shape_of
from wavepp_simulator.show import blocks, holds, requests
from wavepp_simulator.story import KINDS, USUAL
from wavepp_simulator.world import World

LIMIT_S = 900.0
"""Longest `run until`, in virtual seconds."""
CALM_DOWN_S = 2.0
"""Between the last act of a plan and the mending of whatever is still broken."""
MEND_S = 300.0
"""After that, everything must have ended within this."""


class CommandError(Exception):
    """A command that cannot be understood, or an expectation that does not hold."""


class Console:
    def __init__(self, kinds: frozenset[str] = USUAL) -> None:
        """`kinds` of the story go to the output until `log` says otherwise."""
        self._world: World | None = None
        self._kinds = kinds
        self._served_at = 0.0
        self._told = 0
        """Entries of the story that were taken."""
        self._output: list[str] = []

    def obey(self, line: str) -> None:
        """Run one command. Raises CommandError, Violation."""
        words = [word for word in line.split() if "=" not in word]
        options = dict(word.split("=", 1) for word in line.split() if "=" in word)
        self._obey(words, options)
        self._gather()

    def _obey(self, words: list[str], options: dict[str, str]) -> None:
        work = _COMMANDS.get(words[0]) if words else None
        if work is None:
            raise CommandError(f"unknown command; known: {' '.join(sorted(_COMMANDS))}")
        try:
            work(self, words[1:], options)
        except (ValueError, KeyError, IndexError) as error:
            raise CommandError(f"cannot be understood: {error!r}") from error

    def take(self) -> list[str]:
        """Output since the last call."""
        if self._world is not None:
            self._gather()
        output, self._output = self._output, []
        return output

    @property
    def world(self) -> World:
        if self._world is None:
            raise CommandError("begin with `cluster`")
        return self._world

    def _gather(self) -> None:
        if self._kinds:
            self._output += self.world.story.lines(self._told, self._kinds)
        self._told = len(self.world.story.entries)

    # --- commands ---------------------------------------------------------------------------------

    def cluster(self, words: list[str], options: dict[str, str]) -> None:
        """A new cluster, once: runs until its pipeline serves."""
        if self._world is not None:
            raise CommandError("there is a cluster already")
        self._world = World(shape_of(options))
        self._world.start()
        self._world.run(lambda: self.world.controller.formation > 0, LIMIT_S)
        self._served_at = self._world.agenda.now

    def at(self, words: list[str], options: dict[str, str]) -> None:
        """at 12.5ms COMMAND...: that long after the cluster began to serve."""
        span, *command = words
        self.world.advance_to(self._served_at + seconds(span))
        self._obey(command, options)

    def submit(self, words: list[str], options: dict[str, str]) -> None:
        """submit r1 len=100 [text=a*64+b] [deadline_ms=500] [priority=1] [salt=x] [pipeline=p]"""
        (name,) = words
        length = int(options.pop("len"))
        tokens = prompt(options.pop("text", name), length) if length else b""
        deadline_ms = int(options["deadline_ms"]) if "deadline_ms" in options else None
        pipeline = PipelineId(options["pipeline"]) if "pipeline" in options else None
        unknown = options.keys() - {"deadline_ms", "pipeline", "priority", "salt"}
        if unknown:
            raise CommandError(f"no option {' '.join(sorted(unknown))}")
        priority, salt = int(options.get("priority", "0")), options.get("salt", "")
        self.world.clients.submit(PrefillRequest(RequestId(name), tokens, pipeline, deadline_ms, priority, salt))

    def cancel(self, words: list[str], options: dict[str, str]) -> None:
        (name,) = words
        self.world.clients.cancel(RequestId(name))

    def run(self, words: list[str], options: dict[str, str]) -> None:
        """run until idle | serving | formation 2 | r1 running | r1 ended | stage 1 executes 3"""
        until, *what = words
        if until != "until":
            raise CommandError("run until what?")
        self.world.run(self._condition(what), LIMIT_S)
        if what == ["idle"]:
            self.world.check_drained()

    def _condition(self, what: list[str]) -> Callable[[], bool]:
        world = self.world
        match what:
            case ["idle"]:
                return lambda: world.idle
            case ["serving"]:
                return lambda: world.controller.formation > 0
            case ["formation", number]:
                return lambda: world.controller.formation == int(number)
            case ["stage", place, "executes", ordinal]:
                return lambda: world.stages[world.place_named(place)].executor.executing == int(ordinal)
            case [name, "ended"]:
                return lambda: world.clients.of(RequestId(name)).outcome is not None
            case [name, state]:
                return lambda: self._state(name) == state
        raise CommandError(f"no condition {' '.join(what)}")

    def _state(self, name: str) -> str | None:
        for pipeline in self.world.controller.machine.pipelines.values():
            if (request := pipeline.book.living.get(RequestId(name))) is not None:
                return request.state.value
        return None

    def advance(self, words: list[str], options: dict[str, str]) -> None:
        (span,) = words
        self.world.advance(seconds(span))

    def settle(self, words: list[str], options: dict[str, str]) -> None:
        """Give faults time to show, mend whatever is broken, wait until all has ended; then nothing may be left."""
        self.world.advance(CALM_DOWN_S)
        mischief = self.world.faulted_at
        mishaps.mend(self.world)
        self.world.faulted_at = mischief
        self.world.run(lambda: self.world.idle, MEND_S)
        if self.world.harmed:  # what a lost message left behind is found by the next comparisons of holds
            self.world.advance(3 * self.world.shape.config.inventory_ms / 1e3)
        self.world.check_drained()
        outcomes.check(self.world)

    def log(self, words: list[str], options: dict[str, str]) -> None:
        """log usual | log all | log +digest -votes"""
        for word in words:
            kind = word[1:] if word[0] in "+-" else word
            if word in ("usual", "all", "nothing"):
                self._kinds = {"usual": USUAL, "all": KINDS, "nothing": frozenset[str]()}[word]
            elif kind not in KINDS:
                raise CommandError(f"no kind {kind}; known: {' '.join(sorted(KINDS))}")
            else:
                self._kinds = self._kinds | {kind} if word[0] == "+" else self._kinds - {kind}

    def show(self, words: list[str], options: dict[str, str]) -> None:
        """show blocks | holds | requests"""
        self._gather()
        for word in words:
            self._output += {"blocks": blocks, "holds": holds, "requests": requests}[word](self.world)

    def expect(self, words: list[str], options: dict[str, str]) -> None:
        """expect r1 finished [cached=96] | expect r1 STAGE_LOST [within=2s]: since the last fault."""
        name, wanted = words
        asked = self.world.clients.of(RequestId(name))
        match asked.outcome:
            case Finished(cached_tokens=cached):
                got = "finished"
                if int(options.get("cached", cached)) != cached:
                    raise CommandError(f"{cached} tokens were cached")
            case Failed(error=error):
                got = error.reason
            case None:
                got = "waiting"
        if got != wanted:
            raise CommandError(f"{name} is {got}")
        if "within" in options:
            since = self.world.faulted_at or 0.0
            took = (asked.ended_at or self.world.agenda.now) - since
            if took > seconds(options["within"]):
                raise CommandError(f"it took {took:.3f} s")


def _spoil(verb: str) -> Callable[[Console, list[str], dict[str, str]], None]:
    return lambda console, words, options: FAULTS[verb](console.world, words, options)


_COMMANDS: dict[str, Callable[[Console, list[str], dict[str, str]], None]] = {
    "advance": Console.advance,
    "at": Console.at,
    "cancel": Console.cancel,
    "cluster": Console.cluster,
    "expect": Console.expect,
    "log": Console.log,
    "run": Console.run,
    "settle": Console.settle,
    "show": Console.show,
    "submit": Console.submit,
    **{verb: _spoil(verb) for verb in FAULTS},
}
