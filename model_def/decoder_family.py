"""What one Hugging Face decoder family is: a record of keys, defaults and block kinds, and how its values are read.

In: nothing, or a parsed config.json. Out: records, numbers and flags. The families themselves stand in
`rms_norm_decoders.py` and `layer_norm_decoders.py`, the names of tensors in `decoder_tensors.py`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from graphport.model_def.block_config import NormConfig, NormOrder
from graphport.model_def.checkpoint_record import CheckpointError
from graphport.model_def.decoder_tensors import LLAMA, DecoderTensors
from graphport.model_def.huggingface_experts import TRAINING_KEYS, ExpertRule
from graphport.model_def.huggingface_latent import LATENT_KEYS
from graphport.model_def.huggingface_values import Values, read_flag
from graphport.model_def.huggingface_windows import WindowRule
from graphport.model_def.position_config import AlibiBias
from graphport.model_def.rotary_parameters import RotaryRule

# our names of sizes to the keys that most families have
COMMON_KEYS: Mapping[str, str] = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "width": "intermediate_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "positions": "max_position_embeddings",
    "activation": "hidden_act",
    "epsilon": "rms_norm_eps",
}
_TOKEN_KEYS = ("model_type", "tie_word_embeddings", "bos_token_id", "eos_token_id", "pad_token_id")


class Flag(NamedTuple):
    """A true or false of config.json, and transformers' default."""

    key: str
    default: bool = False

    def read(self, values: Values) -> bool:
        """The value; raises CheckpointError when it is neither true nor false."""
        return read_flag(values, self.key, default=self.default)


class Number(NamedTuple):
    """A positive number of config.json to the power `power`; None where transformers has it off or the key is null."""

    key: str
    default: float | None = None
    power: float = 1.0

    def read(self, values: Values, notes: list[str]) -> float | None:
        """The number; raises CheckpointError when it is none."""
        if self.key not in values and self.default is not None:
            notes.append(f"{self.key} is absent; transformers' default {self.default!r} was taken")
        value = values.get(self.key, self.default)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
            raise CheckpointError(f"config.json: {self.key} must be a positive number, got {value!r:.80}")
        scaled: float = value**self.power
        return scaled


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderFamily:
    """One `model_type`: what it fixes, and which keys say the rest.

    `keys`: our name of a size to the config's key, without those that the family does not have. `refine` gives the
    family as a config.json changes it, from the keys `refined_by`. Keys of `neutral` are accepted at the values that
    change nothing, those of `ignored` always. `epsilon`, `activation`, `head_dim` and `width_factor` (times the hidden
    size) are transformers' defaults; `head_dim` None is hidden size / heads. `kv_heads_default`: an absent number is
    that of the query heads. `kv_heads` is a fixed number; without it and a key every query head has its own. `norm`
    with its epsilon replaced is every norm, q/k norms without its bias unless `qk_norm_bias`. `position_offset`:
    positions are a learned table, whose row `position_offset` is the first. `alibi`: positions are biases.
    `id_width_key`: the width of the ids' embeddings where it is not the hidden size. `embedding_norm`: embeddings are
    normed. `has_latent`: attention goes by way of latent vectors. `sinks`: its heads have them. `scale_by_layer`: layer
    i divides its scores by i + 1 besides. `unscaled`: scores are not divided by the root of the head size.
    """

    model_type: str
    tensors: DecoderTensors = LLAMA
    keys: Mapping[str, str] = field(default_factory=lambda: COMMON_KEYS)
    refine: "Callable[[DecoderFamily, Values], DecoderFamily] | None" = None
    refined_by: tuple[str, ...] = ()
    neutral: Mapping[str, tuple[object, ...]] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()
    epsilon: float = 1e-6
    activation: str = "silu"
    head_dim: int | None = None
    width_factor: int | None = None
    kv_heads_default: bool = False
    kv_heads: int | None = None
    norm: NormConfig = NormConfig()  # noqa: RUF009 - frozen
    norm_order: NormOrder = "pre"
    feed_forward_norm: bool = True
    has_final_norm: bool = True
    gated: bool = True
    experts: ExpertRule | None = None
    qkv_bias: bool | Flag = False
    output_bias: bool | Flag = False
    feed_forward_bias: bool | Flag = False
    head_bias: bool = False
    qk_norm_over: Literal["head", "each_head", "width"] | None = None
    qk_norm_bias: bool = True
    rotary: RotaryRule | None = RotaryRule()  # noqa: RUF009 - frozen
    position_offset: int | None = None
    alibi: AlibiBias | None = None
    id_width_key: str | None = None
    embedding_norm: bool = False
    has_latent: bool = False
    sinks: bool = False
    window: WindowRule | None = None
    attention_scale: Number | None = None
    unscaled: bool = False
    scale_by_layer: Flag | None = None
    attention_softcap: Number | None = None
    residual_scale: Number | None = None
    embedding_scale: Number | None = None
    logit_scale: Number | None = None
    logit_softcap: Number | None = None

    @property
    def read_keys(self) -> tuple[str, ...]:
        """Every config key that is read."""
        values = (self.qkv_bias, self.output_bias, self.feed_forward_bias, self.scale_by_layer, *self.numbers)
        named = [value.key for value in values if isinstance(value, Flag | Number)]
        rotary = () if self.rotary is None else self.rotary.keys
        window = () if self.window is None else self.window.keys
        experts = () if self.experts is None else (*self.experts.keys, *TRAINING_KEYS)
        latent = LATENT_KEYS if self.has_latent else ()
        return (*_TOKEN_KEYS, *self.keys.values(), *self.refined_by, *named, *rotary, *window, *experts, *latent)

    @property
    def numbers(self) -> tuple[Number | None, ...]:
        """Scales and caps."""
        return (
            self.attention_scale,
            self.attention_softcap,
            self.residual_scale,
            self.embedding_scale,
            self.logit_scale,
            self.logit_softcap,
        )

    @property
    def required_keys(self) -> tuple[str, ...]:
        """The keys that a config.json of this family cannot lack."""
        optional = {"head_dim", "activation", "epsilon"}
        optional |= {"kv_heads"} if self.kv_heads_default else set()
        optional |= {"width"} if self.width_factor is not None else set()
        return tuple(key for name, key in self.keys.items() if name not in optional)


def keys_of(*without: str, **own: str) -> Mapping[str, str]:
    """The common keys, without some, with a family's own spelling of others."""
    return {name: key for name, key in {**COMMON_KEYS, **own}.items() if name not in without}


def is_on(flag: bool | Flag, values: Values) -> bool:
    """A constant of the family, or the flag of config.json that decides."""
    return flag.read(values) if isinstance(flag, Flag) else flag
