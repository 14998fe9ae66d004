"""`wavepp up`: a whole cluster on this machine, until Ctrl-C.

Owns the conversation with the operator; `local_cluster.py` runs the processes. A stage that dies is
started again at its address, so the pipeline heals by itself.
"""

from __future__ import annotations

import asyncio
import json
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from wavepp.commands._shared import console, security
from wavepp_proto.runtime import options as opt

if TYPE_CHECKING:
    from rich.console import Console

    from wavepp.local_cluster import Child, LocalCluster, LocalPlan

WATCH_S = 0.5
RESTARTS_PER_STAGE = 5
"""Restarts of one daemon within the last ten minutes; older ones say nothing about what is broken now."""
RESTART_WINDOW_S = 600.0
RESTART_PAUSE_S = 1.0
"""Before the second restart within the window; it doubles with each."""


def up(
    model: Annotated[
        str, typer.Option("--model", envvar="WAVEPP_MODEL", help="Hugging Face folder, or emulated:layers=N,...")
    ],
    stages: Annotated[int, typer.Option("--stages", envvar="WAVEPP_STAGES", help="Stages in the pipeline.")] = 4,
    ranks: Annotated[
        int, typer.Option("--ranks", envvar="WAVEPP_RANKS", help="Daemons of each stage (tensor parallel).")
    ] = 1,
    engine: opt.Engine = None,
    pool_blocks: Annotated[
        str,
        typer.Option(
            "--pool-blocks", envvar="WAVEPP_POOL_BLOCKS", help="One number, or one for each stage or daemon: 9,8"
        ),
    ] = "1024",
    host_pool_blocks: Annotated[
        str,
        typer.Option(
            "--host-pool-blocks", envvar="WAVEPP_HOST_POOL_BLOCKS", help="Blocks of the host tier, as --pool-blocks."
        ),
    ] = "0",
    state_slots: Annotated[
        str,
        typer.Option(
            "--state-slots", envvar="WAVEPP_STATE_SLOTS", help="Recurrent states of hybrid models, as --pool-blocks."
        ),
    ] = "64",
    layers: Annotated[
        str, typer.Option("--layers", envvar="WAVEPP_LAYERS", help="Bands first:last,first:last...; even by default.")
    ] = "",
    block_tokens: Annotated[
        int, typer.Option("--block-tokens", envvar="WAVEPP_BLOCK_TOKENS", help="Tokens in one cache block.")
    ] = 64,
    wave_tokens: Annotated[
        int, typer.Option("--wave-tokens", envvar="WAVEPP_WAVE_TOKENS", help="Most tokens in one wave.")
    ] = 16_384,
    policy: Annotated[
        str | None,
        typer.Option("--policy", envvar="WAVEPP_POLICY", help="Wave planner: adaptive (default), mpu or fixed."),
    ] = None,
    mode: Annotated[
        str | None,
        typer.Option("--mode", envvar="WAVEPP_MODE", help="Admission: overlapped (default), lockstep or drain."),
    ] = None,
    min_wave_tokens: Annotated[
        int | None,
        typer.Option("--min-wave-tokens", envvar="WAVEPP_MIN_WAVE_TOKENS", help="mpu: smallest wave budget."),
    ] = None,
    fills: Annotated[
        int | None,
        typer.Option("--fills", envvar="WAVEPP_FILLS", help="mpu: pipeline fills of waves kept available."),
    ] = None,
    short_share: opt.ShortShare = None,
    model_file: Annotated[
        Path | None,
        typer.Option(
            "--model-file", envvar="WAVEPP_MODEL_FILE", help="Keeps learnt stage times; a device profile seeds them."
        ),
    ] = None,
    hang_ms: opt.HangMs = None,
    first_wave_ms: opt.FirstWaveMs = None,
    headroom_blocks: opt.HeadroomBlocks = None,
    snapshot_tokens: opt.SnapshotTokens = 8192,
    share_tokens: opt.ShareTokens = None,
    link: Annotated[str | None, typer.Option("--link", envvar="WAVEPP_LINK", help="gloo, nccl or grpc.")] = None,
    device: opt.Device = None,
    dtype: opt.Dtype = None,
    threads: Annotated[
        int | None, typer.Option("--threads", envvar="WAVEPP_THREADS", help="Intra-op threads of each stage.")
    ] = None,
    listen: Annotated[
        str | None,
        typer.Option("--listen", envvar="WAVEPP_LISTEN", help="host:port of the controller; 127.0.0.1:7411 if free."),
    ] = None,
    etcd: Annotated[
        str | None, typer.Option("--etcd", envvar="WAVEPP_ETCD", help="An etcd that runs; else one is brought along.")
    ] = None,
    etcd_ca: opt.EtcdCa = None,
    etcd_cert: opt.EtcdCert = None,
    etcd_key: opt.EtcdKey = None,
    cluster: opt.Cluster = "default",
    timeout_s: Annotated[
        float, typer.Option("--timeout-s", envvar="WAVEPP_TIMEOUT_S", help="Longest start (seconds).")
    ] = 120.0,
    trace_file: Annotated[
        Path | None,
        typer.Option("--trace-file", envvar="WAVEPP_TRACE_FILE", help="Keep a Perfetto timeline here while it runs."),
    ] = None,
    otlp: opt.Otlp = None,
    trace_sample: opt.TraceSample = 1.0,
    log_dir: Annotated[
        Path | None, typer.Option("--log-dir", envvar="WAVEPP_LOG_DIR", help="Where the processes log.")
    ] = None,
    log_level: opt.LogLevel = "info",
    tls_ca: opt.TlsCa = None,
    tls_cert: opt.TlsCert = None,
    tls_key: opt.TlsKey = None,
    tls_server_name: opt.TlsServerName = "",
    as_json: opt.Json = False,
) -> None:
    """Run etcd, a controller and all stages on this machine; Ctrl-C stops everything."""
    from wavepp import profiles
    from wavepp._paths import check_writable, log_folder
    from wavepp.local_cluster import LocalPlan
    from wavepp_proto.errors import InvalidRequest, WaveppError, describe
    from wavepp_proto.runtime.process import run_process

    names = {"tls-ca": tls_ca, "tls-cert": tls_cert, "tls-key": tls_key, "tls-server-name": tls_server_name}
    try:
        client = security(tls_ca, tls_cert, tls_key, tls_server_name)
        if tls_ca is not None and tls_cert is None:
            message = "--tls-ca needs --tls-cert and --tls-key: every process here is a server too"
            raise InvalidRequest(message, field="tls_cert")
        plan = LocalPlan(
            model=profiles.in_preset(model), engine=opt.engine_of(engine, model), stages=stages, ranks=ranks,
            pool_blocks=_numbers("pool_blocks", pool_blocks),
            host_pool_blocks=_numbers("host_pool_blocks", host_pool_blocks),
            state_slots=_numbers("state_slots", state_slots),
            headroom_blocks=headroom_blocks, snapshot_tokens=snapshot_tokens, share_tokens=share_tokens,
            layers=tuple(filter(None, layers.split(","))), block_tokens=block_tokens, wave_tokens=wave_tokens,
            policy=policy, mode=mode, min_wave_tokens=min_wave_tokens, fills=fills, short_share=short_share,
            model_file=model_file,
            hang_ms=hang_ms, first_wave_ms=first_wave_ms,
            link=link, device=device, dtype=dtype, threads=threads, listen=listen or _free_default(),
            cluster=cluster, etcd=etcd, etcd_ca=etcd_ca, etcd_cert=etcd_cert, etcd_key=etcd_key,
            otlp=otlp, trace_sample=trace_sample, log_level=log_level,
            timeout_s=timeout_s, tls={name: str(value) for name, value in names.items() if value},
        )  # fmt: skip
        if trace_file is not None:
            check_writable("trace_file", trace_file.parent)
            if trace_file.is_dir():
                raise InvalidRequest(f"{trace_file} is a folder", field="trace_file", value=str(trace_file))
    except WaveppError as error:
        typer.echo(describe(error), err=True)
        raise typer.Exit(1) from None

    async def main(stop: asyncio.Event) -> None:
        from wavepp.local_cluster import LocalCluster

        folder = log_dir or log_folder("", lambda text: _tell(text, console()))
        async with AsyncExitStack() as stack:
            running = plan
            if trace_file is not None:
                running = await _traced(plan, trace_file, stack)
            local = LocalCluster(running, folder, client)
            stack.push_async_callback(local.close)
            await _serve(local, stop, as_json)

    raise typer.Exit(run_process(main))


async def _serve(local: LocalCluster, stop: asyncio.Event, as_json: bool) -> None:
    from wavepp._discovery import forget_cluster
    from wavepp_proto.runtime.closers import end_tasks

    talk = console()
    started = time.monotonic()
    starting = asyncio.create_task(local.start(lambda text: talk.print(text, highlight=False)))
    stopped = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({starting, stopped}, return_when=asyncio.FIRST_COMPLETED)
        if not starting.done():
            return
        starting.result()
        _remember(local, talk)
        if as_json:
            typer.echo(
                json.dumps(
                    {"controller": local.address, "pids": local.pids(), "logs": str(local.log_dir)}, allow_nan=False
                )
            )
        talk.print(f"serving at {local.address} after {time.monotonic() - started:.1f} s; logs in {local.log_dir}")
        talk.print("Ctrl-C stops everything", highlight=False)
        await _watch(local, stop, talk)
        talk.print("stopping")
    finally:
        forget_cluster()
        await end_tasks(starting, stopped)


def _remember(local: LocalCluster, talk: Console) -> None:
    """Let other commands find this cluster by themselves: a convenience, without which it serves all the same."""
    from wavepp._discovery import remember_cluster
    from wavepp_proto.errors import InvalidRequest

    try:
        remember_cluster(local.address, local.plan.cluster, local.plan.model)
    except InvalidRequest as error:
        _tell(f"{error.message}: other commands need --controller {local.address}", talk)


def _tell(text: str, talk: Console) -> None:
    talk.print(text, highlight=False, markup=False, soft_wrap=True)


class Restarts:
    """When one daemon was started again, of late, and when it may be the next time."""

    def __init__(self) -> None:
        self._at: list[float] = []
        self.due: float | None = None
        """When it is to be started again; None while it runs."""

    @property
    def number(self) -> int:
        """Of the restart that is due, within the window."""
        return len(self._at)

    def allow(self, now: float) -> bool:
        """Note one more restart, and when it is due: at once, then after pauses that grow; False if there were too many
        within the window."""
        self._at = [at for at in self._at if now - at < RESTART_WINDOW_S]
        if len(self._at) >= RESTARTS_PER_STAGE:
            return False
        self.due = now + (RESTART_PAUSE_S * 2 ** (len(self._at) - 1) if self._at else 0.0)
        self._at.append(now)
        return True


async def _watch(local: LocalCluster, stop: asyncio.Event, talk: Console) -> None:
    """Until `stop`: start stages again that died, at the address they had."""
    from wavepp_proto.errors import PipelineUnavailable

    plan = local.plan
    daemons = [d for p in (await local.status()).pipelines for d in p.daemons]
    addresses = {(d.key.stage, d.key.rank): d.address for d in daemons}
    restarts = {place: Restarts() for place in plan.places}
    etcd_ended = False
    while not stop.is_set():
        if local.etcd is not None and not local.etcd.alive and not etcd_ended:
            etcd_ended = True
            talk.print("etcd ended: what serves goes on serving, but nothing can join any more", highlight=False)
        for stage, rank in plan.places:
            child = local.children[plan.name(stage, rank)]
            if child.alive:
                continue
            name, again, now = child.name.replace("-", " "), restarts[stage, rank], time.monotonic()
            if again.due is None:
                if not again.allow(now):
                    raise PipelineUnavailable(
                        f"{name} ended again after {RESTARTS_PER_STAGE} restarts in {RESTART_WINDOW_S:g} s: "
                        f"{child.tail()}",
                        stage=stage,
                        rank=rank,
                    )
                talk.print(f"{name} {_ending(child)}; {_promise(again, now)}", highlight=False)
            if again.due is not None and now >= again.due:
                again.due = None
                await local.start_stage(stage, addresses.get((stage, rank), "127.0.0.1:0"), rank=rank)
        controller = local.children["controller"]
        if not controller.alive:
            status = controller.process.returncode
            raise PipelineUnavailable(
                f"the controller ended with status {status}; its log is in {local.log_dir}", process="controller"
            )
        try:
            async with asyncio.timeout(WATCH_S):
                await stop.wait()
        except TimeoutError:
            continue


def _ending(child: Child) -> str:
    """`ended with status 1`, and what a status of ours means."""
    from wavepp_proto.runtime.process import EXIT_HUNG

    status = child.process.returncode
    return f"ended with status {status}" + (" (its engine hung)" if status == EXIT_HUNG else "")


def _promise(again: Restarts, now: float) -> str:
    """When it is started again, and how often that was done."""
    wait_s = 0.0 if again.due is None else again.due - now
    when = f" in {wait_s:g} s" if wait_s else ""
    return f"starting it again{when} (restart {again.number} of {RESTARTS_PER_STAGE} in {RESTART_WINDOW_S:g} s)"


async def _traced(plan: LocalPlan, path: Path, stack: AsyncExitStack) -> LocalPlan:
    """Collect spans in this process; write the timeline while it grows, and once more when everything has ended."""
    from dataclasses import replace

    from wavepp_proto.runtime.timeline import keep_timeline, write_timeline
    from wavepp_proto.runtime.trace_sink import TraceSink

    sink = await TraceSink.start()
    keeping = asyncio.create_task(keep_timeline(lambda: sink.spans, path), name="timeline")

    async def finish() -> None:
        await sink.close()
        keeping.cancel()
        # A full disk shows in the last write, below.
        await asyncio.gather(keeping, return_exceptions=True)
        write_timeline(sink.spans, path)
        console().print(f"timeline of {len(sink.spans)} spans in {path}", highlight=False)

    stack.push_async_callback(finish)
    return replace(plan, otlp=sink.endpoint)


def _numbers(field: str, text: str) -> tuple[int, ...]:
    from wavepp_proto.errors import InvalidRequest

    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise InvalidRequest(
            f"{field} must be numbers with commas between, got {text!r}", field=field, value=text, limit="N,N..."
        ) from None


def _free_default() -> str:
    """The default address, or a free port if somebody has it (said on stderr)."""
    import socket

    from wavepp._discovery import DEFAULT_ADDRESS

    host, _, port = DEFAULT_ADDRESS.rpartition(":")
    try:
        with socket.create_server((host, int(port))):
            return DEFAULT_ADDRESS
    except OSError:
        console().print(f"port {port} is taken; using a free one", highlight=False)
        return f"{host}:0"
