"""Member records for tests: valid ones, with what a test cares about replaced."""

from __future__ import annotations

import dataclasses

from wavepp_proto import limits
from wavepp_proto.terms import DaemonKey, Incarnation, MemberRecord, ModelFacts, PipelineId, Rank, StageIndex

MODEL = ModelFacts(name="org/tiny", fingerprint="f00d", layers=8, vocabulary=512, window=4096, path="/models/tiny")


def make_record(cluster: str = "test", stage: int = 0, incarnation: int = 1, **changes: object) -> MemberRecord:
    """Stage `stage` of a four-stage pipeline `p0`, two layers each."""
    record = MemberRecord(
        cluster=cluster,
        key=DaemonKey(PipelineId("p0"), StageIndex(stage), Rank(0)),
        incarnation=Incarnation(incarnation),
        stages=4,
        ranks=1,
        address=f"127.0.0.1:{7000 + stage}",
        link_address="",
        engine="emulated",
        model=MODEL,
        first_layer=2 * stage,
        last_layer=2 * stage + 2,
        block_tokens=32,
        pool_blocks=100,
        host_pool_blocks=0,
        protocol=limits.PROTOCOL_VERSION,
        pid=1234,
        version="0.1.0",
    )
    return dataclasses.replace(record, **changes)  # type: ignore[arg-type]
