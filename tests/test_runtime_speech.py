"""A model that hears in the runtime: features, recordings, what a text begins with, marks of time, bad input.

One bundle; the reference is transformers' feature extractor and `generate`.
"""

import dataclasses
import json
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
from parity import TOLERANCES, assert_parity
from tiny_checkpoints import edit_json
from tiny_encoder_decoders import (
    END,
    MEL_BINS,
    NO_TIMESTAMPS,
    POSITIONS,
    SPOKEN,
    START,
    TASKS,
    features,
    make_encoder_decoder,
    source_input,
)
from tiny_speech import RATE, recording, reference_features, save_speech_folder
from transformers import WhisperFeatureExtractor
from typer.testing import CliRunner

from graphport.cli import app, main
from graphport.export.model_export import export
from graphport.model_def.checkpoint import CheckpointError, load_checkpoint
from graphport.model_def.speech_tokens import SpeechTokens
from graphport.runtime import GenerationOutput, LanguageModel, SamplingParams, load
from graphport.runtime.audio_features import log_mel_features

GREEDY = SamplingParams(max_new_tokens=12, temperature=0.0)
SOUND = recording(9_000)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whisper")
    save_speech_folder(folder)
    return folder


@pytest.fixture(scope="module")
def reference() -> Any:
    return make_encoder_decoder("whisper")


@pytest.fixture(scope="module")
def bundle(source: Path) -> Path:
    return export(source, source / "bundle", precision="fp32", verify=False).path


@pytest.fixture(scope="module")
def lm(bundle: Path) -> Iterator[LanguageModel]:
    with load(bundle, max_batch=4, threads=1) as opened:
        assert isinstance(opened, LanguageModel)
        yield opened


def generated(reference: Any, heard: np.ndarray, **options: Any) -> list[int]:
    """All of transformers' ids, with what the text begins with."""
    single = {"force_unique_generate_call": True, "return_dict_in_generate": True}
    found = reference.generate(**source_input(heard), max_new_tokens=12, do_sample=False, **single, **options)
    ids: list[int] = found.sequences[0].tolist()
    return ids[: ids.index(END) + 1] if END in ids else ids


def all_ids(output: GenerationOutput) -> list[int]:
    return [*output.prompt_token_ids, *output.token_ids]


@pytest.mark.parametrize(("bands", "seconds"), [(80, 1), (128, 30)])
def test_features_equal_those_of_transformers(bands: int, seconds: int) -> None:
    make = WhisperFeatureExtractor(feature_size=bands, chunk_length=seconds)
    for length in (1, 159, 9_000, RATE * seconds):
        sound = recording(length)
        expected = np.asarray(make(sound, sampling_rate=RATE)["input_features"])[0]
        found = log_mel_features(sound, mel_bins=bands, max_positions=50 * seconds)
        assert_parity(found, expected, "log-mel features")
    late = log_mel_features(np.roll(sound, 80), mel_bins=bands, max_positions=50 * seconds)
    assert np.abs(late - expected).max() > 100 * TOLERANCES["log-mel features", "float32"]


def test_a_recording_is_heard_as_its_features_are(lm: LanguageModel, reference: Any) -> None:
    spoken, given = lm.generate([(SOUND, RATE), reference_features(SOUND)], GREEDY, language="de")
    assert spoken.token_ids == given.token_ids
    assert spoken.prompt_token_ids == (START, SPOKEN["de"], TASKS["transcribe"], NO_TIMESTAMPS)
    assert all_ids(spoken) == generated(reference, reference_features(SOUND), language="de")
    assert spoken.text


def test_files_channels_and_rates_are_heard(lm: LanguageModel, tmp_path: Path) -> None:
    for name, values, rate in (
        ("mono.wav", SOUND, RATE),
        ("stereo.flac", np.stack([SOUND * 1.5, SOUND * 0.5], axis=1), RATE),
    ):
        soundfile.write(tmp_path / name, values, rate, subtype="PCM_24")
    expected = lm.generate([(SOUND, RATE)], GREEDY, language="en")[0]
    for prompt in (tmp_path / "mono.wav", str(tmp_path / "stereo.flac"), (np.stack([SOUND, SOUND], axis=1), RATE)):
        assert lm.generate([prompt], GREEDY, language="en")[0].token_ids == expected.token_ids
    time = np.arange(24_000) / 48_000
    low, high = ((0.3 * np.sin(2 * np.pi * 440 * t)).astype(np.float32) for t in (time[::3], time))
    expected = lm.generate([(low, RATE)], GREEDY, language="en")[0]
    assert lm.generate([(high, 48_000)], GREEDY, language="en")[0].token_ids == expected.token_ids


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"repetition_penalty": 1.7}])
def test_the_language_that_is_not_named_is_heard(lm: LanguageModel, reference: Any, options: dict[str, Any]) -> None:
    params = dataclasses.replace(GREEDY, **options)
    heard = [features(seed) for seed in range(17, 21)]
    outputs = lm.generate(heard, params)
    with torch.inference_mode():
        languages = reference.detect_language(torch.from_numpy(np.stack(heard))).tolist()
    assert len(set(languages)) > 1
    assert [output.prompt_token_ids for output in outputs] == [(START, id_, NO_TIMESTAMPS) for id_ in languages]
    for output, sound in zip(outputs, heard, strict=True):
        assert all_ids(output) == generated(reference, sound, **options)


@pytest.mark.parametrize("num_beams", [1, 3])
def test_b128_tasks_and_marks_of_time_are_those_of_transformers(
    lm: LanguageModel, reference: Any, num_beams: int
) -> None:
    params = dataclasses.replace(GREEDY, num_beams=num_beams)
    for seed in range(30, 34):
        heard = features(seed)
        (output,) = lm.generate([heard], params, language="fr", task="translate", timestamps=True)
        asked = {"language": "fr", "task": "translate", "num_beams": num_beams}
        expected = generated(reference, heard, return_timestamps=True, **asked)
        assert output.prompt_token_ids == (START, SPOKEN["fr"], TASKS["translate"])
        assert all_ids(output) == expected != generated(reference, heard, **asked)
        assert NO_TIMESTAMPS < output.token_ids[0] <= NO_TIMESTAMPS + 6  # a mark, within the first five after 0.00
        assert output.text.startswith("<|0.")


def test_suppressed_ids_never_come_however_ids_are_chosen(lm: LanguageModel) -> None:
    params = SamplingParams(max_new_tokens=20, temperature=3.0, seed=1, n=4, ignore_eos=True)
    for output in lm.generate([(SOUND, RATE)], params, language="en"):
        for sample in output.samples:
            assert sample.token_ids[0] not in (END, 7)
            assert not {9, 11, START, *SPOKEN.values(), *TASKS.values()} & set(sample.token_ids)


def test_old_checkpoints_say_language_and_task_by_place() -> None:
    ids = {"tasks": TASKS, "no_timestamps": NO_TIMESTAMPS}
    open_language = SpeechTokens(forced=(None, TASKS["transcribe"]), **ids)
    named = SpeechTokens(forced=(SPOKEN["en"], TASKS["translate"], NO_TIMESTAMPS), **ids)
    english = SpeechTokens(forced=(NO_TIMESTAMPS,), no_timestamps=NO_TIMESTAMPS)

    def begin(tokens: SpeechTokens, languages: dict[str, int], **asked: Any) -> tuple[int | None, ...]:
        return tokens.beginning(START, languages, **{"language": None, "task": None, "timestamps": False, **asked})

    assert begin(open_language, SPOKEN) == (START, None, 65, 66)
    assert begin(open_language, SPOKEN, language="de") == (START, 62, 65, 66)
    assert begin(open_language, SPOKEN, task="translate", timestamps=True) == (START, None, 64)
    assert begin(named, SPOKEN) == (START, 61, 64, 66)
    assert begin(named, SPOKEN, timestamps=True) == (START, 61, 64)
    assert begin(english, {}) == (START, 66)
    assert begin(english, {}, timestamps=True) == (START,)


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        (
            (np.zeros(16_001, np.float32), RATE),
            {},
            r"prompt 0 is 1\.00006 s long, and the model hears 1 s at once; cut",
        ),
        ((np.zeros(0, np.float32), RATE), {}, "prompt 0 is empty: there is nothing to hear"),
        ((np.full(9, np.nan, np.float32), RATE), {}, "prompt 0 holds samples that are not finite"),
        ((SOUND * np.float32(32767), RATE), {}, r"prompt 0 reaches \d+\.\d+, and samples lie between -1 and 1; divide"),
        ((np.full(900, -1e300), 8_000), {}, r"prompt 0 reaches 1e\+300, and samples lie between -1 and 1"),
        ((np.full((900, 2), 3e38, np.float32), RATE), {}, r"prompt 0 reaches 3e\+38"),
        ("a" * 5000, {}, "prompt 0: no file at 'aaa"),
        ((np.zeros((2, 900), np.float32), RATE), {}, r"prompt 0 is an array \[2, 900\]; samples are \[n\] or"),
        ((SOUND, 0), {}, "prompt 0 has the sampling rate 0; it must lie in 1000"),
        ("nowhere.wav", {}, "prompt 0: no file at 'nowhere.wav'"),
        (str(Path(__file__).parent), {}, "prompt 0: .* is a folder; give the path of a WAV or FLAC file"),
        (__file__, {}, "cannot be read as a recording"),
        (SOUND, {}, r"prompt 0 is an array of float32 \[9000\]; features are float32 \[80, 100\]"),
        (np.full((MEL_BINS, 2 * POSITIONS), np.inf, np.float32), {}, "prompt 0 holds features that are not finite"),
        ((SOUND, RATE), {"language": "xx"}, "language 'xx' is unknown: one of de, en, fr"),
        ((SOUND, RATE), {"task": "sing"}, "task 'sing' is unknown: one of transcribe, translate"),
        ((SOUND, RATE), {"source_language": "de"}, "source_language is for models that translate text"),
    ],
)
def test_bad_input_is_refused_in_one_line(
    lm: LanguageModel, prompt: Any, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        lm.generate([prompt], GREEDY, **options)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([1, 2, 3], "prompt 0 is of type list; give a recording: the path of a WAV or FLAC file"),
        (((SOUND * 32767).astype(np.int16), RATE), "prompt 0 holds an array of int16; samples are an array of floats"),
        ((SOUND, 16e3), "prompt 0 has the sampling rate 16000.0; it is a whole number"),
    ],
)
def test_what_is_no_recording_is_refused(lm: LanguageModel, prompt: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        lm.generate([prompt], GREEDY)


def _wav(path: Path, *, counted: int) -> Path:
    """SOUND as 16-bit samples, whose header counts `counted` bytes of them."""
    samples = (SOUND * 32767).astype("<i2").tobytes()
    form = struct.pack("<IHHIIHH", 16, 1, 1, RATE, 2 * RATE, 2, 16)
    head = b"RIFF" + struct.pack("<I", min(36 + counted, 2**32 - 1)) + b"WAVEfmt " + form
    path.write_bytes(head + b"data" + struct.pack("<I", counted) + samples)
    return path


def test_a_torn_recording_is_refused_with_both_numbers(lm: LanguageModel, tmp_path: Path) -> None:
    whole = lm.generate([_wav(tmp_path / "whole.wav", counted=2 * len(SOUND))], GREEDY)
    torn = _wav(tmp_path / "torn.wav", counted=20 * len(SOUND))
    counts = f"counts {20 * len(SOUND)} bytes of samples, {2 * len(SOUND)} are there; copy it again"
    with pytest.raises(ValueError, match=rf"prompt 0: .*torn\.wav' is torn: its header {counts}"):
        lm.generate([torn], GREEDY)
    streamed = _wav(tmp_path / "streamed.wav", counted=2**32 - 1)  # as ffmpeg writes into a pipe
    assert lm.generate([streamed], GREEDY) == whole
    soundfile.write(tmp_path / "cut.aiff", SOUND, RATE)
    (tmp_path / "cut.aiff").write_bytes((tmp_path / "cut.aiff").read_bytes()[:-5000])
    with pytest.raises(ValueError, match=r"cut\.aiff' is torn: its header counts \d+ bytes of samples, \d+ are there"):
        lm.generate([tmp_path / "cut.aiff"], GREEDY)
    soundfile.write(tmp_path / "cut.flac", SOUND, RATE)
    (tmp_path / "cut.flac").write_bytes((tmp_path / "cut.flac").read_bytes()[:-5000])
    with pytest.raises(ValueError, match=r"cut\.flac' cannot be read as a recording"):
        lm.generate([tmp_path / "cut.flac"], GREEDY)


@pytest.mark.parametrize("module", ["soundfile", "soxr", "kaldi_native_fbank"])
def test_what_is_not_installed_is_named_with_the_command(
    lm: LanguageModel, module: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    soundfile.write(tmp_path / "a.wav", SOUND[:4_000], 8_000)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'graphport\[audio\]'"):
        lm.generate([tmp_path / "a.wav"], GREEDY)
    assert lm.generate([features(0)], GREEDY)[0].token_ids


@pytest.mark.parametrize(
    ("file", "changes", "message"),
    [
        ("preprocessor_config.json", {"hop_length": 80}, "hop_length = 80"),
        ("preprocessor_config.json", {"feature_size": 128}, "feature_size = 128"),
        ("preprocessor_config.json", {"do_normalize": True}, "do_normalize = True"),
        ("generation_config.json", {"lang_to_id": {"<|en|>": 500}}, "names id 500, beyond a vocabulary of 80"),
        ("generation_config.json", {"language": "xx"}, "language 'xx' is none of lang_to_id"),
        ("generation_config.json", {"forced_decoder_ids": [[2, 61]]}, "must name the places 1, 2, ... in order"),
        ("generation_config.json", {"return_timestamps": True, "no_timestamps_token_id": None}, "timestamps need"),
    ],
)
def test_folders_that_hear_otherwise_are_refused_by_name(
    source: Path, tmp_path: Path, file: str, changes: dict[str, Any], message: str
) -> None:
    for path in source.iterdir():
        if path.is_file():
            (tmp_path / path.name).write_bytes(path.read_bytes())
    edit_json(tmp_path / file, lambda values: values.update(changes))
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(tmp_path)


def test_transcribe_writes_down_a_file(bundle: Path, lm: LanguageModel, tmp_path: Path) -> None:
    soundfile.write(tmp_path / "a.wav", SOUND, RATE, subtype="FLOAT")
    for more, asked in (([], {}), (["--language", "de", "--timestamps"], {"language": "de", "timestamps": True})):
        command = ["transcribe", str(bundle), str(tmp_path / "a.wav"), "--max-new-tokens", "12", *more, "--json"]
        result = CliRunner().invoke(app, command)
        assert result.exit_code == 0, result.output
        (expected,) = lm.generate([(SOUND, RATE)], GREEDY, **asked)
        found = json.loads(result.stdout)
        assert (found["token_ids"], found["text"]) == (list(expected.token_ids), expected.text)


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["generate", "BUNDLE", "a text"], "this model hears, and reads no text; use `graphport transcribe"),
        (["bench", "BUNDLE"], "bench gives random ids, and"),
        (["diff", "BUNDLE", "BUNDLE"], "is an encoder-decoder, and diff feeds a text alone; use `graphport verify"),
        (["report", "BUNDLE", "--times", "--html", "page.html"], "is an encoder-decoder, of which no times are taken"),
        (["serve", "BUNDLE"], "is an encoder-decoder, for which there is no route"),
        (["tune", "BUNDLE"], "only decoders for cpu are tuned"),
        (["prepare", "BUNDLE"], "only decoders are packed"),
        (["chat", "BUNDLE"], "is an encoder-decoder, and chat is for decoders; use `graphport generate`"),
        (["eval", "BUNDLE", "text.txt"], "this model reads a source first"),
    ],
)
def test_what_a_model_that_hears_cannot_do_is_refused_in_one_line(
    bundle: Path,
    command: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("word1 " * 200, encoding="utf-8")
    assert main([str(bundle) if word == "BUNDLE" else word for word in command]) == 1
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("graphport: error: ")
    assert message in last
