"""WavePP's Python SDK: send prompts to a controller, get first tokens and how much was reused.

Owns the public names, nothing else; they are loaded on first use, so that `import wavepp` costs
milliseconds and brings in neither gRPC nor numpy. Start at `AsyncClient` or `Client`; every error is
in `wavepp.errors`; `wavepp.testing` has a fake controller for tests of code that uses this SDK.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from wavepp_proto import __version__ as __version__

if TYPE_CHECKING:
    from wavepp import errors
    from wavepp._client import AsyncClient
    from wavepp._retry import RetryPolicy
    from wavepp._status import ClusterStatus
    from wavepp._stream import PrefillStream
    from wavepp._sync import Client
    from wavepp._types import Description, PrefillOutcome, PrefillResult, RequestOptions
    from wavepp_proto.errors import WaveppError
    from wavepp_proto.runtime.channels import ClientSecurity
    from wavepp_proto.runtime.tracing import TraceSettings
    from wavepp_proto.terms import Admitted, Finished, Progress, Queued, Sampling, Timings

__all__ = [
    "Admitted",
    "AsyncClient",
    "Client",
    "ClientSecurity",
    "ClusterStatus",
    "Description",
    "Finished",
    "PrefillOutcome",
    "PrefillResult",
    "PrefillStream",
    "Progress",
    "Queued",
    "RequestOptions",
    "RetryPolicy",
    "Sampling",
    "Timings",
    "TraceSettings",
    "WaveppError",
    "errors",
]

_HOME = {
    "Admitted": "wavepp_proto.terms",
    "AsyncClient": "wavepp._client",
    "Client": "wavepp._sync",
    "ClientSecurity": "wavepp_proto.runtime.channels",
    "ClusterStatus": "wavepp._status",
    "Description": "wavepp._types",
    "Finished": "wavepp_proto.terms",
    "PrefillOutcome": "wavepp._types",
    "PrefillResult": "wavepp._types",
    "PrefillStream": "wavepp._stream",
    "Progress": "wavepp_proto.terms",
    "Queued": "wavepp_proto.terms",
    "RequestOptions": "wavepp._types",
    "RetryPolicy": "wavepp._retry",
    "Sampling": "wavepp_proto.terms",
    "Timings": "wavepp_proto.terms",
    "TraceSettings": "wavepp_proto.runtime.tracing",
    "WaveppError": "wavepp_proto.errors",
}


def __getattr__(name: str) -> Any:
    if name == "errors":
        return importlib.import_module("wavepp.errors")
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'wavepp' has no attribute {name!r}")
    found = getattr(importlib.import_module(home), name)
    if home.startswith("wavepp."):
        # Tracebacks and reprs show the name that users import. Names of `wavepp_proto` keep their home:
        # the controller uses them too, and their annotations resolve there.
        found.__module__ = __name__
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
