"""Stand-ins for `graphport.runtime`, `graphport.export` and standard input, for tests of the command line.

In: nothing. Out: records of what the command line asked for, and fixed answers. They load no model.
"""

import sys
import types
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from graphport.model_def.block_config import AttentionConfig, BlockConfig, FeedForwardConfig, NormConfig
from graphport.model_def.config import TransformerConfig
from graphport.model_def.signature import FileRecord, GenerationDefaults, Manifest, decoder_signature


@dataclass
class FakeEvent:
    text: str
    token_id: int | None
    finish_reason: str | None = None
    logprob: float | None = None


@dataclass
class FakeTokenizer:
    has_chat_template: bool = True

    def encode(self, text: str) -> list[int]:
        return [ord(letter) for letter in text]

    def compile_chat_template(self) -> None:
        """It has none to compile."""

    def apply_chat_template(self, messages: list[dict[str, str]]) -> list[int]:
        return self.encode("".join(f"<{message['role']}>{message['content']}" for message in messages))


@dataclass
class FakeRuntime:
    """Stands for `graphport.runtime`: records its calls and answers "Paris."."""

    tokenizer: FakeTokenizer | None = field(default_factory=FakeTokenizer)
    loads: list[tuple[Any, dict[str, Any]]] = field(default_factory=list)
    prompts: list[str] = field(default_factory=list)
    sampling: list[dict[str, Any]] = field(default_factory=list)
    failure: BaseException | None = None

    def load_language_model(self, bundle: Path, **options: Any) -> "FakeRuntime":
        self.loads.append((bundle, options))
        return self

    def open_bundle(self, _bundle: Path) -> "FakeRuntime":
        return self

    def SamplingParams(self, **given: Any) -> dict[str, Any]:  # noqa: N802 - the name of the real class
        if given.get("temperature", 0) < 0:
            raise ValueError(f"temperature ({given['temperature']}) must not be negative; 0 is greedy")
        return given

    @property
    def manifest(self) -> Manifest:
        return tiny_manifest()

    def stream(self, ids: list[int], sampling: dict[str, Any]) -> Any:
        self.prompts.append("".join(map(chr, ids)))
        self.sampling.append(sampling)
        yield FakeEvent("Par", 7)
        if self.failure is not None:
            raise self.failure
        yield FakeEvent("is", 8)
        yield FakeEvent(".", None, "stop")


def tiny_manifest() -> Manifest:
    attention = AttentionConfig(num_heads=6, num_kv_heads=2, head_dim=10)
    norm = NormConfig()
    block = BlockConfig(attention=attention, feed_forward=FeedForwardConfig(width=7), norm=norm)
    config = TransformerConfig(vocab_size=11, hidden_size=5, max_positions=13, blocks=(block, block), final_norm=norm)
    return Manifest(
        graphport_version="0.1.0",
        kind="decoder",
        target="cpu",
        precision="int8",
        max_length=13,
        config=config,
        signature=decoder_signature(config),
        generation=GenerationDefaults(),
        source={"format": "gguf", "name": "tiny[1].gguf"},
        files={name: FileRecord(size=1_250_000, sha256="00") for name in ("model.onnx", "tokenizer.json")},
    )


CHECK = {"name": "int8 against fp32, KL", "measured": 0.004, "tolerance": 0.006, "passed": True, "detail": "top-1 99%"}


@dataclass
class FakeExport:
    """Stands for `graphport.export`."""

    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = field(default_factory=list)
    checks: list[Any] = field(default_factory=lambda: [types.SimpleNamespace(**CHECK, inputs="a text")])
    manifest: Any = field(default_factory=tiny_manifest)
    __path__: tuple[str, ...] = ()

    def export(self, *arguments: Any, **options: Any) -> Any:
        self.calls.append((arguments, options))
        options["progress"]("tracing [30 layers]")
        return types.SimpleNamespace(
            path=arguments[1],
            manifest=self.manifest,
            text_manifest=None,
            fusions={"pack_qkv": 30},
            certificate=self.checks,
            notes=["context limited to 13"],
        )


class PipedInput:
    """Piped standard input; `.isatty` is a terminal's when told so."""

    def __init__(self, text: str, *, terminal: bool = False) -> None:
        self._lines = text.splitlines(keepends=True)
        self._terminal = terminal

    def isatty(self) -> bool:
        return self._terminal

    def read(self) -> str:
        return "".join(self._lines)

    def readline(self) -> str:
        return self._lines.pop(0) if self._lines else ""


def take_torch_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `graphport.export` fail to import as it does where torch is not installed."""

    class Blocked:
        def find_spec(self, name: str, *_: Any) -> None:
            if name.startswith("graphport.export"):
                raise ModuleNotFoundError("No module named 'torch'", name="torch")

    for name in [name for name in sys.modules if name.startswith("graphport.export")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr("sys.meta_path", [Blocked(), *sys.meta_path])
