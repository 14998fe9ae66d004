"""One synchronous connection to etcd through the package `etcd3`, confined to one thread.

Owns endpoints, TLS, user and password, moving to the next endpoint, and the translation of the
package's errors into ours. Does not own threads or asyncio (`etcd_store.py`).

Fits etcd3 0.12.0 and its unreleased successor, whose multi-endpoint client would otherwise refuse
calls for 300 s after one failure: it gets one endpoint with `time_retry=0` and `failover=True`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeVar

import grpc

from wavepp_proto import convert, limits
from wavepp_proto.errors import InvalidRequest, MembershipUnavailable, Unauthenticated
from wavepp_proto.runtime.channels import ETCD_CHANNEL_OPTIONS, Address, parse_address
from wavepp_proto.runtime.etcd_import import load_etcd3
from wavepp_proto.runtime.store import LeaseGone

T = TypeVar("T")

CALL_TIMEOUT_S: Final = limits.STORE_CALL_MS / 1000
"""Deadline of one etcd call: short against MEMBER_TTL_S, so that a lease survives several misses."""
_DENIED: Final = frozenset(
    {
        grpc.StatusCode.UNAUTHENTICATED,
        grpc.StatusCode.PERMISSION_DENIED,
        # A wrong or missing user, and a user at a server without authentication: our requests give no other cause.
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.FAILED_PRECONDITION,
    }
)


@dataclass(frozen=True, slots=True)
class EtcdOptions:
    """How to reach etcd. No `ca` = plain text."""

    endpoints: tuple[str, ...]
    """host:port, optionally with http:// or https:// in front (https needs `ca`)."""
    ca: Path | None = None
    cert: Path | None = None
    key: Path | None = None
    user: str = ""
    password: str = field(default="", repr=False)
    timeout_s: float = CALL_TIMEOUT_S

    def addresses(self) -> tuple[Address, ...]:
        """The endpoints, parsed. Raises InvalidRequest naming the option that is wrong."""
        if not self.endpoints:
            raise InvalidRequest("no etcd endpoint given", field="etcd")
        if (self.cert is None) != (self.key is None) or (self.cert is not None and self.ca is None):
            raise InvalidRequest("etcd client cert and key come together, and need ca", field="etcd_cert")
        if bool(self.user) != bool(self.password):
            raise InvalidRequest("etcd user and password come together", field="etcd_user")
        convert.check_utf8("etcd_user", self.user)
        return tuple(self._address(endpoint) for endpoint in self.endpoints)

    def _address(self, endpoint: str) -> Address:
        scheme, found, rest = endpoint.rpartition("://")
        if found and scheme not in ("http", "https"):
            raise InvalidRequest(f"unknown scheme in {endpoint!r}", field="etcd", value=endpoint)
        if found and (scheme == "https") != (self.ca is not None):
            raise InvalidRequest(f"{endpoint!r} and the TLS ca do not go together", field="etcd_ca", value=endpoint)
        return parse_address(rest.rstrip("/"), field="etcd")


class EtcdConnection:
    """Clients for all endpoints, made when first needed and kept until a connection falls silent."""

    def __init__(self, options: EtcdOptions) -> None:
        self._options = options
        self._addresses = options.addresses()
        self._turn = 0
        self._clients: dict[Address, Any] = {}
        self._answered: set[Address] = set()
        """Endpoints whose present client has had an answer: its connection stood once."""
        self._etcd3 = load_etcd3()

    def perform(self, operation: Callable[[Any], T]) -> T:
        """`operation(client)`. Raises LeaseGone, Unauthenticated or MembershipUnavailable.

        A token that the server no longer knows (it restarted, or the token aged) is renewed once.
        """
        try:
            return self._attempt(operation)
        except Unauthenticated:
            if not self._options.user:
                raise
            self._drop(self._current)
            return self._attempt(operation)

    def watch(self, prefix: str, from_revision: int, more_requests: Iterator[Any]) -> Any:
        """A started watch call over `prefix`; it lives until `more_requests` ends or it is cancelled."""
        rpc = self._etcd3.etcdrpc
        key = prefix.encode()
        # First key after the prefix; ours are ASCII, so the last byte never overflows.
        end = key[:-1] + bytes([key[-1] + 1])
        creation = rpc.WatchCreateRequest(key=key, range_end=end, start_revision=from_revision)

        def requests() -> Iterator[Any]:
            yield rpc.WatchRequest(create_request=creation)
            yield from more_requests

        def start(client: Any) -> Any:
            stub = rpc.WatchStub(client.channel)
            return stub.Watch(requests(), metadata=client.metadata)

        return self.perform(start)

    def close(self) -> None:
        for address in tuple(self._clients):
            self._drop(address)

    @property
    def _current(self) -> Address:
        return self._addresses[self._turn % len(self._addresses)]

    def _attempt(self, operation: Callable[[Any], T]) -> T:
        etcd3 = self._etcd3
        try:
            client = self._clients.get(self._current)
            if client is None:
                client = self._clients[self._current] = self._make_client(self._current)
                # The token travels as metadata already; as call credentials gRPC refuses it on plain channels.
                client.call_credentials = None
            answer = operation(client)
            self._answered.add(self._current)
            return answer
        except etcd3.Etcd3Exception as error:
            raise self._unavailable(error.__context__ or error) from error
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.NOT_FOUND:
                raise LeaseGone(error.details()) from error
            if error.code() in _DENIED:
                raise Unauthenticated(f"etcd refuses: {error.details()}", field="etcd_user") from error
            raise self._unavailable(error) from error

    def _unavailable(self, error: BaseException) -> MembershipUnavailable:
        address = self._current
        self._turn += 1
        if address in self._answered and _is_silence(error):
            # A half-open connection swallows everything and never breaks: only a new one tells. Its watches end with
            # it. One that never answered may still be connecting and is let be.
            self._drop(address)
        details = error.details() if isinstance(error, grpc.RpcError) else str(error)
        return MembershipUnavailable(f"etcd at {address} does not answer: {details}", endpoint=str(address))

    def _drop(self, address: Address) -> None:
        self._answered.discard(address)
        client = self._clients.pop(address, None)
        if client is not None:
            client.close()

    def _make_client(self, address: Address) -> Any:
        etcd3, options = self._etcd3, self._options
        host = f"[{address.host}]" if ":" in address.host else address.host
        common = {
            "timeout": options.timeout_s,
            "user": options.user or None,
            "password": options.password or None,
        }
        multi = getattr(etcd3, "MultiEndpointEtcd3Client", None)
        tls = tuple(str(path) if path else None for path in (options.ca, options.key, options.cert))
        if multi is None:
            ca, key, cert = tls
            paths = {"ca_cert": ca, "cert_key": key, "cert_cert": cert}
            return etcd3.Etcd3Client(host, address.port, grpc_options=ETCD_CHANNEL_OPTIONS, **paths, **common)
        credentials = multi.get_secure_creds(*tls) if options.ca else None
        endpoint = etcd3.Endpoint(
            host, address.port, credentials is not None, credentials, time_retry=0, opts=ETCD_CHANNEL_OPTIONS
        )
        return multi([endpoint], failover=True, **common)


def _is_silence(error: BaseException) -> bool:
    return isinstance(error, grpc.RpcError) and error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
