"""Linear attention: parallel, chunked and recurrent form are one, in PyTorch, in the graph and in a user's file."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from parity import assert_parity
from tiny_models import HEAD_DIM, HEADS, attention, block, decoder, tiny_model, token_ids

from graphport.cli import main
from graphport.export import export
from graphport.model_def.cached_decoder import CachedDecoder
from graphport.model_def.config import TransformerConfig
from graphport.model_def.linear_attention import LinearState, empty_state, linear_attention
from graphport.model_def.position_config import ConfigError, LearnedPosition, RelativeBias, RotaryPosition
from graphport.model_def.recurrent_decoder import RecurrentDecoder
from graphport.model_def.recurrent_signature import recurrent_signature
from graphport.runtime import RecurrentModel, load
from graphport.runtime import recurrent_model as served
from graphport.runtime.encoder_session import EncoderSession

EXAMPLE = Path(__file__).resolve().parent.parent / "examples/linear_attention.py"
SOURCE = f"{EXAMPLE}:decoder"
B, N, S, H = 2, 3, 11, 5


def _formula(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> np.ndarray:
    """Katharopoulos et al. 2020, equations 18 to 20, one token after the other in double precision."""
    q, k, v = (part.double().numpy() for part in (query, key, value))
    phi_q, phi_k = (np.where(x > 0, x + 1, np.exp(np.minimum(x, 0))) for x in (q, k))
    found = np.zeros_like(v)
    for row, head in np.ndindex(B, N):
        products, keys = np.zeros((H, H)), np.zeros(H)
        for i in range(S):
            products += np.outer(phi_k[row, head, i], v[row, head, i])
            keys += phi_k[row, head, i]
            found[row, head, i] = phi_q[row, head, i] @ products / (phi_q[row, head, i] @ keys)
    return found.astype(np.float32)


def _in_pieces(heads: list[torch.Tensor], sizes: tuple[int, ...]) -> tuple[torch.Tensor, LinearState]:
    state, found, begin = empty_state(B, N, H), [], 0
    for size in sizes:
        piece, state = linear_attention(*(part[:, :, begin : begin + size] for part in heads), state)
        found.append(piece)
        begin += size
    return torch.cat(found, dim=2), state


def test_parallel_chunked_and_recurrent_form_equal_the_formula() -> None:
    torch.manual_seed(0)
    heads = [2 * torch.randn(B, N, S, H) for _ in range(3)]
    wanted = _formula(*heads)
    whole, after = _in_pieces(heads, (S,))
    assert_parity(whole, wanted, "equal models")
    assert after.products.shape == (B, N, H, H)
    assert after.keys.shape == (B, N, H)
    for sizes in ((1,) * S, (4, 1, 6), (S - 1, 1)):
        found, state = _in_pieces(heads, sizes)
        assert_parity(found, wanted, "equal models")
        assert_parity(state.products, after.products, "equal models")
        assert_parity(state.keys, after.keys, "equal models")
    later, before = [part[:, :, 4:] for part in heads], _in_pieces([part[:, :, :4] for part in heads], (4,))[1]
    zeros = empty_state(B, N, H)
    for wrong in (zeros, LinearState(before.products, zeros.keys), LinearState(before.products.mT, before.keys)):
        with pytest.raises(AssertionError):
            assert_parity(linear_attention(*later, wrong)[0], wanted[:, :, 4:], "equal models")


def test_features_that_underflow_give_no_nan() -> None:
    heads = torch.full((1, 1, 3, H), -200.0)
    found, state = linear_attention(heads, heads, heads, empty_state(1, 1, H))
    assert found.isfinite().all()
    assert state.products.isfinite().all()


def _tiny() -> TransformerConfig:
    linear = attention(num_kv_heads=HEADS, rotary=None, linear=True, gate=True)
    return decoder(block(of=linear), position=LearnedPosition(max_positions=64))


def test_a_stack_steps_over_its_states_as_over_the_whole_text() -> None:
    config = _tiny()
    model, ids = tiny_model(config), token_ids(2, 9)
    step = RecurrentDecoder(model, max_length=64)
    states = [part for _ in config.blocks for part in empty_state(2, HEADS, HEAD_DIM)]
    specs = recurrent_signature(config).inputs[2:]
    assert [spec.shape[1:] for spec in specs] == [tuple(state.shape[1:]) for state in states]
    with torch.inference_mode():
        wanted, found, begin = model(ids), [], 0
        for size in (1, 4, 1, 3):
            piece = ids[:, begin : begin + size]
            logits, *states = step(piece, torch.full((2,), begin), *states)
            found.append(logits)
            begin += size
        assert_parity(torch.cat(found, dim=1), wanted, "equal models")
        misplaced, *_ = step(ids[:, :2], torch.full((2,), 5), *[torch.zeros_like(state) for state in states])
        with pytest.raises(AssertionError):
            assert_parity(misplaced, wanted[:, :2], "equal models")


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> str:
    out = str(tmp_path_factory.mktemp("linear") / "bundle")
    assert main(["export", SOURCE, out, "--precision", "fp32"]) == 0
    return out


def test_an_example_file_goes_through_the_certificate(bundle: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", bundle, "--against", SOURCE, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["passed"]
    names = " ".join(check["parity"] if "parity" in check else str(check) for check in facts["checks"])
    assert all(way in names for way in ("one piece", "pieces", "token by token"))


def test_the_certificate_rejects_states_that_are_dropped(
    bundle: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = served.step

    def forgets(
        session: EncoderSession, ids: np.ndarray, state: served.RecurrentState
    ) -> tuple[np.ndarray, served.RecurrentState]:
        logits, after = right(session, ids, state)
        return logits, after._replace(tensors=tuple(np.zeros_like(tensor) for tensor in after.tensors))

    monkeypatch.setattr(served, "step", forgets)
    assert main(["verify", bundle, "--json"]) != 0
    assert not json.loads(capsys.readouterr().out)["passed"]


@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_quantised_stacks_pass_their_certificate(precision: str, tmp_path: Path) -> None:
    export(SOURCE, tmp_path / "out", precision=precision)
    with load(tmp_path / "out") as model:
        assert isinstance(model, RecurrentModel)
        assert model.step([[1, 2]])[0].shape == (1, 2, 100)


def test_a_state_goes_on_twice_and_rows_do_not_see_each_other(bundle: str) -> None:
    ids = np.random.default_rng(0).integers(100, size=(3, 8))
    with load(bundle) as model:
        assert isinstance(model, RecurrentModel)
        whole, _ = model.step(ids)
        _, state = model.step(ids[:, :5])
        for _ in range(2):  # the state that is given stays as it is
            rest, after = model.step(ids[:, 5:], state)
            assert_parity(rest, whole[:, 5:], "equal models")
            assert (state.length, after.length) == (5, 8)
        for row in range(3):
            alone, _ = model.step(ids[row : row + 1])
            assert_parity(alone[0], whole[row], "equal models")


def test_ids_and_states_that_do_not_fit_are_refused(bundle: str) -> None:
    with load(bundle, max_batch=2) as model:
        assert isinstance(model, RecurrentModel)
        _, state = model.step([[1, 2], [3, 4]])
        for wrong in ([1, 2], [[]], [[0.5]]):
            with pytest.raises(ValueError, match="ids must be whole numbers"):
                model.step(np.array(wrong))
        with pytest.raises(ValueError, match=r"3 rows are more than max_batch \(2\)"):
            model.step([[1], [2], [3]])
        with pytest.raises(ValueError, match=r"ids must lie in 0 \.\. 99, got 5 \.\. 100"):
            model.step([[5, 100]])
        with pytest.raises(ValueError, match="the state is of 2 rows, ids have 1"):
            model.step([[1]], state)
        with pytest.raises(ValueError, match="ids must be whole numbers"):
            model.step([[1, 2], [3]])
        other = tuple(tensor[..., :8] for tensor in state.tensors)
        wide = tuple(tensor.astype(np.float64) for tensor in state.tensors)
        for tensors in (state.tensors[:-1], state.tensors[::-1], other, wide, ()):
            with pytest.raises(ValueError, match="the state is not of this model: shapes or dtypes differ"):
                model.step([[1], [3]], state._replace(tensors=tensors))
        for given in (state.tensors, tuple(state), [], 0):  # what is empty begins no text
            with pytest.raises(TypeError, match="state must be what an earlier step gave, or None"):
                model.step([[1], [3]], given)  # type: ignore[arg-type]  # what a caller may pass
        for length in (-1, 1.5, True):
            with pytest.raises(ValueError, match="length must be a number of tokens"):
                model.step([[1], [3]], state._replace(length=length))  # type: ignore[arg-type]  # as above
        with pytest.raises(ValueError, match="the state has numbers that are not finite"):
            model.step([[1], [3]], state._replace(tensors=tuple(tensor * np.nan for tensor in state.tensors)))
        with pytest.raises(ValueError, match=r"129 tokens are more than max_length \(128\)"):
            model.step(np.ones((2, 127), np.int64), state)
    with pytest.raises(RuntimeError, match="this RecurrentModel is closed"):
        model.step([[1]])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["generate", "x"], "a recurrent decoder, whose states no KV cache holds; use load, and generate"),
        (["embed", "x"], "is a recurrent decoder, which embeds no text; use generate"),
        (["verify", "--invariance"], "leave --invariance out"),
        (["report", "--times", "--html", "page.html"], "of which no times are taken; leave --times out"),
        (["diff", str(EXAMPLE.parent / "linear_attention.py:decoder")], "has no KV cache, over which diff steps"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_commands_that_need_a_kv_cache_refuse_in_one_line(
    arguments: list[str],
    words: str,
    bundle: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([arguments[0], bundle, *arguments[1:]]) != 0
    assert words in " ".join(capsys.readouterr().err.split())


def test_what_linear_attention_cannot_be_is_refused() -> None:
    for changes in (
        {"causal": False},
        {"num_kv_heads": 1},
        {"rotary": RotaryPosition(theta=10.0)},
        {"window": 3},
        {"softcap": 1.0},
    ):
        with pytest.raises(ConfigError, match="linear attention is causal with as many kv heads as heads"):
            attention(**({"num_kv_heads": HEADS, "rotary": None, "linear": True} | changes))
    linear = block(of=attention(num_kv_heads=HEADS, rotary=None, linear=True))
    with pytest.raises(ConfigError, match="linear attention in some blocks only"):
        decoder(linear, block())
    with pytest.raises(ConfigError, match="linear attention is for decoders with a head"):
        decoder(linear, relative_bias=RelativeBias(num_buckets=8, max_distance=20))
    with pytest.raises(ConfigError, match="linear attention has states, not a KV cache"):
        CachedDecoder(tiny_model(_tiny()), max_length=8)
    with pytest.raises(ConfigError, match="a recurrent decoder has linear attention in every block"):
        RecurrentDecoder(tiny_model(decoder(block())), max_length=8)
    with pytest.raises(ConfigError, match=r"max_length \(65\) must lie in 1 \.\. max_positions \(64\)"):
        RecurrentDecoder(tiny_model(_tiny()), max_length=65)
    assert TransformerConfig.from_dict(_tiny().to_dict()) == _tiny()
