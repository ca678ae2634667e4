"""graphport as one system of a comparison: see `peer_worker.py`.

In: a bundle. Beyond the others' commands it can answer a batch, and time an export.
"""

import importlib.metadata
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from peer_worker import Reply, require_rows, serve


class Graphport:
    def load(self, model: str, *, threads: int, context: int, max_batch: str = "1") -> Reply:
        from graphport.runtime import SamplingParams, load_language_model

        rows = int(max_batch)
        self._lm = load_language_model(model, device="cpu", threads=threads, max_batch=rows, max_length=context)
        self._params = SamplingParams
        versions = {name: importlib.metadata.version(name) for name in ("graphport", "onnxruntime-gpu")}
        return {"vocab_size": self._lm.vocab_size, "versions": versions}

    def tokens(self, prompt: list[int], count: int) -> Iterator[int]:
        for event in self._lm.stream(prompt, self._greedy(count)):
            if event.token_id is not None:  # it is where there is no room for a new token
                yield event.token_id

    def batch(self, *, prompts: list[list[int]], new_tokens: int) -> Reply:
        """Greedy continuations of prompts together."""
        outputs = self._lm.generate(prompts, self._greedy(new_tokens))
        return require_rows([list(output.token_ids) for output in outputs], prompts, new_tokens)

    def logits(self, ids: list[int]) -> NDArray[np.float32]:
        return self._lm.logits([ids])[0]

    def _greedy(self, count: int) -> Any:  # noqa: ANN401 - graphport is imported in load
        return self._params(max_new_tokens=count, temperature=0.0, ignore_eos=True)


def export_again(*, source: str, folder: str, precision: str) -> Reply:
    """Seconds to read the source's weights, and to export it into `folder`, which reads them once more."""
    from graphport.export import export
    from graphport.model_def.checkpoint import load_checkpoint

    begin = time.perf_counter()
    load_checkpoint(source)
    read = time.perf_counter()
    export(source, Path(folder) / "bundle", target="cpu", precision=precision)
    return {"read_s": read - begin, "export_s": time.perf_counter() - read}


if __name__ == "__main__":
    system = Graphport()
    serve(system, {"batch": system.batch, "export": export_again})
