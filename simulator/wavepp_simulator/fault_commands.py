"""Commands that break things, for scenarios and plans.

Owns their words: each takes the rest of its line and calls one function of `mishaps`. Raises ValueError,
KeyError or IndexError for what it does not understand; `console` turns that into an error that names the line.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from wavepp_controller.core.events import DrainAsked
from wavepp_simulator import mishaps
from wavepp_simulator.options import seconds
from wavepp_simulator.wire_faults import Strike
from wavepp_simulator.world import World

Command = Callable[[World, list[str], dict[str, str]], None]


def slow(world: World, words: list[str], options: dict[str, str]) -> None:
    """slow s1>c/digest 500ms"""
    wire, span = words
    mishaps.slow_wire(world, wire, seconds(span))


def partition(world: World, words: list[str], options: dict[str, str]) -> None:
    """partition c>s1: nothing arrives until `heal c>s1`"""
    (wire,) = words
    mishaps.partition(world, wire)


def heal(world: World, words: list[str], options: dict[str, str]) -> None:
    (wire,) = words
    mishaps.heal(world, wire)


def strike(kind: Strike, world: World, words: list[str], options: dict[str, str]) -> None:
    """drop | duplicate | reorder c>s1/rounds [2]: the next two; with chance=0.1 each by that chance; 0 ends it."""
    wire, *count = words
    chance = float(options.get("chance", "0"))
    times = int(count[0]) if count else int(not chance)
    mishaps.strike_wire(world, kind, wire, times, chance)


def misnumber(world: World, words: list[str], options: dict[str, str]) -> None:
    """misnumber link 0 by=1: the next activation of stage 0"""
    _, place = words
    mishaps.misnumber(world, world.place_named(place), int(options["by"]))


def etcd(world: World, words: list[str], options: dict[str, str]) -> None:
    """etcd stops | etcd answers"""
    (what,) = words
    {"stops": mishaps.stop_etcd, "answers": mishaps.start_etcd}[what](world)


def copies(world: World, words: list[str], options: dict[str, str]) -> None:
    """copies fail on stage 1: its next lot"""
    *_, place = words
    mishaps.fail_copy(world, world.place_named(place))


def break_row(world: World, words: list[str], options: dict[str, str]) -> None:
    """break r1 stage 1"""
    name, _, place = words
    mishaps.break_row(world, world.place_named(place), name)


def spoil_row(world: World, words: list[str], options: dict[str, str]) -> None:
    """nan r1 stage 1: its rows compute NaN there"""
    name, _, place = words
    mishaps.spoil_row(world, world.place_named(place), name)


def orphan(world: World, words: list[str], options: dict[str, str]) -> None:
    """orphan x stage 1: the stage holds room for x, which nobody asked for"""
    name, _, place = words
    mishaps.plant_hold(world, world.place_named(place), name)


def reform(world: World, words: list[str], options: dict[str, str]) -> None:
    """reform stage 1 blocks=12"""
    _, place = words
    mishaps.reform(world, world.place_named(place), int(options["blocks"]))


def process(verb: str, world: World, words: list[str], options: dict[str, str]) -> None:
    """crash | restart | pause | resume | cut | drain | hang, of stage N (its rank R: N.R) or of the controller (which
    does not hang); cut link N (or N.R), to the next. `restart stage N dtype=float16`: with another dtype than the
    others."""
    match words:
        case ["stage", place] if verb == "restart" and options:
            mishaps.restart_stage(world, world.place_named(place), options["dtype"])
        case ["stage", place]:
            _STAGE[verb](world, world.place_named(place))
        case ["link", place] if verb == "cut":
            mishaps.cut_link(world, world.place_named(place))
        case ["controller"]:
            _CONTROLLER[verb](world)
        case _:
            raise ValueError(f"{verb} what?")


def _drain_controller(world: World) -> None:
    controller = world.controller
    world.note("world", "the controller is told to drain", "fault")
    controller.post(DrainAsked(controller.now))


_STAGE: dict[str, Callable[[World, int], None]] = {
    "crash": mishaps.crash_stage,
    "restart": mishaps.restart_stage,
    "pause": mishaps.pause_stage,
    "resume": mishaps.resume_stage,
    "cut": mishaps.cut_stage,
    "drain": mishaps.drain_stage,
    "hang": mishaps.hang_stage,
}
_CONTROLLER: dict[str, Callable[[World], None]] = {
    "crash": mishaps.crash_controller,
    "restart": mishaps.replace_controller,
    "pause": mishaps.pause_controller,
    "resume": mishaps.resume_controller,
    "drain": _drain_controller,
}
FAULTS: dict[str, Command] = {
    "break": break_row,
    "copies": copies,
    "etcd": etcd,
    "heal": heal,
    "misnumber": misnumber,
    "nan": spoil_row,
    "orphan": orphan,
    "partition": partition,
    "reform": reform,
    "slow": slow,
    **{kind.value: partial(strike, kind) for kind in Strike},
    **{verb: partial(process, verb) for verb in _STAGE},
}
