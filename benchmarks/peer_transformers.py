"""transformers eager in float32 as one system of a comparison, and the reference of its fidelity: see `peer_worker.py`.

In: a .gguf file, whose weights it de-quantises, or a Hugging Face folder. Nothing is compiled.
"""

import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from peer_worker import Reply, serve

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import Cache

os.environ["HF_HUB_OFFLINE"] = "1"


class TransformersEager:
    def load(self, model: str, *, threads: int, context: int) -> Reply:
        import torch
        import transformers

        torch.set_num_threads(threads)
        warnings.simplefilter("ignore", FutureWarning)  # transformers 5.24 renames past_key_values
        path = Path(model)
        folder, file = (path.parent, {"gguf_file": path.name}) if path.is_file() else (path, {})
        loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, **file, dtype=torch.float32)
        self._model = loaded.eval()
        self._torch = torch
        longest = self._model.config.max_position_embeddings
        if context > longest:
            raise ValueError(f"the model has {longest} positions, {context} are asked for")
        versions = {"transformers": transformers.__version__, "torch": torch.__version__}
        return {"vocab_size": self._model.config.vocab_size, "versions": versions}

    def tokens(self, prompt: list[int], count: int) -> Iterator[int]:
        token, cache = self._step(self._torch.tensor([prompt]), None)
        yield int(token)
        for _ in range(count - 1):
            token, cache = self._step(token, cache)
            yield int(token)

    def logits(self, ids: list[int]) -> NDArray[np.float32]:
        with self._torch.inference_mode():
            rows: NDArray[np.float32] = self._model(self._torch.tensor([ids])).logits[0].numpy()
        return rows

    def _step(self, ids: "Tensor", cache: "Cache | None") -> "tuple[Tensor, Cache]":
        """The best next id [1, 1] and the cache. One row of logits, as the others compute."""
        with self._torch.inference_mode():
            result = self._model(ids, past_key_values=cache, logits_to_keep=1)
            return result.logits[:, -1:].argmax(-1), result.past_key_values


if __name__ == "__main__":
    serve(TransformersEager())
