"""One seed is one plan: a random cluster, a random load and random faults.

Owns the model of what may happen and how often. Plays nothing (`explore` does); equal seeds draw equal plans.
"""

from __future__ import annotations

from random import Random

from wavepp_controller.core.riding import SHORT_BYTES
from wavepp_simulator.plan import Act, Plan, plan_of

CALM = 0.3
"""Share of seeds without any fault: there a lost formation is a violation as well."""
HARMLESS = 0.15
"""Share of seeds with faults that must cost no request."""
RANKED = 0.2
"""Share of seeds whose stages have two ranks."""
UNLIKE = 0.15
"""Share of seeds with faults that may cost requests in which a stage has another dtype for a while."""
HANGING = 0.15
"""Share of the other seeds with faults in which an engine hangs."""
SPAN_US = 600_000
"""Requests come and things break within this much virtual time."""
CHECK_EVERY = 8
"""See `world.Shape.check_every`."""
MOMENTS_US = (100_000, 200_000, 400_000)
"""Half of everything happens at once, at one of these."""


def draw(seed: int, requests: int) -> Plan:
    rng, aside = Random(f"wavepp-{seed}"), Random(f"wavepp-ranks-{seed}")
    mood = rng.random()
    calm = mood < CALM
    options = _cluster(rng, calm)
    options |= {"seed": str(seed), "check_every": str(CHECK_EVERY)}
    options |= _pace(Random(f"wavepp-pace-{seed}"))
    options |= _riding(Random(f"wavepp-riding-{seed}"))
    # Chances of their own: a seed without ranks is the plan that it was before there were any.
    if aside.random() < RANKED:
        options |= _ranked(aside, options)
    acts: list[Act] = []
    streams = rng.choice(("abc", "abc", "ab"))
    for number in range(requests):
        acts += _request(rng, options, number, streams)
    if requests and rng.random() < 0.3:
        acts += _burst(rng, options)
    kinds = tuple(_FAULTS) if mood >= CALM + HARMLESS else _HARMLESS
    if not calm:
        if rng.random() < 0.3:  # hints that are behind all the time: stages hold different prefixes
            place = _name(rng.randrange(_stages(options)), aside.randrange(_ranks(options)))
            acts.append(Act(0, f"slow s{place}>c/digest 300ms"))
        for _ in range(rng.randint(1, 4)):
            acts += _fault(rng, aside, options, requests, rng.choice(kinds))
        if kinds is not _HARMLESS:
            acts += _gap(Random(f"wavepp-gap-{seed}"), options)
        acts += _not_finite(Random(f"wavepp-nan-{seed}"), options, requests)
        if kinds != _HARMLESS:
            acts += _unlike(Random(f"wavepp-unlike-{seed}"), options)
    if mood >= CALM + HARMLESS:
        acts += _hang(Random(f"wavepp-hang-{seed}"), options)
    return plan_of(options, acts)


def _cluster(rng: Random, calm: bool) -> dict[str, str]:
    block = rng.choice((2, 4, 16))
    stages = rng.randint(1, 4)
    pools = [rng.randint(6, 40) for _ in range(stages)]
    options = {
        "pools": ",".join(map(str, pools)),
        "block": str(block),
        "wave": str(block * rng.choice((1, 2, 4, 16))),
        "lanes": str(rng.choice((1, 2, 4, 16))),
        "latency_us": str(rng.choice((100, 500, 3000))),
        "jitter": str(rng.choice((0, 1, 20))),
        "wave_ms": str(rng.choice((0, 1, 10))),
        "token_us": str(rng.choice((0, 10, 1000))),
        "most_bypasses": str(rng.choice((0, 1, 8))),
        "snapshot_tokens": str(block * rng.choice((1, 3, 64))),
        "inventory_ms": str(rng.choice((100, 5000))),
        "attempts": str(rng.choice((1, 1, 2, 3))),
        "round_deadline_ms": str(rng.choice((200, 1000))),
        "join_deadline_ms": "5000",
        # without the timer a lost wake-up shows; after a lost round it is the only one
        "capacity_retry_ms": str(rng.choice((100, 1_000_000)) if calm else 100),
        "max_queued_requests": str(rng.choice((4, 1024, 1024, 1024))),
    }
    if rng.random() < 0.7:  # else the headroom that the controller computes
        options["floor_blocks"] = str(rng.choice((0, 0, 2)))
    if rng.random() < 0.2:
        options["share_tokens"] = str(rng.choice((0, 4 * block)))
    return options | _tiers(rng, stages, calm)


def _pace(rng: Random) -> dict[str, str]:
    """Pauses between rounds and releases held back, as a controller process has them, in half of the clusters."""
    if rng.random() < 0.5:
        return {}
    return {"round_rest": str(rng.choice((0, 1, 10))), "release_lag_ms": str(rng.choice((0, 20, 200)))}


def _riding(rng: Random) -> dict[str, str]:
    """Announcements in front of rounds, as a controller process has them, in half of the clusters; some leave long
    prompts on their own stream."""
    return {} if rng.random() < 0.5 else {"riding_bytes": str(rng.choice((400, SHORT_BYTES)))}


def _tiers(rng: Random, stages: int, calm: bool) -> dict[str, str]:
    """Host tiers and recurrent layers, each in about half of the clusters."""
    options: dict[str, str] = {}
    if rng.random() < 0.5:
        options["host"] = ",".join(str(rng.choice((0, 1, 4, 20))) for _ in range(stages))
        options["copy_us"] = str(rng.choice((0, 50, 2000)))
        options["copy_failures"] = str(0 if calm else rng.choice((0, 0, 0.1)))
    if rng.random() < 0.5:
        options["groups"] = ",".join(rng.choice(("a", "r", "ar")) for _ in range(stages))
        options["states"] = str(rng.choice((2, 3, 6, 20)))
    return options


def _ranked(aside: Random, options: dict[str, str]) -> dict[str, str]:
    """Another daemon for each stage, like its first one but for the sizes of its pools."""
    pools = [(int(pool), aside.randint(6, 40)) for pool in options["pools"].split(",")]
    found = {"ranks": "2", "pools": ",".join(f"{one},{other}" for one, other in pools)}
    if "host" in options:
        found["host"] = ",".join(f"{one},{aside.choice((0, 1, 4, 20))}" for one in options["host"].split(","))
    return found


def _ranks(options: dict[str, str]) -> int:
    return int(options.get("ranks", "1"))


def _stages(options: dict[str, str]) -> int:
    return len(options["pools"].split(",")) // _ranks(options)


def _name(stage: int, rank: int) -> str:
    return f"{stage}.{rank}" if rank else str(stage)


def _burst(rng: Random, options: dict[str, str]) -> list[Act]:
    """Several ask at once for one prefix that nobody has computed; their own ends differ."""
    block, pools = int(options["block"]), [int(pool) for pool in options["pools"].split(",")]
    most = min(pools) * block
    shared = rng.randint(1, max(1, most // 2))
    at, acts = _moment(rng), []
    for number in range(rng.randint(2, 5)):
        own = rng.randint(1, max(1, most // 4))
        name = f"b{number}"
        acts.append(Act(at + rng.randint(0, 1000), f"submit {name} len={shared + own} text=n*{shared}+{name}*{own}"))
        if rng.random() < 0.2:
            acts.append(Act(at + int(rng.random() * 50_000), f"cancel {name}"))
    return acts


def _request(rng: Random, options: dict[str, str], number: int, streams: str) -> list[Act]:
    """One request at a random moment, sharing prefixes with others; maybe cancelled, maybe late."""
    block = int(options["block"])
    limit = min(map(int, options["pools"].split(","))) * block
    length = rng.randint(1, limit + 1 if rng.random() < 0.05 else max(1, int(limit * rng.choice((0.2, 0.5, 1.0)))))
    shared = min(length, rng.randint(0, 8) * block + rng.choice((0, 0, 1)))
    parts = [f"{rng.choice(streams)}*{shared}"] if shared else []
    parts += [f"{rng.choice('abcdef')}*{length - shared}"] if length > shared else []
    # a retry after an outcome, or a duplicate of a living request
    name = f"r{rng.randrange(number) if number and rng.random() < 0.1 else number}"
    line = f"submit {name} len={length} text={'+'.join(parts)}"
    deadline_ms = rng.choice((None, None, 20_000, rng.randint(1, 500)))
    if deadline_ms is not None:
        line += f" deadline_ms={deadline_ms}"
    if rng.random() < 0.2:
        line += f" priority={rng.randint(-2, 2)}"
    at = _moment(rng)
    acts = [Act(at, line)]
    if rng.random() < 0.25:
        acts.append(Act(at + int(rng.choice((100, 2_000, 50_000, 500_000)) * rng.random()), f"cancel {name}"))
    return acts


def _moment(rng: Random) -> int:
    return int(rng.random() * SPAN_US) if rng.random() < 0.6 else rng.choice(MOMENTS_US)


def _fault(rng: Random, aside: Random, options: dict[str, str], requests: int, kind: str) -> list[Act]:
    stages = _stages(options)
    stage, rank = rng.randrange(stages), aside.randrange(_ranks(options))
    place, following = _name(stage, rank), _name(min(stage + 1, stages - 1), rank)
    at = int(rng.random() * SPAN_US) if rng.random() < 0.5 else rng.choice(MOMENTS_US) + int(rng.random() * 30_000)
    until = at + int(rng.choice((1_000, 100_000, 1_000_000, 2_000_000, 2_000_000, 15_000_000)) * rng.random())
    if kind == "row":
        names = sorted({f"r{rng.randrange(requests)}" for _ in range(rng.randint(1, 4))}) if requests else []
        return [Act(0, f"break {name} stage {place}") for name in names]
    if kind == "usurped":
        return _usurped(rng, options, at)
    if kind == "isolated":
        ways = (f"c>s{place}", f"s{place}>c")
        return [Act(when, f"{verb} {way}") for when, verb in ((at, "partition"), (until, "heal")) for way in ways]
    first, then = _FAULTS[kind]
    wire = rng.choice(_WIRES).format(place=place, following=following)
    words = {
        "place": place,
        "wire": wire,
        "message_wire": rng.choice(_MESSAGE_WIRES).format(place=place),
        "silent_wire": rng.choice(_SILENT_WIRES).format(place=place),
        "strike": rng.choice(("drop", "drop", "duplicate", "reorder")),
        "count": rng.randint(1, 3),
        "chance": rng.choice((0.02, 0.2)),
        "ms": rng.choice((10, 300, 2000)),
        "blocks": rng.randint(4, 40),
    }
    acts = [Act(at, first.format(**words))]
    if then:
        acts.append(Act(until, then.format(**words)))
    return acts


def _gap(rng: Random, options: dict[str, str]) -> list[Act]:
    """An activation between two stages is lost, repeated, overtaken or misnumbered, in a third of the plans."""
    stages = _stages(options)
    if stages == 1 or rng.random() > 1 / 3:
        return []
    stage, rank = rng.randrange(stages - 1), rng.randrange(_ranks(options))
    place, following = _name(stage, rank), _name(stage + 1, rank)
    what = rng.choice(("drop", "duplicate", "reorder", "misnumber"))
    line = f"{what} s{place}>s{following} 1"
    return [Act(_moment(rng), f"misnumber link {place} by={rng.choice((-1, 1, 2))}" if what == "misnumber" else line)]


def _not_finite(rng: Random, options: dict[str, str], requests: int) -> list[Act]:
    """Requests that compute NaN on one stage, from the start or from some moment on, in a third of the plans."""
    if not requests or rng.random() > 1 / 3:
        return []
    place = _name(rng.randrange(_stages(options)), rng.randrange(_ranks(options)))
    names = sorted({f"r{rng.randrange(requests)}" for _ in range(rng.randint(1, 4))})
    return [Act(rng.choice((0, _moment(rng))), f"nan {name} stage {place}") for name in names]


def _unlike(rng: Random, options: dict[str, str]) -> list[Act]:
    """A stage comes back with another dtype than the others, and as it was some time later, in a few clusters."""
    if rng.random() >= UNLIKE:
        return []
    place = _name(rng.randrange(_stages(options)), rng.randrange(_ranks(options)))
    at = int(rng.random() * SPAN_US)
    until = at + int(rng.choice((100_000, 2_000_000, 40_000_000)) * rng.random())
    return [Act(at, f"restart stage {place} dtype=float16"), Act(until, f"restart stage {place}")]


def _hang(rng: Random, options: dict[str, str]) -> list[Act]:
    """An engine that does not return from a wave, in some clusters."""
    if rng.random() >= HANGING:
        return []
    place = _name(rng.randrange(_stages(options)), rng.randrange(_ranks(options)))
    return [Act(int(rng.random() * SPAN_US), f"hang stage {place}")]


def _usurped(rng: Random, options: dict[str, str], at: int) -> list[Act]:
    """A controller goes on just when its successor takes over its stages."""
    taken_over = at + int(rng.random() * 50_000)
    resumed = taken_over + int(rng.random() * 5 * int(options["latency_us"]))
    acts = ((at, "pause controller"), (taken_over, "restart controller"), (resumed, "resume controller"))
    return [Act(when, line) for when, line in acts]


_FAULTS: dict[str, tuple[str, str]] = {
    "crash": ("crash stage {place}", "restart stage {place}"),
    "restart": ("restart stage {place}", ""),
    "pause": ("pause stage {place}", "resume stage {place}"),
    "cut": ("cut stage {place}", ""),
    "link": ("cut link {place}", ""),
    "slow": ("slow {wire} {ms}ms", "slow {wire} 0ms"),
    "row": ("", ""),
    "drain": ("drain stage {place}", "restart stage {place}"),
    "controller": ("crash controller", "restart controller"),
    "replaced": ("restart controller", ""),
    "usurped": ("", ""),
    "isolated": ("", ""),
    "stop controller": ("pause controller", "resume controller"),
    "strikes": ("{strike} {message_wire} {count}", ""),
    "lossy": ("{strike} {message_wire} chance={chance}", "{strike} {message_wire} 0"),
    "partition": ("partition {silent_wire}", "heal {silent_wire}"),
    "etcd": ("etcd stops", "etcd answers"),
    "reform": ("reform stage {place} blocks={blocks}", ""),
    "copy": ("copies fail on stage {place}", ""),
    "repeats": ("duplicate {message_wire} {count}", ""),
    "swaps": ("reorder {message_wire} {count}", ""),
}
"""How it begins and how it ends; nothing where it needs no end, `settle` mends what is left."""
_HARMLESS = ("cut", "cut", "repeats", "swaps", "copy")
_MESSAGE_WIRES = (
    "c>s{place}", "s{place}>c", "c>s{place}/announce", "c>s{place}/rounds", "c>s{place}/waves", "c>s{place}/control",
    "s{place}>c/announce", "s{place}>c/rounds", "s{place}>c/waves", "s{place}>c/digest", "s{place}>c/digest",
)  # fmt: skip
_WIRES = ("c>s{place}", "s{place}>c", "s{place}>c/digest", "s{place}>c/rounds", "s{place}>s{following}", "etcd")
_SILENT_WIRES = ("c>s{place}", "s{place}>c", "s{place}>etcd")
