"""The check of a GPU host, behind scripts/gpu-check: a line per item, a JSON file, an exit status.

Status 0: nothing failed; 1: something did; 2: an argument or the environment is refused; 3: no GPU here, so that
nothing was checked. With `--device cpu` the items that need no GPU run on the CPU: a test of the check itself, which
says nothing about a GPU.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
import time
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, Final, NoReturn

from tests.gpu.items import Check, Host, Verdict, judge
from wavepp_proto.errors import InvalidRequest, describe

REFUSED: Final = 2
NO_GPU: Final = 3
TRTLLM: Final = "trtllm: "
"""How the names of the items begin that only an environment with TensorRT-LLM can run."""
ELSEWHERE: Final = (
    "give the interpreter of an environment that has it, WAVEPP_GPU_PYTHON=PATH/TO/PYTHON scripts/gpu-check"
)


def _item(module: str, function: str, **arguments: Any) -> Check:
    """Imported when it runs: an environment that lacks what some items need can run the others."""

    def check(host: Host) -> str:
        said: str = getattr(import_module(f"tests.gpu.{module}"), function)(host, **arguments)
        return said

    return check


ITEMS: Final[Mapping[str, Check]] = {
    "device": _item("device_items", "device"),
    "one stage, float32": _item("engine_items", "float32"),
    "one stage, bfloat16": _item("engine_items", "bfloat16"),
    "two stages on one device": _item("engine_items", "split", family="llama", stages=2),
    "four stages on one device": _item("engine_items", "split", family="qwen3_moe", stages=4),
    "recurrent layers": _item("engine_items", "split", family="qwen3_next", stages=2),
    "host tier": _item("engine_items", "host_tier"),
    "copies beside waves": _item("engine_items", "overlap"),
    "compute time": _item("engine_items", "wave_time"),
    "memory": _item("engine_items", "memory"),
    "throughput": _item("engine_items", "throughput"),
    "link through host memory": _item("link_items", "through_host_memory"),
    "link nccl": _item("link_items", "nccl"),
    "link nccl on one device": _item("link_items", "nccl_on_one_device"),
    "cluster": _item("cluster_items", "torch_cluster"),
    "killed stage": _item("cluster_items", "killed_stage"),
    f"{TRTLLM}names": _item("trtllm_items", "doctor"),
    f"{TRTLLM}one stage": _item("trtllm_items", "one_stage"),
    f"{TRTLLM}uneven stages": _item("trtllm_items", "uneven"),
}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise InvalidRequest(message)


def main(arguments: list[str] | None = None) -> int:
    try:
        chosen = _chosen(arguments)
        _check_environment(chosen.json)
        return _check(chosen)
    except InvalidRequest as refused:
        print(describe(refused), file=sys.stderr)
        return REFUSED


def _chosen(arguments: list[str] | None) -> argparse.Namespace:
    """Raises InvalidRequest."""
    parser = _Parser(prog="scripts/gpu-check", description=__doc__)
    parser.add_argument("--device", default="cuda:0", help="cuda:N, or cpu to test the check itself")
    parser.add_argument("--json", type=Path, help="write the verdicts and figures here as well")
    parser.add_argument("--only", action="append", help="an item by name; may be repeated")
    parser.add_argument("--require", action="append", default=[],
                        help="an item that must pass: skipped counts as failed; may be repeated")  # fmt: skip
    chosen = parser.parse_args(arguments)
    for field, names in (("only", chosen.only or []), ("require", chosen.require)):
        for name in names:
            if name not in ITEMS:
                raise InvalidRequest("no such item", field=field, value=name, limit=", ".join(ITEMS))
    if not re.fullmatch("cpu|cuda:(0|[1-9][0-9]{0,9})", chosen.device):
        raise InvalidRequest("no such device", field="device", value=chosen.device, limit="cuda:N or cpu")
    return chosen


def _check_environment(file: Path | None) -> None:
    """What must be right before the work. Raises InvalidRequest."""
    try:
        import_module("torch")
        from wavepp._paths import check_file
    except ImportError as error:
        message = f"this interpreter lacks what every item needs: {error}"
        raise InvalidRequest(message, field="WAVEPP_GPU_PYTHON", value=sys.executable) from error
    if file is not None:
        check_file("json", file)


def _check(chosen: argparse.Namespace) -> int:
    import torch

    if chosen.device != "cpu" and not torch.cuda.is_available():
        reason = "this torch is built without CUDA" if torch.version.cuda is None else "CUDA finds no device"
        print(f"no GPU: {reason} (torch {torch.__version__}); nothing was checked", flush=True)
        _write(chosen.json, {"device": chosen.device, "status": NO_GPU, "reason": reason, "items": []})
        return NO_GPU
    count = torch.cuda.device_count()
    # Before torch.device, which has no words of its own for an index beyond its 8 bits.
    if chosen.device != "cpu" and int(chosen.device.removeprefix("cuda:")) >= count:
        raise InvalidRequest("no such device", field="device", value=chosen.device, limit=f"cuda:{count - 1}")
    names = list(ITEMS) if chosen.only is None else list(dict.fromkeys(chosen.only + chosen.require))
    with tempfile.TemporaryDirectory(prefix="wavepp-gpu-check-") as folder:
        host = Host(torch.device(chosen.device), Path(folder))
        verdicts = _run(host, names)
    counts = {kind: sum(one.verdict == kind for one in verdicts) for kind in ("pass", "fail", "skipped")}
    missed = [one.item for one in verdicts if one.item in chosen.require and one.verdict == "skipped"]
    status = 1 if counts["fail"] or missed else 0
    print(_summary(chosen.device, counts, verdicts, missed), flush=True)
    _write(chosen.json, {
        "device": chosen.device, "torch": torch.__version__, "cuda": torch.version.cuda, "status": status,
        "counts": counts, "figures": host.figures, "items": [one.as_json() for one in verdicts],
    })  # fmt: skip
    return status


def _run(host: Host, names: list[str]) -> list[Verdict]:
    verdicts = []
    began = time.monotonic()
    for name in names:
        verdicts.append(judge(name, ITEMS[name], host))
        one = verdicts[-1]
        print(f"{one.verdict:8}{name:28}{one.seconds:7.1f} s  {one.detail}", flush=True)
    print(f"{time.monotonic() - began:.0f} s in all", flush=True)
    return verdicts


def _summary(device: str, counts: Mapping[str, int], verdicts: list[Verdict], missed: list[str]) -> str:
    """One line. Status 0 must not read as if TensorRT-LLM had been checked where all of its items were skipped."""
    said = ", ".join(f"{count} {kind}" for kind, count in counts.items()) + f" on {device}"
    if missed:
        said += f"; required and skipped: {', '.join(missed)}"
    trtllm = [one.verdict for one in verdicts if one.item.startswith(TRTLLM)]
    if skipped := trtllm.count("skipped"):
        said += f"; {skipped} of {len(trtllm)} trtllm items skipped"
    if skipped and skipped == len(trtllm):
        said += f", nothing of TensorRT-LLM was checked: {ELSEWHERE}"
    return said


def _write(file: Path | None, document: dict[str, object]) -> None:
    """Raises InvalidRequest."""
    from wavepp._paths import write_file

    if file is not None:
        write_file("json", file, json.dumps(document, indent=2) + "\n")


if __name__ == "__main__":
    sys.exit(main())
