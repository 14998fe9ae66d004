"""Registrations as bytes: exact round trip, strict reading, key names (wavepp_proto.runtime.record)."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.harness.members import make_record
from wavepp_proto.errors import InvalidRequest
from wavepp_proto.runtime import record as records
from wavepp_proto.terms import CacheGroup, DaemonKey, PipelineId, Rank, StageIndex


def test_record_survives_when_encoded_and_decoded() -> None:
    record = make_record(
        stage=3,
        incarnation=2**62,
        link_address="[fd00::1]:9",
        groups=(CacheGroup.ATTENTION, CacheGroup.RECURRENT),
        version="1.2.3",
        engine_load=2**62,
        gpu="GPU-5e0c",
    )
    assert records.decode_record(records.encode_record(record)) == record


def test_record_is_read_when_a_newer_daemon_added_a_field() -> None:
    document = json.loads(records.encode_record(make_record()))
    document["later"] = {"any": 1}
    assert records.decode_record(json.dumps(document).encode()) == make_record()


def test_record_of_an_older_daemon_loads_alone_and_names_no_gpu() -> None:
    document = json.loads(records.encode_record(make_record()))
    del document["engine_load"], document["gpu"]
    assert records.decode_record(json.dumps(document).encode()) == make_record()


def test_keys_are_the_documented_ones() -> None:
    key = DaemonKey(PipelineId("p-0"), StageIndex(2), Rank(1))
    assert records.member_key("prod", key) == "/wavepp/prod/members/p-0/2.1"
    assert records.leader_key("prod") == "/wavepp/prod/leader"


@pytest.mark.parametrize("name", ["", "a/b", "a b", "x" * 257, "ü"])
def test_key_is_refused_when_a_name_would_break_it(name: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        records.members_prefix(name)
    assert caught.value.fields["field"] == "cluster"


MISSING = object()


@pytest.mark.parametrize(
    ("path", "value", "field"),
    [
        (("schema",), 2, "schema"),
        (("schema",), MISSING, "schema"),
        (("cluster",), "a/b", "cluster"),
        (("pipeline",), 7, "pipeline"),
        (("stage",), 4, "stage"),
        (("stage",), True, "stage"),
        (("rank",), 1, "rank"),
        (("ranks",), 65, "ranks"),
        (("incarnation",), -1, "incarnation"),
        (("incarnation",), "1", "incarnation"),
        (("incarnation",), 1.0, "incarnation"),
        (("stages",), 65, "stages"),
        (("address",), "host", "address"),
        (("address",), ":80", "address"),
        (("address",), "host:0", "address"),
        (("link_address",), "host", "link_address"),
        (("engine",), "", "engine"),
        (("model",), [], "model"),
        (("model", "name"), "x" * 4097, "model.name"),
        (("model", "path"), "/models/\udcff", "model.path"),
        (("gpu",), "\ud800", "gpu"),
        (("model", "layers"), MISSING, "model.layers"),
        (("model", "window"), 0, "model.window"),
        (("first_layer",), 8, "first_layer"),
        (("last_layer",), 0, "last_layer"),
        (("last_layer",), 9, "last_layer"),
        (("block_tokens",), 0, "block_tokens"),
        (("pool_blocks",), 0, "pool_blocks"),
        (("host_pool_blocks",), None, "host_pool_blocks"),
        (("groups",), [], "groups"),
        (("groups",), ["window"], "groups"),
        (("groups",), [["attention"]], "groups"),
        (("pid",), -1, "pid"),
        (("version",), MISSING, "version"),
    ],
)
def test_record_is_refused_by_field_when_it_breaks_a_rule(path: tuple[str, ...], value: object, field: str) -> None:
    document = json.loads(records.encode_record(make_record()))
    inner: Any = document
    for name in path[:-1]:
        inner = inner[name]
    if value is MISSING:
        del inner[path[-1]]
    else:
        inner[path[-1]] = value
    with pytest.raises(InvalidRequest) as caught:
        records.decode_record(json.dumps(document).encode())
    assert caught.value.fields["field"] == field


@pytest.mark.parametrize("value", [b"", b"{", b"\xff", b"[]", b"3", b" " * 65537, b"[" * 65536])
def test_record_is_refused_when_it_is_no_object(value: bytes) -> None:
    with pytest.raises(InvalidRequest) as caught:
        records.decode_record(value)
    assert caught.value.fields["field"] == "record"


def test_record_is_refused_when_written_with_a_broken_field() -> None:
    with pytest.raises(InvalidRequest) as caught:
        records.encode_record(make_record(pool_blocks=0))
    assert caught.value.fields["field"] == "pool_blocks"
