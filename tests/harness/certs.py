"""A throw-away certificate authority for tests, made with the `openssl` command.

Owns one CA, one server and one client certificate in a folder of the test's choice. Nothing here is
checked in: keys live as long as the temporary folder does.
"""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Certificates:
    """PEM files; `server_*` is valid for the hosts it was made for, `client_*` for client authentication."""

    ca: Path
    server_cert: Path
    server_key: Path
    client_cert: Path
    client_key: Path


def make_certificates(folder: Path, hosts: Sequence[str] = ("127.0.0.1", "localhost")) -> Certificates:
    """Write a CA and two certificates signed by it under `folder`; `hosts` are IPs or DNS names."""
    ca, ca_key = folder / "ca.pem", folder / "ca.key"
    _openssl("req", "-x509", "-nodes", *_NEW_KEY, "-keyout", ca_key, "-out", ca, "-days", "2", "-subj", "/CN=test-ca")
    names = ",".join(f"IP:{host}" if host[0].isdigit() else f"DNS:{host}" for host in hosts)
    server = _signed(folder, "server", ca, ca_key, f"subjectAltName={names}\nextendedKeyUsage=serverAuth,clientAuth")
    client = _signed(folder, "client", ca, ca_key, "extendedKeyUsage=clientAuth")
    return Certificates(ca, *server, *client)


_NEW_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1")


def _signed(folder: Path, name: str, ca: Path, ca_key: Path, extensions: str) -> tuple[Path, Path]:
    cert, key, request, config = (folder / f"{name}.{suffix}" for suffix in ("pem", "key", "csr", "ext"))
    config.write_text(extensions + "\n")
    _openssl("req", "-new", "-nodes", *_NEW_KEY, "-keyout", key, "-out", request, "-subj", f"/CN=test-{name}")
    signer = ("-CA", ca, "-CAkey", ca_key, "-CAcreateserial", "-days", "2", "-extfile", config)
    _openssl("x509", "-req", "-in", request, "-out", cert, *signer)
    return cert, key


def _openssl(*arguments: str | Path) -> None:
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True, timeout=60)
