"""The calibration text: the user's or the one that ships, cut into windows, and what is refused."""

from pathlib import Path

import numpy as np
import pytest
import tiny_tokenizers
import torch
from tiny_graphs import CONFIGS, make_config, make_model, tiny_model
from tiny_models import tiny_encoder_configs
from tokenizers import Tokenizer, processors
from torch import nn

from graphport.export.calibration import (
    FEWEST_IDS,
    MOST_IDS,
    MOST_WINDOWS,
    WINDOW,
    CalibrationError,
    calibration_ids,
    read_calibration,
)
from graphport.export.calibration_text import CALIBRATION_TEXT
from graphport.export.model_export import export
from graphport.export.second_moments import second_moments
from graphport.export.source import SourceModel
from graphport.export.targets import TargetError
from graphport.model_def.signature import GenerationDefaults


def opened(tokenizer: Tokenizer | None, *, vocab_size: int | None = None) -> SourceModel:
    size = vocab_size or (61 if tokenizer is None else tokenizer.get_vocab_size())
    return SourceModel(
        model=make_model(make_config(vocab_size=size)),
        generation=GenerationDefaults(),
        tokenizer_json=None if tokenizer is None else tokenizer.to_str(),
        chat_template=None,
        special_tokens={},
        source={},
        notes=(),
    )


@pytest.fixture(scope="module")
def with_bos() -> Tokenizer:
    tokenizer = tiny_tokenizers.byte_level()
    bos = tokenizer.token_to_id("<s>")
    eos = tokenizer.token_to_id("</s>")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", bos), ("</s>", eos)]
    )
    tokenizer.enable_truncation(128)  # as checkpoints may have
    return tokenizer


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    """All ids, with one added before them and one after."""
    whole = Tokenizer.from_str(tokenizer.to_str())
    whole.no_truncation()
    ids: list[int] = whole.encode(text).ids
    return ids


def test_windows_and_what_is_held_out_cover_the_text_once_and_begin_as_texts_do(with_bos: Tokenizer) -> None:
    found = calibration_ids(opened(with_bos), max_length=100, seed=0)
    bos, *ids, _ = encode(with_bos, CALIBRATION_TEXT)
    parts = [*found.windows, found.held_out]
    assert {part[0] for part in parts} == {bos}
    assert [i for part in parts for i in part[1:]] == ids[:MOST_IDS]
    assert max(map(len, parts)) == len(found.held_out) == 100
    assert not found.notes


def test_the_users_text_is_read_up_to_a_limit_and_said_so(with_bos: Tokenizer, tmp_path: Path) -> None:
    path = tmp_path / "mine.txt"
    path.write_text("Bread rises, and bread burns. " * 2000, encoding="utf-8")
    text = read_calibration(path)
    assert text is not None
    found = calibration_ids(opened(with_bos), text, max_length=4096, seed=0, name=str(path))
    assert sum(map(len, found.windows)) + len(found.held_out) == MOST_IDS + len(found.windows) + 1
    assert max(map(len, found.windows)) == WINDOW + 1
    total = len(encode(with_bos, text)) - 2
    assert found.notes == (f"calibrated on the first {MOST_IDS} of {total} tokens of {path}",)


def test_a_short_context_limits_the_windows(with_bos: Tokenizer) -> None:
    text = "Bread rises, and bread burns. " * 300
    found = calibration_ids(opened(with_bos), text, max_length=3, seed=0, name="mine.txt")
    assert len(found.windows) == MOST_WINDOWS - 1
    assert {len(window) for window in (*found.windows, found.held_out)} == {3}
    assert "first 512 of" in found.notes[0]


def test_without_a_tokenizer_that_fits_the_ids_are_random_and_seeded(with_bos: Tokenizer) -> None:
    for source in (opened(None), opened(with_bos, vocab_size=61)):
        found = calibration_ids(source, max_length=64, seed=3)
        assert found == calibration_ids(source, max_length=64, seed=3)
        assert found.windows != calibration_ids(source, max_length=64, seed=4).windows
        assert max(max(window) for window in found.windows) < 61


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, r"no file at .*text\.txt; --calibration names a text in UTF-8"),
        (b"", r"text\.txt is empty; needed are at least 256 tokens"),
        (b" \n\t ", r"text\.txt is empty"),
        (b"caf\xe9 au lait", r"text\.txt is no UTF-8: byte 0xE9 at position 3 \(line 1\); convert it"),
    ],
)
def test_a_text_that_is_none_is_refused_before_the_model_is_read(
    content: bytes | None, reason: str, tmp_path: Path
) -> None:
    path = tmp_path / "text.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(CalibrationError, match=reason):
        export(tmp_path / "no model here", tmp_path / "out", precision="int4", calibration=path)
    with pytest.raises(CalibrationError, match="is a folder; --calibration names one file"):
        read_calibration(tmp_path)


def test_a_text_that_is_too_short_or_cannot_be_read_says_what_is_needed(with_bos: Tokenizer) -> None:
    short = "Too short a text. "
    num_ids = len(encode(with_bos, short)) - 2
    with pytest.raises(CalibrationError, match=f"short.txt has {num_ids} tokens; needed are at least {FEWEST_IDS}"):
        calibration_ids(opened(with_bos), short, max_length=64, seed=0, name="short.txt")
    with pytest.raises(CalibrationError, match=r"short\.txt needs a tokenizer, which this source lacks"):
        calibration_ids(opened(None), short, max_length=64, seed=0, name="short.txt")
    with pytest.raises(CalibrationError, match=r"makes id \d+, the model's vocabulary has 61; leave --calibration out"):
        calibration_ids(opened(with_bos, vocab_size=61), short * 99, max_length=64, seed=0, name="short.txt")


def test_a_text_that_nothing_would_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text("Some text.", encoding="utf-8")
    with pytest.raises(TargetError, match="precision fp32 with a float cache reads none: leave --calibration out"):
        export(tiny_model("llama"), tmp_path / "out", precision="fp32", calibration=path)
    assert not (tmp_path / "out").exists()


ENCODERS = {name: config for name, config in tiny_encoder_configs().items() if config.relative_bias is not None}


@pytest.mark.parametrize("name", [*CONFIGS, *ENCODERS])
def test_second_moments_are_those_of_what_the_layers_read(name: str) -> None:
    model = tiny_model(name) if name in CONFIGS else make_model(ENCODERS[name])
    windows = ([3, 1, 4, 1, 5, 9], [2, 6, 5])
    inputs: dict[str, list[torch.Tensor]] = {}
    watched = {
        f"{path}.weight": part
        for path, part in model.named_modules()
        if isinstance(part, nn.Linear) and path.startswith("blocks.")
    }
    for path, part in watched.items():
        part.register_forward_pre_hook(lambda _, x, path=path: inputs.setdefault(path, []).append(x[0][0].detach()))
    with torch.no_grad():
        for window in windows:
            model(torch.tensor([window]))
    for part in watched.values():
        part._forward_pre_hooks.clear()
    moments = list(second_moments(model, windows))
    assert sorted(path for found in moments for path in found.names) == sorted(watched)
    groups = [tuple(path.split(".")[-2] for path in found.names) for found in moments]
    assert groups[0] == ("query", "key", "value")
    for found in moments:
        for path in found.names:
            x = torch.cat(inputs[path]).numpy()
            assert np.allclose(found.matrix, x.T @ x / len(x), rtol=1e-4, atol=1e-4)
    assert not any(part._forward_pre_hooks for part in watched.values())


def test_another_text_has_other_moments() -> None:
    model = tiny_model("llama")
    one, two = (next(second_moments(model, [ids])).matrix for ids in ([1, 2, 3], [1, 2, 4]))
    assert not np.allclose(one, two, rtol=1e-4, atol=1e-4)
