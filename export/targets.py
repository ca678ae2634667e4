"""What each execution target can run: one record a target, one row a precision. The passes ask these records.

In: names from the command line. Out: frozen records. Sources: ONNX Runtime 1.31 kernel registries and measurements
(opset <= 26, IR <= 13; GroupQueryAttention, MatMulNBits and norm kernels per provider).
"""

from dataclasses import dataclass
from typing import Literal

from graphport.model_def.block_config import AttentionConfig
from graphport.model_def.signature import DType

WEIGHT_BLOCK = 32  # MatMulNBits block: fast on the CPU, and the CUDA compact GEMM's only size


class TargetError(ValueError):
    """A target, precision or combination that does not exist; the message lists what does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """Activation type and weight bits (None: weights in the activation type).

    `table_bits` are the bits of embedding and head: the head is half of a small model's bytes and the most
    sensitive matrix, so 4-bit bundles keep it at 8. `keeps_blocks`: matrices keep the blocks of a GGUF file, and the
    bits are those of types that have no such form. `chooses_bits`: a matrix has these bits or fewer, as a budget
    allows.
    """

    name: str
    activations: DType
    weight_bits: int | None = None
    table_bits: int | None = None
    keeps_blocks: bool = False
    chooses_bits: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheFormat:
    """How a quantised KV cache holds a value: scale * q with q in `levels`, one scale a tensor or a channel.

    `dtype` uint8 holds two 4-bit q a byte, the even element in the low nibble, each plus 8 (GroupQueryAttention's
    kv_cache_bit_width 4).
    """

    name: str
    dtype: DType
    levels: tuple[float, float]
    per_channel: bool = False

    @property
    def bits(self) -> int:
        """Width of q."""
        return 4 if self.dtype == "uint8" else 8

    @property
    def is_integer(self) -> bool:
        """Whether q is rounded to whole numbers."""
        return self.dtype != "float8e4m3fn"


@dataclass(frozen=True, slots=True, kw_only=True)
class FastDecode:
    """The fastest attention kernel for one new token a row, and what it takes: head sizes, query heads a kv head.

    `quantised_groups`: the query heads a kv head that it takes with a quantised cache.
    """

    kernel: str
    head_dims: tuple[int, ...]
    groups: tuple[int, ...]
    quantised_groups: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """One ONNX Runtime execution provider and what its kernels accept.

    `head_multiple` and `rotary_multiple`: GroupQueryAttention's head size, and the head size and rotary width when
    it rotates. `accuracy_level` is MatMulNBits' (4: int8 activations a block; None: the kernel's own choice).
    `qk_norm_inside`: whether GroupQueryAttention norms query and key heads itself. `samples_on_device`: whether graphs
    reduce their logits to candidates (see `append_sampling.py`), because the host would have to fetch them.
    `caches` are the quantised KV caches that it takes, up to heads of `largest_cached_head`. `float_prefill`: whether
    steps of many tokens need a float attention of their own, because the kernel reads a quantised cache slowly.
    `moves_rows`: whether layers with a window keep no more than that. What serves moves their rows between steps then;
    a captured step has its addresses and its capacity for good.
    `takes_zero_points`: whether its products of 4-bit blocks with zero points are as fast as of symmetric ones.
    `fast_decode` and `fast_rows` (bits, multiple of MatMulNBits' rows) are what the fastest kernels take; a model that
    misses them runs on slower ones.
    `padded_kernel` is the one for the attention of encoders over padded rows. GroupQueryAttention
    reads packed projections and was 1.1 to 1.4 times as fast as MultiHeadAttention on the CPU (32 rows of 16 to 128
    tokens, 12 heads of 32 and 64, one thread); on CUDA MultiHeadAttention has fused kernels for lengths.
    `encoder_precisions` are those whose attention needs no cache.
    """

    name: str
    provider: str
    precisions: tuple[Precision, ...]
    caches: tuple[CacheFormat, ...]
    head_multiple: int
    rotary_multiple: int
    accuracy_level: int | None
    qk_norm_inside: bool
    samples_on_device: bool
    float_prefill: bool
    moves_rows: bool
    takes_zero_points: bool
    padded_kernel: Literal["GroupQueryAttention", "MultiHeadAttention"]
    encoder_precisions: tuple[Precision, ...] = ()
    largest_cached_head: int | None = None
    fast_decode: FastDecode | None = None
    fast_rows: tuple[tuple[int, int], ...] = ()

    def precision(self, name: str, *, has_cache: bool = True) -> Precision:
        """The row called `name`; raises TargetError with the known names, or with the reason for a refusal.

        `has_cache`: whether the model attends over a KV cache, as decoders do.
        """
        rows = self.precisions if has_cache else (*self.precisions, *self.encoder_precisions)
        for row in rows:
            if row.name == name:
                return row
        known = ", ".join(row.name for row in rows)
        reason = _REFUSED.get((self.name, name), "unknown precision")
        raise TargetError(f"precision {name!r} on target {self.name}: {reason}; choose one of {known}")

    def cache_format(self, name: str, precision: Precision) -> CacheFormat | None:
        """The quantised cache called `name`, or None for a cache in the activations' type.

        Raises TargetError with the reason for a refusal.
        """
        for cache in self.caches:
            if cache.name == name:
                return cache
        activations = precision.activations
        if name == "auto" or _FLOAT_CACHES.get(name) == activations:
            return None
        reason = _REFUSED_CACHES.get((self.name, name), "unknown type")
        if name in _FLOAT_CACHES:
            reason = f"a float cache has the activations' type, which is {activations} for precision {precision.name}"
        known = ", ".join(["auto", *(cache.name for cache in self.caches)])
        raise TargetError(f"KV cache type {name!r} on target {self.name}: {reason}; choose one of {known}")

    def cache_limit(self, attention: AttentionConfig) -> str | None:
        """Why this attention cannot read a quantised cache, or None when it can."""
        limit = self.attention_limit(attention)
        if limit is not None:
            return f"{limit}, so attention runs as standard ops over a float cache"
        largest = self.largest_cached_head
        if largest is not None and attention.head_dim > largest:
            return f"no kernel of target {self.name} reads a quantised cache with head_dim above {largest}"
        return None

    def attention_limit(self, attention: AttentionConfig) -> str | None:
        """Why GroupQueryAttention cannot take this attention, or None when it can (rotary aside)."""
        if attention.head_dim % self.head_multiple:
            return f"head_dim {attention.head_dim} is no multiple of {self.head_multiple}"
        return None

    def padded_limit(self, attention: AttentionConfig) -> str | None:
        """Why `padded_kernel` cannot take this bidirectional attention, or None when it can (rotary aside)."""
        if self.padded_kernel == "GroupQueryAttention":
            return self.attention_limit(attention)
        if attention.num_kv_heads != attention.num_heads:
            return f"{attention.num_heads} query heads share {attention.num_kv_heads} key/value heads"
        return None if attention.softcap is None else f"scores are capped at {attention.softcap:g}"

    def rotary_limit(self, head_dim: int, rotary_dim: int) -> str | None:
        """Why GroupQueryAttention cannot rotate inside, or None when it can."""
        for name, size in (("head_dim", head_dim), ("rotary width", rotary_dim)):
            if size % self.rotary_multiple:
                return f"{name} {size} is no multiple of {self.rotary_multiple}"
        return None


INT8_CACHE = CacheFormat(name="int8", dtype="int8", levels=(-128.0, 127.0))
INT4_CACHE = CacheFormat(name="int4", dtype="uint8", levels=(-8.0, 7.0), per_channel=True)
FP8_CACHE = CacheFormat(name="fp8", dtype="float8e4m3fn", levels=(-448.0, 448.0))

CPU = Target(
    name="cpu",
    provider="CPUExecutionProvider",
    precisions=(
        Precision(name="fp32", activations="float32"),
        Precision(name="int8", activations="float32", weight_bits=8, table_bits=8),
        Precision(name="int4", activations="float32", weight_bits=4, table_bits=8),
        Precision(name="gguf", activations="float32", weight_bits=8, table_bits=8, keeps_blocks=True),
        Precision(name="auto", activations="float32", weight_bits=8, table_bits=8, chooses_bits=True),
    ),
    caches=(INT8_CACHE, INT4_CACHE),
    head_multiple=8,
    rotary_multiple=16,
    accuracy_level=4,
    qk_norm_inside=False,  # the CPU kernel accepts the inputs and fails when it is run
    samples_on_device=False,
    float_prefill=True,
    moves_rows=True,
    padded_kernel="GroupQueryAttention",
    takes_zero_points=True,
)

CUDA = Target(
    name="cuda",
    provider="CUDAExecutionProvider",
    precisions=(
        Precision(name="fp16", activations="float16"),
        Precision(name="bf16", activations="bfloat16"),
        Precision(name="int8", activations="float16", weight_bits=8, table_bits=8),
        Precision(name="int4", activations="float16", weight_bits=4, table_bits=8),
        Precision(name="gguf", activations="float16", weight_bits=8, table_bits=8, keeps_blocks=True),
        Precision(name="auto", activations="float16", weight_bits=8, table_bits=8, chooses_bits=True),
    ),
    caches=(INT8_CACHE, FP8_CACHE),
    head_multiple=8,
    rotary_multiple=16,
    accuracy_level=4,  # no CUDA kernel reads it; on the CPU 8-bit products without it are some 400 times slower
    qk_norm_inside=True,
    samples_on_device=True,
    moves_rows=False,
    float_prefill=False,  # the kernel prefills in half precision and quantises what it stores
    padded_kernel="MultiHeadAttention",
    encoder_precisions=(Precision(name="fp32", activations="float32"),),
    takes_zero_points=False,  # the compact GEMM has none
    largest_cached_head=256,
    fast_decode=FastDecode(
        kernel="XQA", head_dims=(64, 128, 256), groups=(1, 2, 4, 5, 8, 16, 32), quantised_groups=(4, 8, 16, 32)
    ),
    fast_rows=((4, 64), (8, 32)),
)

TARGETS: tuple[Target, ...] = (CPU, CUDA)

_REFUSED = {
    ("cpu", "bf16"): "the CPU provider has no bfloat16 kernels (a bf16 checkpoint exports as fp32, int8 or int4)",
    ("cpu", "fp16"): "the CPU provider widens float16 to float32, which costs twice the memory and gains nothing",
    ("cuda", "fp32"): "for decoders the CUDA provider has no float32 GroupQueryAttention and would run it on the CPU",
}

_FLOAT_CACHES: dict[str, DType] = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}

_REFUSED_CACHES = {
    ("cpu", "fp8"): "the CPU provider's attention has no float8 cache",
    ("cuda", "int4"): "the CUDA provider would dequantise the whole cache at every step",
}


def find_target(name: str) -> Target:
    """The target called `name`; raises TargetError with the known names."""
    for target in TARGETS:
        if target.name == name:
            return target
    raise TargetError(f"unknown target {name!r}; choose one of {', '.join(target.name for target in TARGETS)}")
