"""A bundle's graph as packed for one processor: found, checked, and proved to compute what it did when it was made.

In: a checked bundle. Out: the graph to open instead of the bundle's own, or the reason why not. It makes none (see
`preparation.py`). The bundle's own graph runs anywhere; the prepared one loads faster, is mapped instead of copied, and
holds the minima of a GGUF file's blocks inside its kernels instead of in nodes of their own.
"""

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from numpy.typing import NDArray

from graphport.model_def.processor import processor_kind
from graphport.model_def.signature import (
    GRAPH_FILE,
    INPUT_IDS,
    LOGITS,
    LOGITS_ROWS,
    PREPARED_FILE,
    PREPARED_FOLDER,
    SEQLENS_K,
    TOTAL_SEQUENCE_LENGTH,
    WEIGHTS_FILE,
    WINDOW_SEQLENS_K,
    WINDOW_TOTAL_SEQUENCE_LENGTH,
    FileRecord,
    Manifest,
    unmoved_windows,
)
from graphport.runtime.bundle_files import BundleFiles, check_graph

PREPARED_FORMAT = 2  # 1 was compared in steps of many tokens alone

_PROBE_TOLERANCE = 1e-3  # of the largest logit: equal on one machine, garbage where weights lie in another order

_STEP_INPUTS = (
    INPUT_IDS,
    SEQLENS_K,
    TOTAL_SEQUENCE_LENGTH,
    LOGITS_ROWS,
    WINDOW_SEQLENS_K,
    WINDOW_TOTAL_SEQUENCE_LENGTH,
)
_ELEMENTS = {"tensor(float)": np.float32, "tensor(int8)": np.int8, "tensor(uint8)": np.uint8}


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """Ids that are run when the graph is opened, and what its last row of logits was: [vocab] at `columns`."""

    ids: tuple[int, ...]
    columns: tuple[int, ...]
    logits: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedRecord:
    """What `prepared.json` says: what was packed, by what, for what, and the files that came of it."""

    onnxruntime: str
    processor: str
    sources: dict[str, str]
    files: dict[str, FileRecord]
    num_minima: int
    probe: Probe

    def to_json(self) -> str:
        """The file's text."""
        return json.dumps({"format": PREPARED_FORMAT, **dataclasses.asdict(self)}, indent=1)


def read_record(folder: Path) -> PreparedRecord:
    """The record in the prepared folder of a bundle. Raises OSError, ValueError when it is missing, torn or newer."""
    path = folder / PREPARED_FOLDER / PREPARED_FILE
    data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    try:
        if (found := data.pop("format")) != PREPARED_FORMAT:
            raise ValueError(f"{path} has format {found}, this version reads {PREPARED_FORMAT}")
        probe = {key: tuple(values) for key, values in data.pop("probe").items()}
        files = {name: FileRecord(**record) for name, record in data.pop("files").items()}
        return PreparedRecord(**data, files=files, probe=Probe(**probe))
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is damaged ({error})") from error


def source_hashes(manifest: Manifest) -> dict[str, str]:
    """SHA-256 of what a prepared graph is made from."""
    return {name: manifest.files[name].sha256 for name in (GRAPH_FILE, WEIGHTS_FILE) if name in manifest.files}


def find_prepared(bundle: BundleFiles) -> tuple[Path, Probe] | str:
    """The prepared graph of a bundle and its probe, or why there is none for this machine."""
    folder = bundle.folder / PREPARED_FOLDER
    if not (folder / PREPARED_FILE).exists():
        return f"it is not prepared: `graphport prepare {bundle.folder}` packs it for this processor"
    advice = f"`graphport prepare {bundle.folder}` makes it anew"
    try:
        record = read_record(bundle.folder)
        if record.sources != source_hashes(bundle.manifest):
            return f"what is prepared was made from another graph; {advice}"
        if record.onnxruntime != onnxruntime.__version__:
            return f"it is prepared for ONNX Runtime {record.onnxruntime}, this is {onnxruntime.__version__}; {advice}"
        if record.processor != (here := processor_kind()):
            return f"it is prepared for a processor with {record.processor}, this one has {here}; {advice}"
        return check_graph(folder, GRAPH_FILE, record.files)[0], record.probe
    except (OSError, ValueError) as error:
        return f"what is prepared cannot be used ({error}); {advice}"


def make_probe(session: Any, manifest: Manifest, *, num_ids: int, num_columns: int) -> Probe:  # noqa: ANN401 - ORT is untyped
    """Run seeded random ids; records the largest logits of the last row."""
    vocab = manifest.config.vocab_size
    length = min(num_ids, manifest.max_length)
    ids = np.random.default_rng(0).integers(vocab, size=length)
    row = probe_logits(session, ids, step=1)[-1]
    columns = np.argsort(-row, kind="stable")[: min(num_columns, vocab)]
    return Probe(
        ids=tuple(map(int, ids)), columns=tuple(map(int, columns)), logits=tuple(float(row[i]) for i in columns)
    )


def probe_problem(session: Any, probe: Probe) -> str | None:  # noqa: ANN401 - ORT is untyped
    """Why the session does not compute what the probe recorded; None when it does."""
    wanted = np.array(probe.logits, np.float64)
    found = probe_logits(session, np.array(probe.ids, np.int64), step=1)[-1][list(probe.columns)]
    worst = float(np.abs(found - wanted).max())
    limit = _PROBE_TOLERANCE * max(1.0, float(np.abs(wanted).max()))
    return None if worst <= limit else f"its logits differ by {worst:.3g} from those recorded, {limit:.3g} is allowed"


def probe_logits(session: Any, ids: NDArray[np.int64], *, step: int | None = None) -> NDArray[np.float32]:  # noqa: ANN401 - ORT is untyped
    """Logits [S, vocab] of `ids` [S], `step` of them at a time or all at once, from an empty cache.

    One id at a time has kernels of its own: what is right for many may be wrong there.
    """
    inputs = {node.name: node for node in session.get_inputs()}
    caches = {
        name: np.zeros((1, node.shape[1], len(ids), node.shape[3]), _ELEMENTS[node.type])
        for name, node in inputs.items()
        if name not in _STEP_INPUTS
    }
    written = [node.name for node in session.get_outputs() if node.name != LOGITS]  # in the order of the caches
    rows = []
    for begin in range(0, len(ids), step or len(ids)):
        part = ids[begin : begin + (step or len(ids))]
        end = begin + len(part)
        feed: dict[str, NDArray[Any]] = {
            INPUT_IDS: part[np.newaxis],
            SEQLENS_K: np.array([end - 1], np.int32),
            TOTAL_SEQUENCE_LENGTH: np.array(end, np.int32),
            LOGITS_ROWS: np.arange(len(part)),
        }
        windows = unmoved_windows(inputs, feed[SEQLENS_K], feed[TOTAL_SEQUENCE_LENGTH])
        logits, *caches_after = session.run([LOGITS, *written], {**feed, **windows, **caches})
        caches = dict(zip(caches, caches_after, strict=True))
        rows.append(logits)
    return np.concatenate(rows)
