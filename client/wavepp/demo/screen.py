"""What the demo says while it runs: phases with their wall time, lines, progress.

Owns the console. On a terminal progress is drawn; in a file or a pipe only finished lines appear.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

TABLE_WIDTH = 160
"""Columns drawn at least: a narrow terminal wraps the table, it must not cut the figures that are the proof."""


class Screen:
    def __init__(self, console: Console | None = None) -> None:
        from rich.console import Console as RichConsole

        console = console or RichConsole(highlight=False)
        console.width = max(console.width, TABLE_WIDTH)
        self._console = console
        self.phases: dict[str, float] = {}
        """Wall time of each finished phase (seconds)."""

    def say(self, text: str) -> None:
        self._console.print(text, markup=False, soft_wrap=True)

    def show(self, drawn: RenderableType) -> None:
        self._console.print(drawn)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Announce a phase and print how long it took, also when it fails."""
        self.say(f"== {name}")
        began = time.monotonic()
        outcome = " FAILED"
        try:
            yield
            outcome = ""
        except asyncio.CancelledError:
            outcome = " stopped"
            raise
        finally:
            self.phases[name] = time.monotonic() - began
            self.say(f"-- {name}: {self.phases[name]:.3f} s{outcome}")

    @contextmanager
    def progress(self, title: str, total: int) -> Iterator[Callable[[int], None]]:
        """A bar of `total` units while the block runs; call what it yields with the units done since."""
        if not self._console.is_terminal:
            yield lambda units: None
            return
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=self._console, transient=True) as bar:
            task = bar.add_task(title, total=total)
            yield lambda units: bar.advance(task, units)
