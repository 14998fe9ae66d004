"""`wavepp stage` and `python -m wavepp_stage`: one stage daemon in this process.

Owns the command line; `runtime/daemon.py` `run()` is the main path.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Annotated

import typer

from wavepp_proto.runtime import options as opt
from wavepp_proto.runtime.command_line import run_app


def command(
    stage: Annotated[int, typer.Option("--stage", envvar="WAVEPP_STAGE", help="Position in the pipeline, from 0.")],
    stages: Annotated[int, typer.Option("--stages", envvar="WAVEPP_STAGES", help="Stages in the pipeline.")],
    model: Annotated[
        str, typer.Option("--model", envvar="WAVEPP_MODEL", help="Hugging Face folder, or an emulated: preset.")
    ],
    rank: Annotated[int, typer.Option("--rank", envvar="WAVEPP_RANK", help="Position in the stage, from 0.")] = 0,
    ranks: Annotated[
        int, typer.Option("--ranks", envvar="WAVEPP_RANKS", help="Daemons of this stage (tensor parallel).")
    ] = 1,
    engine: opt.Engine = None,
    etcd: opt.Etcd = "127.0.0.1:2379",
    cluster: opt.Cluster = "default",
    pipeline: Annotated[
        str, typer.Option("--pipeline", envvar="WAVEPP_PIPELINE", help="Pipeline this stage belongs to.")
    ] = "default",
    layers: Annotated[
        str | None, typer.Option("--layers", envvar="WAVEPP_LAYERS", help="Band first:last; even split by default.")
    ] = None,
    block_tokens: Annotated[
        int, typer.Option("--block-tokens", envvar="WAVEPP_BLOCK_TOKENS", help="Tokens in one cache block.")
    ] = 64,
    pool_blocks: Annotated[
        int, typer.Option("--pool-blocks", envvar="WAVEPP_POOL_BLOCKS", help="Cache blocks on this stage.")
    ] = 1024,
    host_pool_blocks: Annotated[
        int,
        typer.Option("--host-pool-blocks", envvar="WAVEPP_HOST_POOL_BLOCKS", help="Cache blocks of the host tier."),
    ] = 0,
    state_slots: opt.StateSlots = 64,
    wave_tokens: Annotated[
        int, typer.Option("--wave-tokens", envvar="WAVEPP_WAVE_TOKENS", help="Most tokens in one wave.")
    ] = 16_384,
    listen: Annotated[
        str, typer.Option("--listen", envvar="WAVEPP_LISTEN", help="host:port to bind; port 0 takes a free one.")
    ] = "127.0.0.1:0",
    advertise: opt.Advertise = None,
    device: opt.Device = None,
    dtype: opt.Dtype = None,
    threads: Annotated[
        int | None, typer.Option("--threads", envvar="WAVEPP_THREADS", help="Intra-op threads (torch engine).")
    ] = None,
    etcd_user: opt.EtcdUser = "",
    etcd_password_file: opt.EtcdPasswordFile = None,
    etcd_ca: opt.EtcdCa = None,
    etcd_cert: opt.EtcdCert = None,
    etcd_key: opt.EtcdKey = None,
    tls_ca: opt.TlsCa = None,
    tls_cert: opt.TlsCert = None,
    tls_key: opt.TlsKey = None,
    tls_server_name: opt.TlsServerName = "",
    drain_s: opt.DrainSeconds = 10.0,
    otlp: opt.Otlp = None,
    trace_sample: opt.TraceSample = 1.0,
    metrics: opt.Metrics = None,
    reflection: opt.Reflection = False,
    log_level: opt.LogLevel = "info",
    log_json: opt.LogJson = True,
) -> None:
    """Run one stage daemon: it registers in etcd and serves whichever controller leads."""
    from wavepp_proto.runtime.closers import Closers
    from wavepp_proto.runtime.logs import configure
    from wavepp_proto.runtime.process import run_process
    from wavepp_stage.runtime.daemon import StageDaemon
    from wavepp_stage.runtime.settings import StageSettings, parse_layers

    async def main(stop: asyncio.Event) -> None:
        configure(log_level, log_json, role="stage", stage=stage, rank=rank, pipeline=pipeline)
        settings = StageSettings(
            stage=stage, stages=stages, model=model, engine=opt.engine_of(engine, model),
            cluster=cluster, pipeline=pipeline, rank=rank, ranks=ranks,
            layers=parse_layers(layers) if layers else None,
            block_tokens=block_tokens, pool_blocks=pool_blocks, host_pool_blocks=host_pool_blocks,
            state_slots=state_slots, wave_tokens=wave_tokens,
            listen=listen, advertise=advertise, device=device, dtype=dtype, threads=threads,
            server_security=opt.server_security(tls_ca, tls_cert, tls_key),
            client_security=opt.client_security(tls_ca, tls_cert, tls_key, tls_server_name),
            reflection=reflection, metrics=metrics,
        )  # fmt: skip
        closers = Closers()
        try:
            tracer = opt.tracer("wavepp-stage", otlp, trace_sample)
            closers.push("tracer", partial(asyncio.to_thread, tracer.close))
            store = opt.etcd_store(etcd, etcd_user, etcd_password_file, etcd_ca, etcd_cert, etcd_key)
            closers.push("store", store.close)
            await StageDaemon(settings, store, tracer).run(stop, drain_s)
        finally:
            await closers.close()

    raise typer.Exit(run_process(main))


def main() -> None:
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(command)
    run_app(app)


if __name__ == "__main__":
    main()
