"""Command-line options that several commands share, each with its WAVEPP_* twin.

Owns the spelling, help text and environment name of an option, so that `wavepp controller`, `stage`
and `up` agree. Builders below turn them into settings; nothing heavy is imported before a command
runs.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from wavepp_proto.runtime.channels import ClientSecurity, ServerSecurity
    from wavepp_proto.runtime.etcd_store import EtcdStore
    from wavepp_proto.runtime.tracing import Tracer
    from wavepp_proto.terms import LinkKind

Etcd = Annotated[str, typer.Option("--etcd", envvar="WAVEPP_ETCD", help="etcd endpoints, host:port[,host:port...].")]
EtcdUser = Annotated[str, typer.Option("--etcd-user", envvar="WAVEPP_ETCD_USER", help="etcd user.")]
EtcdPasswordFile = Annotated[
    Path | None,
    typer.Option("--etcd-password-file", envvar="WAVEPP_ETCD_PASSWORD_FILE", help="File with the etcd password."),
]
EtcdCa = Annotated[Path | None, typer.Option("--etcd-ca", envvar="WAVEPP_ETCD_CA", help="CA of etcd; turns TLS on.")]
EtcdCert = Annotated[Path | None, typer.Option("--etcd-cert", envvar="WAVEPP_ETCD_CERT", help="Client certificate.")]
EtcdKey = Annotated[Path | None, typer.Option("--etcd-key", envvar="WAVEPP_ETCD_KEY", help="Its key.")]
Cluster = Annotated[str, typer.Option("--cluster", envvar="WAVEPP_CLUSTER", help="Name that separates clusters.")]
Advertise = Annotated[
    str | None,
    typer.Option("--advertise", envvar="WAVEPP_ADVERTISE", help="host[:port] others dial; needed on a wildcard."),
]
TlsCa = Annotated[
    Path | None,
    typer.Option("--tls-ca", envvar="WAVEPP_TLS_CA", help="CA that peers are checked against; turns TLS on."),
]
TlsCert = Annotated[Path | None, typer.Option("--tls-cert", envvar="WAVEPP_TLS_CERT", help="Own certificate.")]
TlsKey = Annotated[Path | None, typer.Option("--tls-key", envvar="WAVEPP_TLS_KEY", help="Own private key.")]
TlsServerName = Annotated[
    str,
    typer.Option("--tls-server-name", envvar="WAVEPP_TLS_SERVER_NAME", help="Name expected in peers' certificates."),
]
LogLevel = Annotated[str, typer.Option("--log-level", envvar="WAVEPP_LOG_LEVEL", help="debug, info, warning or error.")]
Engine = Annotated[
    str | None,
    typer.Option(
        "--engine",
        envvar="WAVEPP_ENGINE",
        help="torch, emulated or trtllm; by default what the model needs, never trtllm.",
    ),
]
Device = Annotated[
    str | None,
    typer.Option("--device", envvar="WAVEPP_DEVICE", help="cpu or cuda:N; cpu for torch, cuda:0 for trtllm."),
]
Dtype = Annotated[
    str | None,
    typer.Option(
        "--dtype",
        envvar="WAVEPP_DTYPE",
        help="torch: float32 (default), bfloat16 or auto; trtllm: auto (default), float16 or bfloat16.",
    ),
]
LogJson = Annotated[
    bool, typer.Option("--log-json/--log-text", envvar="WAVEPP_LOG_JSON", help="One JSON object a line, or text.")
]
Otlp = Annotated[
    str | None,
    typer.Option("--otlp", envvar="WAVEPP_OTLP", help="OTLP gRPC collector for traces, http(s)://host:port."),
]
TraceSample = Annotated[
    float, typer.Option("--trace-sample", envvar="WAVEPP_TRACE_SAMPLE", help="Share of requests traced, 0..1.")
]
Metrics = Annotated[
    str | None, typer.Option("--metrics", envvar="WAVEPP_METRICS", help="host:port for Prometheus; off by default.")
]
Reflection = Annotated[
    bool, typer.Option("--reflection/--no-reflection", envvar="WAVEPP_REFLECTION", help="Serve gRPC reflection.")
]
DrainSeconds = Annotated[
    float, typer.Option("--drain-s", envvar="WAVEPP_DRAIN_S", min=0.0, help="Longest drain after SIGTERM (seconds).")
]
StateSlots = Annotated[
    int,
    typer.Option(
        "--state-slots", envvar="WAVEPP_STATE_SLOTS", help="Recurrent states on a stage whose layers have any."
    ),
]
HeadroomBlocks = Annotated[
    int | None,
    typer.Option(
        "--headroom-blocks", envvar="WAVEPP_HEADROOM_BLOCKS",
        help="Blocks of every pool that are promised to nobody; by default two rings of waves, at most a quarter.",
    ),
]  # fmt: skip
HangMs = Annotated[
    int | None,
    typer.Option(
        "--hang-ms", envvar="WAVEPP_HANG_MS",
        help="Least by which a wave may exceed its prediction before its stage counts as hung; 5000 by default.",
    ),
]  # fmt: skip
FirstWaveMs = Annotated[
    int | None,
    typer.Option(
        "--first-wave-ms", envvar="WAVEPP_FIRST_WAVE_MS",
        help="Longest that a stage may take for its first wave (it may compile) and while little is known of it, more "
        "than 1250; by default what its engine allows, and a slack.",
    ),
]  # fmt: skip
SnapshotTokens = Annotated[
    int,
    typer.Option(
        "--snapshot-tokens", envvar="WAVEPP_SNAPSHOT_TOKENS", help="Between two recurrent snapshots; 0 takes none."
    ),
]
ShareTokens = Annotated[
    int | None,
    typer.Option(
        "--share-tokens", envvar="WAVEPP_SHARE_TOKENS",
        help="Least that waiting for another request's prefix must win; one block by default, 0 never waits.",
    ),
]  # fmt: skip
ShortShare = Annotated[
    float | None,
    typer.Option(
        "--short-share", envvar="WAVEPP_SHORT_SHARE",
        help="Part of the tokens of waves that short prompts may take before a longer one; 0.25 by default, 0 = none.",
    ),
]  # fmt: skip
Json = Annotated[bool, typer.Option("--json/--no-json", envvar="WAVEPP_JSON", help="Output for programs.")]


def engine_of(engine: str | None, model: str) -> str:
    """The engine asked for, else the one that `model` (a folder, or an emulated: preset) needs."""
    return engine or ("emulated" if model.startswith("emulated:") else "torch")


def server_security(ca: Path | None, cert: Path | None, key: Path | None) -> ServerSecurity:
    """Raises InvalidRequest when one of CA and certificate is there without the other: one direction of this process's
    connections would be plain text without a word."""
    from wavepp_proto.errors import InvalidRequest
    from wavepp_proto.runtime.channels import ServerSecurity

    for name, value, other, plain in (
        ("tls_cert", cert if key else None, ca, "--tls-ca, without which peers would be reached in plain text"),
        ("tls_ca", ca, cert, "--tls-cert and --tls-key, without which this process would serve plain text"),
    ):
        if value is not None and other is None:
            raise InvalidRequest(f"--{name.replace('_', '-')} needs {plain}", field=name, value=str(value))
    return ServerSecurity(ca, cert, key)


def client_security(ca: Path | None, cert: Path | None, key: Path | None, server_name: str) -> ClientSecurity:
    from wavepp_proto.runtime.channels import ClientSecurity

    return ClientSecurity(ca, cert if ca else None, key if ca else None, server_name)


def link_kind(text: str) -> LinkKind:
    """The link that `text` names. Raises InvalidRequest listing the kinds."""
    from wavepp_proto.errors import InvalidRequest
    from wavepp_proto.terms import LinkKind

    try:
        return LinkKind(text)
    except ValueError:
        kinds = ", ".join(kind.value for kind in LinkKind)
        raise InvalidRequest(f"unknown link {text!r}", field="link", value=text, limit=kinds) from None


def etcd_store(
    etcd: str, user: str, password_file: Path | None, ca: Path | None, cert: Path | None, key: Path | None
) -> EtcdStore:
    """The store of a process. Raises InvalidRequest naming the option."""
    from wavepp_proto.errors import InvalidRequest
    from wavepp_proto.runtime.etcd_client import EtcdOptions
    from wavepp_proto.runtime.etcd_store import EtcdStore

    password = ""
    if password_file is not None:
        try:
            password = password_file.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) else "not UTF-8"  # its own text quotes the password
            raise InvalidRequest(
                f"cannot read {password_file}: {why}", field="etcd_password_file", value=str(password_file)
            ) from None
    endpoints = tuple(part.strip() for part in etcd.split(",") if part.strip())
    return EtcdStore(EtcdOptions(endpoints, ca, cert, key, user, password))


def tracer(service: str, otlp: str | None, sample: float) -> Tracer:
    from wavepp_proto.runtime.tracing import Tracer, TraceSettings

    return Tracer(TraceSettings.from_environment(service, otlp, sample))
