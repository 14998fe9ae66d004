"""What a Hugging Face model folder says about itself, read without torch.

Owns the fingerprint by which the stages of a pipeline recognise the same model, and the list of
safetensors files of a folder. Reads configuration and file headers, never whole weights. Called by
the daemon's start-up (membership record) and by `weights.py`.
"""

from __future__ import annotations

import hashlib
import json
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from wavepp_proto.errors import EngineFault
from wavepp_proto.terms import ModelFacts
from wavepp_stage.engine.torch.layer_kinds import recurrent_layers

CONFIG_NAME = "config.json"
SINGLE_FILE = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
MAX_HEADER_BYTES = 100 * 1024 * 1024
"""The bound that the safetensors format itself sets on a header."""
SAMPLE_BYTES = 64
"""Bytes hashed of each tensor: tells fine-tunes of one architecture apart without reading them whole."""
_LOCAL_KEYS = frozenset({"_name_or_path", "transformers_version"})
"""Configuration keys that say where or by what a folder was written, not what model it is."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor as its file's header describes it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    """First byte, counted from the end of the header."""
    end: int


def read_config(folder: Path) -> dict[str, Any]:
    """The folder's config.json. Raises EngineFault when it is missing or not a JSON object."""
    try:
        config = json.loads((folder / CONFIG_NAME).read_bytes())
    except (OSError, ValueError) as error:
        raise EngineFault(
            f"cannot read {CONFIG_NAME} of the model: {error}", field="model", value=str(folder)
        ) from error
    if not isinstance(config, dict):
        raise EngineFault(f"{CONFIG_NAME} is not a JSON object", field="model", value=str(folder))
    return config


def weight_files(folder: Path) -> tuple[Path, ...]:
    """The folder's safetensors files in name order: the index's shards, or the single file."""
    index = folder / INDEX_NAME
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise EngineFault(f"{INDEX_NAME} has no weight_map: {error!r}", field="model", value=str(folder)) from error
    else:
        names = [SINGLE_FILE]
    files = tuple(folder / Path(name).name for name in names)
    for file in files:
        if not file.is_file():
            raise EngineFault(f"the model folder has no {file.name}", field="model", value=str(folder))
    return files


def _read_header(handle: BinaryIO, file: Path) -> tuple[int, tuple[TensorInfo, ...]]:
    """(offset of the data, tensors in offset order) of an open safetensors file."""
    prefix = handle.read(8)
    size = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
    if not 0 < size <= MAX_HEADER_BYTES:
        raise EngineFault("not a safetensors file", field="model", value=str(file))
    try:
        header = json.loads(handle.read(size))
        tensors = [
            TensorInfo(name, entry["dtype"], tuple(entry["shape"]), *entry["data_offsets"])
            for name, entry in header.items()
            if name != "__metadata__"
        ]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise EngineFault(f"damaged safetensors header: {error!r}", field="model", value=str(file)) from error
    return 8 + size, tuple(sorted(tensors, key=lambda tensor: (tensor.begin, tensor.name)))


def read_header(file: Path) -> tuple[TensorInfo, ...]:
    """The tensors of one safetensors file, in the order of their bytes."""
    with file.open("rb") as handle:
        return _read_header(handle, file)[1]


def _hash_tensors(digest: hashlib._Hash, file: Path) -> None:
    with file.open("rb") as handle:
        data, tensors = _read_header(handle, file)
        for tensor in tensors:
            digest.update(f"{tensor.name}\0{tensor.dtype}\0{tensor.shape}\0{tensor.end - tensor.begin}\0".encode())
            # From the middle: the first rows of embeddings and norms often survive a fine-tune unchanged.
            handle.seek(data + (tensor.begin + tensor.end) // 2)
            digest.update(handle.read(min(SAMPLE_BYTES, (tensor.end - tensor.begin + 1) // 2)))


def fingerprint(folder: Path) -> str:
    """SHA-256 over the canonical configuration and every tensor's name, type, shape, size and a sample.

    Equal on all hosts that hold copies of one folder; costs headers and one small read per tensor.
    """
    config = {key: value for key, value in read_config(folder).items() if key not in _LOCAL_KEYS}
    digest = hashlib.sha256(b"wavepp-model-1\0")
    digest.update(json.dumps(config, sort_keys=True, separators=(",", ":")).encode())
    for file in weight_files(folder):
        digest.update(b"\0file\0")
        _hash_tensors(digest, file)
    return digest.hexdigest()


def _positive(config: dict[str, Any], key: str) -> int:
    value = config.get(key)
    if not isinstance(value, int) or value < 1:
        raise EngineFault(f"{CONFIG_NAME} has no usable {key}", field=key, value=repr(value))
    return value


def model_facts(path: str) -> ModelFacts:
    """What a controller must know of the model folder at `path`.

    Raises EngineFault naming the field when the folder is not a usable model, or a layer is of a kind not served."""
    folder = Path(path).expanduser()
    config = read_config(folder)
    layers = _positive(config, "num_hidden_layers")
    return ModelFacts(
        name=path,
        fingerprint=fingerprint(folder),
        layers=layers,
        vocabulary=_positive(config, "vocab_size"),
        window=_positive(config, "max_position_embeddings"),
        path=str(folder.resolve()),
        recurrent_layers=recurrent_layers(config),
    )
