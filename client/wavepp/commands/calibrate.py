"""`wavepp calibrate`: measure a pipeline that runs, and write its device profile.

Owns sending the probes, one at a time, and reading each stage's sums between them; what to send and what follows
from it is `calibration.py`'s. Nobody else may use the pipeline meanwhile: foreign waves are noticed and refused.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from wavepp.commands._shared import Controller, Proxy, address_of, console, run, security
from wavepp_proto.runtime import options as opt

if TYPE_CHECKING:
    import numpy as np

    from wavepp import AsyncClient
    from wavepp._status import PipelineStatus
    from wavepp.calibration import Sample, StageFit
    from wavepp_proto.profile import Profile

REPORT_S = 5.0
"""Longest wait for the reports of all stages after a prompt's end."""
PERIOD_S = 0.005


def calibrate(
    out: Annotated[Path, typer.Option("--out", envvar="WAVEPP_OUT", help="Profile to write.")],
    controller: Controller = None,
    pipeline: Annotated[
        str | None, typer.Option("--pipeline", envvar="WAVEPP_PIPELINE", help="Pipeline; the only one by default.")
    ] = None,
    name: Annotated[
        str | None, typer.Option("--name", envvar="WAVEPP_NAME", help="The profile's name; the file's by default.")
    ] = None,
    longest: Annotated[
        int, typer.Option("--longest", envvar="WAVEPP_LONGEST", min=1, help="Longest prompt to send (tokens).")
    ] = 147_456,
    repeats: Annotated[
        int,
        typer.Option("--repeats", envvar="WAVEPP_REPEATS", min=1, help="Prompts of each length; the median counts."),
    ] = 3,
    seed: Annotated[
        int, typer.Option("--seed", envvar="WAVEPP_SEED", min=0, help="Another one makes other prompts, all cold.")
    ] = 0,
    tls_ca: opt.TlsCa = None,
    tls_cert: opt.TlsCert = None,
    tls_key: opt.TlsKey = None,
    tls_server_name: opt.TlsServerName = "",
    proxy: Proxy = None,
) -> None:
    """Send prompts of several lengths, cold and behind cached prefixes, through an idle pipeline; fit its stages."""
    from wavepp import AsyncClient
    from wavepp._paths import check_file, write_file

    async def work() -> None:
        check_file("out", out)
        secure = security(tls_ca, tls_cert, tls_key, tls_server_name)
        async with AsyncClient(address_of(controller), tls=secure, proxy=proxy) as client:
            profile, fits = await measure(client, pipeline, name or out.stem, longest, repeats, seed)
        write_file("out", out, profile.to_json())
        _show(profile, fits)

    run(work())


async def measure(
    client: AsyncClient, pipeline: str | None, name: str, longest: int, repeats: int, seed: int
) -> tuple[Profile, tuple[StageFit, ...]]:
    """The profile of an idle pipeline. Raises what requests raise, and InvalidRequest when it is not idle, is not
    there, or is too small to measure."""
    from wavepp import calibration

    before = await _pipeline(client, pipeline)
    samples = [sample async for sample in _samples(client, before, longest, repeats, seed)]
    fits = calibration.fit(samples, before.stages)
    provenance = {
        "method": "wavepp calibrate: lone prompts, median of repeats, least squares of relative errors",
        "model": before.model,
        "engine": before.daemons[0].engine,
        "wavepp": before.daemons[0].version,
        "repeats": repeats,
        "not_measured": ["link_us", "link_us_per_token", "copy_us", "attention_every"],
        "fit": [{"stage": at, "worst": round(one.worst, 4), "mean": round(one.mean, 4)} for at, one in enumerate(fits)],
        "samples": [
            {"chunks": [list(one) for one in sample.chunks], "us": list(sample.compute_us)} for sample in samples
        ],
    }
    return calibration.profile_of(before, fits, name, provenance), fits


async def _samples(
    client: AsyncClient, before: PipelineStatus, longest: int, repeats: int, seed: int
) -> AsyncIterator[Sample]:
    from rich.progress import track

    from wavepp import calibration

    plan = calibration.probes(before, longest)
    vocabulary = (await client.describe(before.pipeline)).vocabulary
    talk = console()
    # The first prompts of a process are slow for reasons of their own: caches, allocators, kernels to be chosen.
    await _sent(client, before, _tokens(vocabulary, seed, (2, 0), before.wave_tokens // 2))
    cached = {0}
    for number, probe in enumerate(track(plan, "calibrating", console=talk, disable=not talk.is_terminal)):
        prefix = _tokens(vocabulary, seed, (0, probe.prefix), probe.prefix)
        if probe.prefix not in cached:
            cached.add(probe.prefix)
            sample = await _sent(client, before, prefix)
            if sample is not None:
                yield sample
        for repeat in range(repeats):
            own = _tokens(vocabulary, seed, (1, number * repeats + repeat), probe.suffix)
            sample = await _sent(client, before, _joined(prefix, own))
            if sample is not None:
                yield sample


async def _sent(
    client: AsyncClient, pipeline: PipelineStatus, prompt: np.ndarray[tuple[int], np.dtype[np.int32]]
) -> Sample | None:
    """One prompt's sample; None if nobody can say how it was cut."""
    from wavepp import Admitted, Finished, Progress
    from wavepp.calibration import Sample, chunks_of

    before = await _pipeline(client, pipeline.pipeline)
    start, waves, ends = 0, 0, list[int]()
    async with client.stream(prompt, pipeline=pipeline.pipeline) as stream:
        async for event in stream:
            match event:
                case Admitted():
                    start, ends = event.endpoint, []
                case Progress() if start < event.computed_tokens < len(prompt):
                    ends.append(event.computed_tokens)
                case Finished():
                    waves = event.waves
    after = await _reported(client, before, waves)
    chunks = chunks_of(start, ends, len(prompt), waves)
    return None if chunks is None else Sample(chunks, _spent(before, after))


async def _reported(client: AsyncClient, before: PipelineStatus, waves: int) -> PipelineStatus:
    """The pipeline once every stage has reported `waves` more. Raises InvalidRequest when somebody else uses it."""
    from wavepp_proto.errors import DeadlineExpired, InvalidRequest

    had = {daemon.key: daemon.waves_done for daemon in before.daemons}
    last = asyncio.get_running_loop().time() + REPORT_S
    while True:
        now = await _pipeline(client, before.pipeline)
        more = [daemon.waves_done - had.get(daemon.key, 0) for daemon in now.daemons]
        if now.formation != before.formation or max(more) > waves:
            raise InvalidRequest(
                "the pipeline was not idle, or was formed anew, while it was measured",
                field="pipeline", value=before.pipeline,
            )  # fmt: skip
        if min(more) == waves:
            return now
        if asyncio.get_running_loop().time() > last:
            raise DeadlineExpired(f"a stage reported {min(more)} of {waves} waves", field="waves", value=min(more))
        await asyncio.sleep(PERIOD_S)


async def _pipeline(client: AsyncClient, name: str | None) -> PipelineStatus:
    from wavepp_proto.errors import InvalidRequest

    serving = [one for one in (await client.status()).pipelines if one.state == "serving"]
    found = [one for one in serving if name is None or one.pipeline == name]
    if len(found) != 1:
        known = ", ".join(one.pipeline for one in serving) or "none"
        raise InvalidRequest(f"name one pipeline that serves; there are: {known}", field="pipeline", value=name or "")
    return found[0]


def _spent(before: PipelineStatus, after: PipelineStatus) -> tuple[float, ...]:
    had = {daemon.key: daemon.times.compute_us for daemon in before.daemons}
    # A stage of several ranks is as slow as its slowest.
    slowest: dict[int, float] = {}
    for daemon in after.daemons:
        took = float(daemon.times.compute_us - had[daemon.key])
        slowest[daemon.key.stage] = max(took, slowest.get(daemon.key.stage, 0.0))
    return tuple(slowest[stage] for stage in sorted(slowest))


def _tokens(
    vocabulary: int, seed: int, which: tuple[int, int], count: int
) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    import numpy as np

    return np.random.default_rng((seed, *which)).integers(0, vocabulary, count, dtype=np.int32)


def _joined(
    one: np.ndarray[tuple[int], np.dtype[np.int32]], other: np.ndarray[tuple[int], np.dtype[np.int32]]
) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    import numpy as np

    return np.concatenate((one, other))


def _show(profile: Profile, fits: tuple[StageFit, ...]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("stage", "c us", "b us", "a us", "g us", "mean error", "worst", title=profile.name)
    for number, one in enumerate(fits):
        costs = one.costs
        table.add_row(
            str(number), f"{costs.c_us:.1f}", f"{costs.b_us:.6g}", f"{costs.a_us:.6g}", f"{costs.g_us:.6g}",
            f"{one.mean:.2%}", f"{one.worst:.2%}",
        )  # fmt: skip
    Console().print(table)
