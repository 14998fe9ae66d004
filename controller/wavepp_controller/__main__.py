"""`wavepp controller` and `python -m wavepp_controller`: one controller in this process.

Owns the command line; `runtime/controller.py` `run()` is the main path.
"""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from wavepp_proto.runtime import options as opt
from wavepp_proto.runtime.command_line import run_app


def command(
    etcd: opt.Etcd = "127.0.0.1:2379",
    cluster: opt.Cluster = "default",
    listen: Annotated[
        str, typer.Option("--listen", envvar="WAVEPP_LISTEN", help="host:port to bind; port 0 takes a free one.")
    ] = "127.0.0.1:7411",
    advertise: opt.Advertise = None,
    wave_tokens: Annotated[
        int, typer.Option("--wave-tokens", envvar="WAVEPP_WAVE_TOKENS", help="Most tokens in one wave.")
    ] = 16_384,
    policy: Annotated[
        str, typer.Option("--policy", envvar="WAVEPP_POLICY", help="Wave planner: adaptive, mpu or fixed.")
    ] = "adaptive",
    mode: Annotated[
        str,
        typer.Option(
            "--mode", envvar="WAVEPP_MODE", help="Admission: overlapped; lockstep and drain are for comparison."
        ),
    ] = "overlapped",
    min_wave_tokens: Annotated[
        int, typer.Option("--min-wave-tokens", envvar="WAVEPP_MIN_WAVE_TOKENS", help="mpu: smallest wave budget.")
    ] = 8_192,
    fills: Annotated[
        int, typer.Option("--fills", envvar="WAVEPP_FILLS", help="mpu: pipeline fills of waves kept available.")
    ] = 2,
    short_share: opt.ShortShare = None,
    model_file: Annotated[
        Path | None,
        typer.Option(
            "--model-file",
            envvar="WAVEPP_MODEL_FILE",
            help="Keeps what was learnt of stage times; a device profile seeds it and is not written.",
        ),
    ] = None,
    link: Annotated[
        str | None,
        typer.Option("--link", envvar="WAVEPP_LINK", help="gloo, nccl or grpc; by default what the engines can do."),
    ] = None,
    silence_ms: Annotated[
        int, typer.Option("--silence-ms", envvar="WAVEPP_SILENCE_MS", help="Heartbeat silence that means lost.")
    ] = 1250,
    most_bypasses: Annotated[
        int,
        typer.Option(
            "--most-bypasses",
            envvar="WAVEPP_MOST_BYPASSES",
            help="Later requests of a higher priority that may go first before a request is aged; 0 = no classes.",
        ),
    ] = 8,
    aged_every: Annotated[
        int,
        typer.Option(
            "--aged-every", envvar="WAVEPP_AGED_EVERY", help="One in so many served tokens may be of an aged request."
        ),
    ] = 16,
    queue_requests: Annotated[
        int, typer.Option("--queue-requests", envvar="WAVEPP_QUEUE_REQUESTS", help="Most waiting requests.")
    ] = 1024,
    hang_ms: opt.HangMs = None,
    first_wave_ms: opt.FirstWaveMs = None,
    headroom_blocks: opt.HeadroomBlocks = None,
    snapshot_tokens: opt.SnapshotTokens = 8192,
    share_tokens: opt.ShareTokens = None,
    inventory_ms: Annotated[
        int,
        typer.Option("--inventory-ms", envvar="WAVEPP_INVENTORY_MS", help="Between two comparisons of holds."),
    ] = 5_000,
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
    """Run a controller: it campaigns in etcd, forms pipelines and serves clients."""
    from wavepp_controller.core.config import DEFAULT_SHORT_SHARE, ControllerConfig
    from wavepp_controller.core.round_pace import RELEASE_LAG_MS, ROUND_REST
    from wavepp_controller.runtime.controller import Controller
    from wavepp_controller.runtime.settings import ControllerSettings
    from wavepp_proto.runtime.closers import Closers
    from wavepp_proto.runtime.logs import configure
    from wavepp_proto.runtime.process import run_process

    async def main(stop: asyncio.Event) -> None:
        configure(log_level, log_json, role="controller")
        config = ControllerConfig(
            wave_tokens=wave_tokens, policy=policy, link=opt.link_kind(link) if link else None, silence_ms=silence_ms,
            most_bypasses=most_bypasses, aged_every=aged_every,
            hang_ms=hang_ms, first_wave_ms=first_wave_ms,
            max_queued_requests=queue_requests, floor_blocks=headroom_blocks, snapshot_tokens=snapshot_tokens,
            share_tokens=share_tokens, inventory_ms=inventory_ms, mode=mode,
            min_wave_tokens=min_wave_tokens, fills=fills,
            short_share=DEFAULT_SHORT_SHARE if short_share is None else short_share,
            round_rest=ROUND_REST, release_lag_ms=RELEASE_LAG_MS,
        )  # fmt: skip
        settings = ControllerSettings(
            config=config, cluster=cluster, listen=listen, advertise=advertise,
            server_security=opt.server_security(tls_ca, tls_cert, tls_key),
            client_security=opt.client_security(tls_ca, tls_cert, tls_key, tls_server_name),
            metrics=metrics, reflection=reflection, model_file=model_file,
        )  # fmt: skip
        closers = Closers()
        try:
            tracer = opt.tracer("wavepp-controller", otlp, trace_sample)
            closers.push("tracer", partial(asyncio.to_thread, tracer.close))
            store = opt.etcd_store(etcd, etcd_user, etcd_password_file, etcd_ca, etcd_cert, etcd_key)
            closers.push("store", store.close)
            await Controller(settings, store, tracer).run(stop, drain_s)
        finally:
            await closers.close()

    raise typer.Exit(run_process(main))


def main() -> None:
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(command)
    run_app(app)


if __name__ == "__main__":
    main()
