"""The part of a Hugging Face causal model that one stage executes, out of transformers' own modules.

Owns how the pieces of the served architectures (`layer_kinds`) are called; owns no weights file and no
cache. `build_band` makes the modules without memory (meta device), `weights.py` fills them,
`engine.py` runs them.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PretrainedConfig

from wavepp_proto import __version__
from wavepp_proto.errors import EngineFault
from wavepp_proto.terms import Numerics
from wavepp_stage.engine.base import EnginePlan
from wavepp_stage.engine.torch.attention import ATTENTION, WaveContext
from wavepp_stage.engine.torch.facts import in_one_line, load_config, stored_tensors
from wavepp_stage.engine.torch.layer_kinds import RECURRENT_MODEL_TYPES, recurrent_layers
from wavepp_stage.engine.torch.recurrent_states import NO_STATE, StateShape

HEAD = "lm_head.weight"
EMBEDDING = "model.embed_tokens.weight"
# transformers builds a model under a process-wide default dtype, and a process may hold several engines.
_BUILDING = threading.Lock()


class Band:
    """Embedding (first stage), layers [first, last), norm and head (last stage) under transformers' names.

    The module tree is a whole model in which everything outside the band is an empty placeholder:
    parameter names stay those of the model folder, and no layer is renumbered.
    """

    def __init__(self, model: Any, plan: EnginePlan, head_is_stored: bool) -> None:
        """`model` is a transformers ...ForCausalLM (its modules carry no usable types) on the meta device."""
        self.model = model
        self.plan = plan
        base = model.model
        numbers = range(plan.first_layer, plan.last_layer)
        self.layers = [base.layers[index] for index in numbers]
        recurrent = set(recurrent_layers(model.config.to_dict()))
        self.recurrent_layers = tuple(index for index in numbers if index in recurrent)
        self.attention_layers = tuple(index for index in numbers if index not in recurrent)
        """Global numbers, as everywhere."""
        for index in range(len(base.layers)):
            if index not in numbers:
                base.layers[index] = nn.Identity()
        self.shares_head = bool(model.config.tie_word_embeddings)
        """The configuration says that head and embedding are one tensor."""
        # Where the folder stores a head all the same, the head is what counts: transformers ties only equal ones.
        self.tied = self.shares_head and plan.is_last and not head_is_stored
        if not plan.is_last:
            base.norm = nn.Identity()
            model.lm_head = nn.Identity()
        elif self.tied:
            model.lm_head.weight = base.embed_tokens.weight
        elif self.shares_head:
            model.lm_head.weight = nn.Parameter(torch.empty_like(base.embed_tokens.weight), requires_grad=False)
        if not plan.is_first and not self.tied:
            base.embed_tokens = nn.Identity()

    def finish(self, device: torch.device) -> None:
        """After the weights: make the tables that no file holds, and check that nothing is missing."""
        base = self.model.model
        # Made on the CPU wherever they go: a GPU's pow rounds differently, and far down a prompt the angles of two
        # stages on different devices, or of the unsplit model, would differ visibly.
        base.rotary_emb = type(base.rotary_emb)(config=self.model.config).to(device)
        if self.tied:
            self.model.lm_head.weight = base.embed_tokens.weight
        tensors = [*self.model.named_parameters(), *self.model.named_buffers()]
        if missing := sorted(name for name, tensor in tensors if tensor.is_meta):
            raise EngineFault(f"the model folder lacks {len(missing)} tensors of this stage, first {missing[0]}",
                              field="model", value=self.plan.model)  # fmt: skip
        self.model.requires_grad_(False).eval()

    def embed(self, token_ids: Tensor) -> Tensor:
        """int64 [tokens] to [tokens, hidden]; first stage only."""
        embedded: Tensor = self.model.get_input_embeddings()(token_ids)
        return embedded

    def run_layers(self, hidden: Tensor, context: WaveContext) -> Tensor:
        """[tokens, hidden] through the band's layers, all rows of the wave as one batch."""
        base = self.model.model
        positions = context.batch.positions
        hidden = hidden[None]
        rotary = base.rotary_emb(hidden, position_ids=positions)
        for layer in self.layers:
            hidden = layer(
                hidden, attention_mask=None, position_ids=positions, position_embeddings=rotary, wave=context
            )
        return hidden[0]

    def logits(self, hidden: Tensor) -> Tensor:
        """[n, hidden] to float32 [n, vocabulary]; last stage only."""
        base = self.model.model
        scores: Tensor = self.model.lm_head(base.norm(hidden))
        return scores.float()


def build_band(config: PretrainedConfig, plan: EnginePlan, dtype: torch.dtype) -> Band:
    """The band's modules on the meta device: shapes and names, no memory. Reads which tensors the folder stores."""
    if not 0 <= plan.first_layer < plan.last_layer <= config.num_hidden_layers:
        raise EngineFault("band outside the model", field="band", value=f"[{plan.first_layer}, {plan.last_layer})",
                          limit=config.num_hidden_layers)  # fmt: skip
    factory: Any = AutoModelForCausalLM
    with _BUILDING, torch.device("meta"):
        try:
            model = factory.from_config(config, dtype=dtype, attn_implementation=ATTENTION)
        # Sizes that do not divide, an unknown activation: transformers raises what its arithmetic does.
        except Exception as error:
            message = f"transformers cannot build the model that its configuration describes: {in_one_line(error)}"
            raise EngineFault(message, field="model", value=plan.model) from error
        band = Band(model, plan, HEAD in stored_tensors(folder_of(plan)))
        for index in band.recurrent_layers:
            model.model.layers[index].linear_attn = _recurrent_mixer()(config, index).to(dtype)
    return band


def _recurrent_mixer() -> Any:
    """The class of recurrent layers. Imported when it is needed: the family's own modules take a second."""
    try:
        from wavepp_stage.engine.torch.gated_delta import SlottedGatedDeltaNet
    except ImportError as error:
        raise EngineFault(f"the installed transformers lacks what recurrent layers need: {error}",
                          field="transformers", value=transformers.__version__) from error  # fmt: skip
    return SlottedGatedDeltaNet


def dtype_of(setting: str, config: PretrainedConfig) -> torch.dtype:
    """The dtype that `setting` means for this model."""
    known = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if setting == "auto":
        setting = str(config.dtype or torch.float32).removeprefix("torch.")
    if setting not in known:
        raise EngineFault("unknown dtype", field="dtype", value=setting, limit="float32, bfloat16, float16, auto")
    return known[setting]


def numerics(path: str, dtype: str) -> Numerics:
    """What a stage of the model folder at `path` computes with, known before it is loaded. Raises EngineFault naming
    the field."""
    config = load_config(path)
    names = {"wavepp": __version__, "torch": torch.__version__, "transformers": transformers.__version__}
    return Numerics(
        dtype=str(dtype_of(dtype, config)).removeprefix("torch."),
        hidden=config.hidden_size,
        # a build for another device (2.9.1+cu130) has the same arithmetic
        packages=", ".join(f"{name} {version.partition('+')[0]}" for name, version in names.items()),
    )


def kv_shape(config: PretrainedConfig) -> tuple[int, int]:
    """(key/value heads, head size) of a layer's cache."""
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return config.num_key_value_heads, head_dim


def state_shape(config: PretrainedConfig) -> StateShape:
    """Of one recurrent layer's state."""
    if config.model_type not in RECURRENT_MODEL_TYPES:
        return NO_STATE
    keys = config.linear_num_key_heads * config.linear_key_head_dim
    values = config.linear_num_value_heads * config.linear_value_head_dim
    return StateShape(config.linear_conv_kernel_dim - 1, 2 * keys + values, config.linear_num_value_heads,
                      config.linear_key_head_dim, config.linear_value_head_dim)  # fmt: skip


def folder_of(plan: EnginePlan) -> Path:
    return Path(plan.model).expanduser()
