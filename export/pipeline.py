"""The whole compilation: one ordered tuple of passes, and the check that what had to fuse did fuse.

In: an exported graph and a plan. Out: the compiled graph and a report a pass. Reads and writes no file.
"""

from collections.abc import Iterable, Mapping
from typing import Literal

import onnx_ir as ir

from graphport.export.append_sampling import append_sampling
from graphport.export.clean_graph import clean_graph, finish_graph
from graphport.export.convert_floats import convert_floats
from graphport.export.fuse_qk_norm import fuse_qk_norm
from graphport.export.fuse_residual_norm import fuse_residual_norm
from graphport.export.fuse_silu import fuse_silu
from graphport.export.graph_pass import CompilePlan, GraphPass, Miss, PassReport
from graphport.export.lower_attention import lower_attention
from graphport.export.lower_cross_attention import lower_cross_attention
from graphport.export.lower_experts import lower_experts
from graphport.export.lower_linear import lower_linear
from graphport.export.lower_norm import lower_norm
from graphport.export.lower_padded_attention import lower_padded_attention
from graphport.export.pack_projections import can_pack, pack_gate_up, pack_qkv
from graphport.export.quantize_cache import quantize_cache
from graphport.export.smooth_activations import smooth_activations
from graphport.export.window_caches import window_caches, window_layers
from graphport.model_def.block_config import AttentionConfig, BlockConfig, NormOrder
from graphport.model_def.config import TransformerConfig
from graphport.model_def.expert_config import ExpertsConfig

PASSES: tuple[GraphPass, ...] = (
    clean_graph,
    smooth_activations,
    fuse_residual_norm,
    pack_qkv,
    pack_gate_up,
    fuse_silu,
    lower_attention,
    window_caches,
    lower_padded_attention,
    lower_cross_attention,
    fuse_qk_norm,
    lower_norm,
    convert_floats,
    quantize_cache,
    lower_experts,
    lower_linear,
    append_sampling,
    finish_graph,
)

# What the reports of these passes are called, in order; what `--require-fused` may name.
RULES = (
    "smoothed",
    "residual_norm",
    "packed_qkv",
    "packed_gate_up",
    "silu",
    "attention",
    "window_cache",
    "qk_norm",
    "norm",
    "half_precision",
    "kv_cache",
    "experts",
    "linear",
    "sampling",
)

# Passes that a graph can do without, and what `--disable-pass` calls them. The others make the precision, the cache or
# the outputs asked for.
OPTIONAL_PASSES: dict[GraphPass, str] = {
    smooth_activations: "smoothed",
    fuse_residual_norm: "residual_norm",
    pack_qkv: "packed_qkv",
    pack_gate_up: "packed_gate_up",
    fuse_silu: "silu",
    lower_attention: "attention",
    window_caches: "window_cache",
    lower_padded_attention: "attention",
    lower_cross_attention: "attention",
    fuse_qk_norm: "qk_norm",
    lower_norm: "norm",
}
OPTIONAL_RULES = tuple(dict.fromkeys(OPTIONAL_PASSES.values()))

_QKV, _GATE_UP = ("query", "key", "value"), ("gate", "up")

# sums inside a block that a norm of the block reads, and the orders that begin with a norm
_NORMED_SUMS_INSIDE: Mapping[NormOrder, int] = {"pre": 1, "post": 2, "sandwich": 1, "output": 0, "parallel": 0}
_NORMS_FIRST = ("pre", "sandwich", "parallel")

_MISSES_SHOWN = 8  # a rule that misses in every layer misses for one reason


class FusionError(ValueError):
    """A fusion that the config calls for, or that the user required, did not happen."""


def compile_graph(model: ir.Model, plan: CompilePlan) -> tuple[PassReport, ...]:
    """Run every pass on `model` in place and return their reports in order.

    Raises FusionError, naming the sites and the failed checks, when a fusion that the config calls for is missing.
    """
    reports = tuple(run_pass(graph_pass, model, plan) for graph_pass in PASSES)
    expected = expected_fusions(plan)
    check_fusions(reports, {rule: count for rule, count in expected.items() if rule not in plan.disabled})
    return reports


def run_pass(graph_pass: GraphPass, model: ir.Model, plan: CompilePlan) -> PassReport:
    """Run one pass on `model` in place, unless the plan disables it."""
    rule = OPTIONAL_PASSES.get(graph_pass)
    return PassReport(rule=rule) if rule is not None and rule in plan.disabled else graph_pass(model, plan)


def expected_fusions(plan: CompilePlan) -> dict[str, int]:
    """How often each rule must fire for this config on this target, counted from the config alone."""
    blocks = plan.config.blocks
    attentions = [
        [f"blocks.{i}.attention.{part}.weight" for part in _QKV]
        for i, block in enumerate(blocks)
        if block.attention.latent is None and not block.attention.linear
    ]
    feed_forwards = [
        [f"blocks.{i}.{_dense_name(block)}.{part}.weight" for part in _GATE_UP]
        for i, block in enumerate(blocks)
        if block.dense is not None and block.dense.gated
    ]
    return {
        "residual_norm": _count_normed_sums(plan.config),
        "packed_qkv": sum(can_pack(plan, names) for names in attentions),
        "packed_gate_up": sum(can_pack(plan, names) for names in feed_forwards),
        "silu": sum(block.dense is not None and block.dense.activation in ("silu", "quick_gelu") for block in blocks)
        + plan.config.conditioned,  # one of the conditioning, which all projections read
        "attention": sum(_attention_limit(plan, block.attention) is None for block in blocks)
        + sum(block.cross_attention is not None for block in blocks),
        "window_cache": len(window_layers(plan)),
        "qk_norm": sum(_has_inner_norm(plan, block.attention) for block in blocks),
        "experts": sum(isinstance(block.feed_forward, ExpertsConfig) for block in blocks),
        "kv_cache": 0 if plan.cache is None else len(blocks),
        "sampling": int(plan.target.samples_on_device and plan.config.is_decoder),
    }


def _dense_name(block: BlockConfig) -> str:
    return "feed_forward.shared" if isinstance(block.feed_forward, ExpertsConfig) else "feed_forward"


def _attention_limit(plan: CompilePlan, attention: AttentionConfig) -> str | None:
    """Why the target's kernel does not take this attention, or None when it does."""
    if attention.linear:
        return "linear attention is plain matrix products"
    return plan.target.attention_limit(attention) if plan.config.is_decoder else plan.target.padded_limit(attention)


def _has_inner_norm(plan: CompilePlan, attention: AttentionConfig) -> bool:
    """Whether the attention kernel of this target can take the q/k norm that the config asks for."""
    if not plan.target.qk_norm_inside or attention.qk_norm is None or attention.qk_norm.kind != "rms":
        return False
    if attention.qk_norm_over != "head":
        return False
    if plan.cache is not None or not plan.config.is_decoder:  # see fuse_qk_norm; encoders' kernel takes no norms
        return False
    if plan.target.attention_limit(attention) is not None:
        return False
    rotary, head_dim = attention.rotary, attention.head_dim
    return rotary is None or plan.target.rotary_limit(head_dim, rotary.rotary_dim(head_dim)) is None


def _count_normed_sums(config: TransformerConfig) -> int:
    """Sums that a norm reads: one inside every block, one at its end, one of the embeddings.

    What a sum broadcasts does not fuse: an encoder's positions are one row for all texts, a single token type a vector.
    A parallel block adds twice and norms only the second sum, in the block after it (once, although two norms may read
    it); the first Add stays. Where norms stand on the outputs alone, only the last sum of all is normed.
    """
    last_is_whole = config.token_types > 1 or (
        (config.is_decoder or config.is_recurrent) and config.position is not None and not config.token_types
    )
    is_normed = config.embedding_norm is not None
    count = int(is_normed and last_is_whole)
    is_sum = last_is_whole and not is_normed  # whether the residual stream is a sum where the next block begins
    for block in config.blocks:
        count += is_sum and block.norm_order in _NORMS_FIRST
        count += _NORMED_SUMS_INSIDE[block.norm_order] + (block.cross_attention is not None)
        is_sum = block.norm_order != "post"
    return count + (is_sum and config.final_norm is not None)


def check_fusions(reports: tuple[PassReport, ...], required: Mapping[str, int]) -> None:
    """Raise FusionError unless every rule in `required` fired exactly that often."""
    counts = count_fusions(reports)
    for rule, wanted in required.items():
        found = counts.get(rule, 0)
        if found == wanted:
            continue
        blame = _explain_misses(_misses(reports, rule)) or "No candidate seen."
        raise FusionError(f"rule {rule} fused {found} sites, {wanted} are called for. {blame}")


def check_rules(required: Mapping[str, object]) -> None:
    """Raise FusionError unless every name in `required` is a rule's."""
    for rule in required:
        if rule not in RULES:
            raise FusionError(f"no rule is called {rule!r}; the rules are {', '.join(RULES)}")


def check_disabled(disabled: Iterable[str]) -> None:
    """Raise FusionError unless every name is a rule that can be switched off."""
    names = list(disabled)
    check_rules(dict.fromkeys(names))
    for name in names:
        if name not in OPTIONAL_RULES:
            raise FusionError(f"rule {name} makes what was asked for; those to do without: {', '.join(OPTIONAL_RULES)}")


def require_fusions(reports: tuple[PassReport, ...], required: Mapping[str, int | Literal["all"]]) -> None:
    """Check the user's counts; "all" means that no candidate of the rule may be left. Raises FusionError."""
    check_rules(required)
    counts = count_fusions(reports)
    for rule, wanted in required.items():
        left = _misses(reports, rule)
        if wanted == "all" and (left or not counts[rule]):
            blame = _explain_misses(left) or "No candidate seen."
            raise FusionError(f"rule {rule} is required everywhere; it fused {counts[rule]} sites. {blame}")
    check_fusions(reports, {rule: wanted for rule, wanted in required.items() if wanted != "all"})


def _misses(reports: tuple[PassReport, ...], rule: str) -> list[Miss]:
    return [miss for report in reports if report.rule == rule for miss in report.missed]


def _explain_misses(misses: list[Miss]) -> str:
    """The first misses in words and the number of the others; empty when there are none."""
    parts = [f"{miss.site}: needs that {miss.check}, found {miss.found}" for miss in misses[:_MISSES_SHOWN]]
    others = len(misses) - len(parts)
    return "; ".join([*parts, f"and {others} more"] if others else parts)


def count_fusions(reports: tuple[PassReport, ...]) -> dict[str, int]:
    """Number of sites that each rule changed, tidying aside."""
    counts: dict[str, int] = {}
    for report in reports:
        if report.rule != "clean":
            counts[report.rule] = counts.get(report.rule, 0) + len(report.fused)
    return counts
