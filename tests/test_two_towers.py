"""CLIP and SigLIP with both towers: one bundle, texts and images in one space, scores equal to transformers."""

import dataclasses
import functools
import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import cuda_stubs
import numpy as np
import onnx_ir as ir
import pytest
import torch
from parity import RELATIVE_TOLERANCES
from test_parity_encoder import make_plan
from tiny_checkpoints import edit_json
from tiny_encoders import word_piece
from tiny_vision import TWO_TOWERS, make_pixels, make_vision, save_vision_folder
from tokenizers import Tokenizer

from graphport.cli import main
from graphport.export import export
from graphport.export.bundle import write_graph
from graphport.export.model_kinds import ENCODER
from graphport.export.parity import ParityError
from graphport.export.pipeline import compile_graph
from graphport.export.source import SourceModel, open_source
from graphport.export.targets import CUDA, TargetError
from graphport.export.torch_to_onnx import torch_to_onnx
from graphport.model_def.checkpoint import CheckpointError, load_checkpoint
from graphport.model_def.encoder import Encoder
from graphport.model_def.position_config import ConfigError
from graphport.model_def.signature import GRAPH_FILE, ManifestError, Signature, encoder_signature
from graphport.runtime import DualEncoder, load, load_dual_encoder, load_encoder
from graphport.runtime.graph_checks import SHAPE_OPS

TEXTS = ("a photo of a cat", "", "The quick brown fox jumps over the lazy dog.", "Größe", "tokens, tokenizer")
EXPORTED = ("clip", "siglip")
END, HIGHEST, FILL, LONGEST = 3, 299, 1, 40


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("towers")
    found = {kind: save_vision_folder(folder / kind, make_vision(kind)) for kind in TWO_TOWERS}
    for source in found.values():
        _tokenizer().save(str(source / "tokenizer.json"))
    return found


@pytest.fixture(scope="module")
def opened(sources: dict[str, Path]) -> dict[str, SourceModel]:
    return {kind: open_source(source, seed=0) for kind, source in sources.items()}


class _Traced:
    """`torch_to_onnx` that traces equal modules once."""

    def __init__(self) -> None:
        self.seen: dict[tuple[str, Signature], ir.Model] = {}

    def __call__(
        self, module: torch.nn.Module, signature: Signature, sizes: Mapping[str, int] | None = None
    ) -> ir.Model:
        sums = str([float(parameter.detach().double().sum()) for parameter in module.parameters()])
        if (sums, signature) not in self.seen:
            self.seen[sums, signature] = torch_to_onnx(module, signature, sizes)
        return self.seen[sums, signature].clone()


@pytest.fixture(scope="module")
def traced() -> Iterator[_Traced]:
    traced = _Traced()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("graphport.export.model_export.torch_to_onnx", traced)
        yield traced


@pytest.fixture(scope="module")
def bundles(sources: dict[str, Path], traced: _Traced, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("bundles")
    return {kind: export(sources[kind], folder / kind, precision="fp32").path for kind in EXPORTED}


@functools.cache
def _tokenizer() -> Tokenizer:
    """One for all: training it again may number pieces otherwise."""
    tokenizer = word_piece()
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _rows(texts: Sequence[str]) -> list[list[int]]:
    return [_tokenizer().encode(text).ids for text in texts]


def _filled(kind: str, row: Sequence[int]) -> torch.Tensor:
    """One row as transformers reads it, [1, S]: SigLIP was trained on texts that are filled up."""
    return torch.tensor([[*row, *[FILL] * (LONGEST - len(row))] if kind == "siglip" else list(row)])


def _text_features(kind: str, rows: Sequence[Sequence[int]]) -> torch.Tensor:
    """What transformers gives for each row alone."""
    model = make_vision(kind)
    with torch.inference_mode():
        return torch.cat([model.get_text_features(_filled(kind, row)).pooler_output for row in rows])


def _scores(kind: str, rows: Sequence[Sequence[int]], pixels: torch.Tensor) -> np.ndarray:
    """`logits_per_image` of transformers, a text at a time."""
    model = make_vision(kind)
    with torch.inference_mode():
        found = [model(input_ids=_filled(kind, row), pixel_values=pixels).logits_per_image for row in rows]
    return torch.cat(found, dim=1).numpy()


def _assert_near(found: Any, wanted: Any) -> None:
    found, wanted = np.asarray(found), np.asarray(wanted)
    assert found.shape == wanted.shape
    gap = float(np.abs(found - wanted).max() / np.abs(wanted).max())
    assert gap < RELATIVE_TOLERANCES["checkpoint", "float32"], gap


@pytest.mark.parametrize("kind", TWO_TOWERS)
def test_a_text_tower_equals_transformers_wherever_its_texts_end(kind: str, opened: dict[str, SourceModel]) -> None:
    """The first of two ends counts; of CLIP's first checkpoints the highest id; without an end the first token."""
    text = opened[kind].text
    assert text is not None
    encoder = Encoder(text.model, max_length=LONGEST)
    rows = [*_rows(TEXTS), [2, 9, 4, END, 7, END], [2, HIGHEST, 5, HIGHEST, 6, END], [2, 4, 5, 6]]
    if kind == "siglip":
        rows = [[*row, *[FILL] * (LONGEST - len(row))] for row in rows]
    longest = max(map(len, rows))
    ids = torch.tensor([[*row, *[END] * (longest - len(row))] for row in rows])  # padding of any value
    lengths = torch.tensor([len(row) for row in rows], dtype=torch.int32)
    wanted = _text_features(kind, rows)
    with torch.inference_mode():
        _, found = encoder(ids, lengths)
        _assert_near(found, wanted)
        for wrong in (encoder(ids, lengths.clamp(max=3))[1], encoder(ids.roll(1, 1), lengths)[1]):
            with pytest.raises(AssertionError):
                _assert_near(wrong, wanted)


@pytest.mark.parametrize("kind", EXPORTED)
def test_texts_and_images_of_a_bundle_compare_as_in_transformers(kind: str, bundles: dict[str, Path]) -> None:
    pixels = make_pixels(3, 32, 32)
    rows = _rows(TEXTS)
    wanted = _scores(kind, rows, pixels)
    with load(bundles[kind]) as model:
        assert isinstance(model, DualEncoder)
        assert model.similarity.multi_label == (kind == "siglip")
        assert model.dimension == (48 if kind == "siglip" else 20)
        _assert_near(model.encode(TEXTS), _text_features(kind, rows))
        _assert_near(model.scores(pixels.numpy(), TEXTS), wanted)
        _assert_near(model.scores(pixels.numpy(), rows[::-1]), wanted[:, ::-1])
        assert (model.scores(pixels.numpy(), []).shape, model.scores([], TEXTS).shape) == ((3, 0), (0, 5))
        assert len(model.text.hidden_states(TEXTS[:1])[0]) == (
            LONGEST if kind == "siglip" else len(_rows(TEXTS[:1])[0])
        )
        with pytest.raises(AssertionError):
            _assert_near(model.scores(pixels.numpy()[::-1].copy(), TEXTS), wanted)
        with pytest.raises(ValueError, match=r"text 0 has \d+ tokens, more than max_length \(40\)"):
            model.scores(pixels.numpy(), ["a photo of a cat " * 20])
        with pytest.raises(ValueError, match="36 x 32 is no whole number of patches of 8 x 8"):
            model.encode_images(make_pixels(1, 36, 32).numpy())
    with pytest.raises(RuntimeError, match="this Encoder is closed"):
        model.encode(TEXTS)


@pytest.mark.parametrize("kind", EXPORTED)
def test_a_bundle_of_two_towers_is_verified_and_reported_from_the_command_line(
    kind: str, bundles: dict[str, Path], sources: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", str(bundles[kind]), "--against", str(sources[kind]), "--invariance", "--json"]) == 0
    checks = json.loads(capsys.readouterr().out)["checks"]
    assert {check["name"].split(":")[0] for check in checks} == {"text", "images"}
    assert any(check["name"] == "text: invariance: batch neighbours" for check in checks)
    assert any(check["name"].startswith("images: reference: embeddings") for check in checks)
    assert main(["report", str(bundles[kind]), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["text"]["manifest"]["kind"], report["images"]["manifest"]["kind"]) == ("encoder", "image_encoder")
    assert main(["report", str(bundles[kind])]) == 0
    assert "projected to" in capsys.readouterr().err
    assert main(["embed", str(bundles[kind]), "a photo of a cat"]) == 0
    _assert_near(json.loads(capsys.readouterr().out), _text_features(kind, _rows(TEXTS[:1]))[0])


@pytest.mark.parametrize("kind", EXPORTED)
def test_a_text_tower_lands_on_cuda_and_causal_attention_stays_in_the_kernel(
    kind: str, opened: dict[str, SourceModel], traced: _Traced, tmp_path: Path, cuda: cuda_stubs.Placer
) -> None:
    graph = _text_graph(opened[kind], traced)
    text = opened[kind].text
    assert text is not None
    compile_graph(graph, make_plan(text.model.config, CUDA, "fp16"))
    write_graph(graph, tmp_path)
    placement = cuda.place(tmp_path / GRAPH_FILE)
    assert set(placement.cpu) <= set(SHAPE_OPS)
    kernels = [node for node in graph.graph if node.op_type == "MultiHeadAttention"]
    assert [node.attributes["unidirectional"].as_int() for node in kernels] == [int(kind != "siglip")] * 2
    assert placement.cuda["MultiHeadAttention"] == 2


def _text_graph(source: SourceModel, traced: _Traced) -> ir.Model:
    assert source.text is not None
    model = source.text.model
    return traced(ENCODER.module(model, LONGEST), encoder_signature(model.config))


def _sees_later(graph: ir.Model) -> None:
    for node in graph.graph:
        if node.op_type == "PaddedAttention":
            node.attributes["causal"] = ir.AttrInt64("causal", 0)


def _ends_elsewhere(graph: ir.Model) -> None:
    node = next(node for node in graph.graph if node.op_type == "EndLengths")
    node.attributes["ends_at"] = ir.AttrInt64("ends_at", 2)


@pytest.mark.parametrize("breaks", [_sees_later, _ends_elsewhere])
def test_broken_text_towers_are_rejected(
    breaks: Any, opened: dict[str, SourceModel], traced: _Traced, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = opened["clip"].text
    assert text is not None
    broken = _text_graph(opened["clip"], traced)
    breaks(broken)
    monkeypatch.setattr("graphport.export.model_export.torch_to_onnx", lambda *_: broken)
    with pytest.raises(ParityError, match="exported: 8 texts in one padded batch, relative"):
        export(text.model, tmp_path / "out", precision="fp32")
    assert not list(tmp_path.iterdir())


def test_int8_of_two_towers_and_a_fixed_size_of_the_images(
    sources: dict[str, Path], traced: _Traced, tmp_path: Path
) -> None:
    bundle = export(sources["clip"], tmp_path / "out", precision="int8", image_size=(40, 24))
    assert bundle.manifest.max_length == 16
    assert bundle.text_manifest is not None
    assert bundle.text_manifest.max_length == LONGEST
    assert bundle.fusions["attention"] == 4
    assert {check.name.split(":")[0] for check in bundle.certificate} == {"text", "images"}
    with load_dual_encoder(bundle.path, strict=True, max_batch=2) as model:
        vectors = model.encode(TEXTS)
        assert (vectors * _text_features("clip", _rows(TEXTS)).numpy()).sum() / np.linalg.norm(vectors) > 0.9


@pytest.mark.parametrize(
    ("options", "error", "reason"),
    [
        ({"precision": "int4"}, TargetError, "precision int4 rounds weights on text, which images are not"),
        ({"precision": "fp32", "kv_cache": "int8"}, TargetError, "image_encoder has no KV cache"),
        ({"precision": "fp32", "context": 1}, ConfigError, r"max_length \(1\) must lie in 2"),
    ],
)
def test_what_cannot_be_exported_is_refused_and_leaves_nothing(
    options: dict[str, Any], error: type[Exception], reason: str, sources: dict[str, Path], tmp_path: Path
) -> None:
    with pytest.raises(error, match=reason):
        export(sources["clip"], tmp_path / "out", **options)
    assert not list(tmp_path.iterdir())


def test_commands_for_one_model_name_the_two_bundles(
    bundles: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = bundles["clip"]
    for arguments in (["generate", str(path), "x"], ["plan", str(path)], ["bench", str(path)]):
        assert main(arguments) == 1
        assert f"holds two bundles, of texts and of images; give {path}/text or {path}/images" in (
            capsys.readouterr().err.replace("\n", " ")
        )
    assert main(["report", str(path), "--html", str(tmp_path / "x.html")]) == 1
    assert "--html draws one graph" in capsys.readouterr().err
    with pytest.raises(
        ValueError, match=r"max_length and draft cannot be heeded|draft and max_length cannot be heeded"
    ):
        load(path, draft="x", max_length=8)
    with pytest.raises(ManifestError, match="is no bundle of two towers"):
        load_dual_encoder(path / "text")
    with pytest.raises(ValueError, match=r"filled up to 40 tokens, as the model was trained; max_length is 8"):
        load_encoder(bundles["siglip"] / "text", max_length=8)


def test_towers_of_different_sources_torn_manifests_and_links_are_refused(
    bundles: dict[str, Path], tmp_path: Path
) -> None:
    mixed = tmp_path / "mixed"
    shutil.copytree(bundles["clip"], mixed)
    shutil.rmtree(mixed / "text")
    shutil.copytree(bundles["siglip"] / "text", mixed / "text")
    with pytest.raises(ManifestError, match=r"mixed/text was exported from another source than .*; export the bundle"):
        load(mixed)
    shutil.rmtree(mixed / "text")
    (mixed / "text").symlink_to(bundles["clip"] / "text")
    with pytest.raises(ManifestError, match="links to a folder outside the bundle"):
        load(mixed)
    (mixed / "text").unlink()
    with pytest.raises(ManifestError, match=r"text is no graphport bundle"):
        load(mixed)
    edit_json(mixed / "manifest.json", lambda values: values["similarity"].update(scale=0.0))
    with pytest.raises(ManifestError, match=r"is damaged .similarity scale must be a positive number"):
        load(mixed)
    edit_json(mixed / "manifest.json", lambda values: values.update(format=99))
    with pytest.raises(ManifestError, match="has format 99, this graphport reads 1"):
        load(mixed)


def test_a_folder_whose_towers_cannot_be_compared_is_refused(
    sources: dict[str, Path], opened: dict[str, SourceModel], tmp_path: Path
) -> None:
    edit = shutil.copytree(sources["clip"], tmp_path / "clip")
    edit_json(edit / "config.json", lambda values: values["text_config"].update(num_attention_heads=5))
    with pytest.raises(CheckpointError, match=r"hidden_size \(32\) is no multiple of num_attention_heads \(5\)"):
        load_checkpoint(edit)
    edit_json(edit / "config.json", lambda values: values["text_config"].update(num_attention_heads=4, alibi=True))
    with pytest.raises(CheckpointError, match=r"not supported for model_type clip_text_model .*alibi = True"):
        load_checkpoint(edit)
    text = opened["siglip"].text
    assert text is not None
    with pytest.raises(ConfigError, match="filled up to 40 tokens, as the model was trained; max_length is 8"):
        Encoder(text.model, max_length=8)


def test_a_causal_stack_pools_only_without_a_vocabulary_head(opened: dict[str, SourceModel]) -> None:
    text = opened["clip"].text
    assert text is not None
    assert not text.model.config.is_decoder
    with pytest.raises(ConfigError, match="use head='none'"):
        dataclasses.replace(text.model.config, head="tied")
