"""Loads one band's weights from a folder's safetensors, and nothing else of them.

Owns which stored tensors a band needs: every stored name goes through transformers' own renaming
and conversion rules (a mixture-of-experts layer is stored as one tensor per expert and executed as
fused ones), and is read only when its target belongs to the band. Called by `engine.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

from wavepp_proto.errors import EngineFault
from wavepp_stage.engine.torch.facts import check_dtypes, stored_tensors
from wavepp_stage.engine.torch.model import EMBEDDING, HEAD, Band

Progress = Callable[[int, int], None]


@dataclass(slots=True)
class Target:
    """One parameter of the band and the stored tensors it is made of, in the order they are stacked."""

    name: str
    converter: WeightConverter | None = None
    """None: the one source is the parameter."""
    sources: list[tuple[str, str, Path]] = field(default_factory=list)
    """(stored name, converter's source pattern, file)."""


def plan_reads(band: Band, folder: Path) -> list[Target]:
    """Every parameter of the band with its sources; stored tensors of other stages do not appear."""
    parameters = band.model.state_dict()
    wanted = set(parameters)
    if band.tied:
        wanted.discard(HEAD)
    stored = stored_tensors(folder)
    rules = get_model_conversion_mapping(band.model)
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    by_pattern = {pattern: rule for rule in converters for pattern in rule.source_patterns}
    targets: dict[str, Target] = {}
    for name, file in sorted(stored.items(), key=lambda entry: dot_natural_key(entry[0])):
        if name in wanted:
            target, pattern = name, None
        else:
            target, pattern = rename_source_key(name, renamings, converters, band.model.base_model_prefix,
                                                parameters)  # fmt: skip
        if target in wanted:
            converter = None if pattern is None else by_pattern[pattern]
            entry = targets.setdefault(target, Target(target, converter))
            entry.sources.append((name, pattern or name, file))
    if band.shares_head and EMBEDDING in wanted and EMBEDDING not in targets and HEAD in stored:
        # Tying is symmetric: a folder may hold either of the two.
        targets[EMBEDDING] = Target(EMBEDDING, sources=[(HEAD, HEAD, stored[HEAD])])
    floating = [target for target in targets.values() if parameters[target.name].is_floating_point()]
    check_dtypes(stored, (name for target in floating for name, _, _ in target.sources))
    return list(targets.values())


def load_weights(band: Band, folder: Path, device: torch.device, progress: Progress) -> tuple[str, ...]:
    """Fill the band's parameters; returns the stored names that were read, sorted.

    Progress counts stored tensors. One parameter is assembled at a time, so the peak is the band
    plus one parameter."""
    targets = plan_reads(band, folder)
    total = sum(len(target.sources) for target in targets)
    names: list[str] = []
    with ExitStack() as stack:
        handles: dict[Path, Any] = {}
        for target in targets:
            for _, _, file in target.sources:
                if file not in handles:
                    handles[file] = stack.enter_context(_opened(file))
            _fill(band, target, handles, device)
            names.extend(name for name, _, _ in target.sources)
            progress(len(names), total)
    return tuple(sorted(names))


def _opened(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt", device="cpu")
    except (OSError, SafetensorError) as error:
        raise EngineFault(f"cannot read {file.name}: {error}", field="model", value=str(file)) from error


def _fill(band: Band, target: Target, handles: dict[Path, Any], device: torch.device) -> None:
    owner, _, attribute = target.name.rpartition(".")
    module = band.model.get_submodule(owner)
    empty: Tensor = getattr(module, attribute)

    def read() -> Iterator[tuple[str, str, Tensor]]:
        for name, pattern, file in target.sources:
            yield name, pattern, handles[file].get_tensor(name).to(device=device, dtype=empty.dtype)

    if target.converter is None:
        (_, _, value), *_ = read()
    else:
        value = _convert(band, target, target.converter, read())
    if value.shape != empty.shape:
        raise EngineFault("stored tensor has another shape than the configuration says", field=target.name,
                          value=str(tuple(value.shape)), limit=str(tuple(empty.shape)))  # fmt: skip
    setattr(module, attribute, torch.nn.Parameter(value, requires_grad=False))


def _convert(band: Band, target: Target, rule: WeightConverter, tensors: Iterator[tuple[str, str, Tensor]]) -> Tensor:
    converter: Any = deepcopy(rule)
    for name, pattern, tensor in tensors:
        converter.add_tensor(target.name, name, pattern, tensor)
    made = converter.convert(target.name, model=band.model, config=band.model.config)
    value = made.get(target.name)
    if isinstance(value, list):
        value = value[0]
    if not isinstance(value, Tensor):
        raise EngineFault(f"conversion made {sorted(made)} instead", field=target.name, value=type(value).__name__)
    return value
