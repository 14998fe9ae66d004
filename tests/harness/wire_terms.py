"""Hypothesis strategies for every term that crosses the wire, within the wire's limits.

Numbers reach the edges of their protobuf types, names hold any character UTF-8 can carry.
"""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from wavepp_proto import limits, terms

U32 = st.integers(0, 2**32 - 1)
U64 = st.integers(0, 2**64 - 1)
COUNT = st.integers(0, 2**40)
BLOCKS = st.integers(0, limits.MAX_POOL_BLOCKS)
TEXT = st.text(st.characters(codec="utf-8"), max_size=20)
NAME = st.text(st.characters(codec="utf-8"), min_size=1, max_size=30)
ATTEMPT = st.integers(1, 2**32 - 1)
FLOAT32 = st.floats(width=32, allow_nan=False, allow_infinity=False)
FLOAT64 = st.floats(allow_nan=False)
HASH = st.binary(min_size=32, max_size=32)


def packed(unit: int, most: int = 6) -> st.SearchStrategy[bytes]:
    return st.integers(0, most).flatmap(lambda count: st.binary(min_size=unit * count, max_size=unit * count))


def several(items: st.SearchStrategy[Any], most: int = 4) -> st.SearchStrategy[tuple[Any, ...]]:
    return st.lists(items, max_size=most).map(tuple)


def optional(items: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.none() | items


FENCE = st.builds(terms.Fence, U64, U64, U64, U64)
DAEMON_KEY = st.builds(terms.DaemonKey, NAME, st.integers(0, limits.MAX_STAGES - 1), st.integers(0, 7))
HOLD_KEY = st.builds(terms.HoldKey, NAME, ATTEMPT)
TRACE = st.builds(terms.TraceContext, TEXT, TEXT)
SAMPLING = st.builds(
    terms.Sampling,
    st.just(0.0) | st.floats(limits.MIN_TEMPERATURE, 1e300),
    U64,
    st.integers(0, limits.MAX_TOP_LOGPROBS),
    st.booleans(),
)
TOKEN_LOGPROBS = several(st.builds(terms.TokenLogprob, U32, FLOAT32))
ERROR = st.builds(
    terms.ErrorInfo,
    TEXT,
    TEXT,
    st.dictionaries(TEXT, TEXT, max_size=4).map(lambda fields: tuple(sorted(fields.items()))),
    optional(U32),
)
CAPACITY = st.builds(terms.Capacity, U64, COUNT, COUNT, COUNT, COUNT, COUNT, COUNT)
GROUP = st.sampled_from(terms.CacheGroup)
GROUP_ENDPOINTS = several(st.builds(terms.GroupEndpoint, GROUP, COUNT), 2)
GROUP_BLOCKS = several(st.builds(terms.GroupBlocks, GROUP, COUNT), 2)
TIMES = st.builds(terms.StageTimes, U64, U64, U64, U64, U64)

REQUEST = st.builds(
    terms.PrefillRequest,
    request_id=NAME,
    token_ids=packed(4).filter(bool),
    pipeline=optional(NAME),
    deadline_ms=optional(st.integers(0, limits.MAX_DEADLINE_MS)),
    priority=st.integers(limits.MIN_PRIORITY, limits.MAX_PRIORITY),
    cache_salt=TEXT,
    adapter=TEXT,
    sampling=SAMPLING,
    trace=TRACE,
)
TIMINGS = st.builds(terms.Timings, *[FLOAT64] * 8)
EVENT = st.one_of(
    st.builds(terms.Queued, NAME, TEXT, U32),
    st.builds(terms.Admitted, NAME, ATTEMPT, COUNT, COUNT, optional(st.integers(0, 63)), COUNT, U32),
    st.builds(terms.Progress, NAME, COUNT, COUNT),
    st.builds(
        terms.Finished, NAME, ATTEMPT, U32, COUNT, COUNT, TIMINGS, U32, TOKEN_LOGPROBS, packed(4), TEXT
    ),
    st.builds(terms.Failed, NAME, ERROR),
)  # fmt: skip
ANNOUNCE = st.builds(
    terms.AnnounceFrame,
    FENCE,
    HOLD_KEY,
    st.integers(1000, limits.MAX_PROMPT_TOKENS),
    st.integers(0, 900),
    packed(32),
    st.integers(0, 900),
    packed(4),
    st.booleans(),
    SAMPLING,
    TRACE,
)
ACK = st.builds(terms.AnnounceAck, FENCE, HOLD_KEY, st.lists(HOLD_KEY, max_size=3).map(tuple))
ROUND = st.builds(
    terms.Round,
    FENCE,
    U32,
    several(st.builds(terms.Release, HOLD_KEY, optional(U64))),
    several(st.builds(terms.Revise, HOLD_KEY, COUNT, GROUP_ENDPOINTS)),
    several(st.builds(terms.Prepare, HOLD_KEY, COUNT, GROUP_ENDPOINTS, U32, st.booleans())),
)
VOTE = st.builds(
    terms.Vote, HOLD_KEY, st.sampled_from(terms.VoteOutcome), COUNT, COUNT, GROUP_ENDPOINTS, COUNT, GROUP_BLOCKS,
    COUNT, COUNT, COUNT,
)  # fmt: skip
VOTES = st.builds(terms.Votes, FENCE, several(VOTE), CAPACITY)
HOLD = st.builds(terms.HoldState, HOLD_KEY, TEXT, COUNT, COUNT, COUNT, COUNT)
INVENTORY = st.builds(
    terms.Inventory, FENCE, several(HOLD), several(HOLD_KEY), U64, U64, HASH | st.just(b""), CAPACITY, COUNT, COUNT,
    COUNT, several(TEXT),
)  # fmt: skip
DIGEST = st.builds(
    terms.Digest,
    U64,
    U64,
    st.sampled_from(terms.DigestKind),
    several(st.builds(terms.GroupDigest, GROUP, packed(8), packed(8), COUNT, U64), 2),
    CAPACITY,
    U32,
    st.booleans(),
)


@st.composite
def row(draw: st.DrawFn) -> terms.Row:
    start, length = draw(st.integers(0, 10**6)), draw(st.integers(1, 10**6))
    snapshots = draw(several(st.integers(start + 1, start + length)))
    return terms.Row(draw(HOLD_KEY), start, length, draw(st.booleans()), snapshots)


HEARTBEAT = st.builds(terms.Heartbeat, FENCE, U64, optional(U64), U32, U32, optional(CAPACITY))
COMMAND = st.builds(terms.WaveCommand, FENCE, st.lists(row(), min_size=1, max_size=4).map(tuple), U64)
REPORT = st.builds(
    terms.WaveReport,
    FENCE,
    st.booleans(),
    st.integers(0, 2**128 - 1),
    HASH | st.just(b""),
    TIMES,
    several(st.builds(terms.RowResult, st.integers(0, 127), U32, TOKEN_LOGPROBS, packed(4))),
    several(st.builds(terms.RowFault, st.integers(0, 127), ERROR)),
    optional(CAPACITY),
    optional(ERROR),
    st.booleans(),
)
PEER = st.builds(terms.Peer, DAEMON_KEY, U64, TEXT, TEXT, U32, U32, U64, U64)


@st.composite
def join_plan(draw: st.DrawFn) -> terms.JoinPlan:
    stages, ranks = draw(st.integers(1, limits.MAX_STAGES)), draw(st.integers(1, 8))
    key = draw(st.builds(terms.DaemonKey, NAME, st.integers(0, stages - 1), st.integers(0, ranks - 1)))
    first, pool, heartbeat = draw(st.integers(0, 100)), draw(st.integers(1, 2**40)), draw(st.integers(1, 10**6))
    return terms.JoinPlan(
        fence=draw(FENCE),
        key=key,
        stages=stages,
        ranks=ranks,
        model_fingerprint=draw(TEXT),
        first_layer=first,
        last_layer=first + draw(st.integers(1, 100)),
        block_tokens=draw(st.integers(1, limits.MAX_BLOCK_TOKENS)),
        pool_blocks=pool,
        host_pool_blocks=draw(COUNT),
        floor_blocks=draw(st.integers(0, pool)),
        wave_tokens=draw(st.integers(1, 2**32 - 1)),
        lanes=draw(st.integers(1, limits.MAX_LANES)),
        link=draw(st.sampled_from(terms.LinkKind)),
        link_store=draw(TEXT),
        peers=draw(several(PEER, min(stages * ranks, 4))),
        deadline_ms=draw(U32),
        heartbeat_ms=heartbeat,
        silence_ms=heartbeat + draw(st.integers(1, 10**6)),
    )


REPLY = st.builds(
    terms.JoinReply,
    FENCE,
    DAEMON_KEY,
    BLOCKS,
    st.booleans(),
    several(GROUP, 2),
    U32,
    COUNT,
    CAPACITY,
    TEXT,
    several(U32),
    engine_load=U64,
    host_pool_blocks=optional(BLOCKS),
)
