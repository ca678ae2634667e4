"""Encoder-decoders in the runtime: text in, languages, forced and forbidden ids, beams that are cancelled, bad input.

One mBART bundle with a tokenizer whose words are its ids; the reference is transformers' `generate`.
"""

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_encoder_decoders import END, LANGUAGES, START, language_tokenizer, make_encoder_decoder, source_ids
from typer.testing import CliRunner

from graphport.cli import app
from graphport.export.model_export import export
from graphport.model_def.checkpoint import load_checkpoint
from graphport.model_def.checkpoint_record import CheckpointError
from graphport.model_def.forced_tokens import ForcedTokens
from graphport.model_def.signature import MANIFEST_FILE, read_manifest
from graphport.runtime import LanguageModel, SamplingParams, load

TEXT = "word7 word30 word12 word9 word44"
IDS = [7, 30, 12, 9, 44, END, LANGUAGES["en_XX"]]
GREEDY = SamplingParams(max_new_tokens=8, temperature=0.0)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mbart")
    make_encoder_decoder("mbart").save_pretrained(folder)
    language_tokenizer().save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module")
def bundle(source: Path) -> Path:
    return export(source, source / "bundle", precision="fp32", verify=False).path


@pytest.fixture(scope="module")
def reference() -> Any:
    return make_encoder_decoder("mbart")


def forcing(bundle: Path, folder: Path, **changes: Any) -> Path:
    """The bundle with other forced ids in its manifest."""
    shutil.copytree(bundle, folder)
    manifest = read_manifest(folder)
    forced = manifest.generation.forced
    assert forced is not None
    generation = dataclasses.replace(manifest.generation, forced=dataclasses.replace(forced, **changes))
    text = dataclasses.replace(manifest, generation=generation).to_json()
    (folder / MANIFEST_FILE).write_text(text, encoding="utf-8")
    return folder


def generated(reference: Any, ids: list[int], **options: Any) -> list[int]:
    found = reference.generate(input_ids=torch.tensor([ids]), max_new_tokens=8, do_sample=False, **options)
    new: list[int] = found[0].tolist()[1:]
    return new[: new.index(END) + 1] if END in new else new


@pytest.fixture
def lm(bundle: Path) -> LanguageModel:
    return load(bundle, max_batch=4, threads=1)


def test_a_text_is_read_by_the_encoder(lm: LanguageModel, reference: Any) -> None:
    (output,) = lm.generate([TEXT], GREEDY)
    assert output.source_token_ids == tuple(IDS)
    assert list(output.token_ids) == generated(reference, IDS, num_beams=1)
    assert "".join(event.text for event in lm.stream(TEXT, GREEDY)) == output.text


def test_b128_languages_are_honoured_greedily_and_with_beams(lm: LanguageModel, reference: Any) -> None:
    french = [*IDS[:-1], LANGUAGES["fr_XX"]]
    for num_beams in (1, 3):
        params = dataclasses.replace(GREEDY, num_beams=num_beams)
        (output,) = lm.generate([TEXT], params, language="de_DE", source_language="fr_XX")
        assert output.source_token_ids == tuple(french)
        expected = generated(reference, french, num_beams=num_beams, forced_bos_token_id=LANGUAGES["de_DE"])
        assert list(output.token_ids) == expected
        assert output.token_ids[0] == LANGUAGES["de_DE"]


def test_b128_a_forced_first_id_comes_first_however_ids_are_chosen(bundle: Path, tmp_path: Path) -> None:
    folder = forcing(bundle, tmp_path / "forced", first=7, last=None)
    with load(folder, max_batch=4, threads=1) as lm:
        for params in (GREEDY, SamplingParams(max_new_tokens=4, seed=3, n=4), dataclasses.replace(GREEDY, num_beams=4)):
            for output in lm.generate([TEXT, source_ids(9)], params):
                assert all(sample.token_ids[0] == 7 for sample in output.samples)


def test_a_text_that_fills_its_limit_ends_with_the_forced_end(lm: LanguageModel) -> None:
    outputs = lm.generate([source_ids(5), source_ids(6)], SamplingParams(max_new_tokens=2, seed=0))
    assert all(output.token_ids[-1] == END for output in outputs)
    (free,) = lm.generate([source_ids(5)], SamplingParams(max_new_tokens=2, temperature=0.0, ignore_eos=True))
    assert len(free.token_ids) == 2


def test_suppressed_ids_and_bad_words_are_those_of_transformers(bundle: Path, reference: Any, tmp_path: Path) -> None:
    with load(bundle, threads=1) as lm:
        plain = list(lm.generate([IDS], GREEDY)[0].token_ids)
    rules = {"never": (plain[1],), "never_first": (plain[0],), "bad": ((plain[2], plain[3]), (plain[4],))}
    with load(forcing(bundle, tmp_path / "rules", **rules), max_batch=3, threads=1) as lm:
        for num_beams in (1, 3):
            expected = generated(
                reference,
                IDS,
                num_beams=num_beams,
                suppress_tokens=[plain[1]],
                begin_suppress_tokens=[plain[0]],
                bad_words_ids=[[plain[2], plain[3]], [plain[4]]],
            )
            params = dataclasses.replace(GREEDY, num_beams=num_beams)
            assert list(lm.generate([IDS], params)[0].token_ids) == expected != plain


def test_penalties_reach_beams_as_in_transformers(lm: LanguageModel, reference: Any) -> None:
    params = dataclasses.replace(GREEDY, num_beams=3, repetition_penalty=1.7)
    expected = generated(reference, IDS, num_beams=3, repetition_penalty=1.7)
    assert list(lm.generate([IDS], params)[0].token_ids) == expected
    assert expected != generated(reference, IDS, num_beams=3)


def test_beams_of_several_prompts_share_a_batch_with_other_requests(bundle: Path) -> None:
    beams, plain = dataclasses.replace(GREEDY, num_beams=3), GREEDY
    prompts = [source_ids(length) for length in (4, 12, 7)]
    with load(bundle, max_batch=7, threads=1) as lm:
        alone = [
            lm.generate([prompt], params)[0] for prompt, params in zip(prompts, (beams, plain, beams), strict=True)
        ]
        assert lm.generate(prompts, [beams, plain, beams]) == alone


def test_a_search_that_runs_out_of_time_is_cancelled_as_a_whole(lm: LanguageModel) -> None:
    (output,) = lm.generate([IDS], dataclasses.replace(GREEDY, num_beams=3), timeout=1e-9)
    assert output.finish_reason == "cancelled"
    assert lm.generate([IDS], GREEDY)[0].finish_reason in ("stop", "length")  # its places are free again


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ("", {}, "prompt 0 is empty: there is nothing to read; give a text"),
        (" \n", {}, "prompt 0 is empty"),
        ([], {}, r"prompt 0 \(a source\) is empty"),
        ([5] * 73, {}, r"prompt 0 \(a source\) has 73 tokens, more than max_length \(72\)"),
        ([5, 67], {}, "has id 67, outside the vocabulary: ids are 0 to 66"),
        (TEXT, {"language": "xx_XX"}, "language 'xx_XX' is unknown: one of de_DE, en_XX, fr_XX"),
        (TEXT, {"source_language": "de"}, "source_language 'de' is unknown: one of de_DE"),
        ([5, 6], {"source_language": "de_DE"}, "prompt 0 has no language among its ids"),
        (TEXT, {"keep_state": True}, "rows of an encoder-decoder belong to one source"),
    ],
)
def test_bad_input_is_refused_in_one_line(
    lm: LanguageModel, prompt: Any, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        lm.generate([prompt], GREEDY, **options)


def test_what_only_decoders_do_is_refused(lm: LanguageModel, bundle: Path) -> None:
    with pytest.raises(ValueError, match="this model reads a source first"):
        lm.logits([[1, 2]])
    with pytest.raises(ValueError, match="chat is for decoders"):
        lm.chat([{"role": "user", "content": "hello"}])
    with pytest.raises(ValueError, match="beam search cannot be streamed"):
        lm.stream(TEXT, dataclasses.replace(GREEDY, num_beams=2))
    with pytest.raises(ValueError, match="num_beams=5, which need as many places in the batch; there are 4"):
        lm.generate([TEXT], dataclasses.replace(GREEDY, num_beams=5))
    with pytest.raises(ValueError, match="prefix_cache_bytes and prompt_lookup cannot be heeded by an encoder-decoder"):
        load(bundle, prefix_cache_bytes=1, prompt_lookup=True)
    with pytest.raises(
        ValueError, match=r"prefill_products='float32' cannot be heeded by .*: it is an encoder-decoder"
    ):
        load(bundle, prefill_products="float32")
    with pytest.raises(ValueError, match="cuda_graphs cannot be heeded by an encoder-decoder"):
        load(bundle, cuda_graphs="always")  # type: ignore[arg-type]  # what a caller may pass


def test_a_target_that_nothing_names_must_be_given(source: Path, bundle: Path, tmp_path: Path) -> None:
    folder = tmp_path / "source"
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("bundle"))
    for name in ("config.json", "generation_config.json"):
        values = json.loads((folder / name).read_text(encoding="utf-8"))
        values.pop("decoder_start_token_id")
        (folder / name).write_text(json.dumps(values), encoding="utf-8")
    forced = load_checkpoint(folder).generation.forced
    assert forced is not None
    assert (forced.needs_language, forced.names_target) == (True, "start")
    changes = {"start": forced.start, "needs_language": True, "names_target": "start"}
    with load(forcing(bundle, tmp_path / "bundle", **changes), threads=1) as lm:
        with pytest.raises(ValueError, match="prompt 0 names no language to translate to; give language, one of de_DE"):
            lm.generate([TEXT], GREEDY)
        assert lm.generate([TEXT], GREEDY, language="fr_XX")[0].prompt_token_ids == (LANGUAGES["fr_XX"],)


def test_several_forced_first_ids_are_refused(source: Path, tmp_path: Path) -> None:
    shutil.copytree(source, tmp_path / "source", ignore=shutil.ignore_patterns("bundle"))
    path = tmp_path / "source/generation_config.json"
    values = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({**values, "forced_bos_token_id": [4, 5]}), encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"forced_bos_token_id \[4, 5\] names several ids; one can be forced"):
        load_checkpoint(tmp_path / "source")
    with pytest.raises(ValueError, match="token ids must be whole numbers from 0, got -1"):
        ForcedTokens(start=(START,), never=(-1,))


def test_generate_translates_on_the_command_line(bundle: Path, lm: LanguageModel) -> None:
    arguments = ["generate", str(bundle), TEXT, "--max-new-tokens", "8", "--language", "de_DE"]
    for beams in ([], ["--num-beams", "3", "--length-penalty", "0.6"]):
        result = CliRunner().invoke(app, [*arguments, *beams, "--json"])
        assert result.exit_code == 0, result.output
        params = dataclasses.replace(GREEDY, num_beams=3, length_penalty=0.6) if beams else GREEDY
        (expected,) = lm.generate([TEXT], params, language="de_DE")
        found = json.loads(result.stdout)
        assert found["token_ids"] == list(expected.token_ids)
        assert found["prompt_tokens"] == len(IDS)


def test_sources_survive_growth_and_moves_of_slots(bundle: Path) -> None:
    rng = np.random.default_rng(0)
    prompts = [source_ids(int(length), seed=7) for length in rng.integers(1, 72, size=9)]
    params = [dataclasses.replace(GREEDY, max_new_tokens=int(new)) for new in rng.integers(1, 9, size=9)]
    with load(bundle, max_batch=4, threads=1) as lm:
        together = lm.generate(prompts, params)
    with load(bundle, max_batch=1, threads=1) as lm:
        assert [lm.generate([p], q)[0] for p, q in zip(prompts, params, strict=True)] == together
