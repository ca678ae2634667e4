"""Requests on models whose layers with a window keep no more: answers, states and drafts are those of whole caches."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from window_pairs import CONTEXT, IDS, KINDS, VOCAB, Pair, make_pair

from graphport.runtime import LanguageModel, SamplingParams, load
from graphport.runtime.bundle_files import open_bundle
from graphport.runtime.draft_model import DraftModel


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Pair]:
    return {kind: make_pair(*kind, tmp_path_factory.mktemp(kind[0])) for kind in KINDS[:2]}


@pytest.fixture(scope="module")
def mixed(pairs: dict[tuple[str, str], Pair]) -> Pair:
    return pairs["mixed", "auto"]


def greedy(new: int = 12, **changes: Any) -> SamplingParams:
    return SamplingParams(**{"max_new_tokens": new, "temperature": 0.0, "ignore_eos": True, **changes})


def opened_model(folder: Path, **options: Any) -> LanguageModel:
    lm = load(folder, device="cpu", threads=1, max_batch=3, max_length=CONTEXT, **options)
    assert isinstance(lm, LanguageModel)
    return lm


PROMPTS = [IDS[:200], IDS[50:60], IDS[20:170]]


@pytest.fixture(scope="module")
def expected(mixed: Pair) -> list[tuple[int, ...]]:
    """What whole caches answer."""
    with opened_model(mixed.whole) as lm:
        return [output.token_ids for output in lm.generate(PROMPTS, greedy(150))]


def test_the_engine_answers_as_with_whole_caches_in_less_memory(mixed: Pair, expected: list[tuple[int, ...]]) -> None:
    with opened_model(mixed.kept) as lm, opened_model(mixed.whole) as other:
        assert [output.token_ids for output in lm.generate(PROMPTS, greedy(150))] == expected
        other.generate(PROMPTS, greedy(150))
        # two of three layers hold 166 of 400 tokens
        assert lm.cache_bytes / other.cache_bytes == pytest.approx((1 + 2 * 166 / 400) / 3)
        assert lm.cache_bytes == lm.memory_plan.cache
        samples = greedy(120, n=3, temperature=1.0, seed=3)
        found, wanted = (model.generate([IDS[:150]], samples)[0] for model in (lm, other))
        assert [each.token_ids for each in found.samples] == [each.token_ids for each in wanted.samples]


def test_the_engine_finds_beginnings_again_whose_rows_were_dropped_since(mixed: Pair) -> None:
    prompts = [[*IDS[:160], *IDS[300 : 300 + count]] for count in (80, 7, 30)]  # one beginning, then something else
    reused = []
    with opened_model(mixed.whole) as plain:
        wanted = [plain.generate([prompt], greedy(90))[0].token_ids for prompt in prompts]
    for folder in (mixed.whole, mixed.kept):
        with opened_model(folder, prefix_cache_bytes=4 << 20) as lm:
            assert [lm.generate([prompt], greedy(90))[0].token_ids for prompt in prompts] == wanted
            again = [*prompts[0], *wanted[0], *IDS[:5]]  # the answer's rows are there too
            assert lm.generate([again], greedy(4)) == lm.generate([again], greedy(4))
            statistics = lm.statistics.prefix_cache
            assert statistics is not None
            reused.append(statistics.num_reused_tokens)
    assert reused[0] == reused[1] > 2 * 144


def test_a_prefix_that_was_evicted_under_a_running_row_is_computed_again(mixed: Pair) -> None:
    with opened_model(mixed.kept) as plain:
        wanted = [plain.generate([prompt], greedy(90))[0].token_ids for prompt in PROMPTS]
    with opened_model(mixed.kept, prefix_cache_bytes=40_000) as lm:  # 3 blocks of 16 tokens
        for _ in range(2):
            assert [lm.generate([prompt], greedy(90))[0].token_ids for prompt in PROMPTS] == wanted


@pytest.mark.parametrize("kind", KINDS[:2], ids="-".join)
def test_b100_states_go_on_fork_and_come_back_from_files(
    kind: tuple[str, str], pairs: dict[tuple[str, str], Pair], tmp_path: Path
) -> None:
    with opened_model(pairs[kind].kept, prefill_chunk=32) as lm:
        (first,) = lm.generate([IDS[:150]], greedy(100), keep_state=True)
        assert first.state is not None
        assert first.state.rows[0].shape[1] < 130 < first.state.rows[2].shape[1] == 249
        first.state.save(tmp_path / "state")
        state = lm.restore(tmp_path / "state")
        turn = [*IDS[:150], *first.token_ids, *IDS[300:320]]
        for prompt in (turn, [*turn[:-10], 1, 2, 3]):
            before = lm.statistics.num_prompt_tokens
            (found,) = lm.generate([prompt], greedy(30), state=state)
            ran = lm.statistics.num_prompt_tokens - before
            # of a quantised cache whole chunks of the prompt are used again, else all that ran
            assert ran == len(prompt) - (249 if kind[1] == "auto" else 128)
            assert found == lm.generate([prompt], greedy(30))[0]


@pytest.mark.parametrize("length", [0, 100, 245])
def test_b101_a_state_taken_back_further_than_its_rows_computes_the_text_again(length: int, mixed: Pair) -> None:
    with opened_model(mixed.kept) as lm:
        state = lm.prefill(IDS[:250]).rewind(length)
        assert state.token_ids == tuple(IDS[:length])
        prompt = [*IDS[:length], *IDS[260:270]]
        before = lm.statistics.num_prompt_tokens
        (found,) = lm.generate([prompt], greedy(), state=state)
        assert lm.statistics.num_prompt_tokens - before == (10 if length == 245 else len(prompt))
        assert found == lm.generate([prompt], greedy())[0]


@pytest.mark.parametrize(
    "damage",
    [
        lambda header: header.update(firsts=[0] * 6),
        lambda header: header.update(firsts=header["firsts"][:-1]),
        lambda header: header.update(firsts=[-1, *header["firsts"][1:]]),
    ],
)
def test_a_saved_state_whose_rows_begin_elsewhere_is_refused(damage: Any, mixed: Pair, tmp_path: Path) -> None:
    with opened_model(mixed.kept) as lm:
        lm.prefill(IDS[:250]).save(tmp_path / "state")
        with np.load(tmp_path / "state") as file:
            arrays = dict(file)
        header = json.loads(arrays["header"].tobytes())
        damage(header)
        arrays["header"] = np.frombuffer(json.dumps(header).encode(), np.uint8)
        with (tmp_path / "state").open("wb") as torn:
            np.savez(torn, **arrays)
        with pytest.raises(ValueError, match="holds arrays that are not this model's"):
            lm.restore(tmp_path / "state")


@pytest.mark.parametrize("drafts", ["lookup", "model"])
def test_drafts_change_no_greedy_id(drafts: str, mixed: Pair, expected: list[tuple[int, ...]]) -> None:
    options: dict[str, Any] = {"prompt_lookup": True} if drafts == "lookup" else {"draft": mixed.kept}
    with opened_model(mixed.kept, **options) as lm:
        (output,) = lm.generate(PROMPTS[:1], greedy(150))
        assert output.token_ids == expected[0]
        assert lm.statistics.num_drafted_right > 0
        assert drafts == "model" or lm.statistics.num_drafted_right < lm.statistics.num_drafted
        lm.generate(PROMPTS[1:2], greedy(20))  # the draft model's own cache goes back to the start


def test_a_draft_model_asked_about_an_earlier_text_catches_up_from_its_start(mixed: Pair) -> None:
    options: dict[str, Any] = {"vocab_size": VOCAB, "tokenizer": None, "max_length": CONTEXT}
    model = DraftModel(open_bundle(mixed.kept), **options, device="cpu", device_id=0, threads=1)
    drafter, fresh = model.drafter(), model.drafter()
    drafter.propose(IDS[:250], 4)
    assert drafter.propose([*IDS[:120], *IDS[300:305]], 4) == fresh.propose([*IDS[:120], *IDS[300:305]], 4)
