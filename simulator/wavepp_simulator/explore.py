"""Random exploration: one seed is one cluster, one load and one set of faults; every event is checked.

Owns the random model and what may end a request in it. A third of the seeds is calm: no fault at all,
and there a lost formation is a violation as well. Whatever was broken is mended at the end: every
request must then end, and every stage must be empty of holds (I2).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from random import Random

from wavepp_controller.core.config import ControllerConfig
from wavepp_proto.terms import Failed, LinkKind, PrefillRequest, RequestId
from wavepp_simulator import mishaps
from wavepp_simulator.clients import prompt
from wavepp_simulator.executor import Costs
from wavepp_simulator.ledger import Violation
from wavepp_simulator.world import Shape, World

SPAN_S = 0.6
"""Requests come and things break within this much virtual time."""
CALM_DOWN_S = 2.0
"""Between the last fault and the mending of whatever is still broken."""
MEND_S = 300.0
"""After that, everything must have ended within this."""
ALWAYS = frozenset({"CANCELLED", "DEADLINE_EXPIRED", "NEVER_FITS", "QUEUE_FULL", "DUPLICATE_REQUEST"})
"""Outcomes that need no fault."""
AFTER_FAULTS = frozenset({"STAGE_LOST", "FORMATION_ENDED", "PIPELINE_UNAVAILABLE", "CONTROLLER_UNAVAILABLE"})


@dataclass(slots=True)
class History:
    """One seed, played to its end or to its violation."""

    seed: int
    world: World
    calm: bool
    quiet_at: float = 0.0
    """Nothing breaks after this."""
    broken_rows: set[str] = field(default_factory=set)
    violation: Violation | None = None

    @property
    def events(self) -> int:
        return self.world.events

    def outcomes(self) -> dict[str, int]:
        """How many requests ended in which way."""
        counts: dict[str, int] = {}
        for asked in self.world.clients.every:
            outcome = asked.outcome
            name = outcome.error.reason if isinstance(outcome, Failed) else "FINISHED" if outcome else "WAITING"
            counts[name] = counts.get(name, 0) + 1
        return counts


def explore(seed: int, requests: int, check_every: int = 1) -> History:
    """Play one seed. The violation, if any, is in the result, with the world as it was then."""
    rng = Random(f"wavepp-{seed}")
    calm = rng.random() < 1 / 3
    history = History(seed, World(_shape(rng, calm, check_every), seed), calm)
    try:
        _play(history, rng, requests)
    except Violation as violation:
        history.violation = violation
    except Exception as error:  # a core raised what its shell cannot answer: that is a finding like any other
        history.violation = Violation("crash", f"{type(error).__name__}: {error}")
        history.violation.__cause__ = error
    return history


def _play(history: History, rng: Random, requests: int) -> None:
    world = history.world
    world.start()
    world.run(lambda: world.controller.formation > 0, 10.0)
    for number in range(requests):
        _load(world, rng, number)
    if not history.calm:
        for _ in range(rng.randint(1, 4)):
            _plan_fault(history, rng, requests)
    world.advance(max(history.quiet_at, world.agenda.now + SPAN_S) + CALM_DOWN_S - world.agenda.now)
    _mend(world)
    world.run(lambda: world.idle, MEND_S)
    world.check_drained()
    _check_outcomes(history)


def _shape(rng: Random, calm: bool, check_every: int) -> Shape:
    block = rng.choice((2, 4, 16))
    config = ControllerConfig(
        wave_tokens=block * rng.choice((1, 2, 4, 16)),
        lanes=rng.choice((1, 2, 4, 16)),
        link=LinkKind.GRPC,
        floor_blocks=rng.choice((0, 0, 2)),
        attempts=rng.choice((1, 1, 2, 3)),
        round_deadline_ms=rng.choice((200, 1000)),
        join_deadline_ms=5_000,
        # without the timer a lost wake-up shows; after a lost round it is the only one
        capacity_retry_ms=rng.choice((100, 1_000_000)) if calm else 100,
        max_queued_requests=rng.choice((4, 1024)),
    )
    return Shape(
        pools=tuple(rng.randint(6, 40) for _ in range(rng.randint(1, 4))),
        block_tokens=block,
        latency_s=rng.choice((0.0001, 0.0005, 0.003)),
        jitter=rng.choice((0.0, 1.0, 20.0)),
        costs=Costs(wave_s=rng.choice((0.0, 0.001, 0.01)), token_s=rng.choice((0.0, 0.00001, 0.001))),
        config=config,
        check_every=check_every,
    )


def _load(world: World, rng: Random, number: int) -> None:
    """One request at a random moment, sharing prefixes with others; maybe cancelled, maybe late."""
    shape = world.shape
    limit = min(shape.pools) * shape.block_tokens
    length = rng.randint(1, limit + 1 if rng.random() < 0.05 else max(1, int(limit * rng.choice((0.2, 0.5, 1.0)))))
    shared = min(length, rng.randint(0, 8) * shape.block_tokens + rng.choice((0, 0, 1)))
    stream = rng.choice("abc")
    parts = [f"{stream}*{shared}"] if shared else []
    parts += [f"{rng.choice('abcdef')}*{length - shared}"] if length > shared else []
    # a retry after an outcome, or a duplicate of a living request
    name = RequestId(f"r{rng.randrange(number) if number and rng.random() < 0.1 else number}")
    deadline_ms = rng.choice((None, None, 20_000, rng.randint(1, 500)))
    request = PrefillRequest(name, prompt("+".join(parts), length), deadline_ms=deadline_ms)
    at = rng.random() * SPAN_S if rng.random() < 0.6 else rng.choice((0.1, 0.2, 0.4))
    world.agenda.at(world.agenda.now + at, partial(world.clients.submit, request))
    if rng.random() < 0.25:
        later = at + rng.choice((0.0001, 0.002, 0.05, 0.5)) * rng.random()
        world.agenda.at(world.agenda.now + later, partial(world.clients.cancel, name))


def _plan_fault(history: History, rng: Random, requests: int) -> None:
    world = history.world
    place = rng.randrange(len(world.stages))
    now = world.agenda.now
    at = now + (rng.random() * SPAN_S if rng.random() < 0.5 else rng.choice((0.1, 0.2, 0.4)) + rng.random() * 0.03)
    until = at + rng.choice((0.001, 0.1, 1.0, 2.0, 2.0, 15.0)) * rng.random()
    history.quiet_at = max(history.quiet_at, until)

    def both(first: Callable[[], None], then: Callable[[], None]) -> None:
        world.agenda.at(at, first)
        world.agenda.at(until, then)

    match rng.choice(("crash", "restart", "pause", "cut", "slow", "row", "drain", "controller", "stop controller")):
        case "crash":
            both(partial(mishaps.crash_stage, world, place), partial(mishaps.restart_stage, world, place))
        case "restart":
            world.agenda.at(at, partial(mishaps.restart_stage, world, place))
        case "pause":
            both(partial(mishaps.pause_stage, world, place), partial(mishaps.resume_stage, world, place))
        case "cut":
            world.agenda.at(at, partial(mishaps.cut_stage, world, place))
        case "slow":
            ways = (f"c>s{place}", f"s{place}>c", f"s{place}>c/digest", f"s{place}>c/rounds", f"s{place}>s{place + 1}")
            way, seconds = rng.choice(ways), rng.choice((0.01, 0.3, 2.0))
            both(partial(mishaps.slow_wire, world, way, seconds), partial(mishaps.slow_wire, world, way, 0.0))
        case "row":
            for name in sorted({f"r{rng.randrange(requests)}" for _ in range(rng.randint(1, 4))}) if requests else ():
                history.broken_rows.add(name)
                world.agenda.at(now, partial(mishaps.break_row, world, place, name))
        case "drain":
            both(partial(mishaps.drain_stage, world, place), partial(mishaps.restart_stage, world, place))
        case "controller":
            both(partial(mishaps.crash_controller, world), partial(mishaps.replace_controller, world))
        case "stop controller":
            both(partial(mishaps.pause_controller, world), partial(mishaps.resume_controller, world))


def _mend(world: World) -> None:
    """Everything runs and is connected again."""
    world.network.slow.clear()
    for stage in list(world.stages):
        if not stage.process.alive or stage.draining:
            mishaps.restart_stage(world, stage.place)
        elif stage.process.paused:
            mishaps.resume_stage(world, stage.place)
    if not world.controller.process.alive:
        mishaps.replace_controller(world)
    mishaps.resume_controller(world)


def _check_outcomes(history: History) -> None:
    """Nobody may be told of a bug, nor of a fault that did not happen."""
    for asked in history.world.clients.every:
        outcome = asked.outcome
        if not isinstance(outcome, Failed):
            continue
        reason, name = outcome.error.reason, str(outcome.request_id)
        voided = reason == "ROW_VOIDED" and name in history.broken_rows
        if not (reason in ALWAYS or voided or (reason in AFTER_FAULTS and not history.calm)):
            raise Violation("outcome", f"{name} failed {reason}: {outcome.error.message}")
    controller = history.world.controller.machine
    if controller.status().counters.get("formations_broken", 0):
        raise Violation("outcome", "a formation was broken by the protocol itself")
