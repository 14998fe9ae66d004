"""The contract says what DESIGN.md says, in services, streams, comments and enum values.

That it only grows is tests/meta/test_contract_compat.py's; here: shape, words, and that convert knows
every enum value.
"""

from __future__ import annotations

import importlib
import itertools
import re
from enum import Enum
from pathlib import Path

import pytest
from google.protobuf.descriptor import FileDescriptor, MethodDescriptor
from google.protobuf.descriptor_pb2 import FieldDescriptorProto, FileDescriptorProto, MethodDescriptorProto

from wavepp_proto import limits, terms
from wavepp_proto.v1 import admission_pb2, common_pb2, control_pb2, digest_pb2

V1 = Path(__file__).resolve().parents[2] / "proto" / "wavepp_proto" / "v1"

UNARY, TO, FROM, BOTH = "unary", "stream in", "stream out", "stream both"
SERVICES = {
    "Prefill": {"Submit": BOTH, "Cancel": UNARY, "Run": UNARY, "RunMany": BOTH, "Describe": UNARY},
    "Admin": {"Status": UNARY, "Watch": FROM, "DrainController": UNARY, "Reform": UNARY, "Audit": UNARY},
    "StageAdmission": {"Announce": BOTH, "PinReserve": BOTH, "Inventory": UNARY},
    "StageDigest": {"Watch": FROM},
    "StageExecution": {"RunWaves": BOTH},
    "StageLink": {"Carry": TO},
    "StageControl": {"Join": UNARY, "EndFormation": UNARY, "DrainStage": UNARY, "Refuse": UNARY},
    "KvHandoff": {"ReadBlocks": FROM, "Acknowledge": UNARY},
}


def files() -> list[FileDescriptor]:
    stems = sorted(path.stem for path in V1.glob("*.proto"))
    return [importlib.import_module(f"wavepp_proto.v1.{stem}_pb2").DESCRIPTOR for stem in stems]


def shape(method: MethodDescriptor) -> str:
    proto = MethodDescriptorProto()
    method.CopyToProto(proto)
    return {
        (False, False): UNARY,
        (True, False): TO,
        (False, True): FROM,
        (True, True): BOTH,
    }[proto.client_streaming, proto.server_streaming]


def test_services_and_streams_are_the_designs_when_read() -> None:
    found = {
        service.name: {method.name: shape(method) for method in service.methods}
        for file in files()
        for service in file.services_by_name.values()
    }
    assert found == SERVICES


def test_additions_are_methods_of_known_services_when_another_file_comes() -> None:
    assert {file.package for file in files()} == {"wavepp.v1"}


@pytest.mark.parametrize("path", sorted(V1.glob("*.proto")), ids=lambda path: path.stem)
def test_file_service_and_method_have_a_comment_when_declared(path: Path) -> None:
    lines = [line.strip() for line in path.read_text().splitlines()]
    assert lines[0].startswith("// ")
    silent = [
        line
        for before, line in itertools.pairwise(lines)
        if re.match(r"(service|rpc) ", line) and not before.startswith("// ")
    ]
    assert silent == []


def fields() -> list[tuple[str, FieldDescriptorProto]]:
    found = []
    for file in files():
        proto = FileDescriptorProto()
        file.CopyToProto(proto)
        found += [(f"{message.name}.{field.name}", field) for message in proto.message_type for field in message.field]
    return found


def test_times_and_counts_name_their_unit_when_they_are_numbers() -> None:
    """One unit per word (DESIGN.md): durations end in _ms or _us, nothing says seconds or millis."""
    wrong = re.compile(r"(_millis|_seconds|_secs|_nanos|timeout|_size|_s)$")
    assert [name for name, _ in fields() if wrong.search(name)] == []


def test_lists_of_tokens_and_hashes_are_packed_bytes_when_they_can_be_long() -> None:
    """4096 hashes decode in 5 us as bytes and in 240 us as a repeated field."""
    packed = re.compile(r"\.(block_hashes|token_ids|added|removed|logits|running_hash|void_bitmap|payload|data)$")
    kinds = {name: field.type for name, field in fields() if packed.search(name)}
    assert len(kinds) >= 10
    assert set(kinds.values()) == {FieldDescriptorProto.TYPE_BYTES}


def test_every_message_a_stage_acts_on_is_fenced_when_it_crosses() -> None:
    fenced = {name.partition(".")[0] for name, _ in fields() if name.endswith(".fence")}
    assert fenced >= {
        "AnnounceRequest",
        "Round",
        "InventoryRequest",
        "WatchDigestRequest",
        "WaveRequest",
        "ActivationFrame",
        "JoinRequest",
        "EndFormationRequest",
        "DrainStageRequest",
        "RefuseRequest",
        "AnnounceResponse",
        "Votes",
        "InventoryResponse",
        "WaveResponse",
        "JoinResponse",
        "EndFormationResponse",
    }


ENUMS: list[tuple[type[Enum], object, str]] = [
    (terms.CacheGroup, common_pb2.CacheGroup, "CACHE_GROUP_"),
    (terms.VoteOutcome, admission_pb2.VoteOutcome, "VOTE_OUTCOME_"),
    (terms.DigestKind, digest_pb2.DigestKind, "DIGEST_KIND_"),
    (terms.LinkKind, control_pb2.LinkKind, "LINK_KIND_"),
]


@pytest.mark.parametrize(("term", "wire", "prefix"), ENUMS, ids=lambda item: getattr(item, "__name__", ""))
def test_enum_has_the_same_words_on_both_sides_when_compared(term: type[Enum], wire: object, prefix: str) -> None:
    items = dict(wire.items())  # type: ignore[attr-defined]
    assert items.pop(f"{prefix}UNSPECIFIED") == 0
    assert set(items) == {f"{prefix}{member.name}" for member in term}


def test_void_bitmap_is_as_wide_as_a_wave_when_lanes_grow() -> None:
    assert limits.MAX_LANES == 128, "the wire says 128 bits: another width is another protocol version"
