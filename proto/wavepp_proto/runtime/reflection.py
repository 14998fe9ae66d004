"""gRPC reflection, for operators who explore a server with grpcurl and the like.

Owns how services are listed. Off by default: reflection tells a stranger every call there is. Called
by controller and stage daemon before their servers start.
"""

from __future__ import annotations

import grpc.aio
from google.protobuf.descriptor import FileDescriptor


def serve_reflection(server: grpc.aio.Server, *files: FileDescriptor) -> None:
    """Add reflection to `server`, listing every service of `files` and reflection itself."""
    # Deferred: only who asked for it pays for the import.
    from grpc_reflection.v1alpha import reflection

    names = [service.full_name for file in files for service in file.services_by_name.values()]
    reflection.enable_server_reflection([*names, reflection.SERVICE_NAME], server)
