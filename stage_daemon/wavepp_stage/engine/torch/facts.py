"""What a Hugging Face model folder says about itself, read without loading a weight.

Owns the fingerprint by which the stages of a pipeline recognise the same model, and the list of
safetensors files and tensors of a folder. Reads configuration and file headers, never whole weights.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TypeGuard

from wavepp_proto.errors import EngineFault
from wavepp_proto.profile import MAX_LAYERS
from wavepp_proto.terms import ModelFacts
from wavepp_stage.engine.torch.layer_kinds import check_model_type, layer_kinds, recurrent_layers, refuse

if TYPE_CHECKING:
    from transformers import PretrainedConfig

CONFIG_NAME = "config.json"
SINGLE_FILE = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
MAX_HEADER_BYTES = 100 * 1024 * 1024
"""The bound that the safetensors format itself sets on a header."""
MAX_JSON_DEPTH = 64
"""Objects and lists within each other in a file of the folder. Deeper, code that walks them runs out of stack."""
MAX_HIDDEN = 1 << 20
MAX_HEADS = 1 << 16
MAX_STORED_VOCABULARY = 1 << 24
MAX_POSITIONS = 1 << 26
LFS_POINTER = b"version https://git-lfs.github.com/spec/"
"""How the file begins that git-lfs leaves where it did not fetch the content."""
SAMPLE_BYTES = 64
"""Bytes hashed of each tensor: tells fine-tunes of one architecture apart without reading them whole."""
_NOT_THE_MODEL = frozenset({
    "architectures", "attention_dropout", "bos_token_id", "chunk_size_feed_forward", "dtype", "eos_token_id",
    "id2label", "initializer_range", "is_encoder_decoder", "label2id", "output_attentions", "output_hidden_states",
    "pad_token_id", "problem_type", "return_dict", "torch_dtype", "transformers_version", "use_cache",
})  # fmt: skip
"""Configuration keys that change no logit of one forward: where a folder comes from, training, generation. The dtype
is compared by itself."""
_MOST = {
    "num_hidden_layers": MAX_LAYERS, "vocab_size": MAX_STORED_VOCABULARY, "max_position_embeddings": MAX_POSITIONS,
    "hidden_size": MAX_HIDDEN, "num_attention_heads": MAX_HEADS, "num_key_value_heads": MAX_HEADS,
}  # fmt: skip
"""Bounds of a configuration's sizes: reading it costs time and memory in proportion to some."""
_MAY_LACK = "num_key_value_heads"
_OBJECTS = ("rope_parameters", "rope_scaling", "quantization_config", "id2label", "label2id")
_DTYPE = re.compile(r"(?:torch\.)?(?:b?float\w*|half|double|auto)")
_FLOATING = frozenset({"F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ"})
"""Stored dtypes of which the torch engine can make the values of a parameter."""
_PARAMETER = re.compile(r"(?:model\.)?(?:embed_tokens|norm|layers\.(\d+)\..+)\.weight|lm_head\.weight")
"""Names that are parameters in every family served, where the layer is one of the model's."""
_SERVED_ROPE = frozenset({"default", "linear", "llama3", "yarn"})
_LENGTH_DEPENDENT_ROPE = frozenset({"dynamic", "longrope"})
"""Rotary kinds whose angles depend on the longest position seen: cached keys would go stale."""


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
    if not is_regular(folder / CONFIG_NAME):
        raise _lacks(folder / CONFIG_NAME)
    config = read_json(folder / CONFIG_NAME)
    if not isinstance(config, dict):
        raise EngineFault(f"{CONFIG_NAME} is not a JSON object", field="model", value=str(folder))
    return config


def read_json(file: Path) -> Any:
    """What a small JSON file of the folder holds. Raises EngineFault that names it if that cannot be read."""
    return _parsed(file, _without_pointer(file))


def _parsed(file: Path, content: bytes) -> Any:
    try:
        value = json.loads(content)
        deep = _is_deeper(value, MAX_JSON_DEPTH)
    except ValueError as error:
        raise EngineFault(f"{file.name} is no JSON: {error}", field="model", value=str(file)) from error
    except RecursionError:
        deep = True
    if deep:
        message = f"{file.name} nests its JSON deeper than {MAX_JSON_DEPTH} levels"
        raise EngineFault(message, field="model", value=str(file), limit=MAX_JSON_DEPTH)
    return value


def _is_deeper(value: Any, most: int) -> bool:
    level = [value]
    for _ in range(most + 1):
        level = [one for outer in level if isinstance(outer, dict | list) for one in _inner(outer)]
    return bool(level)


def _inner(outer: dict[str, Any] | list[Any]) -> Iterable[Any]:
    return outer.values() if isinstance(outer, dict) else outer


def is_regular(file: Path) -> bool:
    """Whether it is there. Raises EngineFault for what is no regular file: a pipe would be read for ever."""
    try:
        if file.is_file():
            return True
        there = file.exists()
    except OSError as error:
        raise _unreadable(file, error) from error
    if there:
        raise EngineFault(f"{file.name} of the model is no regular file", field="model", value=str(file))
    return False


def _lacks(file: Path) -> EngineFault:
    return EngineFault(f"the model folder has no {file.name}", field="model", value=str(file.parent))


def _unreadable(file: Path, error: OSError) -> EngineFault:
    return EngineFault(f"cannot read {file.name} of the model: {error.strerror}", field="model", value=str(file))


def stored_tensors(folder: Path) -> dict[str, Path]:
    """Every stored tensor by name, with the file that holds it: what transformers would load from this folder.

    The single file comes before an index, which may be stale. Of a tensor that lies in several shards transformers
    loads the last shard's, whatever the index says: where the two agree it is taken, else EngineFault names the
    tensor and both files. Also raised for a file that is missing, truncated or a git-lfs pointer, and for a tensor
    that the index promises and its shard lacks."""
    if is_regular(folder / SINGLE_FILE):
        return {tensor.name: folder / SINGLE_FILE for tensor in read_header(folder / SINGLE_FILE)}
    mapped = _weight_map(folder)
    found: dict[str, Path] = {}
    for file in weight_files(folder):
        names = {tensor.name for tensor in read_header(file)}
        if absent := sorted(name for name, at in mapped.items() if at == file and name not in names):
            raise EngineFault(
                f"{file.name} lacks {len(absent)} tensors that {INDEX_NAME} places there, first {absent[0]}",
                field="model", value=str(file),
            )  # fmt: skip
        found.update(dict.fromkeys(names, file))
    for name, file in mapped.items():
        if found[name] != file:
            message = f"{name} lies in {file.name}, as {INDEX_NAME} says, and in {found[name].name}: remove one of them"
            raise EngineFault(message, field="model", value=str(folder))
    return found


def weight_files(folder: Path) -> tuple[Path, ...]:
    """The folder's safetensors files in name order: the single file, or else the index's shards."""
    files: tuple[Path, ...] = (folder / SINGLE_FILE,)
    if not is_regular(files[0]):
        files = tuple(sorted(set(_weight_map(folder).values()))) or files
    for file in files:
        if not is_regular(file):
            raise _lacks(file)
    return files


def check_dtypes(stored: Mapping[str, Path], names: Iterable[str]) -> None:
    """Raises EngineFault for the first of `names`, each made into a floating parameter, that is stored as something
    else; `stored` tells the files. Needs the headers alone."""
    dtypes: dict[Path, dict[str, str]] = {}
    for name in names:
        file = stored[name]
        if file not in dtypes:
            dtypes[file] = {tensor.name: tensor.dtype for tensor in read_header(file)}
        if (dtype := dtypes[file][name]) not in _FLOATING:
            raise EngineFault(
                f"{name} in {file.name} is stored as {dtype}: the torch engine serves floating weights alone",
                field=name, value=dtype, limit=", ".join(sorted(_FLOATING)),
            )  # fmt: skip


def _weight_map(folder: Path) -> dict[str, Path]:
    """Tensor name to shard; empty without an index."""
    index = folder / INDEX_NAME
    if not is_regular(index):
        return {}
    told = read_json(index)
    mapped = told.get("weight_map") if isinstance(told, dict) else None
    if not isinstance(mapped, dict):
        message = f"{INDEX_NAME} has no weight_map, which names the file of each tensor"
        raise EngineFault(message, field="weight_map", value=str(folder))
    for tensor, name in mapped.items():
        if not isinstance(name, str) or name != Path(name).name:
            message = f"{INDEX_NAME} places {tensor} in {name!r}, which is no file of the folder"
            raise EngineFault(message, field="weight_map", value=repr(name))
    return {tensor: folder / name for tensor, name in mapped.items()}


def _without_pointer(file: Path) -> bytes:
    """A small file's content. Raises EngineFault if it is what git-lfs leaves where it did not fetch the file."""
    try:
        content = file.read_bytes()
    except OSError as error:
        raise _unreadable(file, error) from error
    _refuse_pointer(file, content[: len(LFS_POINTER)])
    return content


def _refuse_pointer(file: Path, begin: bytes) -> None:
    if begin == LFS_POINTER:
        message = f"{file.name} is a git-lfs pointer, not the file itself: run git lfs pull in {file.parent}"
        raise EngineFault(message, field="model", value=str(file))


def _read_header(handle: BinaryIO, file: Path) -> tuple[int, tuple[TensorInfo, ...]]:
    """(offset of the data, tensors in offset order) of an open safetensors file."""
    begin = handle.read(len(LFS_POINTER))
    _refuse_pointer(file, begin)
    size = struct.unpack("<Q", begin[:8])[0] if len(begin) >= 8 else 0
    if not 0 < size <= MAX_HEADER_BYTES:
        raise EngineFault(f"{file.name} is not a safetensors file", field="model", value=str(file))
    handle.seek(8)
    header = _parsed(file, handle.read(size))
    if not isinstance(header, dict):
        message = f"{file.name} has a damaged safetensors header: it is no JSON object"
        raise EngineFault(message, field="model", value=str(file))
    tensors = [_tensor(file, name, entry) for name, entry in header.items() if name != "__metadata__"]
    held = handle.seek(0, os.SEEK_END) - 8 - size
    if beyond := [tensor.name for tensor in tensors if not 0 <= tensor.begin <= tensor.end <= held]:
        raise EngineFault(
            f"{file.name} is truncated: {len(beyond)} of its {len(tensors)} tensors lie beyond its {max(0, held)} bytes"
            f" of data, first {beyond[0]}",
            field="model", value=str(file),
        )  # fmt: skip
    return 8 + size, tuple(sorted(tensors, key=lambda tensor: (tensor.begin, tensor.name)))


def _tensor(file: Path, name: str, entry: Any) -> TensorInfo:
    told = entry if isinstance(entry, dict) else {}
    dtype, shape, offsets = (told.get(key) for key in ("dtype", "shape", "data_offsets"))
    if not (isinstance(dtype, str) and _are_whole(shape) and _are_whole(offsets) and len(offsets) == 2):
        message = f"{file.name} has a damaged safetensors header: {name} lacks dtype, shape or two data_offsets"
        raise EngineFault(message, field="model", value=str(file))
    return TensorInfo(name, dtype, tuple(shape), *offsets)


def _are_whole(values: Any) -> TypeGuard[list[int]]:
    return isinstance(values, list) and all(isinstance(one, int) for one in values)


def read_header(file: Path) -> tuple[TensorInfo, ...]:
    """The tensors of one safetensors file, in the order of their bytes."""
    try:
        with file.open("rb") as handle:
            return _read_header(handle, file)[1]
    except OSError as error:
        raise _unreadable(file, error) from error


def _hash_tensors(digest: hashlib._Hash, file: Path) -> None:
    with file.open("rb") as handle:
        data, tensors = _read_header(handle, file)
        for tensor in tensors:
            digest.update(f"{tensor.name}\0{tensor.dtype}\0{tensor.shape}\0{tensor.end - tensor.begin}\0".encode())
            # From the middle: the first rows of embeddings and norms often survive a fine-tune unchanged.
            handle.seek(data + (tensor.begin + tensor.end) // 2)
            digest.update(handle.read(min(SAMPLE_BYTES, (tensor.end - tensor.begin + 1) // 2)))


def load_config(path: str) -> PretrainedConfig:
    """The folder's configuration as transformers reads it, defaults filled in and spellings made one.

    Raises EngineFault naming the field that is malformed or not served."""
    # What is wrong here is named by its field; transformers' own checks would name a class of theirs.
    _check_served(read_config(Path(path).expanduser()))
    try:
        from transformers import AutoConfig
    except ImportError as error:
        message = "the torch engine needs transformers: pip install 'wavepp[torch]'"
        raise EngineFault(message, field="transformers") from error
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(
            str(Path(path).expanduser()), local_files_only=True, trust_remote_code=False
        )
    # Whatever a configuration class trips over: it validates some fields and computes with the others.
    except Exception as error:
        message = f"{CONFIG_NAME} describes no model that transformers knows: {in_one_line(error)}"
        raise EngineFault(message, field="model", value=path) from error
    told = config.to_dict()
    _check_served(told)
    _check_rope(told)
    if told.get("quantization_config") is not None:
        raise refuse("quantization_config", told["quantization_config"], "weights must be plain tensors")
    return config


def _check_served(config: Mapping[str, Any]) -> None:
    check_model_type(config)
    for key in _MOST:
        if key != _MAY_LACK or config.get(key) is not None:
            positive(config, key)
    for key in _OBJECTS:
        if not isinstance(config.get(key), dict | None):
            raise refuse(key, config[key], "it must be a JSON object")
    for key in ("dtype", "torch_dtype"):
        told = config.get(key)
        if told is not None and not (isinstance(told, str) and _DTYPE.fullmatch(told)):
            raise refuse(key, told, "it must name a floating dtype")
    layer_kinds(config)


def in_one_line(error: BaseException) -> str:
    """What an error of another library says: its kind matters (a KeyError says nothing but the key)."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]


def _check_rope(config: Mapping[str, Any]) -> None:
    rope = config.get("rope_parameters") or {}
    kind = rope.get("rope_type", "default")
    if kind in _LENGTH_DEPENDENT_ROPE:
        raise refuse("rope_type", kind, "cached keys would depend on the longest prompt seen")
    if kind not in _SERVED_ROPE:
        raise refuse("rope_type", kind, f"it serves {', '.join(sorted(_SERVED_ROPE))}")
    for key, value in rope.items():
        if key in ("rope_theta", "factor", "original_max_position_embeddings") and not _is_over_zero(value):
            raise refuse(key, value, "it must be a number over 0")


def _is_over_zero(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf


def window_of(config: Mapping[str, Any]) -> int:
    """Positions that the model serves. YaRN stretches the trained ones, of which configurations tell either the
    number before or after (https://arxiv.org/abs/2309.00071); the larger of the two is served."""
    told = positive(config, "max_position_embeddings")
    rope = config.get("rope_parameters") or {}
    if rope.get("rope_type") != "yarn" or "original_max_position_embeddings" not in rope:
        return told
    return max(told, int(rope["original_max_position_embeddings"] * rope["factor"]))


def fingerprint(folder: Path, config: Mapping[str, Any]) -> str:
    """SHA-256 over what `config` says of the model and every tensor's name, type, shape, size and a sample.

    Equal on all hosts that hold copies of one folder, however its configuration is spelt where `config` is
    transformers' reading of it; costs headers and one small read per tensor.
    """
    digest = hashlib.sha256(b"wavepp-model-2\0")
    digest.update(json.dumps(_model_keys(config), sort_keys=True, separators=(",", ":")).encode())
    for file in dict.fromkeys(stored_tensors(folder).values()):
        digest.update(b"\0file\0")
        _hash_tensors(digest, file)
    return digest.hexdigest()


def _model_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    kept = {key: value for key, value in config.items() if key not in _NOT_THE_MODEL and not key.startswith("_")}
    rope = kept.get("rope_parameters")
    if isinstance(rope, dict) and "rope_type" in rope:  # "type" is its older name, kept beside it
        kept["rope_parameters"] = {key: value for key, value in rope.items() if key != "type"}
    plain: dict[str, Any] = _one_spelling(kept)
    return plain


def _one_spelling(value: Any) -> Any:
    """10000.0 is 10000, and a key without a value is no key."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, dict):
        return {str(key): _one_spelling(one) for key, one in value.items() if one is not None}
    if isinstance(value, list | tuple):
        return [_one_spelling(one) for one in value]
    return value if isinstance(value, bool | int | float | str) or value is None else str(value)


def positive(config: Mapping[str, Any], key: str) -> int:
    """A size that the configuration tells. Raises EngineFault naming `key` if it is none, or beyond its bound."""
    value, most = config.get(key), _MOST[key]
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= most:
        message = f"{CONFIG_NAME} has no usable {key}"
        raise EngineFault(message, field=key, value=repr(value)[:64], limit=f"an integer from 1 to {most}")
    return value


def _is_parameter(name: str, layers: int) -> bool:
    """Of those that the model surely takes: what else it takes, its load checks."""
    found = _PARAMETER.fullmatch(name)
    return found is not None and (found[1] is None or int(found[1]) < layers)


def model_facts(path: str) -> ModelFacts:
    """What a controller must know of the model folder at `path`.

    Raises EngineFault naming the field when the folder is not a usable model, or a layer is of a kind not served."""
    folder = Path(path).expanduser()
    config = load_config(path).to_dict()
    stored = stored_tensors(folder)
    check_dtypes(stored, (name for name in stored if _is_parameter(name, config["num_hidden_layers"])))
    return ModelFacts(
        name=path,
        fingerprint=fingerprint(folder, config),
        layers=config["num_hidden_layers"],
        vocabulary=config["vocab_size"],
        window=window_of(config),
        path=str(folder.resolve()),
        recurrent_layers=recurrent_layers(config),
    )
