"""TLS that was asked for is TLS or an error: never plain text.

Owns the check that no certificate, key or server name stands alone, which would leave TLS off without
a word; and the look at an address that did not answer, since gRPC says the same of a plain client at a TLS port, a
TLS client at a plain one and a certificate that is not accepted. The credentials themselves are made by
`wavepp_proto.runtime.channels`.
"""

from __future__ import annotations

import socket
import ssl
from collections.abc import Callable

from wavepp_proto.errors import InvalidRequest
from wavepp_proto.runtime.channels import ClientSecurity, parse_address

PROBE_S = 2.0
"""Longest wait for each step of a look at an address that does not answer."""


def check_tls(security: ClientSecurity, spell: Callable[[str], str] = "tls.{}".format) -> ClientSecurity:
    """`security` itself. Raises InvalidRequest naming the first setting that is no use without a CA.

    `spell` turns the name of a field into what the caller wrote.
    """
    if security.ca is not None:
        return security
    for name in ("cert", "key", "server_name"):
        value = getattr(security, name)
        if value:
            message = f"{spell(name)} needs {spell('ca')}: without it the connection would be plain text"
            raise InvalidRequest(message, field=f"tls_{name}", value=str(value))
    return security


def why_unreachable(
    address: str, security: ClientSecurity, spell: Callable[[str], str] = "tls.{}".format
) -> str | None:
    """What a look at `address` says of why no call came through; None if that looks as it should. Blocking, bounded."""
    place = parse_address(address)
    context = _context(security)
    try:
        with (
            socket.create_connection((place.host or "127.0.0.1", place.port), PROBE_S) as plain,
            context.wrap_socket(plain, server_hostname=security.server_name or place.host) as shielded,
        ):
            if security.ca is None:
                return f"{address} speaks TLS: give {spell('ca')}"
            return _refused_afterwards(address, shielded, security, spell)
    except ssl.SSLCertVerificationError as error:
        return (
            f"the certificate of {address} is not accepted ({error.verify_message}): {spell('ca')} must be of the"
            f" authority that signed it, {spell('server_name')} the host that it names"
        )
    except (ssl.SSLError, TimeoutError, ConnectionResetError):
        return f"{address} does not speak TLS: leave {spell('ca')} out" if security.ca is not None else None
    except OSError as error:
        return f"nothing answers at {address} ({error.strerror or error})"


def _context(security: ClientSecurity) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=security.ca)
    if security.ca is None:
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    elif security.cert is not None:
        context.load_cert_chain(security.cert, security.key)
    context.set_alpn_protocols(["h2"])
    return context


def _refused_afterwards(
    address: str, shielded: ssl.SSLSocket, security: ClientSecurity, spell: Callable[[str], str]
) -> str | None:
    """A server of TLS 1.3 refuses a client's certificate, or the lack of one, behind the handshake."""
    shielded.settimeout(PROBE_S)
    try:
        accepted = bool(shielded.recv(1))  # the first of HTTP/2's settings
    except TimeoutError:
        return None
    except OSError:  # an alert is an SSLError, which is one
        accepted = False
    if accepted:
        return None
    wanted = "refuses this client certificate" if security.cert else "wants a client certificate"
    return f"{address} {wanted}: give {spell('cert')} and {spell('key')} that its CA signed"
