"""What goes wrong in the simulated cluster: crashes, pauses, broken and slow connections, bad rows.

Each function does one thing to a World now, notes it in the story and returns; what follows is the
product's business. Called by scenarios and by the random exploration.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from wavepp_simulator.world import World


def crash_stage(world: World, place: int) -> None:
    """Its process dies; the kernel closes its connections."""
    _note(world, f"stage {place} crashes")
    world.stages[place].process.kill()


def restart_stage(world: World, place: int) -> None:
    """A new incarnation at the same address, with an empty cache."""
    stage = world.stages[place]
    if stage.process.alive:
        crash_stage(world, place)
    stage = world.stages[place] = world.new_stage(place)
    _note(world, f"stage {place} starts as incarnation {stage.record.incarnation}")
    world.registry.register(stage.record, stage.process)


def pause_stage(world: World, place: int) -> None:
    """SIGSTOP: connections stay, nothing is said."""
    _note(world, f"stage {place} is paused")
    world.stages[place].process.pause()


def resume_stage(world: World, place: int) -> None:
    _note(world, f"stage {place} goes on")
    world.stages[place].process.resume()


def cut_stage(world: World, place: int) -> None:
    """The connection between the controller and a stage breaks, with whatever was under way."""
    _note(world, f"the connection to stage {place} is cut")
    for key, link in world.controller.links.items():
        if key.stage == place:
            link.cut()


def slow_wire(world: World, name: str, seconds: float) -> None:
    """Messages sent from now on the wire take longer: `c>s1`, `s1>c/digest`, `s0>s1`. 0 ends it."""
    _note(world, f"{name} takes {seconds * 1e3:g} ms longer")
    world.network.slow[name] = seconds


def break_row(world: World, place: int, request_id: str) -> None:
    """The stage's engine finds the request's next row wrong."""
    _note(world, f"stage {place} will find {request_id} wrong")
    world.stages[place].engine.broken.add(request_id)


def drain_stage(world: World, place: int) -> None:
    """SIGTERM to a stage: it asks, by heartbeat, to be let go."""
    _note(world, f"stage {place} wants to leave")
    world.stages[place].draining = True


def crash_controller(world: World) -> None:
    _note(world, "the controller crashes")
    world.controller.process.kill()
    world.clients.lost_controller(world.controller)


def replace_controller(world: World) -> None:
    _note(world, "another controller takes over")
    world.replace_controller()


def pause_controller(world: World) -> None:
    _note(world, "the controller is paused")
    world.controller.process.pause()


def resume_controller(world: World) -> None:
    """It, and any that was replaced while it was paused."""
    _note(world, "the controller goes on")
    for controller in (*world.deposed, world.controller):
        controller.process.resume()


def _note(world: World, what: str) -> None:
    world.faulted_at = world.agenda.now
    world.note("world", what, "fault")
