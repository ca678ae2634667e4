"""`encode_images` and `classify_images` on bundles: equal transformers, pictures included; what is refused."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from parity import RELATIVE_TOLERANCES
from PIL import Image
from tiny_vision import PREPROCESSING, make_pixels, make_vision, reference_outputs, save_vision_folder
from transformers.models.bit.image_processing_pil_bit import BitImageProcessorPil
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.deit.image_processing_pil_deit import DeiTImageProcessorPil
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil
from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil
from typer.testing import CliRunner

from graphport.cli import app
from graphport.export import export
from graphport.model_def.huggingface_preprocessing import read_preprocessing
from graphport.runtime import ImageEncoder, load, load_encoder, load_image_encoder, load_language_model
from graphport.runtime.preprocessing import picture_pixels

KINDS = {"clip vision projection": {}, "vit classifier": {"image_size": (32, 32)}, "siglip no head": {}}


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("vision")
    for kind, options in KINDS.items():
        source = save_vision_folder(folder / f"{kind} source", make_vision(kind))
        if kind == "siglip no head":
            (source / "preprocessor_config.json").unlink()
        export(source, folder / kind, precision="fp32", verify=False, **options)
    return {kind: folder / kind for kind in KINDS}


@pytest.fixture(scope="module")
def clip(bundles: dict[str, Path]) -> ImageEncoder:
    return load_image_encoder(bundles["clip vision projection"], threads=1, max_batch=4)


def _picture(width: int, height: int, mode: str = "RGB") -> Image.Image:
    values = np.random.default_rng(width).integers(0, 256, (height, width, 3), np.uint8)
    return Image.fromarray(values).resize((width, height), Image.Resampling.BILINEAR).convert(mode)


def _assert_near(found: np.ndarray, wanted: Any) -> None:
    wanted = np.asarray(wanted)
    assert found.dtype == np.float32
    assert found.shape == wanted.shape
    assert np.abs(found - wanted).max() / np.abs(wanted).max() < RELATIVE_TOLERANCES["checkpoint", "float32"]


def test_b132_vectors_equal_transformers_whatever_the_sizes_and_the_order(clip: ImageEncoder) -> None:
    model = make_vision("clip vision projection")
    batches = [make_pixels(5, 32, 32), make_pixels(1, 40, 24), make_pixels(2, 16, 16)]
    for pixels in batches:
        _assert_near(clip.encode_images(pixels.numpy()), reference_outputs("clip vision projection", model, pixels)[1])
    order = [2, 7, 0, 5, 1, 6, 3, 4]
    images = [image for pixels in batches for image in pixels]
    wanted = torch.cat([reference_outputs("clip vision projection", model, images[index][None])[1] for index in order])
    _assert_near(clip.encode_images([images[index].numpy() for index in order], batch_size=3), wanted)
    states = clip.hidden_states([images[0].numpy(), images[5].numpy()])
    assert [len(state) for state in states] == [17, 16]
    with pytest.raises(AssertionError):
        _assert_near(clip.encode_images([images[index].numpy() for index in order[::-1]]), wanted)


def test_vectors_are_normalised_on_request(clip: ImageEncoder) -> None:
    pixels = make_pixels(3, 32, 32).numpy()
    plain = clip.encode_images(pixels)
    assert np.abs(np.linalg.norm(plain, axis=1) - 1).min() > 1e-2
    _assert_near(clip.encode_images(pixels, normalize=True), plain / np.linalg.norm(plain, axis=1, keepdims=True))


def test_labels_and_probabilities_equal_transformers(bundles: dict[str, Path]) -> None:
    pixels = make_pixels(3, 32, 32)
    logits = reference_outputs("vit classifier", make_vision("vit classifier"), pixels)[1]
    assert logits is not None
    with load(bundles["vit classifier"]) as model:
        assert isinstance(model, ImageEncoder)
        assert model.labels == ("cat", "dog", "a bird", "none", "Größe")
        _assert_near(model.classify_images(pixels.numpy()), logits.softmax(-1))
        with pytest.raises(ValueError, match="no vector an image; use classify_images"):
            model.encode_images(pixels.numpy())
        with pytest.raises(
            ValueError, match=r"40 x 24 is not of the size 32 x 32 that was fixed.*without --image-size"
        ):
            model.classify_images(make_pixels(1, 40, 24).numpy())
    with pytest.raises(RuntimeError, match="this ImageEncoder is closed"):
        model.classify_images(pixels.numpy())


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"size": {"height": 40, "width": 24}, "do_center_crop": False, "resample": 2},
        {"size": {"shortest_edge": 20}, "resample": 1},  # smaller than the crop: zeros around it
        {"do_resize": False, "crop_size": {"height": 24, "width": 40}},
        {"do_normalize": False, "resample": 0},
        {"do_rescale": False},
    ],
)
def test_pictures_become_the_pixels_of_the_slow_image_processor(changes: dict[str, Any]) -> None:
    values = {**PREPROCESSING, **changes}
    recipe = read_preprocessing(values, "CLIP", [])
    assert recipe is not None
    processor = CLIPImageProcessorPil(**values)
    for picture in (_picture(57, 41), _picture(33, 90), _picture(41, 41, "L"), _picture(38, 50, "RGBA")):
        wanted = processor(picture, return_tensors="np")["pixel_values"][0]
        assert np.array_equal(picture_pixels(picture, recipe, channels=3, name="it"), wanted.astype(np.float32))


@pytest.mark.parametrize(
    "processor",
    [ViTImageProcessorPil, DeiTImageProcessorPil, CLIPImageProcessorPil, BitImageProcessorPil, SiglipImageProcessorPil],
)
@pytest.mark.parametrize("stated", [{}, {"size": 40}])
def test_what_an_old_file_leaves_out_is_what_its_class_does(processor: Any, stated: dict[str, Any]) -> None:
    """Files of old versions name neither do_rescale nor do_convert_rgb, and a size by one number."""
    name = processor.__name__.removesuffix("ImageProcessorPil")
    recipe = read_preprocessing({"feature_extractor_type": f"{name}FeatureExtractor", **stated}, "ViT", [])
    assert recipe is not None
    wanted = processor(**stated)(_picture(57, 41), return_tensors="np")["pixel_values"][0]
    assert np.array_equal(picture_pixels(_picture(57, 41), recipe, channels=3, name="it"), wanted.astype(np.float32))


def test_files_and_pictures_are_encoded(clip: ImageEncoder, tmp_path: Path) -> None:
    picture = _picture(57, 41)
    picture.save(tmp_path / "it.png")
    pixels = CLIPImageProcessorPil(**PREPROCESSING)(picture, return_tensors="np")["pixel_values"]
    wanted = clip.encode_images(pixels.astype(np.float32))
    turned = picture.transpose(Image.Transpose.ROTATE_90)
    exif = turned.getexif()
    exif[0x0112] = 6  # cameras store pictures lying, and how to turn them
    turned.save(tmp_path / "turned.png", exif=exif)
    found = clip.encode_images([tmp_path / "it.png", picture, str(tmp_path / "turned.png")])
    _assert_near(found, np.repeat(wanted, 3, 0))


def test_pictures_that_cannot_be_read_are_refused(
    clip: ImageEncoder, bundles: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "torn.png").write_bytes(b"\x89PNG\r\n\x1a\nno")
    with pytest.raises(ValueError, match="image 0 cannot be read as a picture"):
        clip.encode_images([tmp_path / "torn.png"])
    with pytest.raises(ValueError, match=r"image 1 cannot be read as a picture: .*missing\.png"):
        clip.encode_images([_picture(40, 40), tmp_path / "missing.png"])
    with pytest.raises(ValueError, match=r"image 0 cannot be read as a picture: .*null"):
        clip.encode_images(["a\0b.png"])
    _picture(40, 40).save(tmp_path / "cut.png")
    (tmp_path / "cut.png").write_bytes((tmp_path / "cut.png").read_bytes()[:-40])
    with (
        Image.open(tmp_path / "cut.png") as opened,
        pytest.raises(ValueError, match=r"image 0 cannot be read as a picture: .*truncated"),
    ):
        clip.encode_images([opened])
    closed = _picture(40, 40)
    closed.close()
    with pytest.raises(ValueError, match="image 0 cannot be read as a picture: Operation on closed image"):
        clip.encode_images([closed])
    with pytest.raises(ValueError, match="image 1 has no pixel: its size is 0 x 5"):
        clip.encode_images([_picture(40, 40), Image.new("RGB", (0, 5))])
    for large in (Image.new("1", (8_000, 8_001)), tmp_path / "large.png"):
        if isinstance(large, Path):
            Image.new("1", (100_000, 1_000)).save(large)
        with pytest.raises(ValueError, match=r"image 0 has \d+ x \d+ pixels, more than 64,000,000; make it smaller"):
            clip.encode_images([large])
    with load_image_encoder(bundles["siglip no head"]) as other:
        with pytest.raises(ValueError, match=r"exported without preprocessor_config\.json"):
            other.encode_images([_picture(32, 32)]) if other.image.readout else other.hidden_states([_picture(32, 32)])
        with pytest.raises(ValueError, match="no vector an image; use hidden_states"):
            other.encode_images(make_pixels(1, 32, 32).numpy())
    monkeypatch.setitem(__import__("sys").modules, "PIL", None)
    with pytest.raises(ModuleNotFoundError, match=r"pictures need Pillow: pip install 'graphport\[vision\]'"):
        clip.encode_images(["it.png"])


@pytest.mark.parametrize(
    ("images", "error", "reason"),
    [
        (np.zeros((3, 32, 32), np.float32), ValueError, r"images must be an array \[n, channels, height, width\]"),
        ("it.png", TypeError, r"images must be an array or a list, got str; use \[image\]"),
        ([3], TypeError, "image 0 is of type int; give a float32 array"),
        (np.zeros((1, 3, 32, 32), np.uint8), TypeError, "image 0 is of type uint8; pixels are float32"),
        (np.zeros((1, 1, 32, 32), np.float32), ValueError, r"image 0 is an array \[1, 32, 32\]; needed is \[3, height"),
        (np.zeros((1, 3, 36, 32), np.float32), ValueError, "36 x 32 is no whole number of patches of 8 x 8; resize"),
        (np.zeros((1, 3, 40, 32), np.float32), ValueError, r"has 21 tokens, more than max_length \(17\)"),
        (np.full((1, 3, 32, 32), np.nan, np.float32), ValueError, "image 0 holds values that are not finite"),
    ],
)
def test_images_that_cannot_be_encoded_are_refused(
    images: Any, error: type[Exception], reason: str, clip: ImageEncoder
) -> None:
    with pytest.raises(error, match=reason):
        clip.encode_images(images)


def test_switches_are_true_or_false(clip: ImageEncoder, bundles: dict[str, Path]) -> None:
    with pytest.raises(TypeError, match=r"normalize must be True or False; got 'x' \(str\)"):
        clip.encode_images(make_pixels(1, 32, 32).numpy(), normalize="x")  # type: ignore[arg-type]  # what may be passed
    with pytest.raises(TypeError, match=r"strict must be True or False; got 1 \(int\)"):
        load(bundles["clip vision projection"], strict=1)  # type: ignore[arg-type]  # as above


def test_no_image_gives_no_vector_and_threads_share_an_encoder(clip: ImageEncoder) -> None:
    assert clip.encode_images([]).shape == (0, 20)
    pixels = make_pixels(5, 32, 32).numpy()
    wanted = clip.encode_images(pixels)
    with ThreadPoolExecutor(max_workers=4) as executor:
        for found in executor.map(lambda _: clip.encode_images(pixels), range(8)):
            assert np.array_equal(found, wanted)


def test_load_opens_what_the_manifest_says(bundles: dict[str, Path]) -> None:
    with load(bundles["clip vision projection"], max_batch=2, max_length=10) as opened:
        assert isinstance(opened, ImageEncoder)
        assert (opened.max_batch, opened.max_length, opened.dimension, opened.device) == (2, 10, 20, "cpu")
        with pytest.raises(ValueError, match=r"has 17 tokens, more than max_length \(10\)"):
            opened.encode_images(make_pixels(1, 32, 32).numpy())
        with pytest.raises(ValueError, match="batch_size must be 1 to 2"):
            opened.encode_images(make_pixels(1, 16, 16).numpy(), batch_size=3)
    with pytest.raises(ValueError, match="is an image encoder, which embeds no text; use encode_images"):
        load_encoder(bundles["clip vision projection"])
    with pytest.raises(ValueError, match=r"draft cannot be heeded: .* is an image encoder; leave it out"):
        load(bundles["clip vision projection"], draft="x")
    with pytest.raises(ValueError, match="cuda_graphs cannot be heeded"):
        load(bundles["clip vision projection"], cuda_graphs="always")  # type: ignore[arg-type]  # what a caller may pass
    with pytest.raises(ValueError, match="is an image encoder, which continues no text; use load, and encode_images"):
        load_language_model(bundles["clip vision projection"])


def test_the_command_line_exports_a_size_and_reports_it(tmp_path: Path) -> None:
    save_vision_folder(tmp_path / "source", make_vision("vit classifier"))
    source, out = str(tmp_path / "source"), str(tmp_path / "out")
    ran = CliRunner().invoke(
        app, ["export", source, out, "--precision", "fp32", "--image-size", "40x24", "--no-verify"]
    )
    assert ran.exit_code == 0, ran.output
    report = CliRunner().invoke(app, ["report", out])
    assert "40 x 24" in report.output
    assert "cat, dog, a bird, none" in report.output
    refused = CliRunner().invoke(app, ["export", source, out, "--image-size", "40x"])
    assert refused.exit_code == 2
