"""What was measured to be fastest for a bundle on one machine: `tuning.json` in its folder, found and checked.

In: a checked bundle. Out: the choices to open it with, or the reason why not. It measures nothing (see `tuner.py`). The
manifest does not list the file: it belongs to the machine, not to the model, and can be deleted any time.
"""

import dataclasses
import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import onnxruntime

from graphport.model_def.file_hashes import hash_file
from graphport.model_def.processor import processor_kind
from graphport.model_def.signature import PREPARED_FILE, PREPARED_FOLDER, TUNING_FILE
from graphport.runtime.bundle_files import BundleFiles
from graphport.runtime.device import DeviceWish, PrefillProducts, default_threads
from graphport.runtime.limits import checked_count
from graphport.runtime.prefill_products import FLOAT_STEP
from graphport.runtime.prepared import source_hashes

TUNING_FORMAT = 2  # 1 knew no products of prompts, and compared medians of seconds

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """How a decoder's bundle is opened on the CPU.

    `packed`: the graph packed for this processor, else as exported. `spinning`: whether idle threads wait in busy
    loops. `prefill_products`: those of long steps. `prefill_chunk`: prompt tokens a step.
    """

    packed: bool
    threads: int
    spinning: bool
    prefill_products: PrefillProducts
    prefill_chunk: int

    def words(self) -> str:
        """The choice as people read it."""
        graph = "packed for this processor" if self.packed else "as exported"
        waiting = "spinning" if self.spinning else "sleeping when idle"
        products = "" if self.prefill_products == "as_exported" else f" with {self.prefill_products} products"
        return f"{graph}; threads: {self.threads}, {waiting}; {self.prefill_chunk} prompt tokens a step{products}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One alternative beside the best so far: seconds of a request with each (medians), and the verdict.

    `what` names the alternative. `ratio`: how many times as long it takes, the median over runs that lie between two of
    the best; `noise`: the distance of the quartiles of these. `more_bytes`: memory planned beyond the best's. None
    where it was not run.
    """

    what: str
    best_seconds: float | None
    seconds: float | None
    ratio: float | None
    noise: float | None
    more_bytes: int | None
    kept: bool
    verdict: str

    @property
    def is_slower(self) -> bool:
        """Whether it takes longer, by more than the noise."""
        return self.ratio is not None and self.noise is not None and self.ratio - 1 > self.noise


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """What `tuning.json` says: where it was measured, of what, the request that was timed, the choice, the trials.

    `processors`: threads that ran at once there. `sources`: SHA-256 of graph and weights; `prepared`: of the record of
    the graph that was packed for the processor, None where there was none. `dropped`: fusions without which the bundle
    was exported again, because that is faster here.
    """

    onnxruntime: str
    processor: str
    processors: int
    sources: dict[str, str]
    prepared: str | None
    request: str
    choice: Choice
    trials: tuple[Trial, ...]
    dropped: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON data."""
        return {"format": TUNING_FORMAT, **dataclasses.asdict(self)}

    def mismatch(self, bundle: BundleFiles) -> str | None:
        """Why it says nothing about `bundle` on this machine; None when it does. Raises OSError as `processor_kind`."""
        if self.sources != source_hashes(bundle.manifest):
            return "another graph was measured"
        if self.prepared != prepared_hash(bundle.folder):
            return "the bundle was prepared for this processor since, or what was prepared is gone"
        if self.onnxruntime != onnxruntime.__version__:
            return f"it was measured with ONNX Runtime {self.onnxruntime}, this is {onnxruntime.__version__}"
        if self.processor != (here := processor_kind()):
            return f"it was measured on a processor with {self.processor}, this one has {here}"
        if self.processors != default_threads():
            return f"it was measured where {self.processors} threads run at once, here {default_threads()} do"
        return None


def read_tuning(folder: Path) -> Tuning:
    """The tuning of a bundle. Raises OSError, ValueError when it is missing, torn, newer or no tuning."""
    path = folder / TUNING_FILE
    try:
        data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if (found := data.pop("format")) != TUNING_FORMAT:
            raise ValueError(f"{path} has format {found}, this version reads {TUNING_FORMAT}")
        choice = _checked_choice(data.pop("choice"), most_threads=int(data["processors"]))
        trials = tuple(Trial(**trial) for trial in data.pop("trials"))
        dropped = tuple(data.pop("dropped"))
        return Tuning(**data, choice=choice, trials=trials, dropped=dropped)
    except (KeyError, TypeError, AttributeError, RecursionError, OverflowError) as error:
        raise ValueError(f"{path} is damaged ({error})") from error


def find_tuning(bundle: BundleFiles) -> Tuning | str | None:
    """The tuning that fits `bundle` and this machine, why the one that is there does not, or None: there is none."""
    if not (bundle.folder / TUNING_FILE).exists():
        return None
    advice = f"`graphport tune {bundle.folder}` makes it anew"
    try:
        tuning = read_tuning(bundle.folder)
        problem = tuning.mismatch(bundle)
    except (OSError, ValueError) as error:
        return f"its tuning cannot be used ({error}); {advice}"
    return tuning if problem is None else f"its tuning is left: {problem}; {advice}"


def tuned_choice(bundle: BundleFiles, *, device: DeviceWish) -> Choice | None:
    """The choice to open `bundle` with on `device`, and a line in the log; None where nothing was measured here."""
    if device == "cuda" or bundle.manifest.target != "cpu":
        return None
    found = find_tuning(bundle)
    if isinstance(found, Tuning):
        _log.info("%s is opened as tuned on this machine (%s)", bundle.folder, found.choice.words())
        return found.choice
    if found is not None:
        _log.info("%s: %s", bundle.folder, found)
    return None


def prompt_phase(
    choice: Choice | None, *, products: PrefillProducts | None, chunk: int | None, max_length: int | None
) -> tuple[PrefillProducts, int | None]:
    """Products of prompts and prompt tokens a step (None: the default), as given, or else as measured.

    What was measured to be the best number of tokens is so for the products that were chosen with it. Float32 products
    that no step would have, as it is given, are left.
    """
    if choice is None:
        return "as_exported" if products is None else products, chunk
    longest = min(chunk or choice.prefill_chunk, max_length or FLOAT_STEP)
    if products is None and choice.prefill_products == "float32" and longest < FLOAT_STEP:
        _log.info("float32 products, as tuned, are left: steps of %d tokens are shorter than %d", longest, FLOAT_STEP)
        return "as_exported", chunk
    if chunk is None and products in (None, choice.prefill_products):
        chunk = choice.prefill_chunk
    return choice.prefill_products if products is None else products, chunk


def prepared_hash(folder: Path) -> str | None:
    """SHA-256 of the record of the graph in a bundle that was packed for a processor; None without."""
    path = folder / PREPARED_FOLDER / PREPARED_FILE
    return hash_file(path) if path.is_file() else None


def _checked_choice(data: dict[str, Any], *, most_threads: int) -> Choice:
    choice = Choice(**data)
    checked_count("threads", choice.threads, most=most_threads)
    checked_count("prefill_chunk", choice.prefill_chunk)
    if not isinstance(choice.packed, bool) or not isinstance(choice.spinning, bool):
        raise TypeError(f"packed and spinning are true or false, got {choice.packed!r} and {choice.spinning!r}")
    if choice.prefill_products not in get_args(PrefillProducts):
        raise TypeError(f"prefill_products {choice.prefill_products!r} is none of {get_args(PrefillProducts)}")
    return choice
