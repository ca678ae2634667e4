"""Encoder-decoders exported, compiled, proved and run: the two graphs, kernels, generation equal to transformers'.

One bundle a family, made once; the reference is transformers' own model and `generate`.
"""

import dataclasses
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cuda_stubs
import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from certificates import edit_graph, edit_weight
from parity import assert_parity
from tiny_encoder_decoders import (
    END,
    FAMILIES,
    NO_TIMESTAMPS,
    PAD,
    SPOKEN,
    START,
    TASKS,
    example_sources,
    make_encoder_decoder,
    source_ids,
    source_input,
    teacher_logits,
)
from transformers import GenerationMixin

from graphport.export.bundle import Bundle, write_graph
from graphport.export.graph_pass import CompilePlan
from graphport.export.layouts import LayoutError
from graphport.export.model_export import export
from graphport.export.pipeline import compile_graph
from graphport.export.source_graph import compile_source, trace_source, write_source
from graphport.export.source_runner import SourceRunner
from graphport.export.targets import CPU, CUDA, TargetError
from graphport.export.torch_to_onnx import torch_to_onnx
from graphport.export.verify import fresh_certificate
from graphport.model_def.cached_decoder import CachedDecoder
from graphport.model_def.checkpoint import load_checkpoint
from graphport.model_def.config import TransformerConfig
from graphport.model_def.signature import ENCODER_GRAPH_FILE, ENCODER_WEIGHTS_FILE, GRAPH_FILE, decoder_signature
from graphport.model_def.transformer import Transformer
from graphport.runtime import LanguageModel, SamplingParams, load
from graphport.runtime.graph_checks import SHAPE_OPS
from graphport.runtime.verification import verify

IDS = [START, *source_ids(20, seed=1)]
RUNS = ("prefill", "decode", "chunked prefill", "rewind", "ragged batch", "another source")
GREEDY = SamplingParams(max_new_tokens=12, temperature=0.0)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Staged:
    """A family's model of transformers, its folder, its graphs as exported and for CUDA, and its bundle."""

    name: str
    reference: Any
    config: TransformerConfig
    folder: Path
    decoder: ir.Model
    encoder: ir.Model

    def export(self, out: Path, **options: Any) -> Bundle:
        """A bundle from the trace that is there."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("graphport.export.model_export.torch_to_onnx", lambda *_: self.decoder.clone())
            patch.setattr("graphport.export.encoder_decoder_evidence.trace_source", lambda *_: self.encoder.clone())
            return export(self.folder / "source", out, **options)

    @property
    def sources(self) -> list[Any]:
        return example_sources(self.name, (5, 1, 17, 30))

    @property
    def bundle(self) -> Path:
        return self.folder / "bundle"

    def expected(self) -> np.ndarray:
        """transformers' logits after each source."""
        rows = [teacher_logits(self.reference, source, IDS).numpy() for source in self.sources]
        return np.concatenate(rows)

    def generate(self, source: Any, **options: Any) -> Any:
        """What transformers generates, with the scores of its texts; a model that hears says in which language."""
        spoken = {"language": "de", "force_unique_generate_call": True} if self.name == "whisper" else {}
        asked = {"do_sample": False, "return_dict_in_generate": True, "output_scores": True, **options}
        if spoken and "num_return_sequences" in options:  # of which WhisperForConditionalGeneration makes copies
            begun = {"decoder_input_ids": torch.tensor([self.beginning])}
            return GenerationMixin.generate(self.reference, **source_input(source), **begun, **asked)
        asked |= spoken
        return self.reference.generate(**source_input(source), **asked)

    def generated(self, source: Any, **options: Any) -> tuple[int, ...]:
        """transformers' new ids, without what pads them."""
        ids = self.new_ids(self.generate(source, **options).sequences[0].tolist())
        return tuple(ids[: ids.index(END) + 1] if END in ids else ids)

    def new_ids(self, ids: list[int]) -> list[int]:
        """Those of `ids` after what the decoder begins with."""
        return ids[len(self.beginning) :]

    @property
    def beginning(self) -> tuple[int, ...]:
        """What the decoder's text begins with: start, and of a model that hears language, task, no marks of time."""
        spoken = (SPOKEN["de"], TASKS["transcribe"], NO_TIMESTAMPS)
        return (START, *spoken) if self.name == "whisper" else (START,)

    @property
    def options(self) -> dict[str, str]:
        """Of every request."""
        return {"language": "de"} if self.name == "whisper" else {}


@pytest.fixture(scope="module", params=FAMILIES)
def staged(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Staged:
    reference = make_encoder_decoder(request.param)
    folder = tmp_path_factory.mktemp("pair")
    reference.save_pretrained(folder / "source")
    checkpoint = load_checkpoint(folder / "source")
    model = Transformer(checkpoint.config).eval()
    model.load_state_dict(checkpoint.weights, strict=True)
    length = 64
    decoder = torch_to_onnx(CachedDecoder(model, max_length=length), decoder_signature(checkpoint.config))
    encoder = trace_source(model)
    plan = CompilePlan(config=checkpoint.config, target=CUDA, precision=CUDA.precision("fp16"), max_length=length)
    (folder / "exported").mkdir()
    write_graph(decoder, folder / "exported")
    write_source(encoder, folder / "exported")
    (folder / "half").mkdir()
    half = decoder.clone()
    compile_graph(half, plan)
    write_graph(half, folder / "half")
    write_source(compile_source(encoder, plan)[0], folder / "half")
    made = Staged(
        name=request.param,
        reference=reference,
        config=checkpoint.config,
        folder=folder,
        decoder=decoder,
        encoder=encoder,
    )
    made.export(made.bundle, precision="fp32", context=length, verify=False)  # int8's export has its checks
    return made


@pytest.fixture(scope="module")
def lm(staged: Staged) -> Iterator[LanguageModel]:
    with load(staged.bundle, max_batch=6, threads=1) as opened:
        assert isinstance(opened, LanguageModel)
        yield opened


def kernels(graph: Path) -> Counter[str]:
    return Counter(node.op_type for node in onnx.load(graph, load_external_data=False).graph.node)


@pytest.mark.parametrize("stage", ["exported", "bundle"])
def test_both_graphs_equal_transformers(staged: Staged, stage: str) -> None:
    runner = SourceRunner(staged.folder / stage, staged.config)
    found = np.concatenate(runner.logits(staged.sources, IDS, chunks=(3, 1, 1)))
    assert_parity(found, staged.expected(), "exported" if stage == "exported" else "compiled")
    with pytest.raises(AssertionError):
        assert_parity(np.concatenate(runner.logits(staged.sources[::-1], IDS)), staged.expected(), "compiled")


def test_attention_runs_as_one_kernel_each(staged: Staged) -> None:
    layers = staged.config.num_layers
    decoder, encoder = kernels(staged.bundle / GRAPH_FILE), kernels(staged.bundle / ENCODER_GRAPH_FILE)
    assert decoder["GroupQueryAttention"] == decoder["MultiHeadAttention"] == layers
    assert encoder["GroupQueryAttention"] == 2
    # keys and values of the source are projected in the encoder's graph alone
    assert not any("cross_attention.key" in node.name for node in onnx.load(staged.bundle / GRAPH_FILE).graph.node)
    assert not {"Softmax", "CrossAttention", "BiasedCachedAttention"} & {*decoder, *encoder}


def test_b125_the_pad_length_of_a_source_changes_no_id(staged: Staged) -> None:
    runner = SourceRunner(staged.bundle, staged.config)
    for extra in (0, 3, 11, 59):
        (found,) = runner.logits(staged.sources[:1], IDS, extra=extra, pad_id=7)
        assert_parity(found, teacher_logits(staged.reference, staged.sources[0], IDS).numpy(), "compiled")


def test_ragged_batches_generate_what_transformers_does(staged: Staged) -> None:
    expected = [staged.generated(source, max_new_tokens=12, num_beams=1) for source in staged.sources]
    with load(staged.bundle, max_batch=3, threads=1) as lm:  # fewer places than prompts: slots move
        outputs = lm.generate(staged.sources, GREEDY, **staged.options)
        assert [output.token_ids for output in outputs] == expected
        assert lm.generate(staged.sources[1:2], GREEDY, **staged.options)[0] == outputs[1]
        events = lm.stream(staged.sources[2], GREEDY, **staged.options)
        assert [event.token_id for event in events] == list(outputs[2].token_ids)
    assert outputs[0].source_token_ids == (None if staged.name == "whisper" else tuple(staged.sources[0]))
    assert outputs[0].prompt_token_ids == staged.beginning


@pytest.mark.parametrize(
    ("num_beams", "length_penalty", "early_stopping"),
    [(4, 1.0, False), (3, 2.0, True), (5, 0.0, "never"), (2, -1.0, "never")],
)
def test_beam_search_gives_ids_and_scores_of_transformers(
    staged: Staged, lm: LanguageModel, num_beams: int, length_penalty: float, early_stopping: Any
) -> None:
    options = {"num_beams": num_beams, "length_penalty": length_penalty, "early_stopping": early_stopping}
    params = SamplingParams(max_new_tokens=12, temperature=0.0, n=2, **options)
    outputs = lm.generate(staged.sources, params, **staged.options)
    assert lm.generate(staged.sources[:1], params, **staged.options)[0] == outputs[0]
    for source, output in zip(staged.sources, outputs, strict=True):
        found = staged.generate(source, max_new_tokens=12, num_return_sequences=2, **options)
        for ids, score, sample in zip(found.sequences.tolist(), found.sequences_scores, output.samples, strict=True):
            new, count = staged.new_ids(ids), len(sample.token_ids)
            assert (new[:count], set(new[count:]) - {PAD}) == (list(sample.token_ids), set())
            assert sample.score == pytest.approx(float(score), rel=1e-5, abs=1e-5)


def test_all_that_computes_lands_on_cuda(staged: Staged, cuda: cuda_stubs.Placer) -> None:
    for graph, kernel in ((GRAPH_FILE, "GroupQueryAttention"), (ENCODER_GRAPH_FILE, "MultiHeadAttention")):
        placement = cuda.place(staged.folder / "half" / graph)
        assert set(placement.cpu) <= set(SHAPE_OPS)
        assert placement.cuda[kernel] == 2


def test_verify_runs_the_evidence_again_and_finds_other_weights(staged: Staged, tmp_path: Path) -> None:
    fresh, _ = fresh_certificate(staged.bundle, staged.folder / "source")  # there is none: exported without evidence
    result = verify(staged.bundle, certificate=fresh, threads=1)
    assert len(result.checks) == 13
    assert result.passed
    make_encoder_decoder(staged.name, seed=1).save_pretrained(tmp_path)
    fresh, _ = fresh_certificate(staged.bundle, tmp_path)
    assert [check.passed for check in verify(staged.bundle, certificate=fresh, threads=1).checks] == [True] + 12 * [
        False
    ]


def test_int8_bundles_hold_to_eager_within_their_limit(staged: Staged, tmp_path: Path) -> None:
    bundle = staged.export(tmp_path / "bundle", context=64)  # int8 is what floats get
    assert bundle.manifest.precision == "int8"
    stages = {check.name.partition(":")[0] for check in bundle.certificate}
    assert stages == {"exported", "compiled", "int8", *RUNS}
    for graph in (GRAPH_FILE, ENCODER_GRAPH_FILE):
        assert kernels(tmp_path / "bundle" / graph)["MatMulNBits"] > 4
    with load(tmp_path / "bundle", threads=1, strict=True) as lm:
        assert lm.generate(staged.sources[:1], GREEDY)[0].token_ids
    found = {check.name: check.measured for check in verify(tmp_path / "bundle", threads=1).checks}
    assert found["decode: rms against itself as exported"] < 1e-6
    assert 1e-6 < found["decode: kl against eager PyTorch"] < 0.05
    edit_graph(tmp_path / "bundle", flip_key_bit, graph=ENCODER_GRAPH_FILE, weights=ENCODER_WEIGHTS_FILE)
    failed = [check.name for check in verify(tmp_path / "bundle", threads=1).checks if not check.passed]
    assert {name.split(": ")[1] for name in failed} == {"rms against itself as exported"}


def flip_key_bit(model: onnx.ModelProto) -> None:
    """One number of the matrix that makes keys of the source is off by an eighth of its range."""

    def flip(values: np.ndarray) -> np.ndarray:
        values[3, 0, 5] ^= 32
        return values

    edit_weight(model, "blocks.0.cross_attention.key.weight_q8", flip)


def test_what_needs_a_text_to_be_rounded_is_refused(tmp_path: Path) -> None:
    make_encoder_decoder("bart").save_pretrained(tmp_path / "source")
    for precision in ("int4", "auto"):
        with pytest.raises(
            TargetError, match=f"precision {precision} is not made of encoder-decoders; choose fp32, int8"
        ):
            export(tmp_path / "source", tmp_path / "bundle", precision=precision)
    with pytest.raises(TargetError, match="precision bf16 is not made of encoder-decoders; choose fp16, int8"):
        export(tmp_path / "source", tmp_path / "bundle", target="cuda", precision="bf16")
    with pytest.raises(TargetError, match="KV cache type 'int8' is not made of encoder-decoders"):
        export(tmp_path / "source", tmp_path / "bundle", precision="fp32", kv_cache="int8")
    with pytest.raises(LayoutError, match=r"layout genai, .* is a decoder's, and this is an encoder-decoder"):
        export(tmp_path / "source", tmp_path / "bundle", precision="fp32", layouts=["genai"])
    assert CPU.precision("int8").weight_bits == 8
