"""Scenario texts: a story's commands and its golden output, in one file that a person can review.

    # what the story proves
    cluster pools=64,64,64
    submit r1 len=100
    run until idle
    ----
    (what happened, told by `story`)

Stanzas are separated by blank lines; comments stay as they are. `play` runs all commands in one world
and gives the text back with the output renewed: a file that `play` does not change is right. Owns the
format; what the commands do is in `console`.
"""

from __future__ import annotations

from wavepp_simulator.console import CommandError, Console
from wavepp_simulator.ledger import Violation

RULE = "----"


class ScriptError(Exception):
    """A command that cannot be understood or an expectation that does not hold; names its line.

    `text` is the story up to and including the line, for whoever looks for the cause."""

    def __init__(self, message: str, text: str) -> None:
        super().__init__(message)
        self.text = text


def play(text: str) -> str:
    """`text` with every stanza's output renewed. Raises ScriptError; a violation is one."""
    console = Console()
    told: list[str] = []
    number = 1
    for stanza in text.strip("\n").split("\n\n"):
        lines = stanza.split("\n")
        asked = lines[: lines.index(RULE)] if RULE in lines else lines
        told += asked
        commands = [(number + at, line) for at, line in enumerate(asked) if line and not line.startswith("#")]
        for line_number, line in commands:
            try:
                console.obey(line)
            except (CommandError, Violation) as error:
                so_far = "\n".join([*told, RULE, *console.take(), f"line {line_number}: {line}: {error}"])
                raise ScriptError(f"line {line_number}: {line}: {error}", so_far) from error
        if commands:
            told += [RULE, *(console.take() or ["ok"])]
        told.append("")
        number += len(lines) + 1
    return "\n".join(told)
