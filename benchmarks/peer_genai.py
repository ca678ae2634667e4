"""onnxruntime-genai as one system of a comparison: see `peer_worker.py`.

In: a folder that its model builder made. Its own defaults, but for the number of threads and the length. Beyond the
others' commands it can answer a batch.
"""

import importlib.metadata
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from peer_worker import Reply, require_rows, serve


class Genai:
    def load(self, model: str, *, threads: int, context: int) -> Reply:
        import onnxruntime_genai

        self._api: Any = onnxruntime_genai
        config = onnxruntime_genai.Config(model)
        config.overlay(json.dumps({"model": {"decoder": {"session_options": {"intra_op_num_threads": threads}}}}))
        self._model = onnxruntime_genai.Model(config)
        settings = json.loads((Path(model) / "genai_config.json").read_text(encoding="utf-8"))["model"]
        if context > settings["context_length"]:
            raise ValueError(f"the model has {settings['context_length']} positions, {context} are asked for")
        versions = {name: importlib.metadata.version(name) for name in ("onnxruntime-genai", "onnxruntime")}
        return {"vocab_size": settings["vocab_size"], "versions": versions}

    def tokens(self, prompt: list[int], count: int) -> Iterator[int]:
        generator = self._generator(len(prompt) + count)
        generator.append_tokens(np.array(prompt, np.int32))
        for _ in range(count):
            generator.generate_next_token()
            yield int(generator.get_next_tokens()[0])

    def batch(self, *, prompts: list[list[int]], new_tokens: int) -> Reply:
        """Greedy continuations of prompts of one length together."""
        length = len(prompts[0])
        generator = self._generator(length + new_tokens, rows=len(prompts))
        generator.append_tokens(np.array(prompts, np.int32))
        for _ in range(new_tokens):
            generator.generate_next_token()
        rows = [generator.get_sequence(row)[length:].tolist() for row in range(len(prompts))]
        return require_rows(rows, prompts, new_tokens)

    def logits(self, ids: list[int]) -> NDArray[np.float32]:
        generator = self._generator(len(ids) + 1)
        generator.append_tokens(np.array(ids, np.int32))
        rows: NDArray[np.float32] = generator.get_output("logits")[0]
        return rows

    def _generator(self, length: int, *, rows: int = 1) -> Any:  # noqa: ANN401 - the library has no types
        """A request of exactly `length` tokens a row: before that many no id ends it."""
        params = self._api.GeneratorParams(self._model)
        params.set_search_options(do_sample=False, min_length=length, max_length=length, batch_size=rows)
        return self._api.Generator(self._model, params)


if __name__ == "__main__":
    system = Genai()
    serve(system, {"batch": system.batch})
