"""The encoder's graph of an encoder-decoder: opened and checked, run once a source.

In: a bundle, where its decoder runs, ids or features. Out: keys and values of every layer on the host. It keeps nothing
(see `source_rows.py`).
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from graphport.model_def.signature import INPUT_FEATURES, INPUT_IDS, LENGTHS
from graphport.runtime.bundle_files import BundleFiles
from graphport.runtime.cuda_setup import CudaSetup
from graphport.runtime.device import DeviceRequest
from graphport.runtime.memory_plan import RunLimits
from graphport.runtime.opening import open_graph


class SourceSession:
    """An open encoder graph; `session` is ONNX Runtime's."""

    def __init__(self, encoder: BundleFiles, request: DeviceRequest, *, threads: int) -> None:
        """`encoder`: see `BundleFiles.encoder`. Raises DeviceError, NotEnoughMemoryError, ValueError."""
        manifest = encoder.manifest
        limits = RunLimits(max_batch=1, max_length=manifest.max_length, prefill_chunk=manifest.max_length)
        # the stream lives as long as the session that runs on it
        self._setup = CudaSetup(cuda_graphs=False, stream=None, device_id=request.device_id)
        opened = open_graph(encoder, request, limits, self._setup, threads=threads)
        self.session = opened.session
        self._names = [spec.name for spec in manifest.signature.outputs]

    def run(self, source: Sequence[int] | NDArray[np.float32]) -> list[NDArray[np.generic]]:
        """Keys and values [heads, tokens, head_dim] of layer 0, 1, ... of one source, ids or features [M, F]."""
        feed: dict[str, NDArray[np.generic]] = {}
        if isinstance(source, np.ndarray):
            feed = {INPUT_FEATURES: source[np.newaxis]}
        else:
            feed = {INPUT_IDS: np.array([source], np.int64), LENGTHS: np.array([len(source)], np.int32)}
        return [rows[0] for rows in self.session.run(self._names, feed)]
