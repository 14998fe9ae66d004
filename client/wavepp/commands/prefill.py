"""`wavepp prefill`: prompts in, first tokens and reuse out.

Owns reading prompts (arguments, standard input and files with one text a line, *.jsonl files with one
JSON object a line) and printing; `AsyncClient` does the work.
"""

from __future__ import annotations

import io
import json
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from wavepp.commands._shared import Controller, Proxy, address_of, console, explain, run, security
from wavepp_proto.runtime import options as opt

if TYPE_CHECKING:
    from wavepp import PrefillOutcome, PrefillResult

FIRST_PROMPTS = 5
"""Of those that one error happened to, as many are named."""
TEXT_FIELDS = frozenset({"request_id", "pipeline", "cluster", "cache_salt", "adapter", "model", "address"})
"""Of errors: digits there are names. All that crossed the wire is text, numbers too."""


def prefill(
    prompts: Annotated[
        list[str] | None, typer.Argument(help="Prompts; `-` reads one a line from standard input.")
    ] = None,
    file: Annotated[
        Path | None,
        typer.Option(
            "--file",
            envvar="WAVEPP_FILE",
            help="One text prompt a line; in a *.jsonl file, one JSON object with text or token_ids a line.",
        ),
    ] = None,
    tokens: Annotated[
        str | None, typer.Option("--tokens", envvar="WAVEPP_TOKENS", help="Token ids instead of text: 1,2,3")
    ] = None,
    controller: Controller = None,
    pipeline: Annotated[
        str | None, typer.Option("--pipeline", envvar="WAVEPP_PIPELINE", help="Pipeline; the controller chooses.")
    ] = None,
    tokenizer: Annotated[
        str | None, typer.Option("--tokenizer", envvar="WAVEPP_TOKENIZER", help="Tokenizer folder or tokenizer.json.")
    ] = None,
    concurrency: Annotated[
        int, typer.Option("--concurrency", envvar="WAVEPP_CONCURRENCY", min=1, help="Requests at once.")
    ] = 8,
    deadline_s: Annotated[
        float | None, typer.Option("--deadline-s", envvar="WAVEPP_DEADLINE_S", help="Deadline of each (seconds).")
    ] = None,
    priority: Annotated[int, typer.Option("--priority", envvar="WAVEPP_PRIORITY", help="-9..9, higher first.")] = 0,
    cache_salt: Annotated[
        str, typer.Option("--cache-salt", envvar="WAVEPP_CACHE_SALT", help="Separates tenants in the cache.")
    ] = "",
    top_logprobs: Annotated[
        int, typer.Option("--top-logprobs", envvar="WAVEPP_TOP_LOGPROBS", help="Log probabilities to report.")
    ] = 0,
    temperature: Annotated[
        float, typer.Option("--temperature", envvar="WAVEPP_TEMPERATURE", help="0 is greedy.")
    ] = 0.0,
    seed: Annotated[int, typer.Option("--seed", envvar="WAVEPP_SEED", help="Seed of the sampled token.")] = 0,
    tls_ca: opt.TlsCa = None,
    tls_cert: opt.TlsCert = None,
    tls_key: opt.TlsKey = None,
    tls_server_name: opt.TlsServerName = "",
    proxy: Proxy = None,
    as_json: opt.Json = False,
) -> None:
    """Prefill prompts and print their first tokens; exit status 1 if any failed."""
    from wavepp import AsyncClient, PrefillOutcome, Sampling
    from wavepp.errors import ControllerUnavailable

    wanted = _read(prompts or [], file, tokens)
    if not wanted:
        typer.echo("error: no prompt: give one, --tokens, --file or -", err=True)
        raise typer.Exit(2)
    sampling = Sampling(temperature=temperature, seed=seed, top_logprobs=top_logprobs)

    async def work() -> list[PrefillOutcome]:
        secure = security(tls_ca, tls_cert, tls_key, tls_server_name)
        outcomes: list[PrefillOutcome] = []
        async with AsyncClient(address_of(controller), tls=secure, proxy=proxy, tokenizer=tokenizer) as client:
            try:
                await client.status()
            except ControllerUnavailable as error:  # said at once; a controller that goes away later is waited for
                if not as_json:
                    raise
                return [PrefillOutcome(index, error=error) for index in range(len(wanted))]
            with _progress(len(wanted)) as advance:
                many = client.prefill_many(
                    wanted, concurrency=concurrency, pipeline=pipeline, deadline=deadline_s, priority=priority,
                    cache_salt=cache_salt, sampling=sampling,
                )  # fmt: skip
                async for outcome in many:
                    outcomes.append(outcome)
                    advance()
        return sorted(outcomes, key=lambda outcome: outcome.index)

    outcomes = run(work())
    _print(outcomes, as_json)
    if any(outcome.error for outcome in outcomes):
        raise typer.Exit(1)


def _read(prompts: list[str], file: Path | None, tokens: str | None) -> list[str | list[int]]:
    wanted: list[str | list[int]] = []
    if tokens is not None:
        wanted.append(_ids(tokens))
    source = "-"
    try:
        for prompt in prompts:
            wanted += _lines(_stdin()) if prompt == "-" else [prompt]
        if file is not None:
            source = str(file)
            wanted += _lines(_stdin()) if source == "-" else _entries(file)
    except (OSError, UnicodeDecodeError) as error:
        typer.echo(f"error: cannot read {source}: {error}", err=True)
        raise typer.Exit(2) from None
    return wanted


def _stdin() -> str:
    """All of it. A byte that is no text fails its own prompt, as in `_entries`."""
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")
    return sys.stdin.read()


def _ids(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        typer.echo(f"error: --tokens must be numbers with commas between, got {text!r}", err=True)
        raise typer.Exit(2) from None


def _entries(file: Path) -> list[str | list[int]]:
    """What a file asks for; its name decides, because prose may look like JSON. Raises what reading it raises.

    A byte that is not UTF-8 becomes a lone surrogate, which the client refuses in that prompt alone.
    """
    text = file.read_text(encoding="utf-8", errors="surrogateescape")
    return _objects(text) if file.suffix == ".jsonl" else _lines(text)


def _lines(text: str) -> list[str | list[int]]:
    """One text prompt a line; empty lines are skipped."""
    return [line for line in text.split("\n") if line.strip()]


def _objects(text: str) -> list[str | list[int]]:
    """One JSON object a line, with `text` or `token_ids`; empty lines are skipped."""
    found: list[str | list[int]] = []
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError):
            entry = None
        prompt = entry.get("token_ids", entry.get("text")) if isinstance(entry, dict) else None
        if prompt is None:
            typer.echo(f"error: line {number} is not a JSON object with text or token_ids", err=True)
            raise typer.Exit(2)
        found.append(prompt)
    return found


class _progress:
    """A progress bar on stderr for long work on a terminal; nothing otherwise."""

    def __init__(self, total: int) -> None:
        from rich.progress import Progress

        talk = console()
        self._bar = Progress(console=talk, transient=True, disable=not talk.is_terminal or total < 2)
        self._task = self._bar.add_task("prefill", total=total)

    def __enter__(self) -> Any:
        self._bar.start()
        return lambda: self._bar.advance(self._task)

    def __exit__(self, *exc: object) -> None:
        self._bar.stop()


def _print(outcomes: list[PrefillOutcome], as_json: bool) -> None:
    if as_json:
        for outcome in outcomes:
            typer.echo(json.dumps(_as_dict(outcome), allow_nan=False))
        return
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    headings = ("#", "prompt", "cached", "endpoint", "limited by", "admission\nms", "prefill\nms", "first\ntoken")
    table = Table(*headings)
    for column in table.columns[:4] + table.columns[5:7]:
        column.no_wrap = True  # a narrow terminal wraps words, no figure
    for outcome in outcomes:
        if outcome.result is None:
            continue
        result = outcome.result
        table.add_row(
            str(outcome.index), str(result.prompt_tokens), str(result.cached_tokens), str(result.endpoint),
            _limits(result), f"{result.timings.admission_ms:.2f}", f"{result.timings.prefill_ms:.1f}",
            escape(_token(result)),
        )  # fmt: skip
    if table.row_count:
        Console().print(table)
    for outcome in outcomes:
        if outcome.result is not None and outcome.result.top_logprobs:
            told = ", ".join(f"{one.token_id} {one.logprob:.4f}" for one in outcome.result.top_logprobs)
            typer.echo(f"prompt {outcome.index}: log probabilities {told}")
    for text, indexes in _by_error(outcomes).items():
        several = f"prompts {', '.join(map(str, indexes[:FIRST_PROMPTS]))}"
        if len(indexes) > FIRST_PROMPTS:
            several += f" and {len(indexes) - FIRST_PROMPTS} more"
        typer.echo(f"{several if len(indexes) > 1 else f'prompt {indexes[0]}'}: {text}", err=True)


def _by_error(outcomes: list[PrefillOutcome]) -> dict[str, list[int]]:
    """What failed in words, and the prompts that it happened to, in order."""
    found: dict[str, list[int]] = {}
    for outcome in outcomes:
        if outcome.error is not None:
            found.setdefault(explain(outcome.error), []).append(outcome.index)
    return found


def _limits(result: PrefillResult) -> str:
    """What kept reuse short, and what waiting for another request's prefix cost and won."""
    found = []
    if result.limiting_stage is not None:
        found.append(f"stage {result.limiting_stage} (another held {result.best_stage_hit})")
    if result.lost_to_snapshots:
        found.append(f"no snapshot ({result.endpoint + result.lost_to_snapshots} held)")
    if result.shared_tokens or result.timings.sharing_wait_ms:
        found.append(f"waited {result.timings.sharing_wait_ms:.0f} ms, saved {result.shared_tokens}")
    return "; ".join(found)


def _token(result: PrefillResult) -> str:
    text = "" if result.first_text is None else f" {result.first_text!r}"
    return f"{result.first_token}{text}"


def _number(name: str, value: object) -> object:
    if name in TEXT_FIELDS or not isinstance(value, str) or not re.fullmatch(r"-?(0|[1-9]\d{0,19})", value):
        return value
    return int(value)


def _as_dict(outcome: PrefillOutcome) -> dict[str, Any]:
    if outcome.result is None:
        error = outcome.error
        assert error is not None
        told = {name: _number(name, value) for name, value in error.fields.items()}
        detail = {"reason": error.reason, "message": error.message, "fields": told}
        return {"index": outcome.index, "error": detail}
    from dataclasses import asdict

    data = asdict(outcome.result)
    data.pop("logits_bytes", None)
    return {"index": outcome.index, **data}
