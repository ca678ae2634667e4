"""Quantised KV caches: every kind of tiny model against eager with rounded rows, through the graph and the runtime."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from parity import assert_parity, assert_same_choice
from rounded_cache import Rows, Scales, graph_logits, read_scales, rounded_logits, unpacked
from tiny_models import VOCAB, attention, block, decode_length, decoder, tiny_configs, tiny_model, token_ids

import graphport.export.model_export as export_module
from graphport.export.graph_pass import CacheScales
from graphport.export.graph_runner import GraphRunner
from graphport.export.model_export import export
from graphport.export.parity import ParityError
from graphport.export.targets import CPU
from graphport.model_def.signature import GRAPH_FILE
from graphport.model_def.transformer import Transformer
from graphport.runtime import LanguageModel, SamplingParams, load
from graphport.runtime.cache_buffer import HostBuffer
from graphport.runtime.verification import verify

CONFIGS = tiny_configs()
# Those whose attention differs, and that a quantised cache can serve (no head size of 20).
KINDS = (
    "grouped_query",
    "multi_head",
    "multi_query",
    "own_head_dim",
    "window",
    "window_of_one",
    "qk_norm",
    "softcap_window",
    "own_scale",
    "all_biases",
    "rotary_interleaved",
    "rotary_partial_0.25",
    "rotary_partial_0.5_interleaved",
    "local_local_global",
    "rotary_and_none",
    "learned",
    "everything",
)
CACHES = tuple(cache.name for cache in CPU.caches)
LENGTH = 40
# One long step; long and short ones over a cache, whose bound is 8 tokens; single steps.
PIECES = ((LENGTH,), (9, 3, 8, 1, 1, 9, 9), (1,) * LENGTH)
LONG = decoder(block(of=attention(window=100)), block(), max_positions=200)

GREEDY = SamplingParams(max_new_tokens=12, temperature=0.0)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Quantised:
    """A tiny model, its fp32 bundle with a quantised cache, and the scales in it."""

    model: Transformer
    cache: str
    folder: Path
    scales: Scales

    @property
    def runner(self) -> GraphRunner:
        return GraphRunner(self.folder / GRAPH_FILE, self.model.config)

    def reference(self, ids: list[int], pieces: tuple[int, ...], stored: Rows) -> np.ndarray:
        return rounded_logits(self.model, ids, self.scales, self.cache, pieces, stored)


def make(config_name: str, cache: str, folder: Path) -> Quantised:
    config = LONG if config_name == "long" else CONFIGS[config_name]
    model = tiny_model(config)
    context = decode_length(config)
    bundle = export(model, folder / "bundle", precision="fp32", kv_cache=cache, context=context, verify=False)
    assert bundle.fusions["kv_cache"] == config.num_layers
    scales = read_scales(bundle.path / GRAPH_FILE, config.num_layers)
    return Quantised(model=model, cache=cache, folder=bundle.path, scales=scales)


@pytest.fixture(scope="module", params=[(kind, cache) for kind in KINDS for cache in CACHES], ids="-".join)
def quantised(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Quantised:
    kind, cache = request.param
    return make(kind, cache, tmp_path_factory.mktemp(kind))


@pytest.fixture(scope="module", params=CACHES)
def long(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Quantised:
    return make("long", request.param, tmp_path_factory.mktemp("long"))


@pytest.mark.parametrize("pieces", PIECES, ids=["one_piece", "chunks", "single_steps"])
def test_the_graph_equals_eager_with_rounded_rows(quantised: Quantised, pieces: tuple[int, ...]) -> None:
    ids = token_ids(LENGTH).tolist()
    found, stored = graph_logits(quantised.runner, ids, pieces)
    assert_parity(found, quantised.reference(ids, pieces, stored), "rounded cache")


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("which", [0, 1], ids=["keys", "values"])
def test_rows_and_scales_that_are_off_are_rejected(long: Quantised, layer: int, which: int) -> None:
    ids, pieces = token_ids(LENGTH).tolist(), PIECES[1]
    found, stored = graph_logits(long.runner, ids, pieces)
    with pytest.raises(AssertionError, match="rounded cache"):  # as if nothing were rounded
        assert_parity(found, _eager(long.model, ids), "rounded cache")
    off = [list(pair) for pair in long.scales]
    off[layer][which] = off[layer][which] * 1.1
    with pytest.raises(AssertionError, match="steps away"):
        rounded_logits(long.model, ids, [(k, v) for k, v in off], long.cache, pieces, stored)
    other = list(stored)
    other[2 * layer + which] = np.roll(stored[2 * layer + which], 1, axis=2)  # every row one position later
    with pytest.raises(AssertionError, match="steps away"):
        long.reference(ids, pieces, other)


def test_a_long_prompt_in_one_piece_is_eager_itself(long: Quantised) -> None:
    ids = token_ids(150).tolist()
    assert_parity(long.runner.logits(ids), _eager(long.model, ids), "compiled")


def test_long_and_short_steps_store_the_same_rows(long: Quantised) -> None:
    ids = token_ids(LENGTH).tolist()
    at_once, in_steps = (graph_logits(long.runner, ids, pieces)[1] for pieces in ((LENGTH,), (8,) * 5))
    for one, other in zip(at_once[:2], in_steps[:2], strict=True):  # those of layer 0, which read no attention
        assert np.abs(unpacked(one).astype(int) - unpacked(other)).max() <= 1
        assert (one == other).mean() > 0.99  # but for ties that a last bit decides


def test_the_runtime_grows_the_cache_and_decodes_as_the_reference(long: Quantised) -> None:
    ids = token_ids(180).tolist()
    with load(long.folder, max_batch=2, prefill_chunk=32, threads=1) as lm:
        (found,) = lm.logits([ids])
        stored = _stored_rows(lm, 180)
        assert_parity(found, long.reference(ids, (32,) * 5 + (20,), stored), "rounded cache")
        output = lm.generate([ids[:50]], GREEDY)[0]
        whole = [*ids[:50], *output.token_ids[:-1]]
        wanted = long.reference(whole, (32, 18) + (1,) * 11, _stored_rows(lm, len(whole)))[49:]
    assert_same_choice(_one_hot(output.token_ids), wanted, "rounded cache")


def test_ragged_rows_that_come_and_go_equal_each_prompt_alone(long: Quantised) -> None:
    prompts = [token_ids(length, seed=length).tolist() for length in (3, 30, 1, 70, 12, 9)]
    params = [dataclasses.replace(GREEDY, max_new_tokens=2 + 5 * (row % 3)) for row in range(len(prompts))]
    with load(long.folder, max_batch=3, prefill_chunk=16, threads=1) as lm:  # rows move when one ends
        together = lm.generate(prompts, params)
        assert together == [lm.generate([prompt], one)[0] for prompt, one in zip(prompts, params, strict=True)]


def test_b102_reused_chunks_are_the_very_rows_of_a_prompt_that_runs_alone(long: Quantised) -> None:
    options = {"max_batch": 2, "prefill_chunk": 16, "threads": 1}
    prompts = [token_ids(length, seed=7).tolist() for length in (70, 100, 100)]
    prompts[2][60] = (prompts[2][60] + 1) % VOCAB
    with load(long.folder, **options) as cold, load(long.folder, **options, prefix_cache_bytes=1 << 20) as warm:
        for prompt in prompts:
            stream = iter(warm.stream(prompts[0], GREEDY))  # a neighbour: chunks would be shorter beside it
            next(stream)
            assert warm.generate([prompt], GREEDY) == cold.generate([prompt], GREEDY)
            state = warm.prefill(prompt)
            expected = cold.prefill(prompt)
            assert [rows.tobytes() for rows in state.rows] == [rows.tobytes() for rows in expected.rows]
        assert warm.statistics.prefix_cache is not None
        assert warm.statistics.prefix_cache.num_reused_tokens > 300


def test_drafts_over_a_quantised_cache_leave_the_rows_that_single_steps_do(long: Quantised) -> None:
    options = {"max_batch": 1, "max_length": 150, "threads": 1}
    params = dataclasses.replace(GREEDY, max_new_tokens=60)
    prompt = token_ids(30, seed=1).tolist()
    with load(long.folder, **options) as plain, load(long.folder, **options, draft=long.folder) as drafting:
        (expected,), (found,) = (lm.generate([prompt], params, keep_state=True) for lm in (plain, drafting))
        assert drafting.statistics.num_drafted_right > 10
        assert found.token_ids == expected.token_ids
        assert found.state is not None
        assert expected.state is not None
        for rows, wanted in zip(found.state.rows, expected.state.rows, strict=True):
            assert (rows == wanted).mean() > 0.99  # but for ties that a last bit decides


@pytest.mark.parametrize("length", [0, 9, 29, 30])  # 1 to 8 would be a short step to the reference
def test_b101_a_rewound_quantised_cache_goes_on_with_the_rows_that_are_left(long: Quantised, length: int) -> None:
    ids, other = token_ids(30).tolist(), token_ids(12, seed=3).tolist()
    with load(long.folder, max_batch=1, threads=1) as lm:
        assert lm._engine is not None
        session, cache = lm._engine.session, lm._engine.cache
        cache.claim()
        session.step(cache, np.array([ids]))
        cache.rewind(0, length)
        found = session.step(cache, np.array([other]), np.arange(12)).copy()
        stored = _stored_rows(lm, length + 12)
    pieces = (length, 12) if length else (12,)
    assert_parity(found, long.reference([*ids[:length], *other], pieces, stored)[length:], "rounded cache")


def test_the_cache_takes_a_quarter_or_an_eighth_of_the_memory(long: Quantised) -> None:
    ids = [token_ids(64).tolist()]
    export(long.model, long.folder.parent / "float", precision="fp32", verify=False, force=True)
    sizes = []
    for folder in (long.folder.parent / "float", long.folder):
        with load(folder, max_batch=1, max_length=64, threads=1) as lm:
            lm.logits(ids)
            sizes.append(lm.cache_bytes)
    assert sizes[0] == sizes[1] * {"int8": 4, "int4": 8}[long.cache]


def test_the_certificate_compares_with_a_float_cache_and_verify_repeats_it(tmp_path: Path) -> None:
    model = tiny_model(CONFIGS["grouped_query"])
    bundle = export(model, tmp_path / "bundle", precision="int8", kv_cache="int8")
    (check,) = (check for check in bundle.certificate if check.name.startswith("int8 cache"))
    assert check.name == "int8 cache: 32 tokens against a float cache, kl"
    assert 0 < check.measured <= check.tolerance
    assert verify(bundle.path).passed


@pytest.mark.parametrize(("target", "precision"), [("cpu", "fp32"), ("cuda", "fp16")])
def test_scales_that_clip_fail_the_certificate(
    tmp_path: Path, target: str, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calibrate = export_module.calibrate_cache
    monkeypatch.setattr(
        export_module,
        "calibrate_cache",
        lambda *a, **k: tuple(CacheScales(key / 4, value) for key, value in calibrate(*a, **k)),
    )
    model = tiny_model(CONFIGS["grouped_query"])
    with pytest.raises(ParityError, match=r"1 of . parity checks failed: int8 cache: 32 tokens against a float cache"):
        export(model, tmp_path / "bundle", target=target, precision=precision, kv_cache="int8")
    assert not list(tmp_path.iterdir())


def _eager(model: Transformer, ids: list[int]) -> np.ndarray:
    with torch.inference_mode():
        return model(torch.tensor([ids]))[0].numpy()


def _stored_rows(lm: LanguageModel, length: int) -> Rows:
    """What slot 0 holds, the first `length` tokens."""
    assert lm._engine is not None
    buffers = lm._engine.cache.buffers
    return [buffer.array[:1, :, :length].copy() for buffer in buffers if isinstance(buffer, HostBuffer)]


def _one_hot(ids: tuple[int, ...]) -> np.ndarray:
    return np.eye(VOCAB)[list(ids)]
