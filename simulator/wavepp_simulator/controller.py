"""A controller in virtual time: the real controller core in a shell that follows `wavepp_controller.runtime`.

Owns one life of a controller: its process, its core, its clock and its links. Actions are carried out
in order and never call back into the core within one event. Clients and membership are the world's.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from wavepp_controller.core import events as ev
from wavepp_controller.core.config import ControllerConfig
from wavepp_controller.core.machine import ControllerMachine
from wavepp_controller.core.riding import may_ride, sizes
from wavepp_proto.errors import InternalError
from wavepp_proto.hashing import hash_blocks
from wavepp_proto.terms import (
    Admitted,
    AnnounceFrame,
    DaemonKey,
    Epoch,
    Failed,
    Fence,
    Finished,
    Formation,
    Incarnation,
    MemberRecord,
    PrefillEvent,
    RequestId,
    Round,
    RoundOrdinal,
    WaveCommand,
    WaveOrdinal,
)
from wavepp_simulator.ledger import Violation
from wavepp_simulator.link import SimLink
from wavepp_simulator.process import Process

if TYPE_CHECKING:
    from wavepp_simulator.clients import Asked
    from wavepp_simulator.world import World

TICK_S = 0.05
LEAST_TICK_S = 0.001
HASH_S = 0.0001
"""Hashing one prompt; its place in time matters, not its length."""


class SimController:
    def __init__(self, world: World, epoch: Epoch, config: ControllerConfig) -> None:
        self.world = world
        self.epoch = epoch
        self.touches = 0
        """Events that its core took."""
        self.process = Process("c", world.agenda)
        self.machine = ControllerMachine(config)
        self._links: dict[DaemonKey, SimLink] = {}
        self._busy = False
        self._alarm_at: float | None = None
        """When the core will be woken, of several alarms the first."""
        self._served = 0
        self._streams: dict[RequestId, Asked] = {}
        """To the clients of living requests."""
        self._arriving: Asked | None = None
        self.hashes: dict[RequestId, bytes] = {}
        """Packed 32-byte block hashes of living requests."""
        self._asked_round = (Formation(0), RoundOrdinal(0))
        """Formation and ordinal of the last round in which the first daemon was asked for the first time."""

    @property
    def now(self) -> float:
        return self.world.agenda.now

    @property
    def formation(self) -> int:
        """Number of the formation that serves; 0 if none does."""
        for pipeline in self.machine.pipelines.values():
            if pipeline.serving and pipeline.forming.present is not None:
                return pipeline.forming.present.number
        return 0

    @property
    def links(self) -> dict[DaemonKey, SimLink]:
        return dict(self._links)

    @property
    def settled(self) -> bool:
        """All digests were heard, and none was missed: the index should be the truth."""
        indexes = [pipeline.index for pipeline in self.machine.pipelines.values()]
        in_sync = all(index.in_sync(key) for index in indexes for key in self._links)
        return bool(self._links) and in_sync and all(link.settled for link in self._links.values())

    def asked(self, request_id: RequestId) -> Asked:
        """The submission of a living request. KeyError."""
        return self._streams[request_id]

    def start(self) -> None:
        """Lead, watch membership, tick."""
        self.post(ev.LeadershipWon(self.epoch, self.now))
        self.world.registry.watch(self.process, self._member_up, self._member_gone, self._frozen)
        self._tick()

    def depose(self) -> None:
        """etcd says that somebody else leads."""
        self.post(ev.LeadershipLost(self.now))

    def _set_alarm(self) -> None:
        """Wake the core at the instant it asks for."""
        at = self.machine.wake_at
        if at is None or (self._alarm_at is not None and self._alarm_at <= at):
            return

        def ring() -> None:
            if self._alarm_at == at:
                self._alarm_at = None
                self.post(ev.PauseOver(self.now))

        self._alarm_at = at
        self.process.after(max(0.0, at - self.now), ring)

    def post(self, event: ev.Event) -> None:
        if self._busy:
            raise Violation("shell", f"{type(event).__name__} was posted within another event")
        self._busy = True
        actions = self.machine.handle(event)
        self.world.story.heard(self.now, event)
        self.world.story.decided(self.now, actions)
        if self.formation != self._served and self.formation:
            self.world.note("c", f"serves formation {self.formation}", "formation")
        self._served = self.formation
        if isinstance(event, ev.DigestArrived):
            self.world.omniscient.heard(self, event.key, event.digest)
        for action in actions:
            self._perform(action)
        self._busy = False
        self._set_alarm()
        if actions or not isinstance(event, ev.Tick | ev.BeatArrived):
            self.world.touched(self)

    def submit(self, asked: Asked) -> None:
        """A client's stream opened."""
        request = asked.request
        self._streams.setdefault(request.request_id, asked)
        self._arriving = asked
        self.post(ev.Submit(request, self.now))
        self._arriving = None

    def drop(self, link: SimLink) -> None:
        if self._links.get(link.plan.key) is link:
            del self._links[link.plan.key]

    def _member_up(self, record: MemberRecord) -> None:
        self.post(ev.MemberUp(record, self.now))

    def _member_gone(self, key: DaemonKey, incarnation: Incarnation) -> None:
        self.post(ev.MemberGone(key, incarnation, self.now))

    def _frozen(self, frozen: bool) -> None:
        self.post(ev.MembershipFrozen(frozen, self.now))

    def _tick(self) -> None:
        deadline = self.machine.next_deadline()
        pause = TICK_S if deadline is None else min(TICK_S, max(LEAST_TICK_S, deadline - self.now))

        def ring() -> None:
            self.post(ev.Tick(self.now))
            self.world.check_progress(self)
            self._tick()

        self.process.after(pause, ring, background=True)

    # --- actions ----------------------------------------------------------------------------------

    def _perform(self, action: ev.Action) -> None:
        match action:
            case ev.SendWave(ordinal=ordinal, rows=rows, targets=targets, limit_ms=limit_ms):
                for key, fence in targets:
                    if (link := self._links.get(key)) is not None:
                        link.send_wave(WaveCommand(replace(fence, ordinal=ordinal), rows, limit_ms))
            case ev.SendRound(key, asked):
                self._send_round(key, asked)
            case ev.Emit(event):
                self._emit(event)
            case ev.AnnounceRequest():
                self._announce(action)
            case ev.HashPrompt(request_id, scope, token_ids, block_tokens, life):
                hashes = self.hashes[request_id] = hash_blocks(scope, token_ids, block_tokens)
                self.process.after(HASH_S, lambda: self.post(ev.Hashed(request_id, hashes, life, self.now)))
            case ev.FormPipeline(plans=plans):
                for plan in plans:
                    before = self._links.pop(plan.key, None)
                    if before is not None:
                        before.close()
                    link = self._links[plan.key] = SimLink(self, plan)
                    link.join()
            case ev.EndFormation():
                self._end_formation(action)
            case ev.WatchAgain(key, _, from_seq):
                if (link := self._links.get(key)) is not None:
                    link.watch_digest(from_seq)
            case ev.ReopenStreams(key, _, reported_wave):
                if (link := self._links.get(key)) is not None:
                    link.reopen(reported_wave)
            case ev.AskInventory(key, fence):
                if (link := self._links.get(key)) is not None:
                    link.ask_inventory(fence)
            case ev.RefuseSubmit(request_id, error):
                if self._arriving is None or self._streams.get(request_id) is self._arriving:
                    raise Violation("I4", f"{request_id} was refused as a duplicate of itself")
                self.world.clients.hear(self._arriving, Failed(request_id, error))
            case ev.Span() | ev.RefuseReform() | ev.DigestExcess():
                pass

    def reported_wave(self, key: DaemonKey) -> WaveOrdinal:
        """The last wave whose report the core has taken from this daemon."""
        return self.machine.reported_wave(key)

    def _emit(self, event: PrefillEvent) -> None:
        asked = self._streams.get(event.request_id)
        if asked is None:
            raise Violation("I4", f"nobody asked for {event}, or it had its outcome before")
        if isinstance(event, Admitted):
            self.world.check_admitted(self, event, asked.request.prompt_tokens)
            self.world.omniscient.admits(self, event)
        elif isinstance(event, Finished | Failed):
            del self._streams[event.request_id]
            self.hashes.pop(event.request_id, None)
        self.world.clients.hear(asked, event)

    def _send_round(self, key: DaemonKey, asked: Round) -> None:
        first = key.stage == 0 and key.rank == 0  # every daemon is asked the same
        # A round that is sent again asks nothing new, and may ask for requests that have ended since.
        place = (asked.fence.formation, RoundOrdinal(asked.fence.ordinal))
        if first and place > self._asked_round:
            self._asked_round = place
            for prepare in asked.prepares:
                self.world.omniscient.prepares(self, prepare.key)
        if (link := self._links.get(key)) is not None:
            link.send_round(asked)

    def _announce(self, action: ev.AnnounceRequest) -> None:
        """A short one waits for the next round, where the cluster has that; the others go their own way."""
        short_bytes = self.world.shape.riding_bytes
        links = [self._links.get(key) for key, *_ in action.targets]
        rides = may_ride(action, [link.riding if link is not None else None for link in links], short_bytes)
        for link, (_, fence, with_tokens), size in zip(links, action.targets, sizes(action), strict=True):
            if link is None:
                continue
            whole = _announcement(action, fence, with_tokens)
            if rides:
                link.take_along(whole, size)
            else:
                link.announce(_in_two(whole))
        if rides:
            told = tuple(key for key, *_ in action.targets)
            self.process.after(0.0, lambda: self.post(ev.AnnounceRides(action.key, told, self.now)))

    def _end_formation(self, action: ev.EndFormation) -> None:
        if action.cause.reason == InternalError.reason:
            raise Violation("protocol", f"formation {action.formation} was broken by a rule: {action.cause.message}")
        targets: dict[DaemonKey, Fence] = dict(action.targets)
        for key, link in list(self._links.items()):
            if key.pipeline == action.pipeline and link.plan.fence.formation == action.formation:
                del self._links[key]
                link.end(targets.get(key), action.cause)


def _announcement(action: ev.AnnounceRequest, fence: Fence, with_tokens: bool) -> AnnounceFrame:
    request = action.request
    tokens = request.token_ids if with_tokens else b""
    return AnnounceFrame(
        fence, action.key, request.prompt_tokens, 0, action.block_hashes, 0, tokens, True, request.sampling
    )


def _in_two(whole: AnnounceFrame) -> list[AnnounceFrame]:
    """So that gathering frames is part of every history."""
    first = replace(whole, token_ids=b"", last=False)
    return [first, replace(whole, fence=replace(whole.fence, ordinal=1), block_hashes=b"")]
