"""all-MiniLM-L6-v2, the whole way: transformers and its pooling against the fp32 and int8 bundles."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cuda_stubs import Placer
from numpy.typing import NDArray
from parity import assert_parity

from graphport.runtime import Encoder, load_encoder
from graphport.runtime.graph_checks import SHAPE_OPS

pytestmark = [pytest.mark.real, pytest.mark.xdist_group("minilm")]

# Limits; beside each what was measured over TEXTS.
FP32_COSINE = 1e-5  # 1 - cosine: 1.2e-7, which is float32's rounding
INT8_COSINE = 5e-3  # 1.7e-3, the empty text; 7.7e-4 without it

TEXTS = (
    "The cat sits on the mat.",
    "",
    "A man is playing a guitar.",
    "Größe, naïve café, 東京タワー and 👋",
    "The weather in spring is often mild, and the roads dry early. " * 10,
    "def add(a, b):\n    return a + b",
    "Someone plays an instrument.",
)


@pytest.fixture(scope="module")
def bundles(minilm_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    from graphport.export import export

    folder = tmp_path_factory.mktemp("minilm")
    bundles = {}
    for precision in ("fp32", "int8"):
        bundle = export(minilm_folder, folder / precision, precision=precision, verify=precision == "int8")
        assert bundle.fusions["attention"] == bundle.fusions["packed_qkv"] == 6
        assert bundle.fusions["residual_norm"] == 13
        bundles[precision] = bundle.path
    return bundles


@pytest.fixture(scope="module")
def reference(minilm_folder: Path) -> NDArray[np.float32]:
    """Masked mean and normalisation of transformers' own model, as the folder's recipe has it, 256 tokens at most."""
    import torch
    from transformers import AutoModel, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(minilm_folder)
    model = AutoModel.from_pretrained(minilm_folder).eval()
    batch = tokenizer(list(TEXTS), padding=True, truncation=True, max_length=256, return_tensors="pt")
    with torch.inference_mode():
        hidden = model(**batch).last_hidden_state
    mask = batch["attention_mask"][..., None].float()
    pooled: Any = torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1))
    return pooled.numpy()


def _distances(found: NDArray[np.float32], wanted: NDArray[np.float32]) -> NDArray[np.float64]:
    return 1 - (found.astype(np.float64) * wanted).sum(1)


@pytest.fixture(scope="module")
def fp32(bundles: dict[str, Path]) -> Encoder:
    return load_encoder(bundles["fp32"])


def test_the_fp32_bundle_equals_transformers(fp32: Encoder, reference: NDArray[np.float32]) -> None:
    found = fp32.encode(TEXTS)
    assert found.shape == (len(TEXTS), 384)
    assert _distances(found, reference).max() <= FP32_COSINE
    assert _distances(np.roll(found, 1, axis=0), reference).min() > 0.1


def test_the_int8_bundle_stays_close_to_transformers(bundles: dict[str, Path], reference: NDArray[np.float32]) -> None:
    with load_encoder(bundles["int8"]) as encoder:
        found = encoder.encode(TEXTS)
        assert _distances(found, reference).max() <= INT8_COSINE
        alone = np.concatenate([encoder.encode([text]) for text in TEXTS])
    assert_parity(found, alone, "reused cache")


def test_sentences_of_one_meaning_are_near(fp32: Encoder) -> None:
    cat, guitar, plays = fp32.encode([TEXTS[0], TEXTS[2], TEXTS[6]])
    assert guitar @ plays > 0.5
    assert guitar @ cat < 0.25


def test_the_recipe_limits_texts_to_256_tokens(fp32: Encoder) -> None:
    assert fp32.max_length == 256
    with pytest.raises(ValueError, match=r"more than max_length \(256\)"):
        fp32.encode(["word " * 300])


@pytest.mark.parametrize("precision", ["fp16", "int8"])
def test_every_node_is_placed_on_cuda(precision: str, minilm_folder: Path, tmp_path: Path, cuda: Placer) -> None:
    from graphport.export import export

    bundle = export(minilm_folder, tmp_path / "out", target="cuda", precision=precision, verify=False)
    placement = cuda.place(bundle.path / "model.onnx")
    assert set(placement.cpu) <= set(SHAPE_OPS)
    assert placement.cuda["MultiHeadAttention"] == 6
