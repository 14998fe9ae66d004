"""Structured logs: format, masking, uncaught exceptions (wavepp_proto.runtime.logs)."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import re
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from wavepp_proto.runtime import logs


@pytest.fixture
def stream() -> Iterator[io.StringIO]:
    """Where the logs of this test go; everything global is put back."""
    root = logging.getLogger()
    kept = root.handlers[:], root.level, sys.excepthook, threading.excepthook
    yield io.StringIO()
    root.handlers[:], sys.excepthook, threading.excepthook = kept[0], kept[2], kept[3]
    root.setLevel(kept[1])


def lines(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_line_is_one_json_object_when_logged(stream: io.StringIO) -> None:
    logs.configure("info", stream=stream, component="stage", stage=1)
    log = logs.get_log("wavepp.test").bind(pipeline="p0")
    log.info("wave done", wave=3, note="two\nlines", path=io)
    log.debug("not shown")
    (line,) = lines(stream)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", line.pop("ts"))
    assert line == {
        "level": "info",
        "event": "wave done",
        "log": "wavepp.test",
        "component": "stage",
        "stage": 1,
        "pipeline": "p0",
        "wave": 3,
        "note": "two\nlines",
        "path": str(io),
    }


def test_field_never_hides_the_event_when_it_has_its_name(stream: io.StringIO) -> None:
    logs.configure("info", stream=stream)
    logs.get_log("wavepp.test").info("real", event="fake", level="fake")
    assert (lines(stream)[0]["event"], lines(stream)[0]["level"]) == ("real", "info")


def test_percent_signs_are_kept_when_an_event_has_them(stream: io.StringIO) -> None:
    logs.configure("info", stream=stream)
    logs.get_log("wavepp.test").warning("100 %s done")
    assert lines(stream)[0]["event"] == "100 %s done"


def test_foreign_logs_have_the_same_form_when_libraries_write(stream: io.StringIO) -> None:
    logs.configure("warning", stream=stream, stage=1)
    logging.getLogger("some.library").warning("value %d", 7)
    assert (lines(stream)[0]["event"], lines(stream)[0]["stage"]) == ("value 7", 1)


def test_secrets_are_masked_and_token_counts_are_not(stream: io.StringIO) -> None:
    logs.configure("info", stream=stream, etcd_password="hunter2")
    secret = {"token": "t0p", "client_secret": "s3c", "API_KEY": "k", "nested": {"Authorization": "Bearer b"}}
    plain = {"first_token": 42, "cached_tokens": 64, "token_ids": 3, "password": ""}
    logs.get_log("wavepp.test").info("event", **secret, **plain)
    (line,) = lines(stream)
    assert {name: line[name] for name in plain} == plain
    masked = [
        line["token"],
        line["client_secret"],
        line["API_KEY"],
        line["nested"]["Authorization"],
        line["etcd_password"],
    ]
    assert masked == [logs.MASK] * 5


def test_line_is_readable_when_json_is_off(stream: io.StringIO) -> None:
    logs.configure("info", json=False, stream=stream, stage=1)
    logs.get_log("wavepp.test").info("wave done", wave=3, token="t0p")
    assert re.fullmatch(r"\d\d:\d\d:\d\d\.\d{3} INFO    wave done stage=1 wave=3 token=\*\*\*\n", stream.getvalue())


def test_each_line_appears_once_when_configured_twice(stream: io.StringIO) -> None:
    logs.configure("info", stream=io.StringIO())
    logs.configure("info", stream=stream)
    logs.get_log("wavepp.test").info("event")
    assert len(lines(stream)) == 1


def test_traceback_is_on_the_line_when_an_exception_is_logged(stream: io.StringIO) -> None:
    logs.configure("info", stream=stream)
    try:
        raise ValueError("wrong")
    except ValueError:
        logs.get_log("wavepp.test").exception("failed", wave=3)
    (line,) = lines(stream)
    assert (line["level"], line["error"], line["wave"]) == ("error", "ValueError('wrong')", 3)
    assert "Traceback" in line["traceback"]


async def test_exception_is_logged_when_a_callback_of_the_loop_raised(stream: io.StringIO) -> None:
    logs.configure("info", stream=stream)
    loop = asyncio.get_running_loop()
    logs.log_uncaught(loop)
    done = loop.create_future()

    def broken() -> None:
        loop.call_soon(done.set_result, None)
        raise ValueError("wrong")

    loop.call_soon(broken)
    await done
    (line,) = lines(stream)
    assert (line["event"], line["error"]) == ("uncaught exception in asyncio", "ValueError('wrong')")


async def test_exception_is_logged_when_nobody_awaited_the_failed_task(stream: io.StringIO) -> None:
    logs.configure("info", stream=stream)
    logs.log_uncaught(asyncio.get_running_loop())

    async def broken() -> None:
        raise ValueError("wrong")

    task = asyncio.create_task(broken(), name="broken-task")
    await asyncio.wait([task])
    del task
    (line,) = lines(stream)
    assert (line["error"], line["task"]) == ("ValueError('wrong')", "broken-task")


def test_exception_is_logged_when_a_thread_or_the_process_ends_with_it(stream: io.StringIO) -> None:
    logs.configure("info", stream=stream)

    def broken() -> None:
        raise ValueError("wrong")

    thread = threading.Thread(target=broken, name="broken-thread")
    thread.start()
    thread.join()
    try:
        broken()
    except ValueError as error:
        sys.excepthook(ValueError, error, error.__traceback__)
    in_thread, in_process = lines(stream)
    assert (in_thread["thread"], in_thread["error"]) == ("broken-thread", "ValueError('wrong')")
    assert (in_process["event"], in_process["error"]) == ("uncaught exception", "ValueError('wrong')")
