"""Multi-head latent attention in a Hugging Face config.json: ranks and the parts of a head.

In: a parsed config.json. Out: a record and numbers (see `latent_config.py`).
"""

import dataclasses
import math

from graphport.model_def.huggingface_values import Values, read_integer
from graphport.model_def.latent_config import LatentConfig
from graphport.model_def.position_config import RotaryPosition

LATENT_KEYS = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")


def read_latent(values: Values) -> LatentConfig:
    """The record; transformers norms the vectors with an epsilon of 1e-6 whatever rms_norm_eps says."""
    return LatentConfig(
        query_rank=None if values.get("q_lora_rank") is None else read_integer(values, "q_lora_rank"),
        key_value_rank=read_integer(values, "kv_lora_rank"),
        value_dim=read_integer(values, "v_head_dim"),
    )


def read_latent_head_dim(values: Values) -> int:
    """The size of a head of queries and keys: what passes and what rotates."""
    return read_integer(values, "qk_nope_head_dim") + read_integer(values, "qk_rope_head_dim")


def turn_part(rotary: RotaryPosition, values: Values) -> RotaryPosition:
    """The rotation of a head's first qk_rope_head_dim dimensions.

    The factor is the next number above the ratio, so that its product with the head size rounds down to whole ones.
    """
    ratio = read_integer(values, "qk_rope_head_dim") / read_latent_head_dim(values)
    return dataclasses.replace(rotary, partial_factor=min(1.0, math.nextafter(ratio, 1.0)))
