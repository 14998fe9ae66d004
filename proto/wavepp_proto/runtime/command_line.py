"""Runs a typer app so that a mistake on its command line, or in its environment, is one line and status 2.

Owns the wording of what typer itself refuses (text for a number, an option that is missing or unknown);
what a command refuses goes through `errors.describe`. The three `__main__` modules call `run_app`.
"""

from __future__ import annotations

import io
import os
import sys
from typing import Any, NoReturn

import typer
import typer.main

_REFUSAL: type[Exception] = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")
"""Typer brings its own click, or uses the real one: either way this is what a parser raises."""


def run_app(app: typer.Typer, arguments: list[str] | None = None) -> NoReturn:
    """Run the command that `arguments` (by default the process's own) name, then exit."""
    given = sys.argv[1:] if arguments is None else arguments
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a terminal or file of another encoding shows the rest as escapes
            stream.reconfigure(errors="backslashreplace")
    try:
        status = typer.main.get_command(app).main(args=list(given), standalone_mode=False)
    except _REFUSAL as error:
        refusal: Any = error
        text = refusal.format_message()
        if "\n" in text:  # asked without a command: the help, not a mistake in one option
            refusal.show()
        elif text:  # else the help was shown already
            sys.stderr.write(f"error: INVALID_REQUEST: {text}{_fields(refusal, given)}\n")
        sys.exit(refusal.exit_code)
    except typer.Abort:  # Ctrl-C, as typer passes it on
        from wavepp_proto.runtime.process import EXIT_INTERRUPTED

        sys.exit(EXIT_INTERRUPTED)
    sys.exit(status if isinstance(status, int) else 0)


def _fields(refusal: Any, given: list[str]) -> str:
    """Which option, and what it was given, as far as typer tells."""
    parameter = getattr(refusal, "param", None)
    if parameter is None:
        return ""
    value = _value(parameter, given)
    return f" (field={parameter.name}" + (f", value={value}" if value is not None else "") + ")"


def _value(parameter: Any, given: list[str]) -> str | None:
    for at, argument in enumerate(given):
        name, equals, value = argument.partition("=")
        if name in parameter.opts:
            return value if equals else next(iter(given[at + 1 :]), None)
    return os.environ.get(parameter.envvar) if isinstance(parameter.envvar, str) else None
