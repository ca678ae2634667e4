"""The Python contract: requests checked, texts and ids out, limits, ends, logits, what loading takes."""

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from parity import TOLERANCES
from tiny_bundles import VOCAB, TinyBundle, reference_logits, tiny_weights, write_tiny_bundle
from tiny_requests import P8, greedy, num_steps, random_ids, seeded

from graphport.runtime import LanguageModel, load
from graphport.runtime.sampling import NonFiniteLogitsError

TOLERANCE = TOLERANCES["tiny bundle", "float32"]


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> TinyBundle:
    return write_tiny_bundle(tmp_path_factory.mktemp("model") / "bundle", tokenizer=True)


@pytest.fixture(scope="module")
def model(bundle: TinyBundle) -> LanguageModel:
    return load(bundle.folder, threads=1)


def test_generate_takes_and_gives_lists_of_texts_or_ids(model: LanguageModel, bundle: TinyBundle) -> None:
    assert model.tokenizer is not None
    text, ids = "the cat", random_ids(5)
    first, second = model.generate([text, ids], greedy())
    assert list(first.prompt_token_ids) == model.tokenizer.encode(text)
    assert second.prompt_token_ids == tuple(ids)
    for output in (first, second):
        assert len(output.token_ids) == 8
        assert output.finish_reason == "length"
        assert output.text == model.tokenizer.decode(output.token_ids) or max(output.token_ids) >= VOCAB - 2
        assert output.logprobs is None
        expected = reference_logits(bundle.weights, list(output.prompt_token_ids))[-1]
        assert output.token_ids[0] == expected.argmax()
    assert model.generate([], greedy()) == []


def test_b07_b08_b14_batches_equal_single_prompts_and_row_order_does_not_matter(model: LanguageModel) -> None:
    end = random_ids(1, 5)[0]
    prompts = [random_ids(length) for length in P8]
    prompts[4][3] = end  # an end id inside a prompt hides nothing
    params = greedy(20, stop_token_ids=[end])
    single = [model.generate([prompt], params)[0] for prompt in prompts]
    assert model.generate(prompts, params) == single
    order = [3, 7, 0, 6, 1, 5, 2, 4]
    assert model.generate([prompts[i] for i in order], params) == [single[i] for i in order]


def test_more_prompts_than_max_batch_are_queued(bundle: TinyBundle, model: LanguageModel) -> None:
    prompts = [random_ids(1 + i % 7, i) for i in range(20)]
    with load(bundle.folder, max_batch=3, threads=1) as small:
        assert small.generate(prompts, greedy()) == model.generate(prompts, greedy())
        assert small._engine is not None
        assert small._engine.cache.num_slots <= 3


def test_parameters_may_be_given_one_a_prompt(model: LanguageModel) -> None:
    outputs = model.generate([[1], [1], [1]], [greedy(1), greedy(3, logprobs=2), seeded(3, 2)])
    assert [len(output.token_ids) for output in outputs] == [1, 3, 2]
    assert outputs[0].logprobs is None
    assert outputs[1].logprobs is not None
    assert [sample.token_id for sample in outputs[1].logprobs] == list(outputs[1].token_ids)
    assert all(len(sample.top_logprobs) == 2 for sample in outputs[1].logprobs)
    with pytest.raises(ValueError, match="2 SamplingParams for 1 prompts; give one for all, or one a prompt"):
        model.generate([[1]], [greedy(), greedy()])
    with pytest.raises(TypeError, match="params must be SamplingParams or a list of them, got int"):
        model.generate([[1]], 5)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="params must be SamplingParams, got dict"):
        model.generate([[1]], [{}])  # type: ignore[list-item]


@pytest.mark.parametrize("method", ["generate", "logits"])
def test_a_bare_prompt_where_a_list_is_needed_is_refused(model: LanguageModel, method: str) -> None:
    with pytest.raises(TypeError, match=r"list.*got str"):
        getattr(model, method)("hello")
    with pytest.raises(TypeError, match=r"prompt 0 is of type int; give a str or a list of ids"):
        getattr(model, method)([1, 2, 3])


@pytest.mark.parametrize(
    ("ids", "error", "match"),
    [
        ([], ValueError, "prompt 1 is empty; give at least one token"),
        ([1, VOCAB], ValueError, f"prompt 1 has id {VOCAB}, outside the vocabulary: ids are 0 to {VOCAB - 1}"),
        ([1, -1], ValueError, "prompt 1 has id -1, outside the vocabulary"),
        ([2**70], ValueError, "outside the vocabulary"),
        ([1, True], TypeError, r"prompt 1 holds True \(bool\); ids are integers"),
        ([1.0], TypeError, r"prompt 1 holds 1.0 \(float\); ids are integers"),
        ([None], TypeError, r"prompt 1 holds None \(NoneType\); ids are integers"),
        (["a"], TypeError, r"prompt 1 holds 'a' \(str\); ids are integers"),
        ([np.arange(9), 9], TypeError, "prompt 1 holds a ndarray; ids are integers"),
        (b"ab", TypeError, "prompt 1 is of type bytes"),
        (np.array([1.0, 2.0]), TypeError, r"prompt 1 is a float64 array of shape \[2\]; give one row of integer ids"),
        (np.array([True]), TypeError, "prompt 1 is a bool array"),
        (np.array([[1, 2]]), TypeError, r"prompt 1 is a int64 array of shape \[1, 2\]"),
    ],
)
def test_ids_that_are_no_prompt_are_refused_before_anything_runs(
    model: LanguageModel, ids: Any, error: type[Exception], match: str
) -> None:
    before = num_steps(model)
    for call in (model.generate, model.logits):
        with pytest.raises(error, match=match):
            call([[1], ids])
    with pytest.raises(error):
        model.stream(ids)
    assert num_steps(model) == before


def test_b94_b99_ids_of_any_integer_type_and_memory_layout_are_the_same_prompt(model: LanguageModel) -> None:
    ids = random_ids(6)
    wide = np.zeros((6, 4), np.int64)
    wide[:, 2] = ids
    forms: list[Any] = [
        tuple(ids),
        np.array(ids, np.int32),
        np.array(ids, np.uint16),
        np.array(ids, ">i8"),
        np.array(ids[::-1])[::-1],
        np.array([i for pair in zip(ids, ids, strict=True) for i in pair])[::2],
        wide[:, 2],
        np.asfortranarray(wide)[:, 2],
        wide.T[2],
        [np.int32(i) for i in ids],
    ]
    expected = model.generate([ids], greedy())[0]
    assert model.generate(forms, greedy()) == [expected] * len(forms)
    (logits,) = model.logits([ids])
    for got in model.logits(forms):
        assert np.abs(got - logits).max() < TOLERANCE


@pytest.mark.parametrize(("length", "is_allowed"), [(15, True), (16, True), (17, False), (40, False), (0, False)])
@pytest.mark.parametrize("new", [0, 1, 5, None])
def test_b17_prompts_around_the_limit_are_decided_before_any_run(
    bundle: TinyBundle, length: int, is_allowed: bool, new: int | None
) -> None:
    model = load(bundle.folder, max_length=16, threads=1)
    if not is_allowed:
        match = "is empty" if length == 0 else f"prompt 0 has {length} tokens, more than max_length \\(16\\)"
        for call in (model.generate, model.logits):
            with pytest.raises(ValueError, match=match):
                call([random_ids(length)])
        with pytest.raises(ValueError, match=match.replace("prompt 0", "prompt")):
            model.stream(random_ids(length), greedy(new))
        assert num_steps(model) == 0
        return
    (output,) = model.generate([random_ids(length)], greedy(new))
    expected = min(16 - length, 16 if new is None else new)
    assert (len(output.token_ids), output.finish_reason) == (expected, "length")
    assert num_steps(model) == expected
    assert model.logits([random_ids(length)])[0].shape == (length, VOCAB)


@pytest.mark.parametrize("length", [30, 31, 32])
@pytest.mark.parametrize("new", [1, 2, 3])
def test_b18_prompt_and_new_tokens_share_one_limit(bundle: TinyBundle, length: int, new: int) -> None:
    model = load(bundle.folder, max_length=32, threads=1)
    (output,) = model.generate([random_ids(length)], greedy(new))
    assert len(output.token_ids) == min(new, 32 - length)
    assert output.finish_reason == "length"
    events = list(model.stream(random_ids(length), greedy(new)))
    assert [event.token_id for event in events] == (list(output.token_ids) or [None])
    with pytest.raises(ValueError, match="prompt 0 has 33 tokens, more than max_length"):
        model.generate([random_ids(33)], greedy(new))


@pytest.mark.parametrize("max_length", [0, 129, -1])
def test_a_limit_beyond_the_bundles_own_is_refused(bundle: TinyBundle, max_length: int) -> None:
    with pytest.raises(ValueError, match=f"max_length must be 1 to 128, the bundle's own; got {max_length}"):
        load(bundle.folder, max_length=max_length)
    for size in (0, 65_537, 10**26):
        with pytest.raises(ValueError, match=f"max_batch must be 1 to 65536; got {size}"):
            load(bundle.folder, max_batch=size)


def test_b23_generation_ends_when_the_context_is_full(bundle: TinyBundle) -> None:
    model = load(bundle.folder, max_length=32, threads=1)
    begin = time.monotonic()
    prompt = random_ids(28)
    (output,) = model.generate([prompt], greedy(100))
    assert (len(output.token_ids), output.finish_reason) == (4, "length")
    ids = [*prompt, *output.token_ids]
    assert output.token_ids == tuple(reference_logits(bundle.weights, ids[:-1])[27:].argmax(-1))
    events = list(model.stream(prompt, greedy(100)))
    assert [event.token_id for event in events] == list(output.token_ids)
    assert events[-1].finish_reason == "length"
    assert time.monotonic() - begin < 10


def test_logits_of_every_position_come_through_the_cache_in_chunks(bundle: TinyBundle) -> None:
    prompts = [random_ids(length) for length in (1, 70, 128)]
    for chunk in (1, 7, 512):
        for prompt, got in zip(
            prompts, load(bundle.folder, threads=1, prefill_chunk=chunk).logits(prompts), strict=True
        ):
            assert got.shape == (len(prompt), VOCAB)
            assert got.dtype == np.float32
            assert np.abs(got - reference_logits(bundle.weights, prompt)).max() < TOLERANCE


@pytest.mark.parametrize("own", [(), (0,), (0, 1)])
@pytest.mark.parametrize("callers", [(), (2,), (0, 3)])
@pytest.mark.parametrize("ignore_eos", [False, True])
def test_b105_end_ids_are_the_bundles_and_the_callers(
    tmp_path: Path, own: tuple[int, ...], callers: tuple[int, ...], ignore_eos: bool
) -> None:
    weights = tiny_weights()
    prompt = random_ids(4, 3)
    free = load(write_tiny_bundle(tmp_path / "free", weights=weights).folder, threads=1).generate([prompt], greedy(9))[
        0
    ]
    ids = free.token_ids
    places = [ids[2], ids[4], ids[6], ids[8]]  # what the small numbers above stand for
    model = load(
        write_tiny_bundle(tmp_path / "b", weights=weights, eos_token_ids=tuple(places[i] for i in own)).folder,
        threads=1,
    )
    params = greedy(9, stop_token_ids=[places[i] for i in callers], ignore_eos=ignore_eos)
    (output,) = model.generate([prompt], params)
    ends = {places[i] for i in callers} | (set() if ignore_eos else {places[i] for i in own})
    first = next((i for i, token_id in enumerate(ids) if token_id in ends), None)
    assert output.token_ids == (ids if first is None else ids[: first + 1])
    assert output.finish_reason == ("length" if first is None else "stop")


def test_b50_overflowing_logits_raise_and_are_never_a_stream_of_id_zero(tmp_path: Path) -> None:
    weights = tiny_weights()
    weights["1.down"][0, 0] = np.inf
    model = load(write_tiny_bundle(tmp_path, weights=weights).folder, threads=1)
    for call in (
        lambda: model.generate([[1, 2]], greedy()),
        lambda: list(model.stream([1, 2], greedy())),
        lambda: model.logits([[1, 2]]),
    ):
        with pytest.raises(NonFiniteLogitsError, match=r"not finite.*overflowed"):
            call()
    assert model.num_active == 0


def test_chat_renders_the_template_and_streams_the_answer(model: LanguageModel) -> None:
    assert model.tokenizer is not None
    messages = [{"role": "user", "content": "hello"}]
    ids = model.tokenizer.encode("user: hello\nassistant: ")
    assert list(model.chat(messages, greedy())) == list(model.stream(ids, greedy()))


def test_a_bundle_without_tokenizer_speaks_ids_only(tmp_path: Path) -> None:
    model = load(write_tiny_bundle(tmp_path).folder, threads=1)
    (output,) = model.generate([[1, 2]], greedy(3))
    assert (output.text, len(output.token_ids)) == ("", 3)
    with pytest.raises(ValueError, match="a str prompt needs a tokenizer, which this bundle does not have"):
        model.generate(["hello"])
    with pytest.raises(ValueError, match="stop needs a tokenizer"):
        model.generate([[1]], greedy(3, stop="x"))
    with pytest.raises(ValueError, match="chat needs a tokenizer"):
        model.chat([{"role": "user", "content": "hello"}])


def test_importing_the_package_is_cheap_and_loading_needs_no_torch_and_no_onnx() -> None:
    program = """
import sys
import graphport.runtime
assert "onnxruntime" not in sys.modules and "numpy" not in sys.modules
from graphport.runtime import GenerationOutput, LanguageModel, SamplingParams, StreamEvent, load
for name in ("torch", "onnx", "onnx_ir", "onnxscript", "transformers", "safetensors", "gguf"):
    assert name not in sys.modules, name
assert not hasattr(graphport.runtime, "no_such_name")
"""
    finished = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr


@pytest.mark.parametrize("name", ["max_batch", "max_length", "threads", "prefill_chunk"])
@pytest.mark.parametrize("value", [1.5, True, "8"])
def test_load_refuses_numbers_of_another_kind(name: str, value: object, bundle: TinyBundle) -> None:
    with pytest.raises(TypeError, match=f"{name} must be a whole number, .*; got {value!r}"):
        load(bundle.folder, **{name: value})
