"""TLS on every hop, etcd's included, in real processes; whoever shows no certificate is refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from tests.harness.certs import Certificates, make_certificates
from tests.harness.command import json_lines, wavepp
from tests.harness.etcd import RealEtcd
from tests.harness.processes import QUICK, VOCABULARY, Processes, random_prompt
from wavepp import AsyncClient, ClientSecurity, RetryPolicy
from wavepp.errors import ControllerUnavailable
from wavepp_proto.runtime.channels import ServerSecurity, open_channel
from wavepp_proto.v1 import admission_pb2, admission_pb2_grpc
from wavepp_stage.engine.emulated import expected_first_token

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return make_certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture
def etcd(certificates: Certificates) -> Iterator[RealEtcd]:
    etcd = RealEtcd(ServerSecurity(certificates.ca, certificates.server_cert, certificates.server_key))
    yield etcd
    etcd.close()


async def test_a_cluster_serves_with_tls_everywhere_and_refuses_who_has_no_certificate(
    tmp_path: Path, certificates: Certificates, etcd: RealEtcd
) -> None:
    """The emulated engine's activations travel over gRPC: stage to stage is a hop too."""
    shown = ClientSecurity(certificates.ca, certificates.client_cert, certificates.client_key)
    options = etcd.options
    plan: dict[str, Any] = {
        "etcd": options.endpoints[0], "etcd_ca": options.ca, "etcd_cert": options.cert, "etcd_key": options.key,
        "tls": {"tls-ca": certificates.ca, "tls-cert": certificates.server_cert, "tls-key": certificates.server_key},
    }  # fmt: skip
    async with Processes(tmp_path, QUICK, security=shown, **plan) as cluster:
        await cluster.run(random_prompt(1, 300)).succeeds()

        command = wavepp(
            tmp_path, "prefill", "--tokens", "1,2,3", "--json", "--controller", cluster.address,
            "--tls-ca", str(shown.ca), "--tls-cert", str(shown.cert), "--tls-key", str(shown.key),
        )  # fmt: skip
        assert command.returncode == 0, command.stderr
        assert json_lines(command)[0]["first_token"] == expected_first_token([1, 2, 3], VOCABULARY)

        for refused in (ClientSecurity(), ClientSecurity(certificates.ca)):
            async with AsyncClient(cluster.address, tls=refused, retry=RetryPolicy(attempts=1)) as stranger:
                with pytest.raises(ControllerUnavailable):
                    await stranger.prefill([1, 2, 3], deadline=20)
            for daemon in (await cluster.serving(1)).daemons:
                await _is_refused(daemon.address, refused)


async def _is_refused(address: str, security: ClientSecurity) -> None:
    """A stage daemon answers nobody without a certificate either."""
    async with open_channel(address, security) as channel:
        stub = admission_pb2_grpc.StageAdmissionStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Inventory(admission_pb2.InventoryRequest(), timeout=20)
    assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
