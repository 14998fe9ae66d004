"""`wavepp profile`: device profiles, fitted to measured throughputs and shown.

Owns files, options and tables; the fit is `profile_fit.py`'s, the numbers' meaning `wavepp_proto.profile`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from wavepp_proto.limits import MAX_STAGES

if TYPE_CHECKING:
    from rich.table import Table

    from wavepp.profile_fit import Cell
    from wavepp_proto.profile import Profile, StageCosts

T = TypeVar("T")

app = typer.Typer(no_args_is_help=True, help="Device profiles: fit one to measured throughputs, or show one.")

Name = Annotated[str, typer.Argument(help="A profile's file, or the name of one that ships: `wavepp profile list`.")]


@app.command("list")
def list_profiles() -> None:
    """Names of the profiles that ship with this version."""
    from wavepp import profiles

    for name in profiles.names():
        typer.echo(name)


@app.command()
def path(name: Name) -> None:
    """Where a profile lies; `wavepp stage --model emulated:profile=FILE` wants it, the others take names."""
    from wavepp import profiles

    typer.echo(_typed(lambda: profiles.path_of(name)))


@app.command()
def show(name: Name) -> None:
    """Stages, sizes, and what a profile says of its fit."""
    from rich.console import Console

    from wavepp import profiles

    profile = _typed(lambda: profiles.load(name))
    out = Console()
    out.print(
        f"{profile.name}: {len(profile.stages)} stages, blocks of {profile.block_tokens} tokens, waves of "
        f"{profile.min_wave_tokens} to {profile.wave_tokens} tokens, {profile.lanes} requests, {profile.fills} fills",
        highlight=False,
    )
    out.print(_stages(profile))
    for line in _typed(lambda: _provenance(profile)):
        out.print(line, highlight=False, markup=False)


@app.command()
def fit(
    cells: Annotated[Path, typer.Argument(help="JSON list of {family, input_tokens, cached_tokens, c, tokens_per_s}.")],
    out: Annotated[Path, typer.Option("--out", envvar="WAVEPP_OUT", help="Profile to write.")],
    name: Annotated[
        str | None, typer.Option("--name", envvar="WAVEPP_NAME", help="Its name; the file's by default.")
    ] = None,
    base: Annotated[
        str | None,
        typer.Option(
            "--base", envvar="WAVEPP_BASE", help="Profile to take stages, sizes and links from: file or name."
        ),
    ] = None,
    stages: Annotated[
        int,
        typer.Option(
            "--stages", envvar="WAVEPP_STAGES", min=1, max=MAX_STAGES, help="Equal stages, where there is no --base."
        ),
    ] = 4,
    shares: Annotated[
        str | None,
        typer.Option(
            "--stage-shares", envvar="WAVEPP_STAGE_SHARES", help="Cost of each stage against the others: 3,3,2"
        ),
    ] = None,
    wave_tokens: Annotated[
        int | None,
        typer.Option("--wave-tokens", envvar="WAVEPP_WAVE_TOKENS", min=1, help="M of the measurements; the base's."),
    ] = None,
    pool_blocks: Annotated[
        int | None,
        typer.Option("--pool-blocks", envvar="WAVEPP_POOL_BLOCKS", min=1, help="Cache blocks a stage; the base's."),
    ] = None,
    weights_gb: Annotated[
        float, typer.Option("--weights-gb", envvar="WAVEPP_WEIGHTS_GB", min=0.0, help="All weights (10^9 bytes).")
    ] = 0.0,
    bandwidth_gbs: Annotated[
        float,
        typer.Option(
            "--bandwidth-gbs", envvar="WAVEPP_BANDWIDTH_GBS", min=1.0, help="Of device memory (10^9 bytes/s)."
        ),
    ] = 8000.0,
    least_c_us: Annotated[
        float | None,
        typer.Option(
            "--least-c-us",
            envvar="WAVEPP_LEAST_C_US",
            min=0.0,
            help="Least cost of a wave; by default the time to read a stage's weights once.",
        ),
    ] = None,
) -> None:
    """Fit the coefficients of the stages so that no measured cell exceeds its bound; print what is left over."""
    from rich.console import Console

    from wavepp._paths import write_file
    from wavepp.profile_fit import read_cells, weights_us

    measured = _typed(lambda: read_cells(_read(cells)))
    start = _typed(lambda: _start(base, stages, name or out.stem, wave_tokens, pool_blocks))
    weight = _typed(lambda: _shares(shares, len(start.stages)))
    least = weights_us(weights_gb * 1e9, len(start.stages), bandwidth_gbs * 1e9) if least_c_us is None else least_c_us
    profile = _typed(lambda: _fitted(start, measured, weight, least, str(cells)))
    _typed(profile.check)
    _typed(lambda: write_file("out", out, profile.to_json()))
    for doubt in profile.provenance["doubts"]:
        typer.echo(f"warning: {doubt}", err=True)
    shown = Console()
    shown.print(_stages(profile))
    shown.print(_fractions(profile.provenance["residuals"]))


def _start(base: str | None, stages: int, name: str, wave_tokens: int | None, pool_blocks: int | None) -> Profile:
    """What the fit does not find."""
    from wavepp import profiles
    from wavepp_proto.profile import Profile, StageCosts, StageProfile

    found = Profile(name, (StageProfile(StageCosts(), 1024),) * stages) if base is None else profiles.load(base)
    if wave_tokens is not None:
        found = replace(found, wave_tokens=wave_tokens, min_wave_tokens=min(wave_tokens, found.min_wave_tokens))
    if pool_blocks is not None:
        found = replace(found, stages=tuple(replace(stage, pool_blocks=pool_blocks) for stage in found.stages))
    return replace(found, name=name)


def _fitted(
    start: Profile, measured: Sequence[Cell], shares: Sequence[float], least_c_us: float, cells: str
) -> Profile:
    from wavepp.profile_fit import doubts, residuals
    from wavepp.profile_fit import fit as fit_costs

    slowest = fit_costs(measured, start.wave_tokens, least_c_us)
    stages = tuple(
        replace(stage, costs=_scaled(slowest, share, least_c_us))
        for stage, share in zip(start.stages, shares, strict=True)
    )
    told = {
        "figures": cells,
        "method": "wavepp profile fit",
        "least_c_us": least_c_us,
        "doubts": list(doubts(slowest, measured, start.wave_tokens)),
        "residuals": [one.as_dict() for one in residuals(slowest, measured, start.wave_tokens)],
    }
    return replace(start, stages=stages, provenance=told)


def _scaled(costs: StageCosts, share: float, least_c_us: float) -> StageCosts:
    from wavepp_proto.profile import StageCosts

    return StageCosts(max(least_c_us, costs.c_us * share), costs.b_us * share, costs.a_us * share, costs.g_us * share)


def _shares(text: str | None, stages: int) -> tuple[float, ...]:
    """Cost of each stage over the slowest one's."""
    from wavepp_proto.errors import InvalidRequest

    if text is None:
        return (1.0,) * stages
    try:
        given = [float(part) for part in text.split(",")]
    except ValueError:
        given = []
    if len(given) != stages or not all(0 < share < float("inf") for share in given):
        raise InvalidRequest(
            f"--stage-shares needs {stages} numbers above 0, got {text!r}", field="stage_shares", value=text
        )
    return tuple(share / max(given) for share in given)


def _read(path: Path) -> str:
    from wavepp_proto.errors import InvalidRequest

    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"cannot read {path}: {error}", field="cells", value=str(path)) from error


def _typed(work: Callable[[], T]) -> T:
    """A typed error becomes one line on stderr and exit status 1."""
    from wavepp.commands._shared import explain
    from wavepp_proto.errors import WaveppError

    try:
        return work()
    except WaveppError as error:
        typer.echo(explain(error), err=True)
        raise typer.Exit(1) from None


def _stages(profile: Profile) -> Table:
    from rich.table import Table

    headings = (
        "stage",
        "c us\na wave",
        "b us\na token",
        "a us\na pair",
        "g us\na prefix\ntoken",
        "blocks",
        "host",
        "states",
    )
    table = Table(*headings, title=profile.name)
    for column in table.columns:
        column.no_wrap = True
    for number, stage in enumerate(profile.stages):
        costs = stage.costs
        table.add_row(
            str(number), f"{costs.c_us:.0f}", f"{costs.b_us:.6g}", f"{costs.a_us:.6g}", f"{costs.g_us:.6g}",
            str(stage.pool_blocks), str(stage.host_pool_blocks), str(stage.state_slots),
        )  # fmt: skip
    return table


def _provenance(profile: Profile) -> list[str | Table]:
    """What a profile says of itself. Raises InvalidRequest where somebody wrote something else there."""
    from wavepp_proto.errors import InvalidRequest

    told = profile.provenance
    try:
        said: list[str | Table] = [f"{key}: {told[key]}" for key in ("figures", "devices", "method") if key in told]
        said += [f"{key}: {line}" for key in ("sources", "assumed", "doubts") for line in told.get(key, ())]
        if rest := told.get("residuals"):
            said.append(_fractions(rest))
    except (KeyError, TypeError, ValueError) as error:
        raise InvalidRequest(f"the provenance of {profile.name} is wrong: {error!r}", field="provenance") from error
    return said


def _fractions(rest: Sequence[dict[str, Any]]) -> Table:
    """Of residuals as a profile's provenance keeps them."""
    from rich.table import Table

    table = Table("family", "tokens (cached)", "c", "system", "fitted", "tokens/s", "bound", "fraction")
    for column in table.columns[2:3] + table.columns[5:]:
        column.no_wrap = True  # a narrow terminal wraps words, no figure
    for one in rest:
        shapes = [f"{tokens} ({cached})" if cached else str(tokens) for tokens, cached, _ in one["shapes"]]
        table.add_row(
            one["family"], " + ".join(shapes), str(one["c"]), one["system"], "yes" if one["fitted"] else "bounds",
            f"{one['tokens_per_s']:.0f}", f"{one['bound_tokens_per_s']:.0f}", f"{one['fraction']:.3f}",
        )  # fmt: skip
    return table
