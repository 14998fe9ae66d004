"""Several hosts: etcd, controller, four torch stages and a client, each in a network namespace of its own.

What deploy/README.md tells an operator to type, with exact answers of a random model at the end. The
processes share a disk and nothing else: an address that is loopback's or the wrong host's does not work.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.harness import namespaces, tiny_models
from tests.harness.eventually import eventually_sync
from tests.harness.namespaces import Hosts
from wavepp_proto.runtime.etcd_binary import find_etcd

pytestmark = [pytest.mark.processes, pytest.mark.namespaces, pytest.mark.slow]

STAGES = 4
BLOCK_TOKENS = 16
TOLERANCE = 1e-4
"""Of log probabilities in float32, against the unsplit model."""
START_S = 150.0
"""Four processes import torch on two cores."""
NAMES = ("etcd", "controller", *(f"stage{stage}" for stage in range(STAGES)), "client")


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    # tests/conftest.py turns this into a failure where such a test must run
    if (reason := namespaces.why_not()) is not None:
        pytest.skip(reason)
    with namespaces.hosts(NAMES, tmp_path / "logs") as made:
        yield made


def test_hosts_that_share_only_etcd_give_exact_answers_over_both_links(hosts: Hosts, tmp_path: Path) -> None:
    """The stages stand while the controller comes back with another link; what they cached stays."""
    model = tiny_models.build("llama", tmp_path)
    prompts = _prompts()
    _start_etcd(hosts, tmp_path)
    _start_controller(hosts, link="gloo")
    for stage in range(STAGES):
        _start_stage(hosts, stage, model)
    stages = {name: pid for name, pid in hosts.pids().items() if name.startswith("stage")}
    _await_formations(hosts, 1)
    _check_status(hosts, "gloo")
    cold = _prefill(hosts, tmp_path, prompts[:4])
    _check_answers(model, prompts[:4], cold)

    assert hosts.stop("controller") == 0
    _start_controller(hosts, link="grpc")
    _await_formations(hosts, 2)
    _check_status(hosts, "grpc")
    warm = _prefill(hosts, tmp_path, prompts)
    _check_answers(model, prompts, warm)
    for prompt, answer in zip(prompts[:4], warm, strict=False):
        assert answer["cached_tokens"] == (len(prompt) - 1) // BLOCK_TOKENS * BLOCK_TOKENS
    assert hosts.alive()
    assert {name: pid for name, pid in hosts.pids().items() if name in stages} == stages


def _prompts() -> list[list[int]]:
    """Shared prefixes that end inside and at the end of blocks, and one prompt of its own."""
    draw = torch.Generator().manual_seed(7)
    base: list[int] = torch.randint(tiny_models.VOCABULARY, (400,), generator=draw).tolist()
    own: list[int] = torch.randint(tiny_models.VOCABULARY, (150,), generator=draw).tolist()
    return [base[:200], base[:208] + own[:30], own, base[:1], base[:390], own[:96] + base[:50]]


def _start_etcd(hosts: Hosts, folder: Path) -> None:
    client, peer = (f"http://{hosts.address('etcd')}:{port}" for port in (2379, 2380))
    hosts.start(
        "etcd", str(find_etcd().path), "--name=default", f"--data-dir={folder / 'etcd'}", "--log-level=warn",
        f"--listen-client-urls={client}", f"--advertise-client-urls={client}",
        f"--listen-peer-urls={peer}", f"--initial-advertise-peer-urls={peer}", f"--initial-cluster=default={peer}",
    )  # fmt: skip


def _start_controller(hosts: Hosts, link: str) -> None:
    hosts.start(
        "controller", *_wavepp("controller", "--etcd", f"{hosts.address('etcd')}:2379"),
        "--listen", f"{hosts.address('controller')}:7411", "--link", link, "--wave-tokens", "128",
        # a busy machine is no dead host, and this test is not about silence
        "--silence-ms", "10000",
    )  # fmt: skip


def _start_stage(hosts: Hosts, stage: int, model: Path) -> None:
    """Stage 3 listens on every address, so it must be told which one the others can dial."""
    own = hosts.address(f"stage{stage}")
    listen = ("--listen", f"{own}:7421") if stage < 3 else ("--listen", "0.0.0.0:7421", "--advertise", own)
    hosts.start(
        f"stage{stage}", *_wavepp("stage", "--etcd", f"{hosts.address('etcd')}:2379"), *listen,
        "--stage", str(stage), "--stages", str(STAGES), "--model", str(model), "--pool-blocks", str(100 - 10 * stage),
        "--block-tokens", str(BLOCK_TOKENS), "--wave-tokens", "128", "--threads", "1",
    )  # fmt: skip


def _wavepp(*arguments: str) -> tuple[str, ...]:
    return sys.executable, "-m", "wavepp", *arguments


def _await_formations(hosts: Hosts, count: int) -> None:
    """Until every stage has joined that many formations; a process that ended is an answer too."""

    def joined() -> bool:
        assert hosts.alive(), {name: hosts.log(name)[-2000:] for name in hosts.pids()}
        return all(hosts.log(f"stage{stage}").count('"formation joined"') >= count for stage in range(STAGES))

    eventually_sync(joined, within=START_S, about=f"{count} formations")


def _check_status(hosts: Hosts, link: str) -> None:
    """Every stage is known by its own address, and the link is the one that was asked for."""
    status = hosts.run("client", *_wavepp("status", "--json"), "--controller", _controller(hosts), within_s=60)
    assert status.returncode == 0, status.stderr
    (pipeline,) = json.loads(status.stdout)["pipelines"]
    assert pipeline["link"] == link
    assert [daemon["address"] for daemon in pipeline["daemons"]] == [
        f"{hosts.address(f'stage{stage}')}:7421" for stage in range(STAGES)
    ]


def _prefill(hosts: Hosts, folder: Path, prompts: list[list[int]]) -> list[dict[str, Any]]:
    lines = folder / "prompts.jsonl"
    lines.write_text("".join(json.dumps({"token_ids": prompt}) + "\n" for prompt in prompts))
    finished = hosts.run(
        "client", *_wavepp("prefill", "--file", str(lines), "--json"), "--controller", _controller(hosts),
        "--top-logprobs", "20", "--concurrency", "3", "--deadline-s", "100", within_s=120,
    )  # fmt: skip
    assert finished.returncode == 0, finished.stdout + finished.stderr
    return [json.loads(line) for line in finished.stdout.splitlines()]


def _check_answers(model: Path, prompts: list[list[int]], answers: list[dict[str, Any]]) -> None:
    for prompt, answer in zip(prompts, answers, strict=True):
        expected = tiny_models.unsplit_logits(model, prompt).log_softmax(-1)
        assert answer["first_token"] == int(expected.argmax())
        assert len(answer["top_logprobs"]) == 20
        for entry in answer["top_logprobs"]:
            assert abs(entry["logprob"] - float(expected[entry["token_id"]])) <= TOLERANCE


def _controller(hosts: Hosts) -> str:
    return f"{hosts.address('controller')}:7411"
