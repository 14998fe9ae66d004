"""Every limit of the wire, and keepalive for both ends, in one place.

Owns numbers only. A server's minimum ping interval must stay below its clients' ping time, or
gRPC answers GOAWAY too_many_pings: that is why both ends read these constants.
"""

from __future__ import annotations

from typing import Final

PROTOCOL_VERSION: Final = 1
"""Raised when a message changes its meaning; members of another version are refused by name."""

# Sizes
MAX_MESSAGE_BYTES: Final = 4 * 1024 * 1024
FRAME_BYTES: Final = 1024 * 1024
"""Largest payload of one frame of a framed stream (prompts, announcements, digests, links)."""
MAX_PROMPT_TOKENS: Final = 4 * 1024 * 1024
MAX_ASSEMBLING_BYTES: Final = 256 * 1024 * 1024
"""Tokens of all prompts whose last frame has not come."""
MAX_REQUEST_ID_CHARS: Final = 128
MAX_NAME_CHARS: Final = 256
"""Pipelines, salts, adapters, addresses."""
MAX_PATH_CHARS: Final = 4096
"""Folders and presets of models: what Linux allows."""
MAX_TRACEPARENT_CHARS: Final = 64
"""The W3C form has 55; a later version may add fields behind them."""
MAX_TRACESTATE_CHARS: Final = 512
"""What W3C asks everybody to pass on. Both travel in every frame of an announcement."""
MAX_LANES: Final = 128
"""Rows of one wave: the width of the void bitmap."""
MAX_ROUND_ENTRIES: Final = 32
ENGINE_ROUND_TOKENS: Final = 131_072
"""Tokens of the prompts in one round where an engine's own cache reads them, which takes it a microsecond each while
the daemon's heartbeats wait: a longer prompt has a round to itself."""
MAX_ANNOUNCE_FRAMES: Final = 32
"""Frames in one Announce message: bounds what it keeps an event loop busy with."""
MAX_STREAM_RUNS: Final = 1024
"""Runs that one RunMany stream may have live: as many as may be queued."""
MAX_STREAM_RUN_BYTES: Final = 64 * 1024
"""Tokens of one of them: whatever is longer goes its own way, so that nobody waits behind it."""
MAX_MESSAGE_RUNS: Final = 32
"""Runs in one RunMany message: bounds what it keeps an event loop busy with."""
MAX_TOP_LOGPROBS: Final = 64
MIN_TEMPERATURE: Final = 1e-4
"""Smallest but 0, which is greedy: logits divided by a tinier one leave the range of a float."""
MAX_VOCABULARY: Final = 512 * 1024
"""Bounds a full logits row to 2 MiB, within one message."""
MAX_DIGEST_HASHES: Final = 1024
"""Hashes in one digest message; a snapshot is paged, a backlog coalesced."""
DIGEST_BACKLOG_HASHES: Final = 64 * 1024
"""A reader further behind than this gets a fresh snapshot."""
MAX_BLOCK_TOKENS: Final = 1024
MAX_STAGES: Final = 64
MAX_RANKS: Final = 64
"""Daemons of one stage."""
MAX_REFUSAL_CHARS: Final = 2048
MAX_REFUSAL_FIELDS: Final = 32
"""What a daemon takes of the reason why no pipeline can use it."""
MAX_POOL_BLOCKS: Final = 1 << 30
"""Blocks of one stage's pool: block numbers stay within 32 bits."""
MAX_TOMBSTONES: Final = 4096
DTYPES: Final = ("auto", "float32", "bfloat16", "float16")
"""What a stage may be told to compute in; `auto` is the model's own."""
CLOSE_S: Final = 5.0
"""Longest wait, when something closes, for a part of it that does not end (seconds); it is left behind then."""
MOST_SHORT_SHARE: Final = 0.9
"""Of the tokens of waves, for short prompts: a long one gets the rest at least."""
MAX_WAVE_TOKENS: Final = 1 << 24
"""Tokens of one wave: what a stage makes room for when it loads."""
MAX_STATE_SLOTS: Final = 1 << 20
"""Slots of one stage's recurrent group: working states and snapshots."""
MAX_PRIORITY: Final = 9
MIN_PRIORITY: Final = -9

# Queues
MAX_QUEUED_REQUESTS: Final = 1024
MAX_PENDING_CALLS: Final = 16 * 1024
"""Calls of one server that no handler has taken up yet."""
MAX_QUEUED_TOKENS: Final = 64 * 1024 * 1024

# Time (ms on the wire, s in code that waits)
DEFAULT_DEADLINE_MS: Final = 600_000
MAX_ASSEMBLY_MS: Final = 120_000
"""First to last frame of a prompt: the longest one at 140 KB/s."""
MAX_DEADLINE_MS: Final = 24 * 3600 * 1000
HEARTBEAT_MS: Final = 250
SILENCE_MS: Final = 1250
"""Silence on RunWaves after which a daemon, or a controller, counts as lost."""
ROUND_DEADLINE_MS: Final = 1000
CAPACITY_RETRY_MS: Final = 100
JOIN_DEADLINE_MS: Final = 120_000
CALL_DEADLINE_MS: Final = 5_000
"""Any unary call that names no deadline of its own."""
PIPELINE_WAIT_MS: Final = 30_000
"""Longest wait of a queued request for a pipeline that is not formed."""
WAVE_TIMEOUT_MS: Final = 60_000
"""Longest that a wave whose input is there may wait for its engine, and that one payload may travel."""
HANG_MS: Final = 5_000
"""Least by which a wave may exceed its prediction before its engine counts as hung."""
FIRST_WAVE_MS: Final = 120_000
"""What a wave may take on an engine that says nothing else and of which nothing was learnt: it may compile."""
FILL_TIMEOUT_MS: Final = 3_600_000
"""Longest that a link waits for the next wave to set out. The controller times each stage; this alone ends the wait for
a host that vanished without a word."""
INVENTORY_MS: Final = 5_000
"""Between two comparisons of holds, controller against daemon."""
MEMBER_TTL_S: Final = 10
RELIST_MS: Final = 5_000
"""A listing of members, or of the leader, this old is taken again even if its watch says nothing."""
STORE_CALL_MS: Final = 2_000
"""Any single call to etcd."""
FORMING_MS: Final = 5_000
"""Stages that run join a formation again: the longest pause between two tries."""
CONTROLLER_ABSENCE_MS: Final = 1000 * MEMBER_TTL_S + RELIST_MS + STORE_CALL_MS + SILENCE_MS + FORMING_MS
"""A killed controller, to the first request that another one accepts: its lease expires, the next one sees that and
claims the key, the stages have let go and join. A client tries again for as long."""

# gRPC keepalive (ms): the server's minimum must be below the client's time. Servers ping at the same pace: a client
# that is gone without a word must not hold its streams for the hours that TCP allows.
CLIENT_KEEPALIVE_TIME_MS: Final = 10_000
CLIENT_KEEPALIVE_TIMEOUT_MS: Final = 5_000
SERVER_MIN_PING_INTERVAL_MS: Final = 5_000
ETCD_KEEPALIVE_TIME_MS: Final = 6_000
"""Above the 5 s that an etcd server allows."""
ETCD_KEEPALIVE_TIMEOUT_MS: Final = 3_000

CONNECT_TIMEOUT_MS: Final = 2_000
"""Longest single attempt to connect, handshakes included."""

CHANNEL_OPTIONS: Final[tuple[tuple[str, int], ...]] = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", CLIENT_KEEPALIVE_TIME_MS),
    ("grpc.keepalive_timeout_ms", CLIENT_KEEPALIVE_TIMEOUT_MS),
    # The timeout that closes the connection in gRPC's core, 60 s by default.
    ("grpc.http2.ping_timeout_ms", CLIENT_KEEPALIVE_TIMEOUT_MS),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.enable_retries", 0),
    # A proxy named in the environment is for the web, not for the members of a cluster.
    ("grpc.enable_http_proxy", 0),
    # A restarted peer on the same address must be reached again at once.
    ("grpc.initial_reconnect_backoff_ms", 100),
    # In gRPC's core this is the time-out of one connection attempt: TLS to a busy host takes three round trips.
    ("grpc.min_reconnect_backoff_ms", CONNECT_TIMEOUT_MS),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.use_local_subchannel_pool", 1),
)
SERVER_OPTIONS: Final[tuple[tuple[str, int], ...]] = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.http2.min_ping_interval_without_data_ms", SERVER_MIN_PING_INTERVAL_MS),
    ("grpc.keepalive_time_ms", CLIENT_KEEPALIVE_TIME_MS),
    ("grpc.keepalive_timeout_ms", CLIENT_KEEPALIVE_TIMEOUT_MS),
    # The timeout that closes the connection in gRPC's core, 60 s by default.
    ("grpc.http2.ping_timeout_ms", CLIENT_KEEPALIVE_TIMEOUT_MS),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_ping_strikes", 2),
    # By default gRPC drops calls beyond 1000 that wait for a handler, as CANCELLED: our typed limit must come first.
    ("grpc.server.max_pending_requests", MAX_PENDING_CALLS),
    ("grpc.server.max_pending_requests_hard_limit", MAX_PENDING_CALLS),
    # Two servers must never share one port by accident.
    ("grpc.so_reuseport", 0),
)
