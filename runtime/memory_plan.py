"""How many bytes a model takes on a device, by part, before anything is taken, and what of it would fit.

In: sizes of a model and limits of a run. Out: a `MemoryPlan`. It asks no device and reads no file. Legend: B rows at
once, S tokens of a step, T longest row, N query heads, D head size, E bytes of an element.

Weights are exact on CUDA, where they lie outside the arena; the workspace is an upper bound of what one step needs,
made from the kernels' own buffers (ONNX Runtime 1.31, `contrib_ops/*/bert/group_query_attention*`, `matmul_nbits.cc`),
on CUDA rounded up to a power of two as the arena's blocks are.
"""

import dataclasses
from bisect import bisect_right
from dataclasses import dataclass

from graphport.model_def.block_config import AttentionConfig, BlockConfig
from graphport.model_def.config import TransformerConfig
from graphport.model_def.expert_config import ExpertsConfig
from graphport.model_def.signature import DType
from graphport.runtime.cache_sizes import CacheSizes
from graphport.runtime.device import Device
from graphport.runtime.memory import ELEMENT_BYTES, MIB
from graphport.runtime.prefill_products import FLOAT_STEP
from graphport.runtime.speculation import LONGEST_DRAFT

# Logits of all positions are taken in pieces of at most this many bytes.
SCORING_BYTES = 64 * MIB

# On CUDA beside the arena: handles and workspaces of cuBLAS and cuDNN, kernels loaded when first called.
_LIBRARY_BYTES = 256 * MIB
# What the arena on CUDA may take, to the workspace planned: its blocks double, and smaller ones are kept.
_ARENA_SHARE = 4
_LEAST_ARENA = 32 * MIB

_SAMPLING_BYTES = 8  # a logit: temporaries of its row's reductions, where the graph ends with them
_DEQUANTISED_AT_ONCE = 256 * MIB  # MatMulNBits on CUDA widens a matrix in pieces of at most this
_HALF_AND_FLOAT = 6  # bytes: on the CPU a float16 activation exists as float32 too
_PACKED_BLOCKS = 1.3  # the CPU's copy of a matrix in blocks, with sums of the blocks, to the bytes in the file


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSizes:
    """What decides a model's memory on one device.

    weights: bytes of graph and weights. blocks: those of them that are 4- or 8-bit matrices of MatMulNBits. float_type:
    type of activations. cache: bytes a token of a row. fused_attention: whether one kernel a layer computes it.
    samples: whether the graph reduces its logits. source_bytes: of one row's longest source, of an encoder-decoder.
    repacked: bytes of blocks that stay beside a copy in a kernel's own order. timing: bytes that choosing among kernels
    takes while the session is opened. float_products: whether a second session runs the long steps of prompts.
    """

    config: TransformerConfig
    device: Device
    weights: int
    blocks: int
    float_type: DType
    cache_dtype: DType
    cache: CacheSizes
    fused_attention: bool
    samples: bool = False
    source_bytes: int = 0
    repacked: int = 0
    timing: int = 0
    float_products: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RunLimits:
    """Rows at once, tokens a row, prompt tokens a step."""

    max_batch: int
    max_length: int
    prefill_chunk: int


# Those of a plan, as they are listed.
PLANNED_PARTS = ("weights", "repacked", "timing", "float_products", "workspace", "logits", "libraries", "cache")


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """Bytes on `device` by part.

    `weights`: as the kernels hold them. `repacked`: what they hold twice. `timing`: while the session is opened, before
    there is a workspace or a cache. `float_products`: weights as the kernels of a second session for prompts hold them.
    `workspace`: what ONNX Runtime takes for one step, of each session. `logits`: what a step gives.
    `libraries`: outside ONNX Runtime's own allocators. `cache`: max_batch rows of max_length tokens.
    """

    device: Device
    limits: RunLimits
    weights: int
    repacked: int
    timing: int
    float_products: int
    workspace: int
    logits: int
    libraries: int
    cache: int

    @property
    def total(self) -> int:
        """Bytes at the peak: when the session is opened, or when it runs."""
        held = self.weights + self.repacked + self.float_products + self.libraries
        return held + max(self.timing, self.workspace + self.logits + self.cache)

    @property
    def arena_limit(self) -> int:
        """Bytes that ONNX Runtime's arena on CUDA may take."""
        return _ARENA_SHARE * self.workspace

    def parts(self) -> str:
        """The parts in words, those of no bytes left out."""
        return ", ".join(f"{name} {getattr(self, name) / MIB:.1f}" for name in PLANNED_PARTS if getattr(self, name))


def plan_memory(sizes: ModelSizes, limits: RunLimits) -> MemoryPlan:
    """What a run within `limits` takes at most."""
    steps = [limits]  # the largest of each session
    if sizes.float_products:
        steps.append(dataclasses.replace(limits, prefill_chunk=min(limits.prefill_chunk, FLOAT_STEP - 1)))
    return MemoryPlan(
        device=sizes.device,
        limits=limits,
        weights=_weights(sizes),
        repacked=sizes.repacked,
        timing=sizes.timing,
        float_products=int(_PACKED_BLOCKS * sizes.blocks) if sizes.float_products else 0,
        workspace=sum(_workspace(sizes, step) for step in steps),
        logits=sum(_logits_bytes(sizes, step) for step in steps),
        libraries=_LIBRARY_BYTES if sizes.device == "cuda" else 0,
        cache=sizes.cache.num_bytes(limits.max_batch, limits.max_length, max(limits.prefill_chunk, 1 + LONGEST_DRAFT))
        + sizes.source_bytes * limits.max_batch,
    )


def longest_that_fits(sizes: ModelSizes, limits: RunLimits, free: int) -> int:
    """The largest max_length, up to that of `limits`, of which max_batch rows fit into `free` bytes; 0 if none."""
    return _largest("max_length", sizes, limits, free)


def most_rows_that_fit(sizes: ModelSizes, limits: RunLimits, free: int) -> int:
    """The largest max_batch, up to that of `limits`, of which rows of max_length fit into `free` bytes; 0 if none."""
    return _largest("max_batch", sizes, limits, free)


def _largest(name: str, sizes: ModelSizes, limits: RunLimits, free: int) -> int:
    def total(value: int) -> int:
        return plan_memory(sizes, dataclasses.replace(limits, **{name: value})).total

    most = min(getattr(limits, name), free)  # each takes more than a byte, and a range no count beyond the machine's
    return bisect_right(range(1, most + 1), free, key=total)


def _weights(sizes: ModelSizes) -> int:
    """The CPU packs matrices into copies of its own and lets go of the file's pages."""
    if sizes.device == "cuda":
        return sizes.weights
    floats = (sizes.weights - sizes.blocks) * (2 if sizes.float_type == "float16" else 1)  # widened to float32
    return floats + int(_PACKED_BLOCKS * sizes.blocks)


def _workspace(sizes: ModelSizes, limits: RunLimits) -> int:
    config = sizes.config
    tokens = _tokens_at_once(sizes, limits)
    element = _activation_bytes(sizes)
    layer = max(_layer_elements(config.hidden_size, block) for block in config.blocks)
    attention = max(_attention_bytes(sizes, block.attention, limits) for block in config.blocks)
    temporaries = element + (_SAMPLING_BYTES if sizes.samples else 0)
    logits = _logits_rows(sizes, limits) * config.vocab_size * temporaries
    needed = tokens * layer * element + attention + logits + _dequantised_bytes(sizes) + _pair_bytes(sizes, limits)
    return needed if sizes.device == "cpu" else max(_LEAST_ARENA, 1 << (needed - 1).bit_length())


def _pair_bytes(sizes: ModelSizes, limits: RunLimits) -> int:
    """Pairs of tokens as they are and as each layer norms them, and what they add to the scores of all layers."""
    pair = sizes.config.pair
    if pair is None:
        return 0
    channels = 3 * pair.width + 3 * sum(block.attention.num_heads for block in sizes.config.blocks)
    return _tokens_at_once(sizes, limits) * limits.max_length * channels * _activation_bytes(sizes)


def _logits_bytes(sizes: ModelSizes, limits: RunLimits) -> int:
    """The logits that a step gives, or an encoder's hidden states.

    A larger tensor of logits is taken before the smaller is let go, which on the CPU is free.
    """
    if sizes.config.is_recurrent:  # logits of all tokens, and states before and after
        heads = [block.attention for block in sizes.config.blocks]
        states = 2 * sum(one.num_heads * one.head_dim * (one.head_dim + 1) for one in heads)
        elements = _tokens_at_once(sizes, limits) * sizes.config.vocab_size + limits.max_batch * states
        return elements * ELEMENT_BYTES["float32"]
    if not sizes.config.is_decoder:
        scores = 0 if sizes.config.masked_head is None else limits.max_batch * sizes.config.vocab_size  # a place a text
        return (_tokens_at_once(sizes, limits) * sizes.config.hidden_size + scores) * ELEMENT_BYTES["float32"]
    rows = _logits_rows(sizes, limits) * (2 if sizes.device == "cuda" else 1)
    return rows * sizes.config.vocab_size * ELEMENT_BYTES["float32"]


def _logits_rows(sizes: ModelSizes, limits: RunLimits) -> int:
    """Rows of logits at once: a token of each row, or a piece of a text that is scored; of an encoder none."""
    if not sizes.config.is_decoder:
        return 0
    piece = max(1, SCORING_BYTES // (ELEMENT_BYTES["float32"] * sizes.config.vocab_size))
    return max(limits.max_batch, min(limits.prefill_chunk, limits.max_length, piece))


def _tokens_at_once(sizes: ModelSizes, limits: RunLimits) -> int:
    """Tokens of the largest step: a chunk of a prompt or a token of each row, and of an encoder all rows whole."""
    if not sizes.config.is_decoder:
        return limits.max_batch * limits.max_length
    return max(min(limits.prefill_chunk, limits.max_length), limits.max_batch)


def _activation_bytes(sizes: ModelSizes) -> int:
    if sizes.device == "cpu" and sizes.float_type == "float16":
        return _HALF_AND_FLOAT
    return ELEMENT_BYTES[sizes.float_type]


def _layer_elements(hidden: int, block: BlockConfig) -> int:
    """Elements a token of everything that one layer computes, as if nothing were freed before its end."""
    attention = block.attention
    qkv = (attention.num_heads + 2 * attention.num_kv_heads) * attention.head_dim
    mixed = attention.num_heads * attention.head_dim * (3 if attention.gate else 1)
    if attention.latent is not None:  # keys and values of all heads are put together, and heads narrowed behind them
        qkv, mixed = 2 * qkv, 2 * mixed
    dense = 0 if block.dense is None else (4 if block.dense.gated else 2) * block.dense.width
    return 6 * hidden + 2 * qkv + mixed + dense + _expert_elements(hidden, block)


def _expert_elements(hidden: int, block: BlockConfig) -> int:
    """Scores, and what each of a token's experts reads, computes and gives."""
    experts = block.feed_forward
    if not isinstance(experts, ExpertsConfig):
        return 0
    return 2 * experts.num_experts + experts.num_chosen * (2 * hidden + 3 * experts.width)


def _attention_bytes(sizes: ModelSizes, attention: AttentionConfig, limits: RunLimits) -> int:
    """Buffers of one layer's attention: scores [N, S, T], keys and values widened or expanded to N heads."""
    queries = _tokens_at_once(sizes, limits)
    element = _activation_bytes(sizes)
    scores = attention.num_heads * queries * limits.max_length * ELEMENT_BYTES["float32"]
    expanded = 2 * attention.num_heads * attention.head_dim * limits.max_length * element
    if not sizes.fused_attention:
        return 3 * scores + limits.max_batch * expanded
    if sizes.device == "cpu":
        is_blockwise = sizes.float_type == "float32" and attention.softcap is None and not attention.sinks
        return 0 if is_blockwise else scores
    if not sizes.config.is_decoder:  # the unfused kernel's scores, where no other takes the head size
        return scores
    widened = expanded * attention.num_kv_heads // attention.num_heads * limits.max_batch
    return expanded + (widened if sizes.cache_dtype != sizes.float_type else 0)


def _dequantised_bytes(sizes: ModelSizes) -> int:
    if sizes.device == "cpu" or not sizes.blocks:
        return 0
    config = sizes.config
    widest = max(config.vocab_size, *(2 * block.dense.width for block in config.blocks if block.dense))
    return min(_DEQUANTISED_AT_ONCE, widest * config.hidden_size * ELEMENT_BYTES[sizes.float_type])
