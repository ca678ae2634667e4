"""Sampling parameters: what is refused and by which name, and how they are normalised."""

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
from tiny_logits import VOCAB, sampler

from graphport.runtime.sampling import SamplingParams


@pytest.mark.parametrize(
    ("params", "error", "message"),
    [
        ({"temperature": -1}, ValueError, r"temperature=-1\.0 must be 0 \(greedy\) or a finite positive"),
        ({"temperature": math.nan}, ValueError, "temperature=nan must be"),
        ({"temperature": math.inf}, ValueError, "temperature=inf must be"),
        ({"temperature": 10**400}, ValueError, "temperature is a number beyond every float; it must be 0"),
        ({"temperature": True}, TypeError, "temperature=True must be .*not bool"),
        ({"temperature": "1"}, TypeError, "temperature='1' must be .*not str"),
        ({"top_p": -0.1}, ValueError, r"top_p=-0\.1 must be a number from 0"),
        ({"top_p": 1.1}, ValueError, r"top_p=1\.1 must be"),
        ({"top_p": math.nan}, ValueError, "top_p=nan must be"),
        ({"top_p": None}, TypeError, "top_p=None must be"),
        ({"min_p": 2}, ValueError, r"min_p=2\.0 must be"),
        ({"top_k": -1}, ValueError, r"top_k=-1 must be 0 or None \(off\)"),
        ({"top_k": 1.5}, TypeError, r"top_k=1\.5 must be .*not float"),
        ({"top_k": False}, TypeError, "top_k=False must be .*not bool"),
        ({"repetition_penalty": 0}, ValueError, r"repetition_penalty=0\.0 must be a number from 0\.001 to 1000"),
        ({"repetition_penalty": -1}, ValueError, r"repetition_penalty=-1\.0 must be"),
        ({"presence_penalty": 2.5}, ValueError, r"presence_penalty=2\.5 must be a number from -2 to 2"),
        ({"frequency_penalty": math.nan}, ValueError, "frequency_penalty=nan must be"),
        ({"max_new_tokens": -1}, ValueError, "max_new_tokens=-1 must be None"),
        ({"max_new_tokens": True}, TypeError, "max_new_tokens=True must be .*not bool"),
        ({"seed": -1}, ValueError, "seed=-1 must be None or an integer from 0"),
        ({"seed": 2**63}, ValueError, "seed=9223372036854775808 must be"),
        ({"seed": 1.0}, TypeError, r"seed=1\.0 must be"),
        ({"logprobs": -1}, ValueError, "logprobs=-1 must be"),
        ({"stop": ""}, ValueError, r"stop='' holds an empty string"),
        ({"stop": ("a", "")}, ValueError, "holds an empty string"),
        ({"stop": ("a", 1)}, TypeError, "must be a string or a sequence of strings"),
        ({"stop": None}, TypeError, "stop=None must be"),
        ({"stop_token_ids": (1, -1)}, ValueError, r"stop_token_ids\[1\]=-1 must be a token id"),
        ({"stop_token_ids": [10**30]}, ValueError, r"stop_token_ids\[0\]=10+ must be a token id .* to 2147483647"),
        ({"stop_token_ids": 5}, TypeError, "stop_token_ids=5 must be a sequence"),
        ({"stop_token_ids": "ab"}, TypeError, "stop_token_ids='ab' must be a sequence"),
        ({"ignore_eos": 1}, TypeError, "ignore_eos=1 must be True or False"),
        ({"n": 0}, ValueError, "n=0 must be an integer from 1"),
        ({"n": True}, TypeError, "n=True must be an integer from 1, not bool"),
        ({"prompt_logprobs": -1}, ValueError, "prompt_logprobs=-1 must be None or an integer from 0"),
        ({"logit_bias": [1]}, TypeError, r"logit_bias=\[1\] must be None or a mapping of token ids to numbers"),
        ({"logit_bias": {"1": 2}}, TypeError, "a key of logit_bias='1' must be a token id, not str"),
        ({"logit_bias": {-1: 2}}, ValueError, "a key of logit_bias=-1 must be a token id"),
        ({"logit_bias": {1: 101}}, ValueError, r"logit_bias\[1\]=101.0 must be a number from -100 to 100"),
        ({"logit_bias": {1: math.nan}}, ValueError, r"logit_bias\[1\]=nan must be"),
        ({"bad_words": "x"}, TypeError, "bad_words='x' must be a sequence of strings"),
        ({"bad_words": (" ",)}, ValueError, "holds a word without a character"),
        ({"json_schema": "{"}, ValueError, "json_schema is no JSON: "),
        ({"json_schema": "[" * 100_000}, ValueError, "json_schema is nested too deeply"),
        ({"json_schema": "[]"}, TypeError, "json_schema must be a JSON object, as text or as a record; got list"),
        ({"json_schema": {"a": {1, 2}}}, ValueError, "json_schema is no JSON: .*set"),
        ({"regex": 1}, TypeError, "regex=1 must be None or a string"),
        ({"grammar": b"a"}, TypeError, "grammar=b'a' must be None or a string"),
        ({"regex": "a", "json_schema": {}}, ValueError, "json_schema and regex exclude each other"),
        ({"top_q": 1}, TypeError, "unexpected keyword argument 'top_q'"),
    ],
)
def test_parameters_out_of_range_are_refused_by_name(
    params: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        SamplingParams(**params)


def test_parameters_are_normalised_and_frozen() -> None:
    params = SamplingParams(stop="x", stop_token_ids=[np.int64(3)], top_k=None, temperature=0, seed=np.int32(4))
    assert params.stop == ("x",)
    assert params.stop_token_ids == (3,)
    assert params.top_k == 0
    assert isinstance(params.temperature, float)
    assert type(params.seed) is int
    assert params.is_greedy
    assert SamplingParams(json_schema={"type": "integer"}).json_schema == '{"type": "integer"}'
    assert SamplingParams(logit_bias={np.int64(3): 2}).logit_bias == {3: 2.0}
    assert SamplingParams(bad_words=["a"]).bad_words == ("a",)
    assert [SamplingParams(regex="a").constraint, SamplingParams().constraint] == ["regex", None]
    assert SamplingParams(stop=["a", "b"], max_new_tokens=0).stop == ("a", "b")
    assert dataclasses.replace(params, temperature=0.5).stop == ("x",)
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.top_k = 3


@pytest.mark.parametrize(
    ("params", "prompt", "message"),
    [
        ({}, (1, VOCAB), "prompt holds 37, outside the vocabulary: ids are 0 to 36"),
        ({}, (-1,), "prompt holds -1"),
        ({"stop_token_ids": (99,)}, (), "stop_token_ids holds 99"),
        ({"logit_bias": {37: 1}}, (), "logit_bias holds 37, outside the vocabulary"),
        ({"prompt_logprobs": 38}, (), "prompt_logprobs=38 must be at most the vocabulary's size, 37"),
        ({"logprobs": 38}, (), "logprobs=38 must be at most the vocabulary's size, 37"),
    ],
)
def test_what_depends_on_the_vocabulary_is_checked_where_they_meet(
    params: dict[str, Any], prompt: tuple[int, ...], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        sampler(prompt, **params)


@pytest.mark.parametrize(
    "logits", [np.zeros((1, VOCAB), np.float32), np.zeros(36, np.float32), np.zeros(VOCAB), np.zeros(VOCAB, np.float16)]
)
def test_logits_of_another_shape_or_dtype_are_refused(logits: np.ndarray) -> None:
    with pytest.raises(ValueError, match=r"a sampler needs one row, float32 \[37\]"):
        sampler().sample(logits)
