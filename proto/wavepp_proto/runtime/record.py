"""A daemon's registration as bytes: MemberRecord to and from JSON, and the keys of the store.

Owns the schema version, the strict reading of what another process wrote, and key names. Readers
ignore fields they do not know, so that a newer daemon may add some within one schema version.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, Final

from wavepp_proto import convert, limits
from wavepp_proto.errors import InvalidRequest
from wavepp_proto.runtime.channels import parse_address
from wavepp_proto.terms import (
    CacheGroup,
    DaemonKey,
    Incarnation,
    MemberRecord,
    ModelFacts,
    Numerics,
    PipelineId,
    Rank,
    StageIndex,
)

SCHEMA: Final = 1
MAX_RECORD_BYTES: Final = 64 * 1024
_NAME: Final = re.compile(r"[A-Za-z0-9._-]+")
_MAX_INT: Final = 2**63 - 1


def leader_key(cluster: str) -> str:
    """Raises InvalidRequest when the cluster's name cannot stand in a key."""
    return f"/wavepp/{check_name('cluster', cluster)}/leader"


def members_prefix(cluster: str) -> str:
    return f"/wavepp/{check_name('cluster', cluster)}/members/"


def member_key(cluster: str, key: DaemonKey) -> str:
    """`/wavepp/{cluster}/members/{pipeline}/{stage}.{rank}`."""
    return f"{members_prefix(cluster)}{check_name('pipeline', key.pipeline)}/{key.stage}.{key.rank}"


def encode_record(record: MemberRecord) -> bytes:
    """Compact JSON. Raises InvalidRequest on what `decode_record` would refuse."""
    model = record.model
    document = {
        "schema": SCHEMA,
        "cluster": record.cluster,
        "pipeline": record.key.pipeline,
        "stage": record.key.stage,
        "rank": record.key.rank,
        "incarnation": record.incarnation,
        "stages": record.stages,
        "ranks": record.ranks,
        "address": record.address,
        "link_address": record.link_address,
        "engine": record.engine,
        "model": {
            "name": model.name,
            "fingerprint": model.fingerprint,
            "layers": model.layers,
            "vocabulary": model.vocabulary,
            "window": model.window,
            "path": model.path,
            "recurrent_layers": list(model.recurrent_layers),
        },
        "first_layer": record.first_layer,
        "last_layer": record.last_layer,
        "block_tokens": record.block_tokens,
        "pool_blocks": record.pool_blocks,
        "host_pool_blocks": record.host_pool_blocks,
        "protocol": record.protocol,
        "groups": [group.value for group in record.groups],
        "pid": record.pid,
        "version": record.version,
        "state_slots": record.state_slots,
        "engine_load": record.engine_load,
        "gpu": record.gpu,
        "numerics": asdict(record.numerics),
        "adapters": record.adapters,
    }
    encoded = json.dumps(document, separators=(",", ":"), allow_nan=False).encode()
    decode_record(encoded)
    return encoded


def decode_record(value: bytes) -> MemberRecord:
    """Raises InvalidRequest whose `field` names the first field that is missing or breaks its rule."""
    if len(value) > MAX_RECORD_BYTES:
        raise InvalidRequest("the record is too long", field="record", value=len(value), limit=MAX_RECORD_BYTES)
    try:
        document = json.loads(value)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"the record is no JSON: {error}", field="record") from error
    read = _Reader(document, "")
    schema = read.count("schema", 1)
    if schema != SCHEMA:
        raise InvalidRequest(f"record schema {schema}, expected {SCHEMA}", field="schema", value=schema, limit=SCHEMA)
    stages = read.count("stages", 1, limits.MAX_STAGES)
    ranks = read.count("ranks", 1, limits.MAX_RANKS)
    model = read.inner("model")
    layers = model.count("layers", 1)
    first_layer = read.count("first_layer", 0, layers - 1)
    return MemberRecord(
        cluster=read.name("cluster"),
        key=DaemonKey(
            PipelineId(read.name("pipeline")),
            StageIndex(read.count("stage", 0, stages - 1)),
            Rank(read.count("rank", 0, ranks - 1)),
        ),
        incarnation=Incarnation(read.count("incarnation", 0)),
        stages=stages,
        ranks=ranks,
        address=read.address("address"),
        link_address=read.text("link_address") and read.address("link_address"),
        engine=read.name("engine"),
        model=ModelFacts(
            name=model.text("name", limits.MAX_PATH_CHARS),
            fingerprint=model.text("fingerprint"),
            layers=layers,
            vocabulary=model.count("vocabulary", 1, limits.MAX_VOCABULARY),
            window=model.count("window", 1),
            path=model.text("path", limits.MAX_PATH_CHARS),
            recurrent_layers=model.layers("recurrent_layers", layers),
        ),
        first_layer=first_layer,
        last_layer=read.count("last_layer", first_layer + 1, layers),
        block_tokens=read.count("block_tokens", 1, limits.MAX_BLOCK_TOKENS),
        pool_blocks=read.count("pool_blocks", 1),
        host_pool_blocks=read.count("host_pool_blocks", 0),
        protocol=read.count("protocol", 0),
        groups=read.groups("groups"),
        pid=read.count("pid", 0),
        version=read.text("version"),
        state_slots=read.count("state_slots", 0, limits.MAX_STATE_SLOTS) if "state_slots" in document else 0,
        engine_load=read.count("engine_load", 0) if "engine_load" in document else 0,
        gpu=read.text("gpu") if "gpu" in document else "",
        numerics=_numerics(read.inner("numerics")) if "numerics" in document else Numerics(),
        adapters=read.flag("adapters") if "adapters" in document else False,
    )


def _numerics(read: _Reader) -> Numerics:
    return Numerics(
        dtype=read.text("dtype"),
        hidden=read.count("hidden", 0),
        quantization=read.text("quantization"),
        packages=read.text("packages"),
    )


class _Reader:
    """Fields of one JSON object, each checked when it is read."""

    def __init__(self, document: object, path: str) -> None:
        if not isinstance(document, Mapping):
            field = path.rstrip(".") or "record"
            raise InvalidRequest(f"{field} is not an object", field=field)
        self._document: Mapping[str, Any] = document
        self._path = path

    def count(self, name: str, least: int, most: int = _MAX_INT) -> int:
        value = self._field(name)
        if not isinstance(value, int) or isinstance(value, bool):
            raise self._wrong(name, "must be an integer", value)
        if not least <= value <= most:
            raise self._wrong(name, f"must be {least} to {most}", value, most if value > most else least)
        return value

    def flag(self, name: str) -> bool:
        value = self._field(name)
        if not isinstance(value, bool):
            raise self._wrong(name, "must be true or false", value)
        return value

    def text(self, name: str, most: int = limits.MAX_NAME_CHARS) -> str:
        value = self._field(name)
        if not isinstance(value, str):
            raise self._wrong(name, "must be text", value)
        if len(value) > most:
            raise self._wrong(name, f"has more than {most} characters", len(value), most)
        return convert.check_utf8(self._path + name, value)

    def name(self, name: str) -> str:
        return check_name(self._path + name, self.text(name))

    def address(self, name: str) -> str:
        address = parse_address(self.text(name), field=self._path + name)
        if not address.host or not address.port:
            raise self._wrong(name, "must have a host and a port", str(address))
        return str(address)

    def groups(self, name: str) -> tuple[CacheGroup, ...]:
        value = self._field(name)
        known = {group.value: group for group in CacheGroup}
        if not isinstance(value, list) or not value or not all(isinstance(entry, str) for entry in value):
            raise self._wrong(name, "must be a list of cache groups", value)
        unknown = next((entry for entry in value if entry not in known), None)
        if unknown is not None:
            raise self._wrong(name, "has an unknown cache group", unknown)
        return tuple(known[entry] for entry in value)

    def layers(self, name: str, layers: int) -> tuple[int, ...]:
        """Ascending layer numbers; a record of an older daemon has none."""
        value = self._document.get(name, [])
        if not isinstance(value, list) or not all(type(entry) is int and 0 <= entry < layers for entry in value):
            raise self._wrong(name, "must be a list of layer numbers", value, layers - 1)
        if value != sorted(set(value)):
            raise self._wrong(name, "must be ascending", value)
        return tuple(value)

    def inner(self, name: str) -> _Reader:
        return _Reader(self._field(name), f"{self._path}{name}.")

    def _field(self, name: str) -> object:
        if name not in self._document:
            raise InvalidRequest(f"{self._path}{name} is missing", field=self._path + name)
        return self._document[name]

    def _wrong(self, name: str, rule: str, value: object, limit: int | None = None) -> InvalidRequest:
        field = self._path + name
        return InvalidRequest(f"{field} {rule}, got {value!r}", field=field, value=repr(value), limit=limit)


def check_name(field: str, value: str) -> str:
    """`value` itself. Raises InvalidRequest unless it can stand in a key: a cluster's or a pipeline's name."""
    if len(value) > limits.MAX_NAME_CHARS:
        message = f"{field} has {len(value)} characters, at most {limits.MAX_NAME_CHARS}"
        raise InvalidRequest(message, field=field, value=len(value), limit=limits.MAX_NAME_CHARS)
    if not _NAME.fullmatch(value):
        message = f"{field} must be letters, digits, dot, dash or underscore, got {value!r}"
        raise InvalidRequest(message, field=field, value=value, limit="A-Z a-z 0-9 . - _")
    return value
