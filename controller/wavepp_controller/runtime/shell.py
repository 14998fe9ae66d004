"""The asyncio shell around the controller core: events in, actions carried out.

Owns the one door to the core (`post`), the links to daemons, and the event queues of live requests.
Single-threaded: everything runs on the event loop, so the core needs no lock. Actions never call
back into `post`; whatever they cause arrives later as an event.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from typing import Any, Protocol

from wavepp_controller.core import events as ev
from wavepp_controller.core.machine import ControllerMachine
from wavepp_controller.runtime.daemon_link import DaemonLink
from wavepp_controller.runtime.dispatch import Dispatch
from wavepp_controller.runtime.hashing import hash_prompt, hash_short, is_short
from wavepp_controller.runtime.observability import Observer
from wavepp_controller.runtime.request_spans import RequestSpans
from wavepp_proto.errors import ControllerUnavailable, StaleMessage, WaveppError, from_info
from wavepp_proto.runtime.channels import ClientSecurity
from wavepp_proto.runtime.logs import get_log
from wavepp_proto.terms import (
    DaemonKey,
    Failed,
    Fence,
    Finished,
    JoinPlan,
    PipelineId,
    PrefillEvent,
    RequestId,
)

log = get_log(__name__)

TICK_S = 0.05
RETRY_AFTER_MS = 1000


class EventSink(Protocol):
    """Hears what happens to one request."""

    def put_nowait(self, event: PrefillEvent) -> None: ...


class ControllerShell:
    """Runs one ControllerMachine."""

    def __init__(
        self, machine: ControllerMachine, security: ClientSecurity, spans: RequestSpans, observer: Observer
    ) -> None:
        self.machine = machine
        self._security = security
        self._spans = spans
        self._observer = observer
        self._links: dict[DaemonKey, DaemonLink] = {}
        self._dispatch = Dispatch(self._links, spans)
        self._sinks: dict[RequestId, EventSink] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._reforms: dict[str, asyncio.Future[WaveppError | None]] = {}
        self._loop = asyncio.get_running_loop()
        self._alarm: asyncio.TimerHandle | None = None
        self.closed = False
        """Nothing happens any more: who waits for something must end its call while the server still can say why."""
        self.changed = asyncio.Event()
        """Set whenever something an operator can see has changed."""
        self.outdated = asyncio.Event()
        """Set when a daemon has seen a newer authority than ours: campaign again."""
        self.failure: asyncio.Future[BaseException] = self._loop.create_future()
        """Done when the core broke one of its own rules: the process must end."""

    # --- the door ---------------------------------------------------------------------------------

    def post(self, event: ev.Event) -> None:
        try:
            actions = self.machine.handle(event)
        except WaveppError:
            raise
        except Exception as error:  # a bug in the core: nothing after it can be trusted
            log.exception("the core failed", event=type(event).__name__)
            if not self.failure.done():
                self.failure.set_result(error)
            return
        for action in actions:
            self._perform(action)
        self.changed.set()
        self._set_alarm()

    def _set_alarm(self) -> None:
        """Wake the core at the instant it asks for; an alarm that comes too early does no harm."""
        at = self.machine.wake_at
        if at is None or (self._alarm is not None and self._alarm.when() <= at):
            return
        if self._alarm is not None:
            self._alarm.cancel()
        self._alarm = self._loop.call_at(at, self._alarmed)

    def _alarmed(self) -> None:
        self._alarm = None
        self.post(ev.PauseOver(time.monotonic()))

    async def tick(self) -> None:
        """Give the core its clock until cancelled."""
        while True:
            deadline = self.machine.next_deadline()
            now = time.monotonic()
            pause = TICK_S if deadline is None else min(TICK_S, max(0.001, deadline - now))
            await asyncio.sleep(pause)
            self.post(ev.Tick(time.monotonic()))

    async def changed_within(self, seconds: float) -> bool:
        """Wait for a change of what operators see, at most `seconds`; at once when this shell is closed."""
        if self.closed:
            return True
        self.changed.clear()
        try:
            async with asyncio.timeout(seconds):
                await self.changed.wait()
        except TimeoutError:
            return False
        return True

    def links(self, pipeline: PipelineId) -> dict[DaemonKey, DaemonLink]:
        """The daemons of a pipeline that streams are open to."""
        return {key: link for key, link in self._links.items() if key.pipeline == pipeline}

    # --- requests ---------------------------------------------------------------------------------

    def open_request(self, request_id: RequestId, sink: EventSink) -> None:
        """`sink` hears the events of a request that is about to be submitted; bounded by its chunks."""
        self._sinks[request_id] = sink

    def is_open(self, request_id: RequestId) -> bool:
        return request_id in self._sinks

    def close_request(self, request_id: RequestId, sink: EventSink) -> None:
        """The client is gone or has its answer; a live request is cancelled."""
        # The id may live a next life by now: only the stream that opened this one may end it.
        if self._sinks.get(request_id) is sink:
            del self._sinks[request_id]
            self.post(ev.Cancel(request_id, time.monotonic()))

    def check_open(self) -> None:
        """ControllerUnavailable when this shell is closed."""
        if self.closed:
            raise _closing()

    async def reform(self, event: ev.ReformAsked) -> None:
        """Post a reform; raises what the core refuses it with."""
        answer: asyncio.Future[WaveppError | None] = asyncio.get_running_loop().create_future()
        self._reforms[event.pipeline] = answer
        self.post(event)
        self._reforms.pop(event.pipeline, None)
        if answer.done() and (error := answer.result()) is not None:
            raise error

    # --- actions ----------------------------------------------------------------------------------

    def _perform(self, action: ev.Action) -> None:
        match action:
            case ev.SendWave():
                self._dispatch.send_wave(action)
            case ev.SendRound():
                self._dispatch.send_round(action)
            case ev.Emit(event):
                self._observer.emitted(action)
                self._emit(event)
            case ev.Span():
                self._spans.record(action)
            case ev.AnnounceRequest():
                self._announce(action)
            case ev.HashPrompt():
                self._hash(action)
            case ev.FormPipeline(pipeline, formation, plans):
                self._observer.formation_begun(pipeline, formation)
                for plan in plans:
                    self._spawn(self._join(plan), f"join-{plan.key}")
            case ev.EndFormation():
                self._observer.formation_ended(action)
                self._end_formation(action)
            case ev.WatchAgain(key, _, from_seq):
                if (link := self._links.get(key)) is not None:
                    link.watch_digest(from_seq)
            case ev.DigestExcess(key, told, most):
                log.warning("digest over its bound", pipeline=key.pipeline, stage=key.stage, rank=key.rank,
                            blocks=told, limit=most)  # fmt: skip
            case ev.ReopenStreams(key, fence, reported_wave):
                link = self._links.get(key)
                if link is not None and link.plan.fence.formation == fence.formation:
                    link.reopen(reported_wave)
            case ev.AskInventory(key, fence):
                link = self._links.get(key)
                if link is not None and link.plan.fence.formation == fence.formation:
                    self._spawn(self._take_inventory(link, fence), f"inventory-{key}")
            case ev.RefuseReform(pipeline, error):
                if (answer := self._reforms.get(pipeline)) is not None and not answer.done():
                    answer.set_result(from_info(error))

    def _emit(self, event: PrefillEvent) -> None:
        sink = self._sinks.get(event.request_id)
        if isinstance(event, Finished | Failed):
            self._sinks.pop(event.request_id, None)
            self._spans.ended(event)
        if sink is not None:
            sink.put_nowait(event)

    def _hash(self, action: ev.HashPrompt) -> None:
        if is_short(action.token_ids):
            self._loop.call_soon(self._hash_at_once, action)
        else:
            self._spawn(self._hash_in_slices(action), "hash")

    def _hash_at_once(self, action: ev.HashPrompt) -> None:
        self._hashed(action, hash_short(action.scope, action.token_ids, action.block_tokens))

    async def _hash_in_slices(self, action: ev.HashPrompt) -> None:
        self._hashed(action, await hash_prompt(action.scope, action.token_ids, action.block_tokens))

    def _hashed(self, action: ev.HashPrompt, hashes: bytes) -> None:
        self.post(ev.Hashed(action.request_id, hashes, action.life, time.monotonic()))

    def _announce(self, action: ev.AnnounceRequest) -> None:
        if self._dispatch.announce(action):
            told = ev.AnnounceRides(action.key, tuple(key for key, *_ in action.targets), time.monotonic())
            self._loop.call_soon(self.post, told)

    # --- formations -------------------------------------------------------------------------------

    async def _join(self, plan: JoinPlan) -> None:
        address = next(peer.address for peer in plan.peers if peer.key == plan.key)
        link = DaemonLink(plan, address, self._security, self.post, lambda: self.machine.reported_wave(plan.key))
        before, self._links[plan.key] = self._links.get(plan.key), link
        if before is not None:
            await before.close()
        try:
            reply = await link.calls.join()
        except WaveppError as error:
            if error.reason == StaleMessage.reason and error.fields.get("field") == "epoch":
                self.outdated.set()
            await self._drop(link)
            failed = ev.JoinFailed(plan.key, plan.fence.formation, error.info(), time.monotonic())
            self.post(failed)
            return
        if self._links.get(plan.key) is not link:
            return
        link.serve()
        self.post(ev.Joined(plan.key, plan.fence.formation, reply, time.monotonic()))
        self._observer.formation_joined(plan.key.pipeline, plan.fence.formation)

    def _end_formation(self, action: ev.EndFormation) -> None:
        targets = dict(action.targets)
        for key, link in list(self._links.items()):
            if key.pipeline != action.pipeline or link.plan.fence.formation != action.formation:
                continue
            del self._links[key]
            fence = targets.get(key)
            ending = link.end(fence, action.cause) if fence is not None else link.close()
            self._spawn(ending, f"end-{key}")

    async def _take_inventory(self, link: DaemonLink, fence: Fence) -> None:
        """One that does not come is no loss: the core asks again after a while."""
        try:
            inventory = await link.calls.inventory(fence)
        except WaveppError as error:
            log.debug("no inventory", stage=link.plan.key.stage, reason=error.reason, error=error.message)
            return
        if self._links.get(link.plan.key) is link:
            self.post(ev.InventoryArrived(link.plan.key, inventory, time.monotonic()))

    async def _drop(self, link: DaemonLink) -> None:
        if self._links.get(link.plan.key) is link:
            del self._links[link.plan.key]
        await link.close()

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._reap)

    def _reap(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.exception("a task failed", error=error, task=task.get_name())
            if not self.failure.done():
                self.failure.set_result(error)

    async def stand_down(self) -> None:
        """Leadership is over: fail what is live and let go of every daemon.

        They are told, so that none waits for our silence; where another controller leads, the fence refuses it."""
        self.post(ev.LeadershipLost(time.monotonic()))
        links = list(self._links.values())
        self._links.clear()
        cause = ControllerUnavailable("the controller does not lead any more").info()
        await asyncio.gather(*(link.end(link.plan.fence, cause) for link in links))

    async def close(self) -> None:
        """Fail what is live, close every link. Idempotent."""
        self.closed = True
        self.changed.set()
        await self.stand_down()
        for request_id, sink in list(self._sinks.items()):
            sink.put_nowait(Failed(request_id, _closing().info()))
        self._sinks.clear()
        pending = [task for task in self._tasks if task is not asyncio.current_task()]
        if pending:
            await asyncio.wait(pending, timeout=2.0)


def _closing() -> ControllerUnavailable:
    return ControllerUnavailable("the controller is closing", retry_after_ms=RETRY_AFTER_MS)
