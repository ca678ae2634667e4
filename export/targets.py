"""What each execution target can run: one record a target, one row a precision. The passes ask these records.

In: names from the command line. Out: frozen records. Sources: ONNX Runtime 1.31 kernel registries and measurements
(opset <= 26, IR <= 13; GroupQueryAttention, MatMulNBits and norm kernels per provider).
"""

from dataclasses import dataclass

from graphport.model_def.config import AttentionConfig
from graphport.model_def.signature import DType

WEIGHT_BLOCK = 32  # MatMulNBits block: fast on the CPU, and the CUDA compact GEMM's only size


class TargetError(ValueError):
    """A target, precision or combination that does not exist; the message lists what does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """Activation type and weight bits (None: weights in the activation type).

    `table_bits` are the bits of embedding and head: the head is half of a small model's bytes and the most
    sensitive matrix, so 4-bit bundles keep it at 8. `keeps_blocks`: matrices keep the blocks of a GGUF file, and the
    bits are those of types that have no such form.
    """

    name: str
    activations: DType
    weight_bits: int | None = None
    table_bits: int | None = None
    keeps_blocks: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class FastDecode:
    """The fastest attention kernel for one new token a row, and what it takes: head sizes, query heads a kv head."""

    kernel: str
    head_dims: tuple[int, ...]
    groups: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """One ONNX Runtime execution provider and what its kernels accept.

    `head_multiple` and `rotary_multiple`: GroupQueryAttention's head size, and the head size and rotary width when
    it rotates. `accuracy_level` is MatMulNBits' (4: int8 activations a block; None: the kernel's own choice).
    `qk_norm_inside`: whether GroupQueryAttention norms query and key heads itself. `fast_decode` and `fast_rows` (bits,
    multiple of MatMulNBits' rows) are what the fastest kernels take; a model that misses them runs on slower ones.
    """

    name: str
    provider: str
    precisions: tuple[Precision, ...]
    head_multiple: int
    rotary_multiple: int
    accuracy_level: int | None
    qk_norm_inside: bool
    fast_decode: FastDecode | None = None
    fast_rows: tuple[tuple[int, int], ...] = ()

    def precision(self, name: str) -> Precision:
        """The row called `name`; raises TargetError with the known names, or with the reason for a refusal."""
        for row in self.precisions:
            if row.name == name:
                return row
        known = ", ".join(row.name for row in self.precisions)
        reason = _REFUSED.get((self.name, name), "unknown precision")
        raise TargetError(f"precision {name!r} on target {self.name}: {reason}; choose one of {known}")

    def attention_limit(self, attention: AttentionConfig) -> str | None:
        """Why GroupQueryAttention cannot take this attention, or None when it can (rotary aside)."""
        if attention.head_dim % self.head_multiple:
            return f"head_dim {attention.head_dim} is no multiple of {self.head_multiple}"
        return None

    def rotary_limit(self, head_dim: int, rotary_dim: int) -> str | None:
        """Why GroupQueryAttention cannot rotate inside, or None when it can."""
        for name, size in (("head_dim", head_dim), ("rotary width", rotary_dim)):
            if size % self.rotary_multiple:
                return f"{name} {size} is no multiple of {self.rotary_multiple}"
        return None


CPU = Target(
    name="cpu",
    provider="CPUExecutionProvider",
    precisions=(
        Precision(name="fp32", activations="float32"),
        Precision(name="int8", activations="float32", weight_bits=8, table_bits=8),
        Precision(name="int4", activations="float32", weight_bits=4, table_bits=8),
        Precision(name="gguf", activations="float32", weight_bits=8, table_bits=8, keeps_blocks=True),
    ),
    head_multiple=8,
    rotary_multiple=16,
    accuracy_level=4,
    qk_norm_inside=False,  # the CPU kernel accepts the inputs and fails when it is run
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
    ),
    head_multiple=8,
    rotary_multiple=16,
    accuracy_level=None,
    qk_norm_inside=True,
    fast_decode=FastDecode(kernel="XQA", head_dims=(64, 128, 256), groups=(1, 2, 4, 5, 8, 16, 32)),
    fast_rows=((4, 64), (8, 32)),
)

TARGETS: tuple[Target, ...] = (CPU, CUDA)

_REFUSED = {
    ("cpu", "bf16"): "the CPU provider has no bfloat16 kernels (a bf16 checkpoint exports as fp32, int8 or int4)",
    ("cpu", "fp16"): "the CPU provider widens float16 to float32, which costs twice the memory and gains nothing",
    ("cuda", "fp32"): "the CUDA provider has no float32 GroupQueryAttention and would run it on the CPU",
}


def find_target(name: str) -> Target:
    """The target called `name`; raises TargetError with the known names."""
    for target in TARGETS:
        if target.name == name:
            return target
    raise TargetError(f"unknown target {name!r}; choose one of {', '.join(target.name for target in TARGETS)}")
