"""`wavepp simulate plan`: what a deployment would do with a workload, in virtual time, within seconds.

Owns the options of the command and its words; `plan_asked` makes a workload of them, `planning_load` runs it,
`planning_result` counts. The same controller and stage cores as in the real system decide. Registered by `__main__`.
"""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from wavepp import profiles
from wavepp_controller.core.config import POLICIES
from wavepp_controller.core.modes import MODES
from wavepp_proto.errors import InvalidRequest, describe
from wavepp_proto.workload import FAMILIES, GOOD_HIT, LENGTHS, Family
from wavepp_simulator.capacity import Needed, fewest


def plan(
    profile: Annotated[
        str, typer.Option("--profile", envvar="WAVEPP_PROFILE", help="Device profile: a name that ships, or a file.")
    ],
    family: Annotated[
        str, typer.Option("--family", envvar="WAVEPP_FAMILY", help=f"Closed loop: {', '.join(FAMILIES)}.")
    ] = "",
    concurrency: Annotated[
        int, typer.Option("--concurrency", min=1, envvar="WAVEPP_CONCURRENCY", help="Slots of a closed loop.")
    ] = 8,
    lengths: Annotated[
        str,
        typer.Option("--lengths", envvar="WAVEPP_LENGTHS", help=f"Whose prompt lengths: {', '.join(LENGTHS)}."),
    ] = "glm",
    prompt_tokens: Annotated[
        int | None, typer.Option("--prompt-tokens", min=1, envvar="WAVEPP_PROMPT_TOKENS", help="Another prompt length.")
    ] = None,
    rate: Annotated[
        float | None, typer.Option("--rate", min=1e-6, envvar="WAVEPP_RATE", help="Open loop: mean requests a second.")
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option("--trace", exists=True, dir_okay=False, envvar="WAVEPP_TRACE", help="Mooncake trace to replay."),
    ] = None,
    speed: Annotated[
        float, typer.Option("--speed", min=1e-6, envvar="WAVEPP_SPEED", help="How many times faster it arrives.")
    ] = 1.0,
    minutes: Annotated[
        float | None,
        typer.Option("--minutes", min=1e-6, envvar="WAVEPP_MINUTES", help="Of the trace's own time, or of a --rate."),
    ] = None,
    policy: Annotated[
        str, typer.Option("--policy", envvar="WAVEPP_POLICY", help=f"Wave planner: {', '.join(POLICIES)}.")
    ] = "adaptive",
    mode: Annotated[
        str, typer.Option("--mode", envvar="WAVEPP_MODE", help=f"Admission: {', '.join(MODES)}.")
    ] = "overlapped",
    short_share: Annotated[
        float | None,
        typer.Option(
            "--short-share", envvar="WAVEPP_SHORT_SHARE", help="Part of the tokens of waves for short prompts first."
        ),
    ] = None,
    fills: Annotated[
        int | None, typer.Option("--fills", min=0, envvar="WAVEPP_FILLS", help="mpu: pipeline fills of waves.")
    ] = None,
    min_wave_tokens: Annotated[
        int | None,
        typer.Option("--min-wave-tokens", min=1, envvar="WAVEPP_MIN_WAVE_TOKENS", help="mpu: smallest wave budget."),
    ] = None,
    replicas: Annotated[int, typer.Option("--replicas", min=1, envvar="WAVEPP_REPLICAS", help="Pipelines.")] = 1,
    p95_s: Annotated[
        float | None,
        typer.Option(
            "--p95-s", min=0.0, envvar="WAVEPP_P95_S", help="Find the fewest replicas, up to --replicas, that hold it."
        ),
    ] = None,
    block_tokens: Annotated[
        int | None,
        typer.Option(
            "--block-tokens", min=1, envvar="WAVEPP_BLOCK_TOKENS", help="Another block size; pools keep their tokens."
        ),
    ] = None,
    round_ms: Annotated[
        float | None,
        typer.Option(
            "--round-ms",
            min=0.0,
            envvar="WAVEPP_ROUND_MS",
            help="What a prepare round takes; by default as measured over loopback: 0.9 + 0.475 for each stage.",
        ),
    ] = None,
    requests: Annotated[
        int | None,
        typer.Option(
            "--requests",
            min=1,
            envvar="WAVEPP_REQUESTS",
            help="Measured ones: by default four rounds of a closed loop, at least 64; 256 arrivals at a --rate.",
        ),
    ] = None,
    seconds: Annotated[
        float | None,
        typer.Option("--seconds", min=1e-6, envvar="WAVEPP_SECONDS", help="Of virtual time, instead of --requests."),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", min=0, envvar="WAVEPP_SEED", help="Of the family's prompts.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", envvar="WAVEPP_JSON", help="Print everything as JSON.")] = False,
) -> None:
    """Predict throughput and latency of a family or a trace on a device profile."""
    from wavepp_simulator.plan_asked import MOST_REPLICAS, MOST_ROUND_MS, PlanOptions, at_most
    from wavepp_simulator.planning import Overheads, config_of, with_block_tokens
    from wavepp_simulator.planning_load import planned
    from wavepp_simulator.planning_result import arrivals_of_bound, summarise

    given = PlanOptions(
        family=family, lengths=lengths, concurrency=concurrency, seed=seed, prompt_tokens=prompt_tokens, rate=rate,
        trace=trace, speed=speed, minutes=minutes, requests=requests, seconds=seconds,
    )  # fmt: skip
    try:
        device = profiles.load(profile)
        if block_tokens is not None:
            device = with_block_tokens(device, block_tokens)
        given.check(device)
        at_most("replicas", replicas, MOST_REPLICAS)
        at_most("round_ms", round_ms, MOST_ROUND_MS)
        asked = given.workload()
        overheads = Overheads.measured(len(device.stages))
        if round_ms is not None:
            overheads = replace(overheads, round_s=round_ms / 1e3)
        named = {"short_share": short_share, "fills": fills, "min_wave_tokens": min_wave_tokens}
        given_settings: dict[str, Any] = {name: value for name, value in named.items() if value is not None}
        config = replace(config_of(device, policy, mode), **given_settings)
    except InvalidRequest as error:
        raise _refused(error) from None

    def run(count: int) -> dict[str, Any]:
        began = time.perf_counter()
        played = planned(device, config, overheads, asked, replicas=count, measured=requests, seconds=seconds)
        return {
            "profile": device.name,
            "workload": asked.name,
            "concurrency": asked.concurrency if isinstance(asked, Family) else None,
            "policy": policy,
            "mode": mode,
            "replicas": count,
            "round_ms": overheads.round_s * 1e3,
            "took_s": round(time.perf_counter() - began, 2),
            **summarise(device, played, count),
            "arrivals_of_bound": None if isinstance(asked, Family) else arrivals_of_bound(device, asked, count),
        }

    try:
        found = run(replicas) if p95_s is None else fewest(run, p95_s, replicas)
    except InvalidRequest as error:
        raise _refused(error) from None
    if isinstance(found, Needed):
        _tell_capacity(found, p95_s or 0.0, as_json)
    else:
        typer.echo(json.dumps(found, allow_nan=False) if as_json else _words(found))


def _refused(error: InvalidRequest) -> typer.Exit:
    """One line with every field, and status 2 as for what typer refuses itself."""
    typer.echo(describe(error), err=True)
    return typer.Exit(2)


def _tell_capacity(needed: Needed, p95_s: float, as_json: bool) -> None:
    """Ends 1 if not even the most replicas hold the target."""
    if as_json:
        typer.echo(
            json.dumps(
                {"p95_s": p95_s, "replicas": needed.replicas, "tried": list(needed.tried.values())}, allow_nan=False
            )
        )
    else:
        for told in needed.tried.values():
            typer.echo(_words(told))
        held = "no number of replicas that was tried holds"
        if needed.replicas:
            held = "1 replica holds" if needed.replicas == 1 else f"{needed.replicas} replicas hold"
        typer.echo(f"{held} a p95 completion of {p95_s:g} s")
    if needed.replicas is None:
        raise typer.Exit(1)


def _words(told: dict[str, Any]) -> str:
    """A few lines for a person."""
    completion, admission, waves = told["completion_s"], told["admission_ms"], told["waves"]
    slots = f", {told['concurrency']} at once" if told["concurrency"] else ""
    busy = " ".join(f"{share:.0%}" for share in told["stage_busy"].values())
    lines = [
        f"{told['workload']}{slots} on {told['replicas']} x {told['profile']}, {told['mode']}+{told['policy']}",
        f"  {told['requests']} requests in {told['measured_s']:.1f} s of virtual time, {told['failed']} failed",
        f"  input {told['input_tokens_per_s']:,.0f} tokens/s, computed {told['computed_tokens_per_s']:,.0f} tokens/s; "
        f"{told['fraction_of_bound']:.1%} of the slowest stage's bound",
    ]
    if (offered := told["arrivals_of_bound"] or 0.0) > 1.0:
        lines.append(
            f"  arrivals exceed what the slowest stage can do ({offered:.2f} of its bound): the line only grows"
        )
    if completion:
        lines.append("  completion " + " ".join(f"{name} {value:.2f} s" for name, value in completion.items()))
        lines.append("  admission  " + " ".join(f"{name} {value:.1f} ms" for name, value in admission.items()))
    if told["good_hit_rate"] is not None:
        lines.append(
            f"  reused {told['reused_share']:.1%} of all tokens; {told['good_hit_rate']:.1%} good hits "
            f"(at least {GOOD_HIT:.0%} of what an unbounded cache would have), {told['good_hit_rate_80']:.1%} at 80%"
        )
    lines += [
        f"  {kind or 'prompts'} waited {order['waited_waves_p50']:.0f} waves (p50, most "
        f"{order['waited_waves_most']:.0f}) and lasted {order['stretch_mean']:.2f} times their own, most "
        f"{order['stretch_most']:.2f}"
        for kind, order in told["order_by_kind"].items()
    ]
    if waves["count"]:
        lines.append(
            f"  {waves['count']} waves of {waves['tokens']['mean']:,.0f} tokens, {waves['rows_mean']} rows, "
            f"{waves['milliseconds']['mean']:.1f} ms on average"
        )
    lines.append(f"  stages busy {busy}")
    lines.append(f"  rounds of {told['round_ms']:.2f} ms assumed; played in {told['took_s']:.1f} s")
    return "\n".join(lines)
