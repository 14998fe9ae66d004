"""A request is sent again only where the controller cannot have accepted it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Iterable

import pytest

from tests.harness.virtual_clock import VirtualClock
from wavepp import AsyncClient, RetryPolicy, errors
from wavepp._retry import Retrier
from wavepp.testing import Answer, FakeController, Gate, Step
from wavepp_proto import limits
from wavepp_proto.errors import BY_REASON, WaveppError

AT_ONCE = RetryPolicy(attempts=4, first_delay=0)
REFUSED = ["QUEUE_FULL", "DRAINING", "PIPELINE_UNAVAILABLE", "CONTROLLER_UNAVAILABLE"]
OK = Answer(first_token=5)


@pytest.fixture
async def controller() -> AsyncIterator[FakeController]:
    async with FakeController() as controller:
        yield controller


@pytest.fixture
async def client(controller: FakeController) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(controller.address, retry=AT_ONCE) as client:
        yield client


@pytest.mark.parametrize("as_status", [False, True], ids=["event", "status"])
@pytest.mark.parametrize("reason", REFUSED)
async def test_retried_with_the_same_id_when_refused_before_any_event(
    controller: FakeController, client: AsyncClient, reason: str, as_status: bool
) -> None:
    refusal = Answer(error=BY_REASON[reason]("later"), error_as_status=as_status)
    controller.script(refusal, refusal, OK)
    assert (await client.prefill([1, 2])).first_token == 5
    assert len({received.request.request_id for received in controller.requests}) == 1
    assert [received.request.token_ids for received in controller.requests] == [b"\1\0\0\0\2\0\0\0"] * 3


@pytest.mark.parametrize("step", [Step.ADMITTED, Step.FINISHED])
@pytest.mark.parametrize("reason", sorted(cls.reason for cls in BY_REASON.values() if cls.retryable))
async def test_not_retried_when_the_request_was_accepted(
    controller: FakeController, client: AsyncClient, reason: str, step: Step
) -> None:
    controller.script(Answer(error=BY_REASON[reason]("now"), error_at=step), OK)
    with pytest.raises(BY_REASON[reason]):
        await client.prefill([1])
    assert len(controller.requests) == 1


@pytest.mark.parametrize("reason", sorted(BY_REASON.keys() - REFUSED))
async def test_not_retried_when_the_error_is_not_a_refusal(
    controller: FakeController, client: AsyncClient, reason: str
) -> None:
    controller.script(Answer(error=BY_REASON[reason]("no")), OK)
    with pytest.raises(BY_REASON[reason]):
        await client.prefill([1])
    assert len(controller.requests) == 1


async def test_last_refusal_is_raised_when_the_attempts_are_used_up(
    controller: FakeController, client: AsyncClient
) -> None:
    controller.answer = Answer(error=errors.QueueFull("full", field="queue", value=8, limit=8))
    with pytest.raises(errors.QueueFull) as caught:
        await client.prefill([1])
    assert len(controller.requests) == AT_ONCE.attempts
    assert caught.value.fields == {"field": "queue", "value": "8", "limit": "8"}


async def test_remaining_time_shrinks_when_retried(controller: FakeController, client: AsyncClient) -> None:
    controller.script(Answer(error=errors.QueueFull("full", retry_after_ms=20)), OK)
    await client.prefill([1], deadline=50)
    first, second = (received.request.deadline_ms or 0 for received in controller.requests)
    assert 0 < second <= first - 20 < first <= 50_000


async def test_refusal_is_raised_at_once_when_the_named_wait_is_past_the_deadline(
    controller: FakeController, client: AsyncClient
) -> None:
    controller.script(Answer(error=errors.QueueFull("full", retry_after_ms=3_600_000)), OK)
    with pytest.raises(errors.QueueFull) as caught:
        await client.prefill([1], deadline=60)
    assert (len(controller.requests), caught.value.retry_after_ms) == (1, 3_600_000)


async def test_own_duplicate_is_retried_when_an_earlier_stream_was_lost(
    controller: FakeController, client: AsyncClient
) -> None:
    lost, ghost = errors.ControllerUnavailable("lost"), errors.DuplicateRequest("live")
    controller.script(Answer(error=lost, error_as_status=True), Answer(error=ghost), OK)
    assert (await client.prefill([1])).first_token == 5
    assert len(controller.requests) == 3


async def test_foreign_duplicate_is_raised_when_no_stream_was_lost(
    controller: FakeController, client: AsyncClient
) -> None:
    controller.script(Answer(error=errors.QueueFull("full")), Answer(error=errors.DuplicateRequest("live")), OK)
    with pytest.raises(errors.DuplicateRequest):
        await client.prefill([1])
    assert len(controller.requests) == 2


async def test_retries_stop_for_all_requests_when_the_budget_is_spent(controller: FakeController) -> None:
    policy = RetryPolicy(attempts=10, first_delay=0, budget=3, refund=1)
    controller.answer = Answer(error=errors.QueueFull("full"))
    async with AsyncClient(controller.address, retry=policy) as client:
        for expected in (4, 5):  # three retries, then none is left
            with pytest.raises(errors.QueueFull):
                await client.prefill([1])
            assert len(controller.requests) == expected
        controller.script(OK)
        await client.prefill([1])  # puts one back
        with pytest.raises(errors.QueueFull):
            await client.prefill([1])
    assert len(controller.requests) == 8


async def _gathered(tries: Iterable[Awaitable[float]]) -> list[float | BaseException]:
    return await asyncio.gather(*tries, return_exceptions=True)


class Outage:
    """A controller that is away for some seconds of virtual time, and one client's retries of it."""

    def __init__(self, away_s: float, policy: RetryPolicy, error: type[WaveppError]) -> None:
        self.clock = VirtualClock()
        self._back_at = away_s
        self._error = error
        self.retrier = Retrier(policy, lambda: 1.0, self.clock.now, self._sleep)
        self.tries = 0

    async def _sleep(self, seconds: float) -> None:
        await self.clock.until(self.clock.now() + seconds)

    async def attempt(self) -> float:
        self.tries += 1
        if self.clock.now() < self._back_at:
            raise self._error("away")
        return self.clock.now()

    async def requests(self, count: int, give_up_at: float) -> list[float | BaseException]:
        """When each was accepted, or its error."""
        tries = (self.retrier.run(self.attempt, give_up_at) for _ in range(count))
        return await self.clock.run(_gathered(tries))


ABSENCE_S = limits.CONTROLLER_ABSENCE_MS / 1000


@pytest.mark.parametrize("error", [errors.ControllerUnavailable, errors.Draining, errors.PipelineUnavailable])
@pytest.mark.parametrize("away_s", [9.6, ABSENCE_S - RetryPolicy().longest_delay])
async def test_every_request_waits_for_a_killed_controller_to_be_replaced(
    away_s: float, error: type[WaveppError]
) -> None:
    """500 requests: more tries than the budget of a full queue, which an outage does not spend."""
    outage = Outage(away_s, RetryPolicy(), error)
    accepted = await outage.requests(500, limits.DEFAULT_DEADLINE_MS / 1000)
    assert {isinstance(at, float) and away_s <= at < ABSENCE_S for at in accepted} == {True}
    assert outage.retrier.remaining == RetryPolicy().budget


@pytest.mark.parametrize(
    ("policy", "give_up_at", "tries", "ended_at"),
    [
        pytest.param(RetryPolicy(first_delay=1, longest_delay=1, patience=5), 60.0, 5, 4.0, id="patience"),
        pytest.param(RetryPolicy(first_delay=1, longest_delay=1, patience=5), 3.0, 3, 2.0, id="deadline"),
        pytest.param(RetryPolicy(first_delay=1, longest_delay=1, attempts=2), 60.0, 2, 1.0, id="attempts"),
        pytest.param(RetryPolicy(patience=0), 60.0, 1, 0.0, id="none"),
    ],
)
async def test_the_first_bound_that_is_met_ends_the_tries(
    policy: RetryPolicy, give_up_at: float, tries: int, ended_at: float
) -> None:
    outage = Outage(3600, policy, errors.ControllerUnavailable)
    (error,) = await outage.requests(1, give_up_at)
    assert isinstance(error, errors.ControllerUnavailable)
    assert (outage.tries, outage.clock.now()) == (tries, ended_at)


async def test_patience_begins_with_the_first_failure() -> None:
    """A request may have run for long before its controller was killed."""
    outage = Outage(109.6, RetryPolicy(), errors.ControllerUnavailable)

    async def later() -> float:
        await outage.clock.until(max(100.0, outage.clock.now()))
        return await outage.attempt()

    assert 109.6 <= await outage.clock.run(outage.retrier.run(later, 600.0)) < 100 + ABSENCE_S


async def test_request_waits_for_a_controller_that_comes_back() -> None:
    policy = RetryPolicy(attempts=1000, first_delay=0.01, longest_delay=0.05, budget=1000)
    async with FakeController(answer=OK) as controller, AsyncClient(controller.address, retry=policy) as client:
        await client.prefill([1])
        await controller.stop()
        waiting = asyncio.create_task(client.prefill([2], deadline=60))
        describing = asyncio.create_task(client.describe())
        await controller.start()
        assert (await waiting).first_token == 5
        assert (await describing).pipeline == "default"


async def test_refused_connection_is_typed_when_no_attempt_is_left() -> None:
    async with FakeController() as controller:
        address = controller.address
    async with AsyncClient(address, retry=RetryPolicy(attempts=2, first_delay=0)) as client:
        for call in (client.prefill([1]), client.describe(), client.cancel("x")):
            with pytest.raises(errors.ControllerUnavailable):
                await call


async def test_status_says_at_once_that_there_is_no_controller() -> None:
    async with FakeController() as controller:
        address = controller.address
    async with AsyncClient(address, retry=RetryPolicy(first_delay=3600, longest_delay=3600, patience=7200)) as client:
        with pytest.raises(errors.ControllerUnavailable):
            await client.status()


async def test_not_retried_when_the_connection_breaks_after_an_event(
    controller: FakeController, client: AsyncClient
) -> None:
    gate = Gate()
    controller.script(Answer(gates={Step.ADMITTED: gate}))
    running = asyncio.create_task(client.prefill([1]))
    await gate.reached()
    await controller.stop()
    with pytest.raises(errors.ControllerUnavailable):
        await running
    assert len(controller.requests) == 1


@pytest.mark.parametrize(
    ("tried", "chance", "retry_after_ms", "expected"),
    [
        (1, 0.0, None, 0.05),
        (1, 1.0, None, 0.1),
        (3, 1.0, None, 0.4),
        (30, 1.0, None, 2.0),
        (3000, 0.0, None, 1.0),
        (1, 1.0, 50, 0.1),
        (1, 0.0, 7000, 7.0),
    ],
)
def test_delay_doubles_up_to_its_cap_and_obeys_retry_after(
    tried: int, chance: float, retry_after_ms: int | None, expected: float
) -> None:
    error = errors.QueueFull("full", retry_after_ms=retry_after_ms)
    assert RetryPolicy().delay(tried, error, chance) == pytest.approx(expected)


@pytest.mark.parametrize("name", ["attempts", "patience", "first_delay", "longest_delay", "budget", "refund"])
def test_policy_is_refused_by_name_when_a_number_is_negative(name: str) -> None:
    with pytest.raises(errors.InvalidRequest) as caught:
        RetryPolicy(**{name: -1})
    assert (caught.value.fields["field"], caught.value.fields["value"]) == (name, "-1")


async def test_foreign_exception_is_not_retried() -> None:
    calls: list[int] = []

    async def broken() -> None:
        calls.append(1)
        raise ValueError("a bug")

    with pytest.raises(ValueError, match="a bug"):
        await Retrier(AT_ONCE).run(broken, float("inf"))
    assert calls == [1]


async def test_refund_never_exceeds_the_budget() -> None:
    async def fine() -> WaveppError | None:
        return None

    retrier = Retrier(RetryPolicy(budget=2, refund=5))
    await retrier.run(fine, float("inf"))
    assert retrier.remaining == 2
