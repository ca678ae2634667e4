"""`eval` as a user runs it, on tiny bundles: figures, references of both kinds, exit statuses, what is refused."""

import io
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tiny_tokenizers
import torch
from cli_fakes import take_torch_away
from parity import TOLERANCES
from rich.console import Console
from tiny_bundles import MAX_LENGTH, VOCAB, tiny_weights, write_tiny_bundle
from tiny_checkpoints import add_tokenizer, make_model, write_gguf

from graphport import cli_tables
from graphport.cli import main
from graphport.export import export

TEXT = "The cat sat on the mat, and the dog lay at the end of the story. Größe 😀.\n" * 5
CONTEXT = 48


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """A checkpoint with its transformers model, its fp32 bundle, two bundles without tokenizer, a text, ids."""
    folder = tmp_path_factory.mktemp("eval")
    tokenizer = tiny_tokenizers.byte_level()
    model = make_model("llama", vocab_size=tokenizer.get_vocab_size(), max_position_embeddings=64)
    write_gguf(folder / "model.gguf", model, edit=lambda writer: add_tokenizer(writer, tokenizer))
    export(folder / "model.gguf", folder / "fp32", precision="fp32", verify=False)
    (folder / "text.txt").write_text(TEXT, encoding="utf-8")
    ids = np.random.default_rng(0).integers(0, VOCAB, 300).tolist()
    (folder / "ids.json").write_text(json.dumps(ids))
    write_tiny_bundle(folder / "ids")
    other = {name: weight * np.float32(1.02) for name, weight in tiny_weights().items()}
    write_tiny_bundle(folder / "other", weights=other)
    return SimpleNamespace(folder=folder, model=model, ids=tokenizer.encode(TEXT).ids)


def _run(files: Any, line: str) -> int:
    """Run `eval` with the words that name a file replaced by its path."""
    words = [str(files.folder / word) if (files.folder / word).exists() else word for word in line.split()]
    return main(["eval", *words])


def _json(files: Any, line: str, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert _run(files, f"{line} --json") == 0
    data: dict[str, Any] = json.loads(capsys.readouterr().out)
    return data


def test_perplexity_is_that_of_transformers(files: Any, capsys: pytest.CaptureFixture[str]) -> None:
    data = _json(files, f"fp32 text.txt --context {CONTEXT}", capsys)
    nll = []
    for begin in range(0, len(files.ids), CONTEXT):
        window = torch.tensor([files.ids[begin : begin + CONTEXT]])
        with torch.no_grad():
            rows = files.model(window, use_cache=False).logits[0].double().log_softmax(-1)
        nll += [-rows[i, token].item() for i, token in enumerate(window[0, 1:].tolist())]
    assert data["negative_log_likelihood"] == pytest.approx(np.mean(nll), abs=TOLERANCES["compiled", "float32"])
    assert data["perplexity"] == pytest.approx(np.exp(data["negative_log_likelihood"]))
    assert (data["tokens"], data["scored"]) == (len(files.ids), len(nll))
    assert (data["context"], data["stride"]) == (CONTEXT, CONTEXT)
    assert data["windows"] == data["not_scored"] == -(-len(files.ids) // CONTEXT)
    assert data["bits_per_byte"] > 0
    assert data["fidelity"] is data["against"] is None


def test_against_its_source_an_fp32_bundle_hardly_differs(files: Any, capsys: pytest.CaptureFixture[str]) -> None:
    data = _json(files, f"fp32 text.txt --context {CONTEXT} --stride 17 --against model.gguf", capsys)
    fidelity = data["fidelity"]
    assert 0 < fidelity["max_abs_logit_difference"] <= TOLERANCES["compiled", "float32"]
    assert 0 < fidelity["kl_max"] <= TOLERANCES["compiled", "float32"]
    assert fidelity["widest_flip"] <= 2 * TOLERANCES["compiled", "float32"]
    assert fidelity["perplexity"] == pytest.approx(data["perplexity"], rel=TOLERANCES["compiled", "float32"])
    assert data["not_scored"] == 1


def test_against_the_source_of_another_model_it_does(
    files: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = tiny_tokenizers.byte_level()
    other = make_model("llama", seed=1, vocab_size=tokenizer.get_vocab_size(), max_position_embeddings=64)
    path = write_gguf(tmp_path / "other.gguf", other, edit=lambda writer: add_tokenizer(writer, tokenizer))
    fidelity = _json(files, f"fp32 text.txt --against {path}", capsys)["fidelity"]
    assert fidelity["kl_mean"] > 0.1
    assert fidelity["top1_agreement"] < 0.5


def test_a_bundle_against_itself_is_exactly_zero_and_needs_no_torch(files: Any) -> None:
    paths = [str(files.folder / name) for name in ("fp32", "text.txt", "fp32")]
    command = ["eval", paths[0], paths[1], "--against", paths[2], "--json"]
    script = f"import sys; from graphport.cli import main; code = main({command!r}); "
    script += "print(code, [name for name in ('torch', 'onnx', 'gguf', 'transformers') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=120)
    result, last = done.stdout.splitlines()
    assert last == "0 []"
    fidelity = json.loads(result)["fidelity"]
    assert (fidelity["kl_max"], fidelity["top1_agreement"], fidelity["max_abs_logit_difference"]) == (0.0, 1.0, 0.0)


def test_tables_go_to_stdout_and_progress_to_stderr(files: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert _run(files, f"fp32 text.txt --context {CONTEXT} --against model.gguf") == 0
    out, err = capsys.readouterr()
    for piece in ("perplexity", "bits per byte", "KL divergence, mean", "top-1 agreement", "worst token", "«"):
        assert piece in out
    for piece in ("opening the bundle", "reading the source", f"scoring {len(files.ids)} tokens"):
        assert piece in err
    assert "windows of at most 48 tokens, " in err
    assert " not scored: the first of a window has nothing before it; " in err
    assert _run(files, "ids ids.json") == 0
    out, err = capsys.readouterr()
    assert "bits per byte" not in out
    assert "KL" not in out
    assert "id " in out


def test_progress_is_a_bar_on_a_terminal_that_goes_when_it_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = io.StringIO()
    monkeypatch.setattr(cli_tables, "_console", lambda: Console(file=shown, force_terminal=True, width=60))
    with cli_tables.progress_bar("scoring") as progress:
        progress(30, 60)
        progress(60, 60)
    assert "scoring" in shown.getvalue()
    assert "100%" in shown.getvalue()
    assert shown.getvalue().endswith("\x1b[2K")  # the line is cleared
    monkeypatch.setattr(cli_tables, "_console", lambda: Console(file=shown, width=60))
    shown.truncate(0)
    with cli_tables.progress_bar("scoring") as progress:
        progress(1, 2)
    assert not shown.getvalue().strip("\0")


def test_without_a_tokenizer_ids_are_scored(files: Any, capsys: pytest.CaptureFixture[str]) -> None:
    data = _json(files, "ids ids.json --against other", capsys)
    assert data["bits_per_byte"] is None
    assert (data["tokens"], data["windows"], data["context"]) == (300, 3, MAX_LENGTH)
    assert data["worst"][0]["excerpt"] is None
    assert 0 < data["fidelity"]["kl_mean"] < 1


@pytest.mark.parametrize(
    ("line", "status", "message"),
    [
        ("fp32", 2, "Missing argument 'TEXTFILE'"),
        ("fp32 text.txt --context 1", 2, "--context"),
        ("fp32 text.txt --stride 0", 2, "--stride"),
        ("fp32 text.txt --context 16 --stride 17", 2, "--stride 17 would skip text: it must be at most --context, 16"),
        ("fp32 text.txt --context 65", 1, "context must be 1 to 64, the bundle's own limit; got 65"),
        ("fp32 text.txt --stride 65", 1, "stride must be 1 to 64, the text that a window holds; got 65"),
        ("none text.txt", 1, "none is no graphport bundle"),
        ("fp32 none.txt", 1, "no file at none.txt; TEXTFILE names a text in UTF-8"),
        ("fp32 fp32", 1, "fp32 is a folder; TEXTFILE names one file of text"),
        ("fp32 fp32/model.onnx.data", 1, "is no UTF-8: byte 0x"),
        ("fp32 /dev/null", 1, "/dev/null is empty; give a text of at least two tokens"),
        ("ids text.txt", 1, "this bundle has no tokenizer, so TEXTFILE must hold a JSON list of token ids"),
        ("fp32 text.txt --against ids", 1, "ids has no tokenizer and the bundle has one"),
        ("ids ids.json --against fp32", 1, "fp32 has a tokenizer and the bundle has none"),
        ("fp32 text.txt --against text.txt", 1, "text.txt"),
    ],
)
def test_what_cannot_be_evaluated_is_refused_in_one_line(
    files: Any, line: str, status: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _run(files, line) == status
    out, err = capsys.readouterr()
    assert out == ""
    last = err.splitlines()[-1]
    assert last.startswith("graphport: error: ")
    with pytest.raises(ValueError, match=message):
        raise ValueError(last)


def test_a_python_source_without_tokenizer_is_compared_by_ids(
    files: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "own.py").write_text(
        "from tiny_models import block, decoder, attention\n"
        "def make():\n    return decoder(block())\n"
        "def encoder():\n    return decoder(block(of=attention(causal=False)))\n"
    )
    source = f"{tmp_path / 'own.py'}:make"
    bundle = export(source, tmp_path / "bundle", precision="fp32", verify=False)
    (tmp_path / "ids.json").write_text(json.dumps(list(range(60))))
    assert main(["eval", str(bundle.path), str(tmp_path / "ids.json"), "--against", source, "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["fidelity"]["max_abs_logit_difference"] <= TOLERANCES["compiled", "float32"]
    assert "weights are random, drawn with seed 0" in err
    encoder = source.replace(":make", ":encoder")
    assert main(["eval", str(bundle.path), str(tmp_path / "ids.json"), "--against", encoder]) == 1
    assert "is an encoder: it predicts no next token" in capsys.readouterr().err


def test_a_source_needs_the_export_extra_and_says_so(
    files: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    take_torch_away(monkeypatch)
    assert _run(files, "fp32 text.txt --against model.gguf") == 1
    message = (
        "`graphport eval --against SOURCE` needs torch, which is not installed; do: pip install 'graphport[export]'"
    )
    assert message in capsys.readouterr().err
    assert _run(files, "fp32 text.txt --against fp32") == 0
