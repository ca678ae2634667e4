"""Two forms of a model, named on the command line, opened side by side: `graphport diff A B`.

In: names such as model.gguf, exported:model.gguf, compiled:model.gguf, build/model, build/model@cuda. Out: where they
part. Graphs that are not on disk are made in a temporary folder.
"""

import dataclasses
import functools
import tempfile
from collections.abc import Callable
from pathlib import Path

from graphport.export.bundle import write_graph
from graphport.export.certify import text_ids
from graphport.export.first_divergence import Divergence, first_divergence
from graphport.export.graph_pass import CompilePlan
from graphport.export.graph_sites import ordered_sites, value_site
from graphport.export.pipeline import compile_graph
from graphport.export.plain_tokenizer import plain_tokenizer
from graphport.export.source import SourceModel, open_source
from graphport.export.targets import CPU, CUDA, TargetError
from graphport.export.torch_to_onnx import torch_to_onnx
from graphport.export.traced_models import TracedEager, TracedGraph, TracedModel
from graphport.model_def.cached_decoder import CachedDecoder
from graphport.model_def.config import TransformerConfig
from graphport.model_def.parity_text import PARITY_TEXT
from graphport.model_def.signature import MANIFEST_FILE, TOKENIZER_FILE, decoder_signature, read_manifest

STAGES = ("eager", "exported", "compiled")
# Largest relative error that is none, by what the coarser side rounds.
TOLERANCES = {
    "fp32": 1e-4,  # SmolLM2-135M shows 3.8e-6
    "gguf": 0.6,  # 0.087; a random tiny model 0.46 in int8
    "int8": 0.6,  # 0.053
    "int4": 1.5,  # 0.66
    "auto": 1.5,  # not coarser than int4
    "fp16": 0.05,  # not measured on a GPU yet, as the next
    "bf16": 0.3,
}

_SMOOTHED = ("int8", "int4", "auto")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One side as it was named: a stage of a source, or a bundle, and where it runs."""

    text: str
    path: str
    stage: str | None
    provider: str

    @classmethod
    def parse(cls, text: str) -> "Side":
        """Raises ValueError for a stage or device that there is not."""
        name, at, device = text.rpartition("@")
        path, device = (name, device) if at and device in ("cpu", "cuda") else (text, "cpu")
        stage, colon, rest = path.partition(":")
        is_staged = bool(colon) and stage in STAGES
        path, chosen = (rest, stage) if is_staged else (path, None)
        is_bundle = (Path(path) / MANIFEST_FILE).is_file()
        if is_bundle and chosen is not None:
            raise ValueError(f"{text}: {path} is a bundle, which has no stage {chosen!r}; name its source, or {path}")
        if chosen in (None, "eager") and not is_bundle and device == "cuda":
            raise ValueError(f"{text}: eager PyTorch runs on the CPU here; leave @cuda out")
        provider = (CUDA if device == "cuda" else CPU).provider
        return cls(text=text, path=path, stage=None if is_bundle else chosen or "eager", provider=provider)


def diff_models(
    first: str,
    second: str,
    *,
    num_tokens: int = 48,
    num_steps: int = 8,
    tolerance: float | None = None,
    seed: int = 0,
    progress: Callable[[str], None] = lambda _: None,
) -> Divergence:
    """Feed both the same text, `num_steps` of its `num_tokens` one by one, and say where they part.

    `tolerance` is relative; None takes that of the side that rounds most. Raises TargetError when they are other
    models, ValueError for a name or a number that cannot be, and what reading them raises.
    """
    if not 0 <= num_steps < num_tokens:
        raise ValueError(f"{num_steps} steps need a text of more tokens than that, got {num_tokens}")
    sides = (Side.parse(first), Side.parse(second))
    sources = {side.path: None for side in sides if side.stage is not None}
    opened = {}
    for path in sources:
        progress(f"reading {path}")
        opened[path] = open_source(path, seed=seed)
    configs = [_config(side, opened) for side in sides]
    if configs[0] != configs[1]:
        raise TargetError(f"{first} is another model than {second}: their configurations differ")
    if not configs[0].is_decoder:
        raise TargetError(f"{first} has no KV cache, over which diff steps; use `graphport verify --against`")
    if configs[0].encoder is not None:
        raise TargetError(
            f"{first} is an encoder-decoder, and diff feeds a text alone; use `graphport verify --against`"
        )
    longest = min(_longest(side, configs[0]) for side in sides)
    if num_tokens > longest:
        raise ValueError(f"{num_tokens} tokens do not fit into {longest}, what both can hold; lower --tokens")
    ids = text_ids(PARITY_TEXT, configs[0], _tokenizer(sides, opened), length=num_tokens, seed=seed)
    with tempfile.TemporaryDirectory(prefix="graphport-diff-") as folder:
        models = []
        for number, side in enumerate(sides):
            progress(f"opening {side.text}")
            place = Path(folder) / str(number)
            place.mkdir()
            models.append(_open(side, opened, configs[0], place, capacity=num_tokens))
        return first_divergence(
            models[0],
            models[1],
            ids,
            sites=ordered_sites(configs[0].num_layers),
            num_steps=num_steps,
            tolerance=_tolerance(sides) if tolerance is None else tolerance,
            observe=progress,
        )


def _config(side: Side, opened: dict[str, SourceModel]) -> TransformerConfig:
    return read_manifest(Path(side.path)).config if side.stage is None else opened[side.path].model.config


def _longest(side: Side, config: TransformerConfig) -> int:
    return read_manifest(Path(side.path)).max_length if side.stage is None else config.max_positions


def _tokenizer(sides: tuple[Side, Side], opened: dict[str, SourceModel]) -> str | None:
    """The first side's tokenizer, or the second's; both must make the same ids of the text."""
    texts: list[str] = []
    for side in sides:
        path = Path(side.path) / TOKENIZER_FILE
        text = opened[side.path].tokenizer_json if side.stage is not None else None
        if side.stage is None and path.is_file():
            text = path.read_text(encoding="utf-8")
        texts += [] if text is None else [text]
    ids = [plain_tokenizer(text).encode(PARITY_TEXT).ids for text in texts]
    if len(ids) == 2 and ids[0] != ids[1]:
        raise TargetError(f"{sides[0].text} and {sides[1].text} have other tokenizers: no text is the same for both")
    return texts[0] if texts else None


def _tolerance(sides: tuple[Side, Side]) -> float:
    names = [read_manifest(Path(side.path)).precision if side.stage is None else "fp32" for side in sides]
    return max(TOLERANCES[name] for name in names)


def _open(
    side: Side, opened: dict[str, SourceModel], config: TransformerConfig, place: Path, *, capacity: int
) -> TracedModel:
    open_traced = functools.partial(TracedGraph, side.text, config=config, capacity=capacity, provider=side.provider)
    if side.stage is None:
        is_smoothed = read_manifest(Path(side.path)).precision in _SMOOTHED
        hidden = [value_site(layer) for layer in range(config.num_layers)] if is_smoothed else []
        return open_traced(folder=Path(side.path), hidden=frozenset(hidden))
    model = opened[side.path].model
    if side.stage == "eager":
        return TracedEager(side.text, model, capacity=capacity)
    graph = torch_to_onnx(CachedDecoder(model, max_length=config.max_positions), decoder_signature(config))
    if side.stage == "compiled":
        plan = CompilePlan(config=config, target=CPU, precision=CPU.precision("fp32"), max_length=config.max_positions)
        compile_graph(graph, plan)
    write_graph(graph, place)
    return open_traced(folder=place)
