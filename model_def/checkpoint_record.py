"""What a checkpoint is once read, whatever its format, and the accounting every format shares.

In: the tensors a file holds and the ones a configuration needs. Out: `Checkpoint`, or one error with every difference.
It reads no weights (see `huggingface.py`, `gguf.py`).
"""

import difflib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from graphport.model_def.config import TransformerConfig
from graphport.model_def.gguf_blocks import StoredMatrix
from graphport.model_def.readout_config import SimilarityConfig
from graphport.model_def.signature import GenerationDefaults

Shape = tuple[int, ...]

MOST_COUNT = 1024  # of layers and of experts; a damaged number of them would fill the memory with records


class CheckpointError(ValueError):
    """A checkpoint that is missing, damaged, unsafe or not understood; the message names the file and the fault."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A model read from disk.

    `weights` are float32 tensors by the names of `parameter_shapes(config)`, linear weights [out, in].
    `tokenizer_json` is the text of a `tokenizers` file, `chat_template` a Jinja text, `special_tokens` the
    texts that templates know as bos_token, eos_token, ... `source` has the keys format,
    name and sha256. `notes` are sentences about what was ignored, assumed or converted.
    `stored` are the matrices as a GGUF file holds them, by the names of `weights`; empty for other formats.
    `text_limit` is the longest text in tokens that the checkpoint asks for, None: as many as it has positions.
    Of a checkpoint with two towers this is the images', `text` the texts', and `similarity` compares their vectors.
    """

    config: TransformerConfig
    weights: dict[str, torch.Tensor]
    generation: GenerationDefaults
    tokenizer_json: str | None
    chat_template: str | None
    special_tokens: dict[str, str]
    source: dict[str, str]
    notes: tuple[str, ...] = ()
    stored: Mapping[str, StoredMatrix] = field(default_factory=dict)
    text_limit: int | None = None
    text: "Checkpoint | None" = None
    similarity: SimilarityConfig | None = None


def account_for_tensors(where: str, *, found: Mapping[str, Shape], needed: Mapping[str, Shape]) -> None:
    """Raise CheckpointError listing every tensor of `needed` that is missing, every extra one and every wrong shape.

    Both map the checkpoint's own tensor names to shapes.
    """
    problems = []
    if missing := sorted(set(needed) - set(found)):
        problems.append(f"missing: {', '.join(missing)}")
    if extra := sorted(set(found) - set(needed)):
        problems.append(f"not part of the model: {', '.join(extra)}")
    wrong = [
        f"{name} is {list(found[name])}, the config needs {list(needed[name])}"
        for name in sorted(set(needed) & set(found))
        if tuple(found[name]) != tuple(needed[name])
    ]
    if wrong:
        problems.append(f"wrong shape: {'; '.join(wrong)}")
    if problems:
        raise CheckpointError(f"{where}: tensors do not match the configuration; {'; '.join(problems)}")


def stored_name(name: str, *, outer: Mapping[str, str], blocks: str, modules: Mapping[str, str]) -> str:
    """A format's name of our parameter `name`.

    `outer` maps whole names outside the blocks; a layer's parameter is `blocks`, its number, its module by `modules`,
    and weight or bias: "blocks.3.attention.query.weight" to "blk.3.attn_q.weight". A parameter that is itself in
    `modules` is called as that says.
    """
    if name in outer:
        return outer[name]
    _, layer, rest = name.split(".", 2)
    if rest in modules:
        return f"{blocks}.{layer}.{modules[rest]}"
    module, _, kind = rest.rpartition(".")
    return f"{blocks}.{layer}.{modules[module]}.{kind}"


def name_known(name: object, known: Sequence[str]) -> str:
    """The end of a refusal: "known are ..." and which of them look like `name`."""
    near = difflib.get_close_matches(str(name), known, n=2, cutoff=0.5)
    return f"known are {', '.join(known)}" + (f"; nearest: {', '.join(near)}" if near else "")


def as_float32(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` as float32 (not copied when it is already); raises CheckpointError when a value is not finite."""
    converted = tensor.to(torch.float32)
    if converted.numel():
        lowest, highest = torch.aminmax(converted)  # both are NaN when any value is
        if not (torch.isfinite(lowest) and torch.isfinite(highest)):
            raise CheckpointError(
                f"{name} has values that are not finite in float32 ({tensor.dtype}: {float(lowest)} to "
                f"{float(highest)}); the file is damaged or the model was saved after it diverged"
            )
    return converted


def end_ids(candidates: Iterable[object], *, vocab_size: int, where: str) -> tuple[int, ...]:
    """The union, in order, of ids given as an int, a list of ints or None.

    Raises CheckpointError for anything else and for an id outside the vocabulary.
    """
    ids: list[int] = []
    for candidate in candidates:
        for item in candidate if isinstance(candidate, list) else [candidate]:
            if item is None:
                continue
            if isinstance(item, bool) or not isinstance(item, int) or not 0 <= item < vocab_size:
                raise CheckpointError(f"{where}: end-of-text id {item!r} is no id of a vocabulary of {vocab_size}")
            if item not in ids:
                ids.append(item)
    return tuple(ids)


def first_id(name: str, candidates: Iterable[object], vocab_size: int, notes: list[str]) -> int | None:
    """The first candidate that is an id of the vocabulary; others but None are noted and left out."""
    for candidate in candidates:
        if isinstance(candidate, int) and 0 <= candidate < vocab_size:
            return candidate
        if candidate is not None:
            notes.append(f"{name} {candidate!r} is no id of a vocabulary of {vocab_size}; left out")
    return None


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file, empty when there is no file; raises CheckpointError when it is torn."""
    values = _parse_json(path) if path.is_file() else {}
    if not isinstance(values, dict):
        raise CheckpointError(f"{path} must hold a JSON object, got {type(values).__name__}")
    return values


def read_json_list(path: Path) -> list[Any]:
    """The list in a JSON file; raises CheckpointError when it is torn."""
    values = _parse_json(path)
    if not isinstance(values, list):
        raise CheckpointError(f"{path} must hold a JSON list, got {type(values).__name__}")
    return values


def _parse_json(path: Path) -> Any:  # noqa: ANN401 - JSON
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{path} is no JSON: {error}; fetch it again") from error
