"""What goes wrong in the simulated cluster: crashes, pauses, broken and slow connections, bad rows.

Each function does one thing to a World now, notes it in the story and returns; what follows is the
product's business. Called by scenarios and by the random exploration.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from wavepp_controller.core.events import ReformAsked, StageShape
from wavepp_proto import limits
from wavepp_proto.hashing import HASH_BYTES
from wavepp_proto.terms import Attempt, HoldKey, PipelineId, RequestId
from wavepp_simulator.engine import DTYPE
from wavepp_simulator.wire_faults import Strike
from wavepp_stage.core.block_hashes import BlockHashes

if TYPE_CHECKING:
    from wavepp_simulator.world import World


def crash_stage(world: World, place: int) -> None:
    """Its process dies; the kernel closes its connections."""
    _note(world, f"stage {_name(world, place)} crashes")
    world.stages[place].process.kill()


def restart_stage(world: World, place: int, dtype: str = DTYPE) -> None:
    """A new incarnation at the same address, with an empty cache; `dtype` may be another than that of the others."""
    stage = world.stages[place]
    if stage.process.alive:
        crash_stage(world, place)
    stage = world.stages[place] = world.new_stage(place, dtype)
    unlike = "" if dtype == DTYPE else f", computes in {dtype}"
    world.unlike = world.unlike or bool(unlike)
    _note(world, f"stage {_name(world, place)} starts as incarnation {stage.record.incarnation}{unlike}")
    world.registry.register(stage.record, stage.process)


def pause_stage(world: World, place: int) -> None:
    """SIGSTOP: connections stay, nothing is said."""
    _note(world, f"stage {_name(world, place)} is paused")
    world.stages[place].process.pause()


def resume_stage(world: World, place: int) -> None:
    _note(world, f"stage {_name(world, place)} goes on")
    world.stages[place].process.resume()


def cut_stage(world: World, place: int) -> None:
    """The connection between the controller and a stage breaks, with whatever was under way."""
    _note(world, f"the connection to stage {_name(world, place)} is cut", harmless=True)
    for controller in (*world.deposed, world.controller):
        for key, link in controller.links.items():
            if world.place_of(key) == place:
                link.cut()


def partition(world: World, wire: str) -> None:
    """Nothing arrives on the wire (`c>s1`, `s1>c`, `s1>etcd`, `s0>s1`) until it heals, and nobody is told.

    After as long as keepalive takes to notice, the connection breaks."""
    _note(world, f"{wire} falls silent")
    world.network.silence(wire)
    noticed = (limits.CLIENT_KEEPALIVE_TIME_MS + limits.CLIENT_KEEPALIVE_TIMEOUT_MS) / 1e3
    world.agenda.at(world.agenda.now + noticed, lambda: _notice(world, wire), background=True)


def heal(world: World, wire: str) -> None:
    _note(world, f"{wire} is heard again")
    world.network.heal(wire)


def _notice(world: World, wire: str) -> None:
    """Keepalive found a silent connection dead."""
    ends = {end for end in wire.split("/")[0].split(">") if end.startswith("s")}
    if not world.network.silent(wire) or "c" not in wire.split("/")[0].split(">"):
        return
    for end in ends:
        cut_stage(world, world.place_named(end.removeprefix("s")))


def strike_wire(world: World, strike: Strike, wire: str, count: int = 0, chance: float = 0.0) -> None:
    """Lose, repeat or swap the next `count` messages of a wire, or each by chance: between the controller and a
    daemon, or activations from a stage to the next (`s0>s1`), where it costs the formation."""
    sides = wire.split("/")[0].split(">")
    between = "c" not in sides
    if "etcd" in sides:
        raise ValueError("no message to etcd can be struck")
    much = f"{count} messages" if count else f"{chance:.0%} of messages" if chance else "no more messages"
    _note(world, f"{wire} will {strike.value} {much}", harmless=not (chance or between or strike is Strike.DROP))
    world.network.faults.set(wire, strike, count, chance)
    if between and strike is Strike.DROP:
        world.stages[world.place_named(sides[0].removeprefix("s"))].neighbours.lossy = True


def cut_link(world: World, place: int) -> None:
    """The activation link from a stage to the next one breaks."""
    _note(world, f"the link from stage {_name(world, place)} to the next is cut")
    world.stages[place].neighbours.cut()


def misnumber(world: World, place: int, by: int) -> None:
    """The next activations of a stage carry a number that is `by` too high."""
    _note(world, f"stage {_name(world, place)} will number a wave {by:+d}")
    world.stages[place].neighbours.misnumber.append(by)


def slow_wire(world: World, name: str, seconds: float) -> None:
    """Messages sent from now on the wire take longer: `c>s1`, `s1>c/digest`, `s0>s1`. 0 ends it."""
    _note(world, f"{name} takes {seconds * 1e3:g} ms longer", harmless=name.endswith("/digest"))
    if seconds:
        world.network.slow[name] = seconds
    else:
        world.network.slow.pop(name, None)


def spoil_row(world: World, place: int, request_id: str) -> None:
    """The request's rows compute NaN on the stage from now on; what they wrote stays there as NaN."""
    _note(world, f"stage {_name(world, place)} will compute NaN for {request_id}", harmless=True)
    world.broken_rows.add(request_id)
    world.stages[place].engine.not_finite.add(request_id)


def break_row(world: World, place: int, request_id: str) -> None:
    """The stage's engine finds the request's next row wrong."""
    _note(world, f"stage {_name(world, place)} will find {request_id} wrong", harmless=True)
    world.broken_rows.add(request_id)
    world.stages[place].engine.broken.add(request_id)


def hang_stage(world: World, place: int) -> None:
    """The stage's engine does not return from its next wave; its heart goes on beating."""
    _note(world, f"stage {_name(world, place)} will hang in its next wave")
    world.stages[place].executor.hangs = True


def drain_stage(world: World, place: int) -> None:
    """SIGTERM to a stage: it asks, by heartbeat, to be let go."""
    _note(world, f"stage {_name(world, place)} wants to leave")
    world.stages[place].draining = True


def crash_controller(world: World) -> None:
    _note(world, "the controller crashes")
    world.controller.process.kill()
    world.clients.lost_controller(world.controller)


def replace_controller(world: World) -> None:
    world.registry.start()  # no election without it
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


def reform(world: World, place: int, pool_blocks: int) -> None:
    """An operator gives a stage, with all its ranks, another pool: the pipeline forms again, and its cache is gone."""
    _note(world, f"stage {_name(world, place)} is to have {pool_blocks} blocks")
    controller = world.controller
    shapes = (StageShape(world.stages[place].record.key.stage, pool_blocks=pool_blocks),)
    asked = ReformAsked(PipelineId("p"), shapes, None, None, controller.now)
    controller.process.run(lambda: controller.post(asked))


def stop_etcd(world: World) -> None:
    """etcd answers nobody: watches stand still, leases cannot be renewed, and the controller is told so."""
    _note(world, "etcd stops")
    world.registry.stop()


def start_etcd(world: World) -> None:
    _note(world, "etcd answers again")
    world.registry.start()


def fail_copy(world: World, place: int) -> None:
    """The stage's next lot between the tiers fails."""
    _note(world, f"the next copy on stage {_name(world, place)} will fail", harmless=True)
    world.stages[place].copier.failing += 1


def plant_hold(world: World, place: int, request_id: str) -> None:
    """The stage holds room for a request that nobody asked for."""
    _note(world, f"stage {_name(world, place)} holds room for {request_id}, which nobody asked for", harmless=True)
    stage = world.stages[place]
    assert stage.machine._cache is not None, "a stage in a formation has a cache"
    key = HoldKey(RequestId(request_id), Attempt(1))
    stage.machine._cache.lease(key, world.shape.block_tokens, BlockHashes.unpack(bytes(HASH_BYTES)), 0)
    stage.machine._cache.escrow(key)


def mend(world: World) -> None:
    """Whatever is broken is repaired: everything runs, is connected and is heard."""
    world.network.slow.clear()
    world.network.faults.clear()
    world.network.heal_all()
    world.registry.start()
    for stage in list(world.stages):
        if not stage.process.alive or stage.draining or stage.record.numerics.dtype != DTYPE:
            restart_stage(world, stage.place)
        elif stage.process.paused:
            resume_stage(world, stage.place)
    for stage in world.stages:
        if stage.neighbours.lossy:  # no transport loses its last payload and lives on: the connection breaks in the end
            stage.neighbours.lossy = False
            stage.neighbours.cut()
    if not world.controller.process.alive:
        replace_controller(world)
    if any(controller.process.paused for controller in (*world.deposed, world.controller)):
        resume_controller(world)


def _name(world: World, place: int) -> str:
    return world.stages[place].name


def _note(world: World, what: str, *, harmless: bool = False) -> None:
    """`harmless` is what resumed streams make good: no request may be lost by it."""
    world.faulted_at = world.agenda.now
    world.harmed = world.harmed or not harmless
    world.note("world", what, "fault")
