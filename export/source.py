"""What the user names as SOURCE, as a module with everything that belongs to it.

In: a Hugging Face folder or hub id, a .gguf file, `path/to/file.py:function`, or a Transformer. Out: `SourceModel`.
Formats are read by `model_def/checkpoint.py`.
"""

import contextlib
import hashlib
import runpy
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from graphport.model_def.checkpoint import Checkpoint, CheckpointError, load_checkpoint
from graphport.model_def.config import TransformerConfig
from graphport.model_def.gguf_blocks import StoredMatrix
from graphport.model_def.readout_config import SimilarityConfig
from graphport.model_def.signature import GenerationDefaults
from graphport.model_def.transformer import Transformer


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceModel:
    """A module in eval mode, the text side that came with it, and its matrices as a GGUF file stores them.

    `text_limit`: the longest text in tokens that the source asks for, where it is less than the positions allow.
    Of two towers this is the images', `text` the texts', and `similarity` compares their vectors.
    """

    model: Transformer
    generation: GenerationDefaults
    tokenizer_json: str | None
    chat_template: str | None
    special_tokens: dict[str, str]
    source: dict[str, str]
    notes: tuple[str, ...]
    stored: Mapping[str, StoredMatrix] = field(default_factory=dict)
    text_limit: int | None = None
    text: "SourceModel | None" = None
    similarity: SimilarityConfig | None = None


def open_source(source: str | Path | Transformer, *, seed: int) -> SourceModel:
    """Read `source`; `seed` draws the weights when a function returns a config alone.

    A Transformer is taken as it is, with its training mode. Raises CheckpointError, in one line, for whatever cannot
    be read.
    """
    if isinstance(source, Transformer):
        return _without_text(source, {"format": "module", "name": type(source).__name__, "sha256": _hash(source)})
    path, colon, function = str(source).rpartition(":")
    if colon and path.endswith(".py"):
        return _open_function(Path(path), function, seed=seed)
    return _of_checkpoint(load_checkpoint(source))


def _of_checkpoint(checkpoint: Checkpoint) -> SourceModel:
    with torch.device("meta"):
        model = Transformer(checkpoint.config)
    model.load_state_dict(checkpoint.weights, strict=True, assign=True)
    return SourceModel(
        model=model.eval(),
        generation=checkpoint.generation,
        tokenizer_json=checkpoint.tokenizer_json,
        chat_template=checkpoint.chat_template,
        special_tokens=checkpoint.special_tokens,
        source=checkpoint.source,
        notes=checkpoint.notes,
        stored=checkpoint.stored,
        text_limit=checkpoint.text_limit,
        text=None if checkpoint.text is None else _of_checkpoint(checkpoint.text),
        similarity=checkpoint.similarity,
    )


def _open_function(path: Path, function: str, *, seed: int) -> SourceModel:
    if not path.is_file():
        raise CheckpointError(f"no file at {path}; SOURCE path/to/file.py:function names a Python file")
    made = call_function(path, function)
    notes: tuple[str, ...] = ()
    if isinstance(made, TransformerConfig):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            made = Transformer(made)
        notes = (f"weights are random, drawn with seed {seed}",)
    if not isinstance(made, Transformer):
        raise CheckpointError(
            f"{path}:{function} returned {type(made).__name__}; needed is a graphport TransformerConfig or Transformer "
            "(export any other module with graphport.export.torch_to_onnx.torch_to_onnx)"
        )
    source = {"format": "python", "name": f"{path.name}:{function}", "sha256": _hash(made)}
    return _without_text(made.eval(), source, notes)


def _without_text(model: Transformer, source: dict[str, str], notes: tuple[str, ...] = ()) -> SourceModel:
    return SourceModel(
        model=model,
        generation=GenerationDefaults(),
        tokenizer_json=None,
        chat_template=None,
        special_tokens={},
        source=source,
        notes=notes,
    )


def _hash(model: Transformer) -> str:
    """SHA-256 over names and bytes of the weights, hex."""
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        digest.update(name.encode())
        digest.update(parameter.detach().contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def call_function(path: Path, function: str) -> object:
    """Call the user's function as `python path` would run it: its folder is searched for imports.

    What it prints goes to stderr, and it cannot move the process to another folder.
    """
    try:
        with contextlib.chdir("."), contextlib.redirect_stdout(sys.stderr), _searched(path.resolve().parent):
            make = runpy.run_path(str(path)).get(function)
            if callable(make):
                return make()
    except (Exception, SystemExit) as error:  # the user's own code may raise anything; --debug shows the traceback
        raise CheckpointError(f"{path}:{function} failed: {type(error).__name__}: {error}") from error
    raise CheckpointError(f"{path} defines no function {function!r}")


@contextlib.contextmanager
def _searched(folder: Path) -> Iterator[None]:
    """Search `folder` first for imports, for as long as the block runs."""
    before = sys.path.copy()
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path[:] = before
