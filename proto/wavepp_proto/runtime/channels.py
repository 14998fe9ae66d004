"""gRPC channels and servers: the only place where they get options, credentials and addresses.

Owns address parsing, the advertise rule, TLS material, the keepalive check and binding. Does not own
the numbers (`limits.py`) nor any service. Called by every runtime: controller, stage daemon, client.

TLS: a server with `cert` and `key` speaks TLS; with `ca` too it demands client certificates signed
by that CA. A client with `ca` speaks TLS; with `cert` and `key` it shows its own certificate.
"""

from __future__ import annotations

import errno
import os
import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import grpc
import grpc.aio

from wavepp_proto import limits
from wavepp_proto.errors import InvalidRequest
from wavepp_proto.terms import PipelineId

WILDCARD_HOSTS: Final = frozenset({"", "0.0.0.0", "::", "*"})
_HOST: Final = re.compile(r"[A-Za-z0-9._:%*-]{0,250}")
"""A name, an IPv4 or IPv6 address, a wildcard: with a port at most MAX_NAME_CHARS, as messages have it."""
_GRPC_DEFAULT_MIN_PING_MS: Final = 300_000
"""What a gRPC server enforces when its options name no minimum."""

ETCD_CHANNEL_OPTIONS: Final[tuple[tuple[str, int], ...]] = (
    # etcd allows one ping per 5 s, and none without calls: only streams (watches) are kept alive.
    ("grpc.keepalive_time_ms", limits.ETCD_KEEPALIVE_TIME_MS),
    ("grpc.keepalive_timeout_ms", limits.ETCD_KEEPALIVE_TIMEOUT_MS),
    ("grpc.http2.ping_timeout_ms", limits.ETCD_KEEPALIVE_TIMEOUT_MS),
    # By default gRPC stops after two pings without data, and a watch may have none for hours.
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.enable_http_proxy", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", limits.CONNECT_TIMEOUT_MS),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.use_local_subchannel_pool", 1),
)

Options = Sequence[tuple[str, str | int]]


@dataclass(frozen=True, slots=True)
class Address:
    """`host:port` taken apart; an IPv6 host is stored without its brackets."""

    host: str
    port: int

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


@dataclass(frozen=True, slots=True)
class ServerSecurity:
    """PEM files of a server. Empty = plain text (loopback and trusted networks)."""

    ca: Path | None = None
    """Signs the client certificates that are accepted; None asks clients for no certificate."""
    cert: Path | None = None
    key: Path | None = None

    def credentials(self) -> grpc.ServerCredentials | None:
        """TLS credentials, or None for plain text. Raises InvalidRequest on half a pair or an unreadable file."""
        pair = _pair(self.cert, self.key)
        if pair is None:
            if self.ca is not None:
                raise InvalidRequest("a server with tls ca needs cert and key too", field="tls_cert")
            return None
        root = _read("tls_ca", self.ca) if self.ca else None
        return grpc.ssl_server_credentials([pair], root_certificates=root, require_client_auth=root is not None)


@dataclass(frozen=True, slots=True)
class ClientSecurity:
    """PEM files of a client. Empty = plain text."""

    ca: Path | None = None
    """Signs the server certificates that are trusted; its presence turns TLS on."""
    cert: Path | None = None
    key: Path | None = None
    server_name: str = ""
    """Name to expect in the server's certificate when it is not the host that is dialled."""

    def credentials(self) -> grpc.ChannelCredentials | None:
        """TLS credentials, or None for plain text. Raises InvalidRequest on half a pair, an unreadable file or a
        server name that no host has."""
        if not _HOST.fullmatch(self.server_name):
            message = f"tls server name names no host: {self.server_name!r}"
            raise InvalidRequest(message, field="tls_server_name", value=self.server_name, limit="250 characters")
        pair = _pair(self.cert, self.key)
        if self.ca is None:
            if pair is not None:
                raise InvalidRequest("a client with tls cert needs ca too", field="tls_ca")
            return None
        key, cert = pair or (None, None)
        return grpc.ssl_channel_credentials(_read("tls_ca", self.ca), key, cert)


PLAIN_SERVER: Final = ServerSecurity()
PLAIN_CLIENT: Final = ClientSecurity()


def parse_address(text: str, *, field: str = "address") -> Address:
    """`host:port`, `[v6]:port` or `:port` as an Address; port 0 asks for a free one.

    Raises InvalidRequest naming `field` when the port is missing, not a number or above 65535, or no host can be so
    called.
    """
    host, colon, port = text.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    if bracketed:
        host = host[1:-1]
    if not colon or (":" in host and not bracketed):
        raise InvalidRequest(f"{field} must be host:port, got {text!r}", field=field, value=text)
    if not (port.isascii() and port.isdigit() and len(port) <= 5 and int(port) <= 65535):
        raise InvalidRequest(f"{field} has no valid port: {text!r}", field=field, value=text, limit=65535)
    if not _HOST.fullmatch(host):
        raise InvalidRequest(f"{field} names no host: {text!r}", field=field, value=text, limit="250 characters")
    return Address(host, int(port))


def advertise_address(listen: str, advertise: str | None, port: int) -> str:
    """The address peers should dial: `advertise` if given, else `listen`, with the bound `port` filled in.

    `advertise` may be `host` or `host:port`; port 0 or none means the bound one. Listening on a
    wildcard names no host that a peer could dial, so it needs an explicit `advertise`: InvalidRequest.
    """
    if advertise:
        with_port = advertise if _has_port(advertise) else f"{_bracket(advertise)}:0"
        chosen = parse_address(with_port, field="advertise")
        if chosen.host in WILDCARD_HOSTS:
            raise InvalidRequest(f"no peer can dial {advertise!r}", field="advertise", value=advertise)
        return str(Address(chosen.host, chosen.port or port))
    host = parse_address(listen, field="listen").host
    if host in WILDCARD_HOSTS:
        raise InvalidRequest(f"listening on {listen} needs --advertise: no peer can dial it", field="advertise")
    return str(Address(host, port))


def check_proxy(text: str) -> str:
    """`text` itself, `http://[user:password@]host:port` of a proxy that knows CONNECT. Raises InvalidRequest."""
    scheme, _, place = text.partition("://")
    at = place.rpartition("@")[2]
    if scheme != "http" or not parse_address(at, field="proxy").host or not parse_address(at).port:
        raise InvalidRequest(f"proxy must be http://host:port, got {text!r}", field="proxy", value=text)
    return text


_grpc_in: int | None = None
"""Process that opened a channel first: gRPC's threads and locks do not survive a fork (grpc#13464)."""


def check_not_forked(since: int | None = None) -> None:
    """Raise InvalidRequest in a child of a process that used gRPC, or than `since` (a process id)."""
    used_in, here = (_grpc_in if since is None else since), os.getpid()
    if used_in not in (None, here):
        message = (
            f"process {here} was forked from process {used_in}, which used gRPC: start it by multiprocessing's spawn or"
            " forkserver, or fork before the first client is used"
        )
        raise InvalidRequest(message, field="process", value=here, limit=used_in)


def open_channel(address: str, security: ClientSecurity = PLAIN_CLIENT, proxy: str | None = None) -> grpc.aio.Channel:
    """A channel to `address` (host:port), through `proxy` if there is one; it connects lazily.

    Raises InvalidRequest on bad address, proxy or TLS files, and in a process that was forked from one that used gRPC.
    """
    global _grpc_in
    check_not_forked()
    _grpc_in = os.getpid()
    target = str(parse_address(address))
    options: list[tuple[str, str | int]] = list(limits.CHANNEL_OPTIONS)
    if proxy is not None:
        options = [(name, value) for name, value in options if name != "grpc.enable_http_proxy"]
        options += [("grpc.enable_http_proxy", 1), ("grpc.http_proxy", check_proxy(proxy))]
    credentials = security.credentials()
    if credentials is None:
        return grpc.aio.insecure_channel(target, options=options)
    if security.server_name:
        options.append(("grpc.ssl_target_name_override", security.server_name))
    return grpc.aio.secure_channel(target, credentials, options=options)


def pipeline_service(pipeline: PipelineId) -> str:
    """The service under which gRPC health tells of one pipeline; the empty name tells of the whole process."""
    return f"pipeline/{pipeline}"


def new_server(interceptors: Sequence[grpc.aio.ServerInterceptor] = ()) -> grpc.aio.Server:
    """A server with our options and nothing else; add services, then `bind_server`, then start it."""
    check_keepalive(limits.CHANNEL_OPTIONS, limits.SERVER_OPTIONS)
    return grpc.aio.server(options=list(limits.SERVER_OPTIONS), interceptors=list(interceptors))


def bind_server(server: grpc.aio.Server, listen: str, security: ServerSecurity = PLAIN_SERVER) -> int:
    """Bind `server` to `listen` (host:port, port 0 = any free one) and return the port.

    Raises InvalidRequest with `field`, `value` and, where the system tells, `holder` when it cannot be bound.
    """
    address = parse_address(listen, field="listen")
    bound = Address(address.host or "0.0.0.0", address.port)
    _try_bind(bound)
    target = str(bound)
    credentials = security.credentials()
    try:
        port = server.add_secure_port(target, credentials) if credentials else server.add_insecure_port(target)
    except RuntimeError as error:
        raise _bind_error(address, error) from error
    if port == 0:
        raise _bind_error(address, None)
    return port


def check_server(listen: str, advertise: str | None, metrics: str | None, security: ServerSecurity) -> None:
    """What can be told of a server's addresses and files before anything is loaded or begun.

    Raises InvalidRequest naming the field; whether the port is still free later, `bind_server` finds out.
    """
    advertise_address(listen, advertise, 0)
    if metrics is not None:
        parse_address(metrics, field="metrics")
    security.credentials()
    host, port = (address := parse_address(listen, field="listen")).host or "0.0.0.0", address.port
    _try_bind(Address(host, port))


def check_keepalive(channel_options: Options, server_options: Options) -> None:
    """Refuse a pair of option lists whose pings the server would answer with GOAWAY too_many_pings.

    Raises InvalidRequest naming the option, its value and the limit (reference: gRPC keepalive guide).
    """
    client, server = dict(channel_options), dict(server_options)
    ping_ms = int(client.get("grpc.keepalive_time_ms", 2**31 - 1))
    minimum_ms = int(server.get("grpc.http2.min_ping_interval_without_data_ms", _GRPC_DEFAULT_MIN_PING_MS))
    if ping_ms <= minimum_ms:
        message = f"clients ping every {ping_ms} ms, the server allows one per {minimum_ms} ms"
        raise InvalidRequest(message, field="grpc.keepalive_time_ms", value=ping_ms, limit=minimum_ms)
    permit = "grpc.keepalive_permit_without_calls"
    if int(client.get(permit, 0)) > int(server.get(permit, 0)):
        raise InvalidRequest("clients ping without calls, the server forbids it", field=permit, value=1, limit=0)


def _has_port(text: str) -> bool:
    return (text.startswith("[") and "]:" in text) or text.count(":") == 1


def _bracket(host: str) -> str:
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


def _pair(cert: Path | None, key: Path | None) -> tuple[bytes, bytes] | None:
    """(key, cert) in gRPC's order, or None when neither is set."""
    if cert is None and key is None:
        return None
    if cert is None or key is None:
        missing = "tls_cert" if cert is None else "tls_key"
        raise InvalidRequest("tls cert and key come together", field=missing)
    return _read("tls_key", key), _read("tls_cert", cert)


def _read(field: str, path: Path) -> bytes:
    try:
        return path.read_bytes()
    except (OSError, ValueError) as error:  # ValueError: no file can be called so
        why = getattr(error, "strerror", None) or "no name of a file"
        raise InvalidRequest(f"{field}: cannot read {path}: {why}", field=field, value=str(path)) from error


def _try_bind(address: Address) -> None:
    """Ask the system first: it says why not, where gRPC writes lines of its own to stderr."""
    try:
        found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
        family, kind, number, _, where = found[0]
        with socket.socket(family, kind, number) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as gRPC does
            probe.bind(where)
    except (OSError, UnicodeError) as error:
        raise _bind_error(address, error) from error


def _bind_error(address: Address, cause: Exception | None) -> InvalidRequest:
    number, said = (cause.errno, cause.strerror) if isinstance(cause, OSError) else (None, None)
    holder = _port_holder(address) if address.port and number in (errno.EADDRINUSE, None) else None
    reason = f"the port is held by {holder}" if holder else said or str(cause or "gRPC gives no reason")
    message = f"cannot listen on {address}: {reason}"
    return InvalidRequest(message, field="listen", value=str(address), holder=holder)


def _port_holder(address: Address) -> str | None:
    """`name (pid n)` of the process listening there; None if unknown, not ours to see, or psutil is absent.

    One that listens on the same port of another address of this machine is in nobody's way."""
    try:
        import psutil
    except ImportError:
        return None
    try:
        there = {host[4][0] for host in socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)}
        for connection in psutil.net_connections(kind="tcp"):
            host, port = tuple(connection.laddr) or ("", 0)
            mine = port == address.port and (there & WILDCARD_HOSTS or host in there | WILDCARD_HOSTS)
            if mine and connection.status == psutil.CONN_LISTEN and connection.pid:
                return f"{psutil.Process(connection.pid).name()} (pid {connection.pid})"
    except (psutil.Error, OSError):
        return None
    return None
