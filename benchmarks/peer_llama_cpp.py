"""llama.cpp as one system of a comparison: see `peer_worker.py`.

In: a .gguf file. llama.cpp's own defaults, by its C functions: no sampler and no copy of logits of Python's stand in
between. The number of threads and the context are the comparison's; flash attention can be turned off, as it is on by
default and slows decoding on CPUs down.
"""

import ctypes
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray
from peer_worker import Reply, serve

_FLASH_ATTENTION = {"auto": -1, "off": 0}  # enum llama_flash_attn_type


class LlamaCpp:
    def load(self, model: str, *, threads: int, context: int, flash_attention: str = "auto") -> Reply:
        import llama_cpp

        self._api: Any = llama_cpp
        self._log = llama_cpp.llama_log_callback(_log)  # llama.cpp keeps a pointer to it
        llama_cpp.llama_log_set(self._log, None)
        llama_cpp.llama_backend_init()
        self._model = llama_cpp.llama_model_load_from_file(model.encode(), llama_cpp.llama_model_default_params())
        if not self._model:
            raise ValueError(f"llama.cpp cannot open {model}; it needs a .gguf file of an architecture that it knows")
        params = llama_cpp.llama_context_default_params()
        params.n_ctx, params.n_threads, params.n_threads_batch = context, threads, threads
        params.flash_attn_type = _FLASH_ATTENTION[flash_attention]
        self._batch = params.n_batch
        self._context = llama_cpp.llama_init_from_model(self._model, params)
        if not self._context:
            raise ValueError(f"llama.cpp cannot make a context of {context} tokens")
        self._vocab_size: int = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        used = [text.strip() for text in llama_cpp.llama_print_system_info().decode().split("|")]
        versions = {
            "llama-cpp-python": llama_cpp.__version__,
            "built with": ", ".join(text.split(" = ")[0] for text in used if text.endswith("= 1")),
        }
        return {"vocab_size": self._vocab_size, "versions": versions}

    def tokens(self, prompt: list[int], count: int) -> Iterator[int]:
        self._api.llama_memory_clear(self._api.llama_get_memory(self._context), False)
        ids = prompt
        for _ in range(count):
            for start in range(0, len(ids), self._batch):
                self._decode(ids[start : start + self._batch])
            token = int(self._row(-1).argmax())
            yield token
            ids = [token]

    def logits(self, ids: list[int]) -> NDArray[np.float32]:
        self._api.llama_memory_clear(self._api.llama_get_memory(self._context), False)
        rows = []
        for start in range(0, len(ids), self._batch):
            part = ids[start : start + self._batch]
            self._decode(part, all_logits=True)
            rows += [self._row(index).copy() for index in range(len(part))]
        return np.stack(rows)

    def _decode(self, ids: list[int], *, all_logits: bool = False) -> None:
        tokens = (ctypes.c_int32 * len(ids))(*ids)
        wanted = (ctypes.c_int8 * len(ids))(*[1] * len(ids))
        batch = self._api.llama_batch_get_one(tokens, len(ids))
        if all_logits:
            batch.logits = wanted
        status = self._api.llama_decode(self._context, batch)
        if status:
            raise RuntimeError(f"llama_decode of {len(ids)} tokens returned {status}")

    def _row(self, index: int) -> NDArray[np.float32]:
        pointer = self._api.llama_get_logits_ith(self._context, index)
        return np.ctypeslib.as_array(pointer, shape=(self._vocab_size,))


def _log(level: int, text: bytes, _: object) -> None:
    """Warnings and errors on stderr (ggml_log_level 3 and 4), not a line for every tensor."""
    if level in (3, 4):
        sys.stderr.write(text.decode(errors="replace"))


if __name__ == "__main__":
    serve(LlamaCpp())
