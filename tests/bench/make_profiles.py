"""The device profiles that ship with the client, made from the figures of the WavePP paper.

Owns which cells are fitted, what is known of models and devices, and from where; the fit itself is the
product's. Called by scripts/make-profiles with the figures' path: nothing of this is needed to use a profile.

    python -m tests.bench.make_profiles FIGURES.json [--out FOLDER]
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wavepp.profile_fit import Cell, Residual, Share, fit, residuals, weights_us
from wavepp_proto.profile import Profile, StageCosts, StageProfile
from wavepp_proto.workload import family

OUT = Path("client/wavepp/profiles")
DEVICE_BYTES = 288e9
USABLE = 0.9
"""Share of device memory that weights, cache and states may take together; the rest is activations and libraries."""
BANDWIDTH = 8e12
NVLINK = 900e9
"""NVLink 5, one direction (bytes/s)."""
C2C = 450e9
"""NVLink-C2C between Grace and GPU, one direction (bytes/s)."""
LINK_US = 10.0
BLOCK_TOKENS = 64
METHOD = (
    "Coefficients of equal stages, none negative, such that no measured cell exceeds the bound of a stage (full waves "
    "of M tokens, no idle time) and the fractions of the bound over the fitted cells sum to the most. Saturated cells "
    "tell only c/M + b: c is its physical bound, the time to read a stage's weights once."
)
DEVICE_SOURCES = (
    "NVIDIA Blackwell Ultra (B300, GB300) data sheets: 288 GB HBM3e, 8 TB/s, NVLink 5 at 1.8 TB/s both directions",
    "NVIDIA Grace Blackwell: NVLink-C2C at 900 GB/s both directions",
)


@dataclass(frozen=True, slots=True)
class Facts:
    """What is public of a model, or assumed of its deployment; all sizes are bytes."""

    key: str
    """In workload.LENGTHS and in the figures."""
    name: str
    stages: int
    devices: str
    weight_bytes: float
    cache_bytes: int
    """Of one token in one attention layer."""
    layers: int
    attention_every: int
    payload_bytes: int
    """Of one token from stage to stage."""
    window: int
    fills: int
    sources: tuple[str, ...]
    assumed: tuple[str, ...]
    state_bytes: int = 0
    """One slot, all recurrent layers of a stage."""
    state_slots: int = 0
    host_bytes: float = 0.0


GLM = Facts(
    "glm", "glm_5_2_pp4", 4, "4 x B300", 744e9, 512 + 64 + 128 + 4, 78, 1, 6144 * 2, 1_048_576, 2,
    (
        "GLM-5 technical report, arXiv 2602.15763: 744B parameters without the multi-token head, hidden size 6144, "
        "MLA latent 512 + 64, index key 128",
        "zai-org/GLM-5.2 and zai-org/GLM-5.2-FP8 model cards: 78 layers, window 1M, FP8 release",
    ),
    (
        "FP8 weights, one byte a parameter: the largest published precision that fits 4 devices. The NVFP4 release "
        "(459 GB) would put the physical bound at 14.3 ms; the larger one flatters small waves less",
        "FP8 latent (576 bytes) and FP8 index key with its scale (132 bytes) for each token and layer",
    ),
)  # fmt: skip
MINIMAX = Facts(
    "minimax", "minimax_m2_7_pp4", 4, "4 x B300", 230e9, 2 * 8 * 128, 62, 1, 3072 * 2, 204_800, 2,
    (
        "MiniMaxAI/MiniMax-M2.7 model card and config.json: 230B parameters in FP8, 62 layers, hidden size 3072, "
        "8 key-value heads of 128, window 204,800",
    ),
    ("FP8 weights as released, one byte a parameter", "FP8 keys and values"),
)  # fmt: skip
K3 = Facts(
    "k3", "kimi_k3_pp8", 8, "8 x GB300, 2 nodes of 4", 1.56e12, 576 * 2, 96, 4, 8 * 7168 * 2, 1_048_576, 1,
    (
        "moonshotai/Kimi-K3 model card: 2.8T parameters, a checkpoint of 1.56 TB (MXFP4 experts, BF16 elsewhere)",
        "TensorRT-LLM deployment guide for Kimi K3: 93 layers, every fourth MLA, the others Kimi Delta Attention",
        "NVIDIA Megatron-Bridge, Kimi K3 provider: 96 KDA heads of 128, attention residual blocks of 12 layers, so "
        "that up to 8 hidden vectors of 7168 cross a stage boundary",
    ),
    (
        "96 layers, every fourth attending, instead of 24 MLA among 93: each of 8 equal stages has 3 and 9",
        "BF16 latent (576 values) for each token and MLA layer",
        "one FP32 state of 96 x 128 x 128 and BF16 convolution tails for each KDA layer",
        "slots for 128 running sequences and 384 snapshots; a snapshot each 8,192 tokens",
        "every activation as wide as the widest boundary's",
    ),
    state_bytes=9 * (96 * 128 * 128 * 4 + 3 * 3 * 96 * 128 * 2), state_slots=512, host_bytes=128 * 2**30,
)  # fmt: skip
ALL = (GLM, MINIMAX, K3)


def cells_of(facts: Facts, figures: dict[str, Any]) -> tuple[Cell, ...]:
    """Every cell that ran on these devices, split this way. Cold and reuse cells of the paper's system are fitted;
    all others only bound the fit."""
    return tuple(_kimi(figures)) if facts is K3 else tuple(_table1(facts.key, figures))


def _table1(model: str, figures: dict[str, Any]) -> Iterator[Cell]:
    for told in figures["table1_pp4_b300"]["cells"]:
        name, c = told["family"], told["c"]
        parts = _parts(name, model, c)
        for system in ("wavepp", "trtllm"):
            fitted = system == "wavepp" and name not in ("mixed", "suffix4k")
            yield Cell(name, c, told[model][system], parts, fitted, system)


def _kimi(figures: dict[str, Any]) -> Iterator[Cell]:
    for told in figures["kimi_k3_pp8_gb300"]["cells"]:
        kind, tokens, c = told["family"], told["input_tokens"], told["c"]
        length = "long" if tokens == 262_144 else "short"
        name = kind if kind == "mixed" else f"{length}_{kind}"
        parts = _parts(name, "k3", c, tokens or None)
        for system in ("wavepp", "sglang_pp8", "vllm_pp8"):
            yield Cell(name, c, told[system], parts, system == "wavepp" and kind != "mixed", system)


def _parts(name: str, model: str, c: int, tokens: int | None = None) -> tuple[Share, ...]:
    """The shapes of four prompts in a row: one and the same, but in a mix."""
    asked = family(name, model, c, tokens=tokens)
    four = [asked.prompt(number) for number in range(4)]
    shapes = sorted((prompt.tokens, prompt.reusable_tokens) for prompt in four)
    return tuple(Share(*shape, shapes.count(shape) / 4) for shape in sorted(set(shapes)))


def make(facts: Facts, figures: dict[str, Any]) -> Profile:
    cells = cells_of(facts, figures)
    wave_tokens = 16_384
    least = weights_us(facts.weight_bytes, facts.stages, BANDWIDTH)
    costs = fit(cells, wave_tokens, least)
    block_bytes = BLOCK_TOKENS * facts.cache_bytes * -(-facts.layers // facts.attention_every) / facts.stages
    free = DEVICE_BYTES * USABLE - facts.weight_bytes / facts.stages - facts.state_slots * facts.state_bytes
    stage = StageProfile(
        costs,
        pool_blocks=_round_down(free / block_bytes),
        host_pool_blocks=_round_down(facts.host_bytes / block_bytes),
        state_slots=facts.state_slots,
        copy_us=round(block_bytes / C2C * 1e6, 3) if facts.host_bytes else 0.0,
    )
    return Profile(
        facts.name, (stage,) * facts.stages, BLOCK_TOKENS, wave_tokens, 8_192, facts.fills, 128, facts.window,
        facts.layers, facts.attention_every, 8_192, LINK_US, round(facts.payload_bytes / NVLINK * 1e6, 5),
        _provenance(facts, figures, costs, least, block_bytes, residuals(costs, cells, wave_tokens)),
    )  # fmt: skip


def _provenance(
    facts: Facts,
    figures: dict[str, Any],
    costs: StageCosts,
    least_c_us: float,
    block_bytes: float,
    found: tuple[Residual, ...],
) -> dict[str, Any]:
    return {
        "figures": figures["source"],
        "devices": facts.devices,
        "sources": [*facts.sources, *DEVICE_SOURCES],
        "assumed": [
            *facts.assumed,
            f"weights, cache and states take {USABLE:.0%} of device memory",
            f"{LINK_US:.0f} us latency of a message between stages",
            "equal stages",
        ],
        "method": METHOD,
        "least_c_us": least_c_us,
        "weight_bytes": facts.weight_bytes,
        "memory_bytes_per_s": BANDWIDTH,
        "block_bytes": block_bytes,
        "state_bytes": facts.state_bytes,
        "wave_us": {
            f"{tokens} after {prefix}": round(costs.wave_us([(prefix, tokens)]), 1)
            for prefix, tokens in ((0, 16_384), (0, 8_192), (131_072, 16_384), (131_072, 4_096))
        },
        "residuals": [one.as_dict() for one in found],
    }


def _round_down(blocks: float) -> int:
    """To thousands: the sizes are estimates."""
    return int(blocks) // 1000 * 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("figures", type=Path, help="the paper's tables as JSON")
    parser.add_argument("--out", type=Path, default=OUT, help="folder of the profiles")
    asked = parser.parse_args()
    figures = json.loads(asked.figures.read_text())
    for facts in ALL:
        profile = make(facts, figures)
        profile.check()
        path = asked.out / f"{profile.name}.json"
        path.write_text(profile.to_json())
        print(f"{path}: {profile.stages[0]}", file=sys.stderr)


if __name__ == "__main__":
    main()
