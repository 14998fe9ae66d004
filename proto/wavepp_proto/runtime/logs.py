"""Structured logs on stderr: one JSON object a line, or one readable line.

Owns the log adapter, both formats, masking of secrets and the hooks for uncaught exceptions. Every
process calls `configure` once; modules call `get_log(__name__)` and log an event name with the
vocabulary's words as keys: `log.info("pipeline formed", pipeline="p0", formation=3)`.
"""

from __future__ import annotations

import asyncio
import json as json_module
import logging
import sys
import threading
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Final, TextIO

from wavepp_proto.errors import InvalidRequest

LEVELS: Final = ("debug", "info", "warning", "error")
MASK: Final = "***"
_SECRET_NAMES: Final = frozenset({"token", "authorization", "credentials"})
_SECRET_ENDINGS: Final = ("password", "secret", "api_key", "private_key", "auth_token", "access_token", "bearer_token")
"""Not every word with `token` in it: `first_token` and `cached_tokens` are what these logs are about."""


class Log:
    """A logger whose messages are event names with fields. Immutable; `bind` makes a narrower one."""

    __slots__ = ("_bound", "_logger")

    def __init__(self, logger: logging.Logger, bound: Mapping[str, object] | None = None) -> None:
        self._logger = logger
        self._bound = dict(bound or {})

    def bind(self, **fields: object) -> Log:
        """The same log with `fields` on every line."""
        return Log(self._logger, {**self._bound, **fields})

    def debug(self, event: str, /, **fields: object) -> None:
        self._emit(logging.DEBUG, event, fields)

    def info(self, event: str, /, **fields: object) -> None:
        self._emit(logging.INFO, event, fields)

    def warning(self, event: str, /, **fields: object) -> None:
        self._emit(logging.WARNING, event, fields)

    def error(self, event: str, /, **fields: object) -> None:
        self._emit(logging.ERROR, event, fields)

    def exception(self, event: str, /, error: BaseException | None = None, **fields: object) -> None:
        """At level error, with the traceback of `error` or of the exception being handled."""
        self._emit(logging.ERROR, event, fields, error or sys.exc_info()[1])

    def _emit(self, level: int, event: str, fields: Mapping[str, object], error: BaseException | None = None) -> None:
        if self._logger.isEnabledFor(level):
            extra = {"wavepp_fields": {**self._bound, **fields}}
            self._logger.log(level, "%s", event, extra=extra, exc_info=error)


def get_log(name: str) -> Log:
    """The log of one module: `get_log(__name__)`."""
    return Log(logging.getLogger(name))


def configure(level: str = "info", json: bool = True, stream: TextIO | None = None, **bound: object) -> None:
    """Send every log of this process to `stream` (stderr). Replaces what an earlier call set up.

    `bound` fields appear on every line. Exceptions that end the process or a thread are logged too.
    Raises InvalidRequest for an unknown `level`.
    """
    check_level(level)
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter(bound) if json else TextFormatter(bound))
    handler.set_name("wavepp")
    root = logging.getLogger()
    for old in [known for known in root.handlers if known.get_name() == "wavepp"]:
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(level.upper())
    sys.excepthook = _log_uncaught
    threading.excepthook = _log_uncaught_in_thread


def check_level(level: str) -> None:
    """Raise InvalidRequest listing the levels unless `level` is one, in whatever case."""
    if level.lower() not in LEVELS:
        known = ", ".join(LEVELS)
        raise InvalidRequest(f"unknown log level {level!r}", field="log_level", value=level, limit=known)


def log_uncaught(loop: asyncio.AbstractEventLoop) -> None:
    """Log exceptions that no task, callback or generator of `loop` handled."""
    loop.set_exception_handler(_log_uncaught_in_loop)


class JsonFormatter(logging.Formatter):
    """ts (UTC, ms), level, event, log, then bound and own fields, then error and traceback."""

    def __init__(self, bound: Mapping[str, object]) -> None:
        super().__init__()
        self._bound = dict(bound)

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "ts": _timestamp(record.created),
            "level": record.levelname.lower(),
            "event": record.getMessage(),
            "log": record.name,
        }
        # A field never overwrites what every line has.
        line = {**masked({**self._bound, **_fields(record)}), **line}
        if record.exc_info and record.exc_info[1] is not None:
            line["error"] = repr(record.exc_info[1])
            line["traceback"] = self.formatException(record.exc_info)
        return json_module.dumps(line, default=str, ensure_ascii=False)


class TextFormatter(logging.Formatter):
    """`12:30:01.250 INFO event key=value ...` for people."""

    def __init__(self, bound: Mapping[str, object]) -> None:
        super().__init__()
        self._bound = dict(bound)

    def format(self, record: logging.LogRecord) -> str:
        fields = masked({**self._bound, **_fields(record)})
        words = " ".join(f"{name}={value}" for name, value in fields.items())
        clock = _timestamp(record.created)[11:23]
        line = f"{clock} {record.levelname:<7} {record.getMessage()} {words}".rstrip()
        if record.exc_info and record.exc_info[1] is not None:
            line += "\n" + self.formatException(record.exc_info)
        return line


def masked(fields: Mapping[str, object]) -> dict[str, object]:
    """`fields` with the values of secret names replaced, nested mappings included."""
    return {name: _masked_value(name, value) for name, value in fields.items()}


def _masked_value(name: str, value: object) -> object:
    lowered = name.lower()
    if value and (lowered in _SECRET_NAMES or lowered.endswith(_SECRET_ENDINGS)):
        return MASK
    return masked(value) if isinstance(value, Mapping) else value


def _fields(record: logging.LogRecord) -> dict[str, object]:
    fields: dict[str, object] = getattr(record, "wavepp_fields", {})
    return fields


def _timestamp(seconds: float) -> str:
    whole = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds))
    return f"{whole}.{int(seconds % 1 * 1000):03d}Z"


_UNCAUGHT: Final = get_log("wavepp.uncaught")


def _log_uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, trace)
        return
    _UNCAUGHT.exception("uncaught exception", error)


def _log_uncaught_in_thread(report: threading.ExceptHookArgs) -> None:
    name = report.thread.name if report.thread else None
    _UNCAUGHT.exception("uncaught exception in a thread", report.exc_value, thread=name)


def _log_uncaught_in_loop(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    task = context.get("task") or context.get("future")
    name = task.get_name() if isinstance(task, asyncio.Task) else None
    _UNCAUGHT.exception("uncaught exception in asyncio", context.get("exception"), about=context["message"], task=name)
