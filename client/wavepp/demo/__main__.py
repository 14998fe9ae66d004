"""`python -m wavepp.demo`, behind scripts/demo: flags in, exit status out.

Status 0 only if everything the demo claims holds, 1 if something does not or could not be run, 130
after Ctrl-C or SIGTERM; whatever the way out, no process is left.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from wavepp_proto.runtime.command_line import run_app

if TYPE_CHECKING:
    from wavepp.demo.screen import Screen
    from wavepp.demo.story import Options

TRACE_FILE = Path("wavepp-demo.trace.json")


def demo(
    model: Annotated[
        Path | None,
        typer.Option("--model", envvar="WAVEPP_MODEL", help="Hugging Face folder; by default SmolLM2-135M-Instruct."),
    ] = None,
    stages: Annotated[
        int, typer.Option("--stages", envvar="WAVEPP_STAGES", min=2, help="Stage daemons to split the model over.")
    ] = 4,
    concurrency: Annotated[
        int, typer.Option("--concurrency", envvar="WAVEPP_CONCURRENCY", min=1, help="Most prompts under way.")
    ] = 8,
    dtype: Annotated[
        Literal["float32", "bfloat16"],
        typer.Option("--dtype", envvar="WAVEPP_DTYPE", help="bfloat16 is reported, not judged."),
    ] = "float32",
    trace_file: Annotated[
        Path, typer.Option("--trace-file", envvar="WAVEPP_TRACE_FILE", help="Where the Perfetto timeline goes.")
    ] = TRACE_FILE,
    json_file: Annotated[
        Path | None, typer.Option("--json", envvar="WAVEPP_JSON_FILE", help="Write all that was found here too.")
    ] = None,
) -> None:
    """Split a real model over stage daemons and compare every answer with the unsplit model."""
    from wavepp.demo.screen import Screen
    from wavepp.demo.story import Options
    from wavepp_proto.runtime.process import EXIT_INTERRUPTED, run_process

    options = Options(model, stages, concurrency, dtype, trace_file, json_file)
    screen = Screen()
    began = time.monotonic()
    outcome: list[bool | None] = []

    async def main(stop: asyncio.Event) -> None:
        outcome.append(await _until(stop, options, screen))

    status = run_process(main)
    screen.say(f"-- demo: {time.monotonic() - began:.3f} s")
    if status == 0 and outcome == [None]:
        status = EXIT_INTERRUPTED
    elif status == 0 and outcome != [True]:
        status = 1
    raise typer.Exit(status)


async def _until(stop: asyncio.Event, options: Options, screen: Screen) -> bool | None:
    """Whether everything holds; None if `stop` came first, when all that was started has ended."""
    from wavepp.demo.story import tell

    telling = asyncio.create_task(tell(options, screen), name="demo")
    stopped = asyncio.create_task(stop.wait(), name="stop")
    await asyncio.wait({telling, stopped}, return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
    if telling.done():
        return telling.result()
    screen.say("stopping")
    telling.cancel()
    await asyncio.gather(telling, return_exceptions=True)
    return None


def main() -> None:
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(demo)
    run_app(app)


if __name__ == "__main__":
    main()
