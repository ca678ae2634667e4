"""Models that show what they compute on the way: eager PyTorch by hooks, a graph by outputs added to a copy of it.

In: a module, or a graph on disk. Out: step by step, the values at each site (`graph_sites.py`) as float32 [S, width].
It compares nothing and changes no file.
"""

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import torch
from numpy.typing import NDArray

from graphport.export.graph_runner import UNWRITTEN, parity_options
from graphport.export.graph_sites import (
    EMBEDDING,
    FINAL_NORM,
    down_site,
    key_site,
    output_site,
    site_values,
    value_site,
)
from graphport.export.targets import TargetError
from graphport.model_def.cached_decoder import CachedDecoder
from graphport.model_def.config import TransformerConfig
from graphport.model_def.signature import (
    GRAPH_FILE,
    INPUT_IDS,
    LOGITS,
    LOGITS_ROWS,
    SEQLENS_K,
    TOTAL_SEQUENCE_LENGTH,
    past_key,
    past_value,
    present_key,
    present_value,
    unmoved_windows,
)
from graphport.model_def.transformer import Transformer

Values = dict[str, NDArray[np.float32]]


class TracedModel(Protocol):
    """One text over one cache; `name` is what reports call it, `sites` are those it can show."""

    name: str
    sites: frozenset[str]

    def step(self, ids: Sequence[int]) -> Values:
        """Append `ids` [S]; the values [S, width] at every site."""
        ...


class TracedEager:
    """A module in eager mode, over the cached path that is exported."""

    def __init__(self, name: str, model: Transformer, *, capacity: int) -> None:
        self.name = name
        self._model = model
        self._decoder = CachedDecoder(model, max_length=capacity)  # below any length at which a scaling changes
        self._length = 0
        self._seen: Values = {}
        self._past = [
            torch.zeros(1, block.attention.num_kv_heads, capacity, block.attention.head_dim)
            for block in model.config.blocks
            for _ in range(2)
        ]
        layers = range(model.config.num_layers)
        caches = [make(layer) for layer in layers for make in (key_site, value_site)]
        self.sites = frozenset([*self._modules(), *caches, LOGITS])

    def step(self, ids: Sequence[int]) -> Values:
        """See TracedModel."""
        self._seen = {}
        begin, end = self._length, self._length + len(ids)
        with contextlib.ExitStack() as hooks, torch.inference_mode():
            for site, module in self._modules().items():  # gone afterwards: the module may be exported too
                hooks.callback(module.register_forward_hook(self._keep(site)).remove)
            logits, *self._past = self._decoder(
                torch.tensor([list(ids)]),
                torch.tensor([end - 1], dtype=torch.int32),
                torch.tensor(end, dtype=torch.int32),
                torch.arange(len(ids)),
                *self._past,
            )
        self._length = end
        self._seen[LOGITS] = logits.numpy()
        for index, cache in enumerate(self._past):
            site = (key_site, value_site)[index % 2](index // 2)
            self._seen[site] = _rows_of_cache(cache.numpy(), begin, end)
        return self._seen

    def _modules(self) -> dict[str, torch.nn.Module]:
        modules: dict[str, torch.nn.Module] = {EMBEDDING: self._model.embedding}
        for layer, block in enumerate(self._model.layers):
            modules[output_site(layer)] = block.attention.output
            modules[down_site(layer)] = block.feed_forward.last
        if self._model.final_norm is not None:
            modules[FINAL_NORM] = self._model.final_norm
        return modules

    def _keep(self, site: str) -> Callable[[torch.nn.Module, object, torch.Tensor], None]:
        def hook(_module: torch.nn.Module, _inputs: object, output: torch.Tensor) -> None:
            self._seen[site] = output.reshape(-1, output.shape[-1]).numpy()

        return hook


class TracedGraph:
    """The graph in `folder` with an output added for every site.

    `hidden`: sites that it computes in another form. `plain`: nothing is optimised or packed: it opens soon, and no
    output changes what is computed.
    """

    def __init__(
        self,
        name: str,
        folder: Path,
        config: TransformerConfig,
        *,
        capacity: int,
        provider: str,
        hidden: frozenset[str] = frozenset(),
        plain: bool = False,
    ) -> None:
        self.name = name
        model = ir.load(folder / GRAPH_FILE)
        found = site_values(model.graph, config.num_layers)
        for value in found.values():
            if not value.is_graph_output():
                model.graph.outputs.append(value)
        self._outputs = {site: str(value.name) for site, value in found.items() if site not in hidden}
        self.sites = frozenset(self._outputs)
        options = parity_options(optimize=not plain)
        if plain:
            options.add_session_config_entry("session.disable_prepacking", "1")
        options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(folder.resolve()))
        self._session = _open(ir.to_proto(model).SerializeToString(), options, provider, name=name)
        layers = range(config.num_layers)
        self._past_names = [name for i in layers for name in (past_key(i), past_value(i))]
        self._present_names = [name for i in layers for name in (present_key(i), present_value(i))]
        self._inputs = {node.name: node for node in self._session.get_inputs()}
        self.restart(capacity)

    def restart(self, capacity: int) -> None:
        """Forget everything and make room for `capacity` tokens."""
        self._past = self._empty_caches(capacity)
        self._length = 0

    def logits(self, ids: Sequence[int], *, chunks: Sequence[int] = ()) -> NDArray[np.float32]:
        """Logits [S, V] float32 of a text of its own, `ids` [S], in pieces of these sizes, the rest in one piece."""
        self.restart(len(ids))
        pieces, left = [], list(ids)
        for size in (*chunks, len(ids) - sum(chunks)):
            piece, left = left[:size], left[size:]
            if piece:
                pieces.append(self._run(piece, [self._outputs[LOGITS]])[self._outputs[LOGITS]].astype(np.float32))
        return np.concatenate(pieces)

    def step(self, ids: Sequence[int]) -> Values:
        """See TracedModel."""
        begin, end = self._length, self._length + len(ids)
        got = self._run(ids, list(self._outputs.values()))
        values: Values = {}
        for site, name in self._outputs.items():
            value = got[name]
            is_cache = name in self._present_names
            rows = _rows_of_cache(value, begin, end) if is_cache else value.reshape(-1, value.shape[-1])
            values[site] = rows.astype(np.float32)
        return values

    def _run(self, ids: Sequence[int], outputs: Sequence[str]) -> dict[str, NDArray[Any]]:
        """Append `ids` [S]; values of these outputs and of the caches, by name."""
        end = self._length + len(ids)
        feed: dict[str, Any] = {
            INPUT_IDS: np.array([ids], np.int64),
            SEQLENS_K: np.array([end - 1], np.int32),
            TOTAL_SEQUENCE_LENGTH: np.array(end, np.int32),
            LOGITS_ROWS: np.arange(len(ids), dtype=np.int64),
            **dict(zip(self._past_names, self._past, strict=True)),
        }
        feed |= unmoved_windows(self._inputs, feed[SEQLENS_K], feed[TOTAL_SEQUENCE_LENGTH])
        names = list(dict.fromkeys([*self._present_names, *outputs]))
        got = dict(zip(names, self._session.run(names, feed), strict=True))
        self._past = [got[name] for name in self._present_names]
        self._length = end
        return got

    def _empty_caches(self, capacity: int) -> list[NDArray[Any]]:
        caches = []
        for name in self._past_names:
            _, heads, _, width = self._inputs[name].shape
            dtype, unwritten = UNWRITTEN.get(self._inputs[name].type, (np.float16, 0.0))
            caches.append(np.full((1, heads, capacity, width), unwritten, dtype))
        return caches


def _open(graph: bytes, options: ort.SessionOptions, provider: str, *, name: str) -> ort.InferenceSession:
    """A session that really runs on `provider`. Raises TargetError."""
    available = ort.get_available_providers()
    session = ort.InferenceSession(graph, options, providers=[provider]) if provider in available else None
    if session is None or session.get_providers()[0] != provider:
        raise TargetError(f"{name}: {provider} cannot be used here; ONNX Runtime has {', '.join(available)}")
    return session


def _rows_of_cache(cache: NDArray[Any], begin: int, end: int) -> NDArray[Any]:
    """The new rows of a cache [1, K, C, H] as [S, K * H]."""
    rows = cache[0, :, begin:end]
    return rows.transpose(1, 0, 2).reshape(end - begin, -1)
