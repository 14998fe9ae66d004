"""Items about TensorRT-LLM, for the environment that has it: its names, one stage, uneven stages."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

from transformers import LlamaConfig

from tests.gpu.cluster import Cluster, exhaust, reuse
from tests.gpu.items import Host, Skip
from tests.harness.tiny_models import VOCABULARY, WINDOW, save_random

CPU_TOO = ("package", "names")
"""What `wavepp doctor` finds without a GPU, for a test of the check itself."""


def need_trtllm() -> None:
    if importlib.util.find_spec("tensorrt_llm") is None:
        raise Skip("needs tensorrt_llm, which is not installed in this environment")


def doctor(host: Host) -> str:
    """Everything the adapter touches in the installed package, by name and parameters."""
    need_trtllm()
    asked = [sys.executable, "-m", "wavepp", "doctor", "--engine", "trtllm", "--json"]
    ended = subprocess.run(asked, env=_one_gpu(host), capture_output=True, text=True, timeout=330, check=False)
    assert ended.stdout, f"status {ended.returncode}: {ended.stderr.strip()[-300:]}"
    findings = [one for one in json.loads(ended.stdout) if host.cuda or one["what"] in CPU_TOO]
    missing = [f"{one['what']}: {one['detail']}" for one in findings if not one["ok"]]
    assert not missing, "; ".join(missing)
    return f"{len(findings)} findings, all well"


def _one_gpu(host: Host) -> dict[str, str]:
    """This environment as a stage daemon has it: the device that is checked is the only GPU to be seen."""
    if not host.cuda:
        return dict(os.environ)
    index, seen = host.device.index, os.environ.get("CUDA_VISIBLE_DEVICES")
    return os.environ | {"CUDA_VISIBLE_DEVICES": str(index) if seen is None else seen.split(",")[index].strip()}


def one_stage(host: Host) -> str:
    need_trtllm()

    async def story(cluster: Cluster) -> str:
        return f"{await reuse(cluster)}; {await exhaust(cluster)}"

    return Cluster(host, "trtllm", 1, _model(host)).tell(story)


def uneven(host: Host) -> str:
    need_trtllm()
    host.gpus(2)
    return Cluster(host, "trtllm", 2, _model(host), layers=("0:3", "3:5")).tell(reuse)


def _model(host: Host) -> Path:
    """Of heads that its kernels have: the tiny models' are too small for them."""
    config = LlamaConfig(
        num_hidden_layers=5, hidden_size=256, intermediate_size=512, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=VOCABULARY, max_position_embeddings=WINDOW, initializer_range=0.05,
    )  # fmt: skip
    return save_random(config, host.folder / "llama-5x256")
