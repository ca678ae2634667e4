"""Text that follows a JSON schema, a regular expression or a grammar, row by row, or a refusal before any work."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from fake_cuda import on_fake_device
from sampling_bundles import write_sampling_bundle
from tiny_bundles import VOCAB, TinyBundle, write_tiny_bundle
from tiny_requests import greedy, num_steps, random_ids, seeded

from graphport.runtime import LanguageModel, SamplingParams, load
from graphport.runtime.constraints import ConstraintError, Grammars
from graphport.runtime.tokenizer import Tokenizer

END = 1  # the tokenizer's </s>

SCHEMA = {
    "type": "object",
    "properties": {
        "color": {"enum": ["red", "blue"]},
        "count": {"type": "integer", "minimum": 0, "maximum": 99},
        "flags": {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 3},
    },
    "required": ["color", "count", "flags"],
    "additionalProperties": False,
}
GRAMMAR = 'start: greeting " " NAME\ngreeting: "hello" | "goodbye"\nNAME: /[A-Z][a-z]{2,5}/'


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> TinyBundle:
    folder = tmp_path_factory.mktemp("constraints") / "bundle"
    return write_tiny_bundle(folder, tokenizer=True, eos_token_ids=(END,))


@pytest.fixture(scope="module")
def model(bundle: TinyBundle) -> LanguageModel:
    return load(bundle.folder, threads=1)


def sampled(seed: int, new: int = 100, **options: Any) -> SamplingParams:
    return SamplingParams(max_new_tokens=new, temperature=1.3, seed=seed, **options)


def assert_follows_schema(text: str) -> None:
    found = json.loads(text)
    assert list(found) == ["color", "count", "flags"]
    assert found["color"] in ("red", "blue")
    assert 0 <= found["count"] <= 99
    assert 1 <= len(found["flags"]) <= 3
    assert all(isinstance(flag, bool) for flag in found["flags"])
    assert text == json.dumps(found)  # one way to write it


@pytest.mark.parametrize("seed", range(6))
def test_json_follows_its_schema_and_ends_where_it_is_complete(model: LanguageModel, seed: int) -> None:
    for params in (greedy(100, json_schema=SCHEMA), sampled(seed, json_schema=json.dumps(SCHEMA))):
        (output,) = model.generate([random_ids(5, seed)], params)
        assert output.finish_reason == "stop"
        assert_follows_schema(output.text)
        assert END not in output.token_ids  # nothing may follow: no step is spent on the end id


@pytest.mark.parametrize("seed", range(6))
def test_text_follows_a_regular_expression_or_a_grammar(model: LanguageModel, seed: int) -> None:
    for options, pattern in (
        ({"regex": "[ab]{3}-(cat|dog)"}, "[ab]{3}-(cat|dog)"),
        ({"grammar": GRAMMAR}, "(hello|goodbye) [A-Z][a-z]{2,5}"),
    ):
        (output,) = model.generate([random_ids(4, seed)], sampled(seed, **options))
        assert output.finish_reason == "stop"
        assert re.fullmatch(pattern, output.text)
        events = list(model.stream(random_ids(4, seed), sampled(seed, **options)))
        assert "".join(event.text for event in events) == output.text


def test_without_the_constraint_the_text_does_not_follow(model: LanguageModel) -> None:
    """The model alone would not do it, so the tests above can fail."""
    for seed in range(6):
        (output,) = model.generate([random_ids(4, seed)], sampled(seed))
        assert not re.match("(hello|goodbye) [A-Z]|[ab]{3}-|{", output.text)


def test_an_open_end_is_left_to_the_model(model: LanguageModel) -> None:
    reasons = set()
    for seed in range(30):
        (output,) = model.generate([random_ids(4, seed)], sampled(seed, 12, regex="(a|b)+"))
        assert re.fullmatch("[ab]+", output.text)
        assert (output.token_ids[-1] == END) == (output.finish_reason == "stop")
        reasons.add(output.finish_reason)
    assert reasons == {"stop", "length"}


def test_a_limit_cuts_the_text(model: LanguageModel) -> None:
    (output,) = model.generate([[5]], greedy(3, json_schema=SCHEMA))
    assert output.finish_reason == "length"
    assert '{"color": "blue"'.startswith(output.text) or '{"color": "red"'.startswith(output.text)


def test_constrained_rows_and_others_do_not_change_each_other(model: LanguageModel) -> None:
    params = [
        greedy(40),
        sampled(1, json_schema=SCHEMA),
        seeded(2, 30),
        sampled(3, regex="[0-9]{4}"),
        sampled(4, grammar=GRAMMAR),
        greedy(20, json_schema=SCHEMA, repetition_penalty=1.2, logprobs=2),
    ]
    prompts = [random_ids(3 + i, i) for i in range(len(params))]
    alone = [model.generate([prompt], one)[0] for prompt, one in zip(prompts, params, strict=True)]
    together = model.generate(prompts, params)
    assert [output.token_ids for output in together] == [output.token_ids for output in alone]


def test_samples_of_one_prompt_follow_it_each_on_its_own(model: LanguageModel) -> None:
    (output,) = model.generate([[3]], sampled(0, json_schema=SCHEMA, n=4))
    for sample in output.samples:
        assert_follows_schema(sample.text)
    assert len({sample.text for sample in output.samples}) > 1


def test_drafts_do_not_lead_out_of_the_grammar(bundle: TinyBundle, model: LanguageModel) -> None:
    with load(bundle.folder, threads=1, draft=bundle.folder) as drafting:
        for seed in range(5):
            params = sampled(seed, json_schema=SCHEMA)
            assert drafting.generate([[seed + 2]], params)[0] == model.generate([[seed + 2]], params)[0]
        assert drafting.statistics.num_drafted > 0


def test_logprobs_are_those_of_the_model_and_not_of_what_is_allowed(model: LanguageModel) -> None:
    (free,) = model.generate([[7]], greedy(1, logprobs=VOCAB))
    (output,) = model.generate([[7]], greedy(1, regex="z", logprobs=0))
    assert free.logprobs is not None
    assert output.logprobs is not None
    token_id, logprob = output.token_ids[0], output.logprobs[0].logprob
    assert abs(dict(free.logprobs[0].top_logprobs)[token_id] - logprob) < 1e-6  # the very same row
    assert logprob < free.logprobs[0].logprob


def test_the_end_id_is_allowed_even_where_it_is_ignored(model: LanguageModel) -> None:
    (output,) = model.generate([[7]], greedy(50, regex="abc", ignore_eos=True))
    assert (output.text, output.finish_reason) == ("abc", "stop")


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"json_schema": {"type": "nonsense"}}, "json_schema cannot be followed: Invalid type: nonsense; change it"),
        ({"json_schema": {"type": "string", "format": "x"}}, "json_schema cannot be followed: Unknown format: x"),
        ({"json_schema": {"not": {}}}, "json_schema cannot be followed: "),
        ({"regex": "a("}, "regex cannot be followed: .*unclosed group"),
        ({"regex": "(?=a)b"}, "regex cannot be followed: .*look-around"),
        ({"grammar": "start: foo"}, 'grammar cannot be followed: .*unknown name: "foo"'),
        ({"grammar": "start: start"}, "grammar cannot be followed: no text completes it, as its rules name each other"),
        ({"grammar": "start: a\na: b\nb: a"}, "grammar cannot be followed: no text completes it"),
        ({"grammar": "hello"}, "grammar cannot be followed: .*Expected token"),
    ],
)
def test_what_cannot_be_followed_is_refused_by_name_in_one_line_before_any_work(
    model: LanguageModel, options: dict[str, Any], match: str
) -> None:
    before = num_steps(model)
    for call in (lambda p: model.generate([[1], [2]], p), lambda p: model.stream([1], p)):
        with pytest.raises(ValueError, match=match) as caught:
            call(greedy(5, **options))
        assert "\n" not in str(caught.value)
    assert num_steps(model) == before


def test_a_grammar_that_gets_too_large_ends_its_own_row_with_an_error(model: LanguageModel) -> None:
    params = [greedy(30, regex="(.*a.{1,200}){1,200}b(.*c.{1,300}){1,300}"), greedy(30)]
    alone = model.generate([[2]], greedy(30))[0]
    streams = [iter(model.stream([1 + i], one)) for i, one in enumerate(params)]
    try:
        for _ in streams[0]:
            pass
    except ConstraintError as error:
        assert "cannot be followed" in str(error)  # noqa: PT017 - both ends are right: it depends on llguidance's limits
    assert tuple(event.token_id for event in streams[1]) == alone.token_ids
    assert model.num_active == 0


def test_what_leaves_no_token_is_an_error_and_not_a_wrong_one(model: LanguageModel) -> None:
    assert model.tokenizer is not None
    (z,) = model.tokenizer.encode("z")
    with pytest.raises(
        ConstraintError, match="no token may come next: bad_words, logit_bias and the grammar leave none"
    ):
        model.generate([[1]], greedy(3, regex="z", bad_words=["z"]))
    assert model.generate([[1]], greedy(3, regex="z", logit_bias={z: -100}))[0].text == "z"
    assert model.num_active == 0


def test_without_llguidance_the_error_names_the_command(model: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    for options in ({"regex": "a"}, {"json_schema": SCHEMA}, {"grammar": GRAMMAR}):
        name = next(iter(options))
        match = f"{name} needs llguidance, which is not installed; do: pip install 'graphport\\[constrained\\]'"
        with pytest.raises(RuntimeError, match=match):
            model.generate([[1]], greedy(3, **options))  # type: ignore[arg-type]
    assert len(model.generate([[1]], greedy(3))[0].token_ids) == 3


def test_a_bundle_without_a_tokenizer_refuses_constraints(tmp_path: Path) -> None:
    with load(write_tiny_bundle(tmp_path).folder, threads=1) as lm:
        for options in ({"regex": "a"}, {"json_schema": SCHEMA}, {"grammar": GRAMMAR}, {"bad_words": ["a"]}):
            with pytest.raises(ValueError, match=f"{next(iter(options))} needs a tokenizer"):
                lm.generate([[1]], greedy(3, **options))  # type: ignore[arg-type]


def test_ids_of_a_padded_head_are_never_allowed(bundle: TinyBundle) -> None:
    grammars = Grammars(Tokenizer.load(bundle.folder), vocab_size=VOCAB + 40, end_ids=(END, VOCAB + 3))
    constraint = grammars.constraint(SamplingParams(regex=".*"))
    assert constraint is not None
    allowed = constraint.allowed()
    assert allowed.shape == (VOCAB + 40,)
    assert allowed[:281].sum() > 100
    assert not allowed[281:].any()


def test_greedy_rows_on_a_device_fetch_a_row_only_where_their_own_choice_is_not_allowed(
    tmp_path: Path, model: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = write_sampling_bundle(tmp_path / "bundle", tokenizer=True, eos_token_ids=(END,))
    prompt, text = next(
        ([seed], output.text)
        for seed in range(2, VOCAB)
        if (output := model.generate([[seed]], greedy(4))[0]).finish_reason == "length"
        and "\ufffd" not in output.text
        and max(output.token_ids) < 281
    )
    fetched = []
    with load(other.folder, threads=1) as lm:
        assert lm._engine is not None
        cuda = on_fake_device(lm._engine.session, monkeypatch)
        for regex in (re.escape(text) + ".*", "[0-9]{4}"):
            cuda.reset()
            (output,) = lm.generate([prompt], greedy(4, regex=regex))
            assert output.token_ids == model.generate([prompt], greedy(4, regex=regex))[0].token_ids
            fetched.append(cuda.bytes["download"])
    assert fetched == [4 * 12, len(output.token_ids) * (12 + 4 * VOCAB)]
