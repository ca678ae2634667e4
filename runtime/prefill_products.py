"""Products of prompts with float32 activations, where the graph's own round activations to 8 bits.

In: a checked bundle. Out: what a second session over the same graph is opened with, or in one line why there can be
none. It opens nothing (see `opening.py`).

A product with 8-bit activations suits steps of few tokens, which wait for the weights to be read. One with float32
activations widens a weight once for all tokens of a step, so that long steps gain where floats are multiplied in wide
registers. Both read the same cache, and rows of the second are those of activations as they are.
"""

from collections.abc import Mapping

import onnxruntime

from graphport.model_def.signature import KIND_WORDS
from graphport.runtime.bundle_files import BundleFiles
from graphport.runtime.device import Device, PrefillProducts
from graphport.runtime.kernel_limits import float_products_limit
from graphport.runtime.probe_product import changes_product

# Tokens of a row from which a step runs with float32 products, measured (SmolLM2-135M, its exact GGUF, two threads with
# AVX-512): 0.85 times as fast at 64 tokens, as fast at 96, 1.18 times at 256. Longer than any draft, so that drafts are
# checked with the products that decode. Prompts that end with a shorter step end as exported.
FLOAT_STEP = 96
# Prompt tokens a step by default. Longer than those of 8-bit products, because widening the weights is shared; beyond
# nothing is gained: 928 tokens a second in chunks of 128, 925 of 256, 858 of 512, and 719 as exported in chunks of 64.
FLOAT_CHUNK = 128

# ONNX Runtime 1.31: MatMulNBits takes the kernels of accuracy_level 1 for 4-bit matrices. The threads of this session
# must not wait in busy loops while the other one's decode.
FLOAT_ENTRIES = {"mlas.qnbit.force_fp32": "1", "session.force_spinning_stop": "1"}

# Prompt tokens a step by target, unless the caller chooses. On the CPU more take long and gain little: 1,483 tokens a
# second in chunks of 64, 1,558 in chunks of 128, 1,503 in chunks of 512 (SmolLM2-135M, its exact GGUF, two threads, 512
# tokens); and where results depend on cuts, a cached beginning is used again in whole chunks.
PREFILL_CHUNKS = {"cpu": 64, "cuda": 512}


def default_chunk(target: str, products: PrefillProducts) -> int:
    """Prompt tokens a step, unless the caller chooses."""
    return FLOAT_CHUNK if products == "float32" else PREFILL_CHUNKS[target]


def require_float_products(bundle: BundleFiles, device: Device, *, prefill_chunk: int, max_length: int) -> None:
    """Raise ValueError, saying why, where prompts cannot have float32 products instead of the graph's own.

    Also where steps of `prefill_chunk` tokens of `max_length` are never long enough.
    """
    reason = _limit(bundle, device)
    if reason is not None:
        raise ValueError(f"prefill_products='float32' cannot be heeded by {bundle.folder}: {reason}; leave it out")
    for name, value in (("prefill_chunk", prefill_chunk), ("max_length", max_length)):
        if value < FLOAT_STEP:
            raise ValueError(
                f"prefill_products='float32' is for steps of {FLOAT_STEP} tokens and more, and {name} is {value}; give "
                f"{name} at least {FLOAT_STEP}, or prefill_products='as_exported'"
            )


def can_have_float_products(bundle: BundleFiles) -> bool:
    """Whether `require_float_products` passes `bundle` on the CPU."""
    return _limit(bundle, "cpu") is None


def require_heeded(entries: Mapping[str, str]) -> None:
    """Raise ValueError unless `entries` change products here.

    ONNX Runtime takes entries that it does not know without a word, and on processors without kernels for 8-bit
    activations it multiplies floats anyway.
    """
    if not changes_product(entries):
        raise ValueError(
            f"prefill_products='float32' changes nothing: ONNX Runtime {onnxruntime.__version__} gives the same bits "
            "with and without it on this processor; give prefill_products='as_exported'"
        )


def _limit(bundle: BundleFiles, device: Device) -> str | None:
    if bundle.manifest.target != "cpu":
        return f"it was exported for {bundle.manifest.target}, and this is for bundles exported for the CPU"
    if bundle.manifest.kind != "decoder":
        return f"it is {KIND_WORDS[bundle.manifest.kind]}, and this is for decoders"
    if device != "cpu":
        return f"it runs on {device}, and this is for the CPU"
    return float_products_limit(bundle.header)
