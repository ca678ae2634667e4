"""Pack a bundle for this machine's processor: `prepared/` in its folder, whole or not at all.

In: a bundle folder. Out: a graph whose weights lie on disk as the CPU kernels want them, and the record that says for
which processor. It changes nothing that the manifest lists; the folder may be deleted any time (see `prepared.py`).
"""

import logging
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnxruntime
from numpy.typing import NDArray

from graphport.model_def.file_hashes import record_file
from graphport.model_def.parity_text import PARITY_TEXT
from graphport.model_def.processor import processor_kind
from graphport.model_def.signature import (
    BARE_GRAPH_FILE,
    GRAPH_FILE,
    KIND_WORDS,
    PREPARED_FILE,
    PREPARED_FOLDER,
    WEIGHTS_FILE,
)
from graphport.runtime.bundle_files import BundleFiles, open_bundle
from graphport.runtime.graph_file import read_graph_header
from graphport.runtime.opening import cpu_session
from graphport.runtime.packed_file import lay_out
from graphport.runtime.packed_weights import GraphFiles, add_minima
from graphport.runtime.prepared import PreparedRecord, make_probe, probe_logits, source_hashes
from graphport.runtime.token_scores import log_softmax
from graphport.runtime.tokenizer import Tokenizer

_PROBE_IDS, _PROBE_COLUMNS = 3, 16  # each id is a step when a bundle is opened
_COMPARED_IDS, _SINGLE_STEPS = 64, 16
# The bundle's graph adds minima to exact sums of activations, the prepared one to sums of rounded ones: two roundings
# of one model, 0.004 apart for SmolLM2. Weights in a wrong place give 10 and more.
MOST_DIVERGENCE = 0.1

SAVING = {
    "session.save_external_prepacked_constant_initializers": "1",
    "session.optimized_model_external_initializers_file_name": WEIGHTS_FILE,
    "session.optimized_model_external_initializers_min_size_in_bytes": "128",  # shapes stay in the graph
}

_log = logging.getLogger(__name__)


class PrepareError(ValueError):
    """A bundle that cannot be packed for this machine; its own graph goes on running."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """What was made: folder, matrices with minima, bytes on disk, KL divergence (nats) to the bundle's own graph."""

    folder: Path
    num_minima: int
    disk_bytes: int
    divergence: float


def prepare(bundle: str | os.PathLike[str]) -> Prepared:
    """Pack the bundle for this processor, in place of what was prepared before.

    Raises PrepareError when it is not for the CPU or does not compute the same when packed, PackingError when ONNX
    Runtime packs in an unknown way, OSError when the folder cannot be written or the processor not be told.
    """
    files = open_bundle(bundle)
    if files.manifest.target != "cpu":
        raise PrepareError(f"{files.folder} is for {files.manifest.target}; only bundles for the cpu target are packed")
    if files.manifest.kind != "decoder":
        raise PrepareError(f"{files.folder} is {KIND_WORDS[files.manifest.kind]}; only decoders are packed")
    kind = processor_kind()
    part = Path(tempfile.mkdtemp(prefix=f".{PREPARED_FOLDER}.", dir=files.folder))
    try:
        num_minima, divergence = _pack_best(files, part)
        probe = make_probe(
            cpu_session(part / GRAPH_FILE), files.manifest, num_ids=_PROBE_IDS, num_columns=_PROBE_COLUMNS
        )
        record = PreparedRecord(
            onnxruntime=onnxruntime.__version__,
            processor=kind,
            sources=source_hashes(files.manifest),
            files={path.name: record_file(path) for path in part.iterdir()},
            num_minima=num_minima,
            probe=probe,
        )
        (part / PREPARED_FILE).write_text(record.to_json(), encoding="utf-8")
        part.chmod(0o755)
        folder = files.folder / PREPARED_FOLDER
        shutil.rmtree(folder, ignore_errors=True)
        part.replace(folder)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    size = sum(path.stat().st_size for path in folder.iterdir())
    return Prepared(folder=folder, num_minima=num_minima, disk_bytes=size, divergence=divergence)


def _pack_best(files: BundleFiles, part: Path) -> tuple[int, float]:
    """Pack with minima inside the kernels, or where this processor's pass them over, the graph as it is.

    Returns the number of matrices with minima, and the divergence. Raises PrepareError.
    """
    divergence = float("inf")
    if BARE_GRAPH_FILE in files.manifest.files:
        num_minima = _pack(files.folder / BARE_GRAPH_FILE, part)
        divergence = _divergence(files, part / GRAPH_FILE)
        if divergence <= MOST_DIVERGENCE:
            return num_minima, divergence
        _log.info("kernels of this processor pass minima over (%.3g nats): they stay nodes of the graph", divergence)
        for path in part.iterdir():
            path.unlink()
    _pack(files.graph, part)
    divergence = _divergence(files, part / GRAPH_FILE)
    if not divergence <= MOST_DIVERGENCE:
        raise PrepareError(
            f"{files.folder} packed for this processor differs from its own graph by {divergence:.3g} nats, "
            f"{MOST_DIVERGENCE} are allowed; the bundle's own graph is used instead"
        )
    return 0, divergence


def _pack(source: Path, part: Path) -> int:
    """Let ONNX Runtime write `source` packed to `part`, then add minima to a bare graph's; the number that have any."""
    with tempfile.TemporaryDirectory(dir=part) as name:
        written = Path(name) / GRAPH_FILE
        cpu_session(source, entries=SAVING, save_to=written)
        header = lay_out(written, written.with_name(WEIGHTS_FILE), part)
    if source.name != BARE_GRAPH_FILE:
        return 0
    bare = GraphFiles(path=source, header=read_graph_header(source))
    return add_minima(GraphFiles(path=part / GRAPH_FILE, header=header), bare)


def _divergence(files: BundleFiles, packed: Path) -> float:
    """Mean KL divergence of the packed graph to the bundle's own on English, or on random ids without a tokenizer.

    On random ids of a real model the last bits of activations are worth more than 0.1 nats, so those are not taken.
    The worse of two: all ids in one step, and one id a step, for which the library has kernels of their own. Those of
    processors with AVX2 alone read zero points where the others read sums, so that they pass minima over.
    """
    ids = _compared_ids(files)
    own, found = cpu_session(files.graph), cpu_session(packed)
    at_once = _mean_divergence(*(probe_logits(session, ids) for session in (own, found)))
    singly = _mean_divergence(*(probe_logits(session, ids[:_SINGLE_STEPS], step=1) for session in (own, found)))
    return float(np.max([at_once, singly]))  # NaN if one is


def _compared_ids(files: BundleFiles) -> NDArray[np.int64]:
    vocab, length = files.manifest.config.vocab_size, min(_COMPARED_IDS, files.manifest.max_length)
    if files.has_tokenizer:
        ids = np.array(Tokenizer.load(files.folder).encode(PARITY_TEXT)[:length], np.int64)
        if len(ids) == length and ids.max() < vocab:
            return ids
    return np.random.default_rng(1).integers(vocab, size=length)


def _mean_divergence(logits: NDArray[np.float32], others: NDArray[np.float32]) -> float:
    own, found = log_softmax(logits), log_softmax(others)
    return float((np.exp(own) * (own - found)).sum(axis=-1).mean())
