"""The type of a handler's context: generic in stubs, not worth repeating at every handler."""

from __future__ import annotations

from typing import Any, TypeAlias

import grpc.aio

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
