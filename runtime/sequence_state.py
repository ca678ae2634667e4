"""Cached rows of a sequence outside the engine: rewound, used by any number of requests, saved to a file and read back.

In: ids and rows. Out: `SequenceState`, and files. It runs nothing: a request that is given a state computes what the
state lacks. A file is a .npz (NumPy's own format, with a checksum for each array); its header says what it is of.
"""

import json
import numbers
import os
import zipfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

import graphport
from graphport.model_def.signature import GRAPH_FILE, WEIGHTS_FILE, Manifest, TensorSpec
from graphport.model_def.whole_files import OWN, write_whole
from graphport.runtime.cache_buffer import NUMPY_DTYPES, Rows
from graphport.runtime.cache_sizes import is_moving
from graphport.runtime.device import PrefillProducts

STATE_FORMAT = 3  # 2 did not say with which products prompts were run

_HEADER, _TOKEN_IDS = "header", "token_ids"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelIdentity:
    """What rows depend on: the graph and its weights (SHA-256 of each), precisions, this package's version.

    `is_prepared`: whether the graph is the one packed for this processor, whose products round in other places.
    `prefill_products`: what those of a prompt's long steps were.

    `chunk`: the size of a prompt's chunks where results depend on it, else 0.
    """

    graph: str
    weights: str
    precision: str
    cache_dtype: str
    graphport_version: str
    is_prepared: bool
    prefill_products: str
    chunk: int

    @classmethod
    def of(
        cls, manifest: Manifest, *, is_prepared: bool, prefill_products: PrefillProducts, chunk: int | None
    ) -> "ModelIdentity":
        """The identity of a bundle opened with chunks of that size."""
        sums = {name: record.sha256 for name, record in manifest.files.items()}
        return cls(
            graph=sums[GRAPH_FILE],
            weights=sums.get(WEIGHTS_FILE, ""),
            precision=manifest.precision,
            cache_dtype=str(manifest.cache_dtype),
            graphport_version=graphport.__version__,
            is_prepared=is_prepared,
            prefill_products=prefill_products,
            chunk=chunk or 0,
        )

    def require(self, other: "ModelIdentity", what: str) -> None:
        """Raise ValueError, naming what differs, unless rows of `other` are rows of this model."""
        mine, theirs = asdict(self), asdict(other)
        for name, value in mine.items():
            if theirs[name] != value:
                raise ValueError(
                    f"{what} is of another model: its {name} is {theirs[name]!r}, this one's {value!r}; "
                    "compute the state with this model"
                )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class SequenceState:
    """The rows that a model has cached for `token_ids`, on the host; it never changes, so any request may share it.

    `rows`: of each cache buffer, [kv_heads, tokens, width], from the token on that `firsts` names: layers with a window
    have the newest alone. `num_prompt_tokens`: how many of the ids were a prompt, the others were generated.
    """

    token_ids: tuple[int, ...]
    rows: Rows
    firsts: tuple[int, ...]
    num_prompt_tokens: int
    model: ModelIdentity

    @property
    def num_bytes(self) -> int:
        """Bytes of the rows."""
        return sum(int(rows.nbytes) for rows in self.rows)

    def rewind(self, num_tokens: int) -> "SequenceState":
        """The state after the first `num_tokens` ids; it shares memory with this one.

        Raises ValueError beyond, TypeError for anything but a whole number.

        Where layers with a window no longer have the rows before them, a request that is given it computes all ids.
        """
        if isinstance(num_tokens, bool) or not isinstance(num_tokens, numbers.Integral):
            raise TypeError(f"rewind takes a whole number of tokens, 0 to {len(self.token_ids)}; got {num_tokens!r}")
        if not 0 <= num_tokens <= len(self.token_ids):
            raise ValueError(
                f"cannot rewind to {num_tokens} tokens: the state has {len(self.token_ids)}, give 0 to "
                f"{len(self.token_ids)}"
            )
        return SequenceState(
            token_ids=self.token_ids[:num_tokens],
            rows=tuple(
                rows[:, : max(0, num_tokens - first)] for rows, first in zip(self.rows, self.firsts, strict=True)
            ),
            firsts=tuple(min(first, num_tokens) for first in self.firsts),
            num_prompt_tokens=min(self.num_prompt_tokens, num_tokens),
            model=self.model,
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the state to `path`, beside it first and renamed when all of it is on disk.

        What was at `path` stays if that fails (OSError, for instance when the disk is full).
        """
        target = Path(path)
        header = {
            "format": STATE_FORMAT,
            "num_prompt_tokens": self.num_prompt_tokens,
            "firsts": self.firsts,
            "model": asdict(self.model),
        }
        arrays: dict[str, Any] = {
            _HEADER: np.frombuffer(json.dumps(header).encode(), np.uint8),
            _TOKEN_IDS: np.array(self.token_ids, np.int64),
            **{_rows_name(i): rows for i, rows in enumerate(self.rows)},
        }
        write_whole(target, lambda file: np.savez(file, **arrays), mode=OWN)


def read_state(
    path: str | os.PathLike[str], *, model: ModelIdentity, specs: tuple[TensorSpec, ...], vocab_size: int
) -> SequenceState:
    """The state in the file at `path`, of `model`, whose cache inputs are `specs`.

    Raises ValueError for a file that is torn, of another kind or version, or of another model; OSError if there is
    none.
    """
    try:
        header, arrays = _read_members(Path(path), len(specs))
    except (zipfile.BadZipFile, KeyError, ValueError, EOFError) as error:
        raise ValueError(f"{path} is no saved state, or it is torn ({error}); save it again") from error
    if header.get("format") != STATE_FORMAT:
        raise ValueError(
            f"{path} has format {header.get('format')!r}, this version reads {STATE_FORMAT}; save it again"
        )
    try:
        model.require(ModelIdentity(**header["model"]), str(path))
        state = SequenceState(
            token_ids=tuple(arrays[_TOKEN_IDS].tolist()),
            rows=tuple(arrays[_rows_name(i)] for i in range(len(specs))),
            firsts=tuple(int(first) for first in header["firsts"]),
            num_prompt_tokens=int(header["num_prompt_tokens"]),
            model=model,
        )
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path} is no saved state ({error}); save it again") from error
    _check_arrays(state, arrays[_TOKEN_IDS], specs, vocab_size, str(path))
    return state


def _rows_name(index: int) -> str:
    return f"rows_{index}"


def _read_members(path: Path, num_buffers: int) -> tuple[dict[str, Any], dict[str, np.ndarray[Any, Any]]]:
    with zipfile.ZipFile(path) as archive:
        packed = [info.filename for info in archive.infolist() if info.compress_type != zipfile.ZIP_STORED]
        if packed:  # a small file must not become a large array
            raise ValueError(f"its member {packed[0]} is compressed")
    names = (_HEADER, _TOKEN_IDS, *map(_rows_name, range(num_buffers)))
    with np.load(path, allow_pickle=False) as members:
        arrays = {name: np.asarray(members[name]) for name in names}
    header = json.loads(arrays[_HEADER].tobytes())
    if not isinstance(header, dict):
        raise ValueError("its header is no record")
    return header, arrays


def _check_arrays(
    state: SequenceState, ids: np.ndarray[Any, Any], specs: tuple[TensorSpec, ...], vocab_size: int, path: str
) -> None:
    count = len(state.token_ids)
    is_sound = ids.ndim == 1 and ids.dtype == np.int64 and 0 <= state.num_prompt_tokens <= count
    is_sound = is_sound and (count == 0 or (int(ids.min()) >= 0 and int(ids.max()) < vocab_size))
    is_sound = is_sound and len(state.firsts) == len(specs)
    ends = (count, state.num_prompt_tokens)  # see `row_reuse.note_prompt`
    for spec, rows, first in zip(specs, state.rows, state.firsts, strict=False):
        heads, width = (size for size in spec.shape if isinstance(size, int))
        is_sound = is_sound and rows.ndim == 3 and (rows.shape[0], rows.shape[2]) == (heads, width)
        is_sound = is_sound and rows.dtype == np.dtype(NUMPY_DTYPES[spec.dtype])
        end = first + rows.shape[1] if rows.ndim == 3 else -1
        is_sound = is_sound and (first >= 0 and end in ends if is_moving(spec) else (first, end) == (0, count))
    if not is_sound:
        raise ValueError(f"{path} holds arrays that are not this model's; save it again")
