"""The blocking client: same answers, many threads, a clean end."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.harness.eventually import eventually_sync
from wavepp import Client, Finished, errors
from wavepp.testing import Answer, FakeController, Gate, Outcome, Step

WAIT_S = 30


@pytest.fixture
def controller() -> Iterator[FakeController]:
    with FakeController.sync(answer=Answer(first_token=3, cached_tokens=64)) as controller:
        yield controller


@pytest.fixture
def client(controller: FakeController) -> Iterator[Client]:
    with Client(controller.address) as client:
        yield client


def test_every_method_answers_as_the_asyncio_client_does(controller: FakeController, client: Client) -> None:
    assert client.prefill([1] * 100, request_id="mine").cached_tokens == 64
    assert client.describe() == controller.description
    assert client.status().ready
    assert not client.cancel("mine")
    outcomes = client.prefill_many([[1], [], [2]], concurrency=2, priority=4)
    assert {outcome.index: type(outcome.error) for outcome in outcomes} == {
        0: type(None),
        1: errors.EmptyPrompt,
        2: type(None),
    }
    assert controller.requests[-1].request.priority == 4


def test_stream_yields_events_and_a_result(client: Client) -> None:
    with client.stream([1], request_id="mine") as stream:
        names = [type(event).__name__ for event in stream]
        assert names == ["Queued", "Admitted", "Finished"]
        assert stream.result().trace_id == stream.trace_id
        assert stream.request_id == "mine"


def test_stream_cancels_its_request_when_left(controller: FakeController, client: Client) -> None:
    controller.script(Answer(gates={Step.FINISHED: Gate()}))
    with client.stream([1]) as stream:
        assert not isinstance(next(stream), Finished)
    assert eventually_sync(lambda: controller.requests[0].outcome, WAIT_S) is Outcome.CANCELLED


def test_many_cancels_what_is_under_way_when_left(controller: FakeController, client: Client) -> None:
    controller.script(Answer())
    controller.answer = Answer(gates={Step.FINISHED: Gate()})
    outcomes = client.prefill_many([[1], [2], [3]], concurrency=3)
    next(outcomes)
    outcomes.close()  # type: ignore[attr-defined]  # a generator, as the caller of next() knows
    eventually_sync(lambda: all(received.outcome for received in controller.requests), WAIT_S)
    assert [received.outcome for received in controller.requests].count(Outcome.FINISHED) == 1


def test_typed_error_is_raised_in_the_calling_thread(controller: FakeController, client: Client) -> None:
    controller.script(Answer(error=errors.StageLost("stage 2 is gone", stage=2), error_at=Step.FINISHED))
    with pytest.raises(errors.StageLost, match="stage 2 is gone") as caught:
        client.prefill([1])
    assert caught.value.fields == {"stage": "2"}
    with pytest.raises(errors.InvalidRequest):
        client.stream([1], priority=99)


def test_threads_run_at_once_when_they_share_a_client(controller: FakeController, client: Client) -> None:
    gate = Gate()
    controller.answer = Answer(first_token=9, gates={Step.FINISHED: gate})
    with ThreadPoolExecutor(6) as pool:
        running = [pool.submit(client.prefill, [number]) for number in range(6)]
        eventually_sync(lambda: len(controller.requests) == 6, WAIT_S)
        assert not any(future.done() for future in running)
        gate.open()
        assert [future.result(WAIT_S).first_token for future in running] == [9] * 6


def test_calls_in_other_threads_end_typed_when_the_client_is_closed(controller: FakeController) -> None:
    controller.answer = Answer(gates={Step.FINISHED: Gate()})
    client = Client(controller.address)
    with ThreadPoolExecutor(2) as pool:
        running = [pool.submit(client.prefill, [number]) for number in range(2)]
        eventually_sync(lambda: len(controller.requests) == 2, WAIT_S)
        client.close()
        assert [type(future.exception(WAIT_S)) for future in running] == [errors.Cancelled] * 2
    client.close()
    with pytest.raises(RuntimeError, match="closed"):
        client.prefill([1])


def test_thread_ends_when_the_client_is_closed_or_dropped(controller: FakeController) -> None:
    before = threading.active_count()
    client = Client(controller.address)
    client.prefill([1])
    client.close()
    assert threading.active_count() == before
    dropped = Client(controller.address)
    dropped.describe()
    del dropped
    assert threading.active_count() == before


def test_iterators_end_quietly_when_the_client_was_closed_first(controller: FakeController) -> None:
    with Client(controller.address) as client:
        outcomes = client.prefill_many([[1], [2]], concurrency=1)
        next(outcomes)
        stream = client.stream([1])
        next(stream)
    stream.close()
    outcomes.close()  # type: ignore[attr-defined]


def test_interrupt_cancels_the_request_and_leaves_the_client_usable(controller: FakeController, client: Client) -> None:
    gate = Gate()
    controller.script(Answer(gates={Step.FINISHED: gate}))
    main = threading.get_ident()

    def interrupt() -> None:
        eventually_sync(lambda: controller.requests, WAIT_S)
        signal.pthread_kill(main, signal.SIGINT)

    helper = threading.Thread(target=interrupt)
    helper.start()
    with pytest.raises(KeyboardInterrupt):
        client.prefill([1])
    helper.join()
    assert eventually_sync(lambda: controller.requests[0].outcome, WAIT_S) is Outcome.CANCELLED
    assert client.prefill([1]).first_token == 3
