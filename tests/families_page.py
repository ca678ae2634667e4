"""docs/families.md from the table of decoder families and the shapes that the tests try of each.

In: nothing. Out: the page, printed when run as a program (`make families`). A mark stands where a test of that stage
runs on the family; `test_docs_families.py` compares the page with this.
"""

import inspect
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import test_export_decoder_families as stages
import test_export_encoder_decoders as pairs
import test_model_decoder_families as reading
from tiny_decoder_values import Decoder
from tiny_decoders import DECODERS, make_decoder
from tiny_encoder_decoders import SHAPES, make_encoder_decoder
from tiny_models import decode_length

from graphport.export.graph_pass import CompilePlan
from graphport.export.pipeline import expected_fusions
from graphport.export.targets import CPU
from graphport.model_def.config import TransformerConfig
from graphport.model_def.encoder_decoder_family import ENCODER_DECODER_FAMILIES
from graphport.model_def.huggingface_config import DECODER_FAMILIES, read_config
from graphport.model_def.huggingface_encoder_decoders import read_encoder_decoder_config
from graphport.model_def.huggingface_encoders import ENCODER_FAMILIES
from graphport.model_def.position_config import AlibiBias

STAGES: Mapping[str, Callable[..., object]] = {
    "read, eager": reading.test_a_family_equals_transformers_at_every_length,
    "exported": stages.test_the_exported_graph_equals_transformers,
    "compiled, cached": stages.test_the_compiled_graph_equals_transformers_however_it_is_fed,
    "ragged batch": stages.test_ragged_batches_decode_as_transformers_recomputes,
    "CUDA placement": stages.test_all_that_computes_lands_on_cuda,
}

_HEAD = """\
# Families

<!-- written by `make families`: change the table of families or its tests, not this page -->

Decoders by the `model_type` of their config.json, one row of a table in `model_def/` each. Each row is a tiny
random model of transformers that the tests take through every stage: config and weights read and eager logits equal
to transformers within 1e-5 of the largest; the exported graph; the compiled one, fed whole, in chunks and token by
token over a KV cache, equal to full recomputation; ragged batches in the runtime; every node of the float16 graph
placed on CUDA (by ONNX Runtime's CUDA provider, without a GPU). *fused* counts the sites of two layers on the CPU:
attention, packed query-key-value, packed gate and up, residual add with norm, mixtures of experts. *beyond* is what
the texts are longer than.

"""

_TAIL = """
A parallel block adds attention and feed-forward to the stream in two sums; the first stays an Add, the second fuses
with the norm of the block after it. Where only outputs are normed (OLMo 2), only the last sum is.

Experts become one MoE node a layer, and QMoE in int8 and int4: nearest rounding in blocks of 32, not calibrated. The
router and the gate of a shared feed-forward stay floats. Experts whose widths are no multiples of 32 stay floats too,
and so do those of a GGUF file in `--precision gguf`, exact and larger; the report says so, and `--require-fused
experts=all` refuses them. On the CPU 8-bit experts round activations to 8 bits
whatever `--accuracy-level` says. A token near the border of two experts may choose the other one once anything is
rounded. Files may have a tensor for each expert or transformers 5's one for all. Routers that choose among groups, by
sigmoids or with a correction (DeepSeek) are standard ops in front of that node: they give it scores of which it can
only choose what they chose.

Latent attention (DeepSeek) is one GroupQueryAttention a layer over keys and values of every head, as they come out of
the latent vector; the dimensions that rotate are moved to the front of a head. Values are as wide as keys in the cache,
with zeros behind them: exact, and as long a cache as multi-head attention of that head size has. DeepSeek-V2-Lite
caches 2 x 16 x 192 = 6,144 numbers a token and layer where the latent vector and its rotating part are 576; the third
of the values that is zeros costs a third more products with them. Layers behind the last that predict further tokens
are left out. Sinks (GPT-OSS) are an input of the same kernel; on the CPU it computes whole rows of scores then. Experts
in MXFP4, as the hub has GPT-OSS, are widened exactly when they are read.

ALiBi (`falcon` with `alibi`, `bloom`) is a bias of the scores, made on the device from the positions and as large as
they are: [rows, heads, new tokens, all tokens] a step, one for all layers. GroupQueryAttention takes it on both
providers, on CUDA in its unfused form and in steps that are not captured. Falcon's is rounded to bfloat16 as
transformers has it.

Refused by name: any key that is not understood. A `model_type`
that is not here is refused with the nearest family and the keys that keep the folder from being read as one. longrope
is decoded up to the original length: keys in the cache would keep the factors of short texts.

"""


_PAIRS_HEAD = """\
## Encoder-decoders

Taken through the same stages, with two graphs each: cross-attention over keys and values that the encoder's graph
computes once, sources of several lengths padded in one batch, greedy ids and those of beam search with their scores
equal to `generate` of transformers. *fused* counts both graphs of two and two layers. See
[encoder-decoders](encoder_decoders.md).

"""

PAIR_STAGES: Mapping[str, Callable[..., object]] = {
    "exported, compiled": pairs.test_both_graphs_equal_transformers,
    "padded sources": pairs.test_b125_the_pad_length_of_a_source_changes_no_id,
    "ragged batch": pairs.test_ragged_batches_generate_what_transformers_does,
    "beam search": pairs.test_beam_search_gives_ids_and_scores_of_transformers,
    "CUDA placement": pairs.test_all_that_computes_lands_on_cuda,
    "verify": pairs.test_verify_runs_the_evidence_again_and_finds_other_weights,
}


def families_page() -> str:
    """The whole page."""
    encoders = ", ".join(family.model_type for family in ENCODER_FAMILIES)
    last = f"[Encoders](encoders.md): {encoders}. GGUF architectures: [exporting](export.md#sources).\n"
    pairs = _PAIRS_HEAD + "\n".join(_pair_rows()) + "\n\n"
    return _HEAD + "\n".join(_rows()) + "\n" + _TAIL + pairs + last


def _rows() -> Iterable[str]:
    columns = ["family", "shape", "norms", "positions", *STAGES, "fused", "beyond"]
    yield f"| {' | '.join(columns)} |"
    yield "|" + " --- |" * len(columns)
    for family in DECODER_FAMILIES:
        for name, decoder in DECODERS.items():
            if decoder.model_type != family.model_type:
                continue
            config, _ = read_config(make_decoder(name).config.to_dict(), head="tied")
            shape = name.removeprefix(family.model_type).strip(" ,") or "plain"
            marks = ["yes" if name in _tried_by(test) else "no" for test in STAGES.values()]
            cells = [f"`{family.model_type}`", shape, _norms(config), _positions(config), *marks, _fused(config)]
            yield f"| {' | '.join([*cells, _beyond(decoder)])} |"


def _pair_rows() -> Iterable[str]:
    columns = ["family", "norms", "positions", "read, eager, cached", *PAIR_STAGES, "fused"]
    yield f"| {' | '.join(columns)} |"
    yield "|" + " --- |" * len(columns)
    for family in ENCODER_DECODER_FAMILIES:
        values = make_encoder_decoder(family.model_type).config.to_dict()
        config, _ = read_encoder_decoder_config(values, family, head="tied", has_head_bias=False)
        assert config.encoder is not None
        shapes = [name.partition(", ")[2] or "plain" for name in SHAPES if name.startswith(family.model_type)]
        staged = "yes" if family.model_type in pairs.FAMILIES else "no"
        marks = [staged if "staged" in inspect.signature(test).parameters else "no" for test in PAIR_STAGES.values()]
        both = zip(*(_fused(stack).split() for stack in (config, config.encoder)), strict=True)
        fused = " ".join(str(int(decoder) + int(encoder)) for decoder, encoder in both)
        cells = [f"`{family.model_type}`", _norms(config), family.positions, ", ".join(shapes), *marks, fused]
        yield f"| {' | '.join(cells)} |"


def _tried_by(test: Callable[..., Any]) -> set[str]:
    """The names of DECODERS that a test runs on, by its own parameters or by those of the fixture that it takes."""
    for mark in getattr(test, "pytestmark", ()):
        if mark.name == "parametrize" and mark.args[0] == "name":
            return set(mark.args[1])
    return set(stages.STAGED) if "staged" in inspect.signature(test).parameters else set()


def _norms(config: TransformerConfig) -> str:
    block = config.blocks[0]
    kind = {"rms": "RMS", "layer": "layer"}[block.norm.kind]
    shared = "" if block.feed_forward_norm else ", one for both"
    heads = {"head": ", q/k by head", "each_head": ", q/k each head", "width": ", q/k at once"}[
        block.attention.qk_norm_over
    ]
    return f"{kind}, {block.norm_order}{shared}{heads if block.attention.qk_norm else ''}"


def _positions(config: TransformerConfig) -> str:
    if config.position is not None:
        return "learned"
    if isinstance(config.relative_bias, AlibiBias):
        return "ALiBi"
    rotaries = [block.attention.rotary for block in config.blocks]
    first = next(rotary for rotary in rotaries if rotary is not None)
    scalings = {
        type(rotary.scaling).__name__.removesuffix("Scaling") for rotary in rotaries if rotary and rotary.scaling
    }
    parts = ["rotary", *(scaling.lower() for scaling in sorted(scalings))]
    parts += [f"{first.partial_factor:g} of a head"] if first.partial_factor < 1 else []
    parts += ["neighbours"] if first.interleaved else []
    parts += ["not in every layer"] if None in rotaries else []
    return ", ".join(parts)


def _fused(config: TransformerConfig) -> str:
    plan = CompilePlan(config=config, target=CPU, precision=CPU.precision("fp32"), max_length=decode_length(config))
    counts = expected_fusions(plan)
    return " ".join(
        str(counts[rule]) for rule in ("attention", "packed_qkv", "packed_gate_up", "residual_norm", "experts")
    )


def _beyond(decoder: Decoder) -> str:
    if decoder.window is not None:
        return "the window"
    return "" if decoder.switch is None else "the original context (eager; decoding stops there)"


if __name__ == "__main__":
    sys.stdout.write(families_page())
