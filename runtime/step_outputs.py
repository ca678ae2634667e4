"""What a step computed, on the device until asked for.

In: the tensors of a step that has run. Out: rows of logits on the host, whole or as far as a sampler needs them, and
all logits on the device for other libraries. The session's next step overwrites everything. R: rows; V: vocabulary.
"""

import functools
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from graphport.model_def.signature import GREEDY_IDS, LOG_TOTAL, TOP_IDS, TOP_LOGITS
from graphport.runtime.device_memory import DeviceMemory, DeviceTensor
from graphport.runtime.dlpack import DlpackTensor
from graphport.runtime.logits_row import Candidates, LogitsRow, ReducedRow


class StepOutputs:
    """The logits of `num_rows` rows. Each method fetches what it returns, once; arrays are views of reused buffers."""

    def __init__(
        self,
        memory: DeviceMemory,
        logits: DeviceTensor,
        samples: Mapping[str, DeviceTensor],
        *,
        num_rows: int,
        vocab_size: int,
    ) -> None:
        """Queue the copies of each row's greedy id and log total, if there are any; the caller synchronises."""
        self.num_rows = num_rows
        self._memory = memory
        self._logits = logits
        self._samples = samples
        self._vocab_size = vocab_size
        self._has_candidates = False
        for name in (GREEDY_IDS, LOG_TOTAL) if samples else ():
            samples[name].download(0, num_rows)

    def logits(self) -> NDArray[np.float32]:
        """Logits [R, V] on the host."""
        return self._fetch_logits(0, self.num_rows)

    def row(self, index: int) -> LogitsRow:
        """Row `index`, to sample from."""
        full = functools.partial(self._fetch_row, index)
        if not self._samples:
            return LogitsRow(full=full)
        has_more = self._samples[TOP_IDS].shape[1] < self._vocab_size
        reduced = ReducedRow(
            greedy_id=int(self._samples[GREEDY_IDS].host[index, 0]),
            log_total=float(self._samples[LOG_TOTAL].host[index]),
            candidates=functools.partial(self._fetch_candidates, index) if has_more else None,
        )
        return LogitsRow(full=full, reduced=reduced)

    def device_logits(self) -> DlpackTensor:
        """Logits float32 [R, V] where they lie, for `from_dlpack` of NumPy, torch, CuPy and others; nothing is copied.

        They are complete when this returns, and valid until the session's next step.
        """
        shape = (self.num_rows, self._vocab_size)
        return DlpackTensor(self._logits, shape, device=self._memory.device, device_id=self._memory.device_id)

    def _fetch_candidates(self, index: int) -> Candidates:
        if not self._has_candidates:  # of all rows: several samplers of a batch will ask
            for name in (TOP_LOGITS, TOP_IDS):
                self._samples[name].download(0, self.num_rows)
            self._memory.synchronize()
            self._has_candidates = True
        ids, logits = self._samples[TOP_IDS].host[index], self._samples[TOP_LOGITS].host[index]
        return Candidates(ids=ids, logits=logits, vocab_size=self._vocab_size)

    def _fetch_row(self, index: int) -> NDArray[np.float32]:
        row: NDArray[np.float32] = self._fetch_logits(index, index + 1)[0]
        return row

    def _fetch_logits(self, begin: int, end: int) -> NDArray[np.float32]:
        self._logits.download(begin, end)
        self._memory.synchronize()
        logits: NDArray[np.float32] = self._logits.host[begin:end]
        return logits
