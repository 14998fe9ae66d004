"""What an operator says about one controller, validated by the core's own Config."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from wavepp_controller.core.config import ControllerConfig
from wavepp_proto.runtime.channels import ClientSecurity, ServerSecurity
from wavepp_proto.runtime.record import check_name

DEFAULT_PORT = 7411


@dataclass(frozen=True, slots=True)
class ControllerSettings:
    config: ControllerConfig = field(default_factory=ControllerConfig)
    cluster: str = "default"
    listen: str = f"127.0.0.1:{DEFAULT_PORT}"
    advertise: str | None = None
    server_security: ServerSecurity = field(default_factory=ServerSecurity)
    """For clients and operators."""
    client_security: ClientSecurity = field(default_factory=ClientSecurity)
    """For stage daemons."""
    metrics: str | None = None
    """host:port of the Prometheus endpoint; None serves none."""
    reflection: bool = False
    model_file: Path | None = None
    """Where latency models are kept, or a device profile that seeds them; None keeps them for this life only."""

    def __post_init__(self) -> None:
        check_name("cluster", self.cluster)
