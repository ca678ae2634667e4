"""A certificate can fail: faults planted in bundles whose hashes were made to fit are caught, by a check named here."""

import json
from collections.abc import Callable
from pathlib import Path
from shutil import copytree
from typing import Any

import numpy as np
import onnx
import pytest
from certificates import edit_attribute, edit_graph, edit_weight, lose_last_token, rehash
from tiny_graphs import tiny_model
from tiny_sources import write_tiny_source
from tokenizers import Tokenizer

from graphport.cli import main
from graphport.export import export
from graphport.model_def.certificate import read_certificate
from graphport.model_def.signature import CHAT_TEMPLATE_FILE, TOKENIZER_FILE, read_manifest
from graphport.model_def.vocabulary_evidence import vocabulary_evidence
from graphport.runtime.cache_growth import Growth
from graphport.runtime.kv_cache import KVCache
from graphport.runtime.verification import verify

Change = Callable[[onnx.ModelProto], None]
QKV, GATE_UP = "blocks.0.attention.query_key_value.weight", "blocks.0.feed_forward.gate_up.weight"


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Tiny bundles: gemma has a window, caps and q/k norms, gpt learned positions, llama is packed in 4 bits."""
    folder = tmp_path_factory.mktemp("bundles")
    precisions = {"gemma": "fp32", "gpt": "fp32", "llama": "int4"}
    return {
        name: export(tiny_model(name), folder / name, precision=precision).path
        for name, precision in precisions.items()
    }


def failed_checks(bundle: Path) -> list[str]:
    return [check.name for check in verify(bundle, device="cpu", threads=1).checks if not check.passed]


def flip_bit(model: onnx.ModelProto) -> None:
    def flip(values: np.ndarray) -> np.ndarray:
        values.view(np.uint32)[7, 11] ^= 1 << 23  # twice or half the value
        return values

    edit_weight(model, QKV + "_transposed", flip)


def flip_packed_bit(model: onnx.ModelProto) -> None:
    def flip(values: np.ndarray) -> np.ndarray:
        values[5, 1, 3] ^= 8
        return values

    edit_weight(model, QKV + "_q4", flip)


def transpose_block(values: np.ndarray) -> np.ndarray:
    values[16:32, 16:32] = values[16:32, 16:32].T.copy()
    return values


FAULTS: dict[str, tuple[str, Change, str]] = {
    "weight bit flip": ("gemma", flip_bit, "prefill: max_abs against eager PyTorch"),
    "weight bit flip in 4 bits": ("llama", flip_packed_bit, "prefill: rms against itself as exported"),
    "swapped heads": (
        "gemma",
        lambda model: edit_weight(model, QKV + "_transposed", lambda w: np.roll(w, 16, axis=1)),
        "prefill: max_abs against eager PyTorch",
    ),
    "swapped heads in 4 bits": (
        "llama",
        lambda model: edit_weight(model, QKV + "_q4", lambda w: np.roll(w, 16, axis=0)),
        "prefill: rms against itself as exported",
    ),
    "position + 1": (
        "gpt",
        lambda model: edit_weight(model, "position.weight", lambda w: np.roll(w, -1, axis=0)),
        "prefill: max_abs against eager PyTorch",
    ),
    "rotary angles of keys and queries apart": (
        "gemma",
        lambda model: edit_weight(model, "cos_1", lambda w: np.roll(w, 1, axis=0)),
        "prefill: max_abs against eager PyTorch",
    ),
    "window one short": (
        "gemma",
        lambda model: edit_attribute(model, "GroupQueryAttention", "local_window_size", 5),
        "window of 6: max_abs against eager PyTorch",
    ),
    "softcap dropped": (
        "gemma",
        lambda model: edit_attribute(model, "GroupQueryAttention", "softcap", 0.0),
        "prefill: max_abs against eager PyTorch",
    ),
    "missing last token in the cache": ("gemma", lose_last_token, "decode: max_abs against eager PyTorch"),
    "wrong eps": (
        "gemma",
        lambda model: edit_attribute(model, "SkipSimplifiedLayerNormalization", "epsilon", 1e-3),
        "prefill: rms against eager PyTorch",
    ),
    "transposed block": (
        "gemma",
        lambda model: edit_weight(model, GATE_UP + "_transposed", transpose_block),
        "prefill: max_abs against eager PyTorch",
    ),
}


@pytest.mark.parametrize("kind", ["gemma", "gpt", "llama"])
def test_what_was_only_written_again_passes(kind: str, bundles: dict[str, Path], tmp_path: Path) -> None:
    bundle = Path(copytree(bundles[kind], tmp_path / "b"))
    edit_graph(bundle, lambda _: None)
    assert failed_checks(bundle) == []


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_caught_by_the_numbers(fault: str, bundles: dict[str, Path], tmp_path: Path) -> None:
    kind, change, check = FAULTS[fault]
    bundle = Path(copytree(bundles[kind], tmp_path / "b"))
    edit_graph(bundle, change)
    assert check in failed_checks(bundle)


def test_a_token_lost_between_steps_leaves_prefill_right(bundles: dict[str, Path], tmp_path: Path) -> None:
    bundle = Path(copytree(bundles["gemma"], tmp_path / "b"))
    edit_graph(bundle, lose_last_token)
    runs = {name.split(":")[0] for name in failed_checks(bundle)}
    assert runs == {"decode", "chunked prefill", "ragged batch", "rewind", "window of 6"}


def test_a_window_off_by_one_shows_only_where_the_text_is_longer(bundles: dict[str, Path], tmp_path: Path) -> None:
    bundle = Path(copytree(bundles["gemma"], tmp_path / "b"))
    edit_graph(bundle, lambda model: edit_attribute(model, "GroupQueryAttention", "local_window_size", 7))
    assert {"prefill", "window of 6"} <= {name.split(":")[0] for name in failed_checks(bundle)}


def test_a_cache_that_forgets_to_rewind_is_caught(bundles: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KVCache, "rewind", lambda *_: None)
    assert {name.split(":")[0] for name in failed_checks(bundles["gemma"])} == {"rewind"}


def test_a_cache_that_mixes_up_slots_is_caught(bundles: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    take = KVCache._take

    def broken(self: KVCache, growth: Growth) -> None:
        take(self, growth)
        for buffer in self.buffers if self.num_slots > 1 else ():
            buffer.array[:2] = buffer.array[1::-1]  # type: ignore[attr-defined]

    monkeypatch.setattr(KVCache, "_take", broken)
    assert {name.split(":")[0] for name in failed_checks(bundles["gpt"])} == {"ragged batch"}


NO_STEPS = dict.fromkeys(("normalizer", "pre_tokenizer", "post_processor", "decoder"))
TEMPLATE = "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"


@pytest.fixture(scope="module")
def text_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    source = write_tiny_source(folder / "model.gguf", chat_template=TEMPLATE)
    return export(source, folder / "bundle", precision="int8").path


@pytest.mark.parametrize("which", [0, 20, -1])
def test_a_tokenizer_off_by_one_merge_is_caught(which: int, text_bundle: Path, tmp_path: Path) -> None:
    bundle = Path(copytree(text_bundle, tmp_path / "b"))
    change_tokenizer(bundle, lambda data: data["model"]["merges"].pop(which))
    assert {name.split(":")[0] for name in failed_checks(bundle)} == {"tokenizer"}


def change_tokenizer(bundle: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the tokenizer.json of a bundle; all hashes agree again."""
    path = bundle / TOKENIZER_FILE
    data = json.loads(path.read_text(encoding="utf-8"))
    change(data)
    path.write_text(json.dumps(data), encoding="utf-8")
    rehash(bundle)


def unused_tokens(bundle: Path) -> list[str]:
    """Tokens made by merges that no text of the corpus has."""
    texts = read_certificate(bundle, read_manifest(bundle)).texts
    assert texts is not None
    used = {number for ids in texts.ids for number in ids}
    vocabulary = json.loads((bundle / TOKENIZER_FILE).read_text(encoding="utf-8"))["model"]["vocab"]
    return [token for token, number in vocabulary.items() if number not in used and 2 < len(token) < 6]


def swap_tokens(bundle: Path) -> dict[str, int]:
    """Two tokens that no text of the corpus has change places; by token, the id that it had."""
    first, second = unused_tokens(bundle)[:2]
    before: dict[str, int] = {}

    def swap(data: dict[str, Any]) -> None:
        vocabulary = data["model"]["vocab"]
        before.update({first: vocabulary[first], second: vocabulary[second]})
        vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]

    change_tokenizer(bundle, swap)
    return before


def test_two_tokens_that_changed_places_are_named(text_bundle: Path, tmp_path: Path) -> None:
    bundle = Path(copytree(text_bundle, tmp_path / "b"))
    (first, first_id), (second, second_id) = swap_tokens(bundle).items()
    failed = [check for check in verify(bundle, device="cpu", threads=1).checks if not check.passed]
    assert [(check.name, check.measured) for check in failed] == [("tokenizer: ids with other tokens", 2)]
    named = sorted([(first_id, second), (second_id, first)])
    assert failed[0].detail == "other tokens than the reference's at ids " + ", ".join(
        f"{number} {token!r}" for number, token in named
    )


def test_eval_names_a_token_that_changed_places(
    text_bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bundle = Path(copytree(text_bundle, tmp_path / "b"))
    first, number = next(iter(sorted(swap_tokens(bundle).items())))
    (tmp_path / "text.txt").write_text("The capital of France is Paris.", encoding="utf-8")
    assert main(["eval", str(bundle), str(tmp_path / "text.txt"), "--against", str(text_bundle)]) == 1
    err = " ".join(capsys.readouterr().err.split())
    assert f"has another vocabulary: 2 tokens differ, {first!r} is id" in err
    assert f"and {number} there" in err


def test_merges_in_another_order_are_caught(text_bundle: Path, tmp_path: Path) -> None:
    bundle = Path(copytree(text_bundle, tmp_path / "b"))
    unused = unused_tokens(bundle)

    def swap(data: dict[str, Any]) -> None:
        merges = data["model"]["merges"]
        first, second = [place for place, merge in enumerate(merges) if "".join(merge) in unused][-2:]
        merges[first], merges[second] = merges[second], merges[first]

    change_tokenizer(bundle, swap)
    assert failed_checks(bundle) == ["tokenizer: merges or scores"]


def test_scores_and_which_of_two_equal_merges_comes_first() -> None:
    def rules(**model: Any) -> str | None:
        return vocabulary_evidence(Tokenizer.from_str(json.dumps({"model": model, **NO_STEPS}))).rules

    scores = [["a", -1.0], ["b", -2.0]]
    assert rules(type="Unigram", vocab=scores, unk_id=0) == rules(type="Unigram", vocab=scores, unk_id=0)
    assert rules(type="Unigram", vocab=scores, unk_id=0) != rules(
        type="Unigram", vocab=[*scores[:1], ["b", -2.5]], unk_id=0
    )
    vocabulary = {"a": 0, "b": 1, "ab": 2, "ba": 3, "aba": 4}
    merges = [["a", "b"], ["b", "a"], ["ab", "a"], ["a", "ba"]]
    same, other = [*merges[:2], *merges[:1:-1]], [*merges[1::-1], *merges[2:]]
    assert rules(type="BPE", vocab=vocabulary, merges=merges) == rules(type="BPE", vocab=vocabulary, merges=same)
    assert rules(type="BPE", vocab=vocabulary, merges=merges) != rules(type="BPE", vocab=vocabulary, merges=other)
    assert rules(type="WordLevel", vocab={"a": 0}, unk_token="a") is None


def test_a_chat_template_with_another_space_is_caught(text_bundle: Path, tmp_path: Path) -> None:
    bundle = Path(copytree(text_bundle, tmp_path / "b"))
    (bundle / CHAT_TEMPLATE_FILE).write_text(TEMPLATE.replace(": ", ":"), encoding="utf-8")
    rehash(bundle)
    assert failed_checks(bundle) == ["chat template: chats written otherwise"]
