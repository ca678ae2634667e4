"""Mixtures of experts in GGUF metadata: how many, how wide, how chosen, and which layers have none.

In: metadata keys and what the architecture fixes. Out: a record a layer, None where it has no mixture.
"""

from collections.abc import Sequence

from graphport.model_def.checkpoint_record import CheckpointError
from graphport.model_def.expert_config import ExpertsConfig, RouterConfig
from graphport.model_def.gguf_architectures import Architecture
from graphport.model_def.gguf_keys import GgufKeys

_SOFTMAX, _SIGMOID = (0, 1), 2  # gguf's ExpertGatingFuncType; 0 is not said


def read_experts(keys: GgufKeys, architecture: Architecture, widths: Sequence[int]) -> list[ExpertsConfig | None]:
    """The experts of each layer; `widths` are those of an expert where the metadata has none of its own.

    Raises CheckpointError for values that do not fit.
    """
    fixed = architecture.experts
    if fixed is None or not keys.get("expert_count"):
        return [None] * len(widths)
    num_dense = keys.get("leading_dense_block_count", 0) if fixed.is_stated else 0
    if type(num_dense) is not int or not 0 <= num_dense <= len(widths):
        raise CheckpointError(
            f"{keys.file.path}: leading_dense_block_count must lie in 0 .. {len(widths)}, got {num_dense!r:.80}"
        )
    width = keys.per_layer("expert_feed_forward_length", 1, widths[-1])[0]
    shared_width = None
    if fixed.shared_gate:
        shared_width = keys.per_layer("expert_shared_feed_forward_length", 1, widths[-1])[0]
    elif fixed.is_stated and keys.get("expert_shared_count"):
        shared_width = keys.integer("expert_shared_count") * width
    experts = ExpertsConfig(
        num_experts=keys.integer("expert_count"),
        num_chosen=keys.integer("expert_used_count"),
        width=width,
        normalized=keys.get("expert_weights_norm", False) is True if fixed.is_stated else fixed.normalized,
        bias=keys.file.has_any("ffn_gate_exps.bias", "ffn_up_exps.bias", "ffn_down_exps.bias"),
        router_bias=keys.file.has_any("ffn_gate_inp.bias"),
        alpha=fixed.alpha,
        up_offset=fixed.up_offset,
        limit=fixed.limit,
        router=_router(keys) if fixed.is_stated else RouterConfig(),
        shared_width=shared_width,
        shared_gate=fixed.shared_gate,
    )
    return [None if layer < num_dense else experts for layer in range(len(widths))]


def _router(keys: GgufKeys) -> RouterConfig:
    """How a token's experts are chosen; with a correction by the two best of a group, as DeepSeek-V3 does."""
    function = keys.get("expert_gating_func", 0)
    if function not in (*_SOFTMAX, _SIGMOID):
        raise CheckpointError(
            f"{keys.file.path}: expert_gating_func {function!r:.80} is not read; known are 1 (softmax), 2 (sigmoid)"
        )
    has_correction = keys.file.has_any("exp_probs_b.bias")
    num_groups = keys.per_layer("expert_group_count", 1, 1)[0]
    return RouterConfig(
        scores="sigmoid" if function == _SIGMOID else "softmax",
        correction=has_correction,
        num_groups=num_groups,
        num_chosen_groups=keys.per_layer("expert_group_used_count", 1, 1)[0],
        group_best=2 if has_correction and num_groups > 1 else 1,
        scaling=keys.number("expert_weights_scale") or 1.0,
    )
