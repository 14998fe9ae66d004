"""TLS that was asked for is TLS or an error: never plain text.

Owns the check that no certificate, key or server name stands alone, which would leave TLS off without
a word. The credentials themselves are made by `wavepp_proto.runtime.channels`. Called by the client
and, with the spelling of their options, by the commands.
"""

from __future__ import annotations

from collections.abc import Callable

from wavepp_proto.errors import InvalidRequest
from wavepp_proto.runtime.channels import ClientSecurity


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
