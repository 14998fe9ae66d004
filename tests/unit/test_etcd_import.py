"""`import etcd3` on a current protobuf (wavepp_proto.runtime.etcd_import)."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from wavepp_proto.runtime.etcd_import import load_etcd3, serialized_descriptor


def run(program: str, *path: Path) -> str:
    """Standard output of `program` in a fresh interpreter with `path` in front."""
    code = f"import sys; sys.path[:0] = {[str(entry) for entry in path]!r}\n{textwrap.dedent(program)}"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.strip()


def test_package_is_usable_when_loaded() -> None:
    etcd3 = load_etcd3()
    rpc = etcd3.etcdrpc
    request = rpc.TxnRequest(success=[rpc.RequestOp(request_put=rpc.PutRequest(key=b"k", value=b"v", lease=7))])
    assert rpc.TxnRequest.FromString(request.SerializeToString()) == request
    assert rpc.RangeRequest.DESCEND == 2
    assert load_etcd3() is etcd3


def test_plain_import_works_when_loaded_before() -> None:
    """Other users of etcd3 in the process get the same, working package."""
    told = run("""
        from wavepp_proto.runtime.etcd_import import load_etcd3
        loaded = load_etcd3()
        import etcd3
        from etcd3.etcdrpc import kv_pb2
        print(etcd3 is loaded, kv_pb2.KeyValue(key=b"k").key)
    """)
    assert told == "True b'k'"


def test_loading_from_many_threads_gives_one_package() -> None:
    told = run("""
        from concurrent.futures import ThreadPoolExecutor
        from wavepp_proto.runtime.etcd_import import load_etcd3
        with ThreadPoolExecutor(8) as pool:
            print(len({id(module) for module in pool.map(lambda _: load_etcd3(), range(8))}))
    """)
    assert told == "1"


def test_loading_fails_typed_when_the_package_is_missing() -> None:
    told = run("""
        import importlib.util
        find = importlib.util.find_spec
        importlib.util.find_spec = lambda name, *rest: None if name == "etcd3" else find(name, *rest)
        from wavepp_proto.runtime.etcd_import import load_etcd3
        try:
            load_etcd3()
        except ImportError as error:
            print(error.name)
    """)
    assert told == "etcd3"


def test_multi_endpoint_client_is_told_to_retry_at_once_when_the_package_has_one(tmp_path: Path) -> None:
    """The unreleased successor refuses calls for 300 s after one failure unless told otherwise."""
    package = tmp_path / "etcd3"
    package.mkdir()
    (package / "__init__.py").write_text(
        textwrap.dedent("""
            class Etcd3Exception(Exception): ...
            class Endpoint:
                def __init__(self, host, port, secure, creds, time_retry=300.0, opts=None):
                    self.told = (host, port, secure, time_retry)
            class MultiEndpointEtcd3Client:
                def __init__(self, endpoints, timeout=None, user=None, password=None, failover=False):
                    self.told = ([endpoint.told for endpoint in endpoints], timeout, user, password, failover)
        """)
    )
    told = run(
        """
        import etcd3
        from wavepp_proto.runtime.etcd_client import EtcdConnection, EtcdOptions
        connection = EtcdConnection(EtcdOptions(("[::1]:7", "host:8"), timeout_s=3.0))
        print(connection.perform(lambda client: client.told))
        """,
        tmp_path,
    )
    assert told == "([('[::1]', 7, False, 0)], 3.0, None, None, True)"


@pytest.mark.parametrize(
    "source",
    [
        "D = _descriptor.FileDescriptor(name='x', serialized_pb=_b('\\n\\x01\\xff'))",
        "D = _descriptor.FileDescriptor(name='x', serialized_pb=b'\\n\\x01\\xff')",
        "D = _descriptor_pool.Default().AddSerializedFile(b'\\n\\x01\\xff')",
    ],
)
def test_descriptor_is_read_when_written_in_a_known_form(source: str) -> None:
    assert serialized_descriptor(f"import sys\n_b = None\n{source}\n") == b"\n\x01\xff"


@pytest.mark.parametrize("source", ["", "f()", "pool.AddSerializedFile(data)", "d.FileDescriptor(name='x')"])
def test_descriptor_is_none_when_the_source_has_no_literal(source: str) -> None:
    assert serialized_descriptor(source) is None
