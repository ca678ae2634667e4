"""Products with block-quantised matrices: ONNX Runtime's MatMulNBits and the prototype of `block_product.c`, in turn.

    python benchmarks/block_products.py --include FOLDER [--rows 1,8,16,64,128] [--out FILE.md]

In: the folder of onnxruntime_c_api.h (Debian: libonnxruntime-dev); a processor with AVX-512 VNNI. Out: milliseconds a
product of the shapes of SmolLM2-135M, and the share of what the processor's int8 instruction alone reaches. Both are
first compared with NumPy.
"""

import argparse
import ctypes
import datetime
import os
import shlex
import statistics
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from block_product_graph import BLOCK, OP, block_sums
from comparison import spread
from decode_step_graph import DOMAIN
from machine import commit, describe_machine
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper
from options import add_shared_options, lengths
from peer_process import CpuTimes, PeerError
from prefill_step import SOURCES
from rounds import Quiet
from step_runs import REST_S
from step_times import compiled

ROWS = (1, 8, 16, 64, 128)
TOLERANCE = 1e-5  # of the largest result; a block's sum left out gives 1
COLUMNS_CHECKED = 256
SYSTEMS = ("MatMulNBits", "prototype")

_WINDOW_S = 0.01  # of a measurement
_PEAK_REPEATS = 20_000_000

Floats = NDArray[np.float32]
Product = Callable[[Floats], Floats]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A matrix [N, K] of SmolLM2-135M and the bits of its codes."""

    name: str
    width: int
    columns: int
    bits: int


SHAPES = (
    Shape(name="qkv", width=576, columns=960, bits=4),
    Shape(name="attention output", width=576, columns=576, bits=4),
    Shape(name="gate and up", width=576, columns=3072, bits=4),
    Shape(name="down", width=1536, columns=576, bits=4),
    Shape(name="gate and up, 8-bit", width=576, columns=3072, bits=8),
    Shape(name="head", width=576, columns=49152, bits=8),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocks:
    """A random matrix in blocks: codes [N, J, BLOCK], scales and zero points [N, J]."""

    bits: int
    codes: NDArray[np.uint8]
    scales: Floats
    zero_points: NDArray[np.uint8]

    @classmethod
    def random(cls, columns: int, width: int, bits: int) -> "Blocks":
        """Seeded."""
        random, shape = np.random.default_rng(columns), (columns, width // BLOCK)
        return cls(
            bits=bits,
            codes=random.integers(1 << bits, size=(*shape, BLOCK), dtype=np.uint8),
            scales=random.uniform(0.5, 1.5, shape).astype(np.float32),
            zero_points=random.integers(1 << bits, size=shape, dtype=np.uint8),
        )

    @property
    def packed(self) -> NDArray[np.uint8]:
        """Codes as MatMulNBits holds them."""
        return _pairs(self.codes) if self.bits == 4 else self.codes

    @property
    def sums(self) -> Floats:
        """See `block_sums`."""
        return block_sums(self.scales, self.zero_points, None)


def _pairs(values: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Values below 16, two a byte along the last axis, the even one in the low nibble."""
    odd = np.pad(values, [(0, 0)] * (values.ndim - 1) + [(0, values.shape[-1] % 2)])
    return odd[..., 0::2] | np.left_shift(odd[..., 1::2], 4, dtype=np.uint8)


def expected(x: Floats, blocks: Blocks, columns: slice) -> NDArray[np.float64]:
    """X [M, K] times some columns, as accuracy_level 4 has it: activations rounded to int8, a scale a block."""
    parts = x.reshape(len(x), -1, BLOCK)
    largest = np.abs(parts).max(axis=-1, keepdims=True)
    scales = largest / np.float32(127)
    inverse = np.divide(np.float32(127), largest, out=np.zeros_like(largest), where=largest > 0)
    rounded = np.rint(parts * inverse).astype(np.float64) * scales
    weights = blocks.codes[columns].astype(np.float64) - blocks.zero_points[columns][..., None]
    weights *= blocks.scales[columns][..., None]
    product: NDArray[np.float64] = rounded.reshape(len(x), -1) @ weights.reshape(weights.shape[0], -1).T
    return product


def model(blocks: Blocks, *, is_prototype: bool) -> bytes:
    """A graph of one product."""
    columns, count = blocks.scales.shape
    width = count * BLOCK
    constants: dict[str, NDArray[Any]] = {"codes": blocks.packed, "scales": blocks.scales}
    if is_prototype:
        constants["sums"] = blocks.sums
        node = helper.make_node(OP, ["x", *constants], ["y"], domain=DOMAIN, bits=blocks.bits)
    else:
        constants["zero_points"] = _pairs(blocks.zero_points) if blocks.bits == 4 else blocks.zero_points
        sizes = {"K": width, "N": columns, "bits": blocks.bits, "block_size": BLOCK, "accuracy_level": 4}
        node = helper.make_node("MatMulNBits", ["x", *constants], ["y"], domain="com.microsoft", **sizes)
    graph = helper.make_graph(
        [node],
        "product",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["M", width])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["M", columns])],
        [numpy_helper.from_array(values, name) for name, values in constants.items()],
    )
    opsets = [helper.make_opsetid(domain, version) for domain, version in (("", 21), ("com.microsoft", 1), (DOMAIN, 1))]
    made: onnx.ModelProto = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    return bytes(made.SerializeToString())


def opened(blocks: Blocks, library: Path | None, threads: int) -> Any:  # noqa: ANN401 - ORT is untyped
    """A session of one product, the prototype's with its library."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    if library is not None:
        options.register_custom_ops_library(str(library))
    graph = model(blocks, is_prototype=library is not None)
    return onnxruntime.InferenceSession(graph, options, providers=["CPUExecutionProvider"])


def require_exact(name: str, product: Product, blocks: Blocks, rows: int) -> None:
    """Raises PeerError unless `product` of random rows is what NumPy computes, in the first and last columns."""
    x = rows_of(rows, blocks)
    found = product(x)
    for columns in (slice(0, COLUMNS_CHECKED), slice(-COLUMNS_CHECKED, None)):
        right = expected(x, blocks, columns)
        difference, largest = float(np.abs(found[:, columns] - right).max()), float(np.abs(right).max())
        if not difference <= TOLERANCE * largest:
            raise PeerError(f"{name}, {rows} rows: off by {difference:.3g} of {largest:.3g}, {TOLERANCE:g} is allowed")


def rows_of(count: int, blocks: Blocks) -> Floats:
    """Seeded activations [M, K], one block of them all zero."""
    x = np.random.default_rng(count).standard_normal((count, blocks.scales.shape[1] * BLOCK), np.float32)
    x[0, :BLOCK] = 0
    return x


def peak(library: Path, threads: int) -> float:
    """Operations a second of vpdpbusd on registers alone, in as many threads."""
    operations = ctypes.CDLL(str(library)).vnni_operations
    operations.restype, operations.argtypes = ctypes.c_double, [ctypes.c_int64]
    done: list[float] = []
    workers = [threading.Thread(target=lambda: done.append(operations(_PEAK_REPEATS))) for _ in range(threads)]
    begin = time.perf_counter()
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return sum(done) / (time.perf_counter() - begin)


def check(sessions: dict[tuple[str, str], Any], rows: tuple[int, ...]) -> None:
    """Raises PeerError unless every session computes what NumPy does."""
    for shape in SHAPES:
        blocks = Blocks.random(shape.columns, shape.width, shape.bits)
        for system in SYSTEMS:
            product = partial(_multiplied, sessions[shape.name, system])
            for count in rows:
                require_exact(f"{system}, {shape.name}", product, blocks, count)


def _multiplied(session: Any, x: Floats) -> Floats:  # noqa: ANN401 - ORT is untyped
    found: Floats = session.run(None, {"x": x})[0]
    return found


def measure(
    sessions: dict[tuple[str, str], Any], rows: tuple[int, ...]
) -> tuple[dict[tuple[str, int, str], float], float]:
    """Median seconds by shape, rows and system; the share of the CPU that other processes took meanwhile."""
    before = CpuTimes.now(os.getpid())
    spent = {
        (shape.name, count, system): _seconds(sessions[shape.name, system], count, shape.width)
        for shape in SHAPES
        for count in rows
        for system in SYSTEMS
    }
    return spent, CpuTimes.now(os.getpid()).others_since(before)


def _seconds(session: Any, rows: int, width: int) -> float:  # noqa: ANN401 - ORT is untyped
    """Median of the runs in a window of time, the first left out."""
    binding = session.io_binding()
    x = np.random.default_rng(rows).standard_normal((rows, width), np.float32)
    binding.bind_ortvalue_input("x", onnxruntime.OrtValue.ortvalue_from_numpy(x))
    binding.bind_output("y", "cpu")
    time.sleep(REST_S)
    session.run_with_iobinding(binding)
    spent: list[float] = []
    while sum(spent) < _WINDOW_S:
        begin = time.perf_counter()
        session.run_with_iobinding(binding)
        spent.append(time.perf_counter() - begin)
    return statistics.median(spent)


def report(times: dict[tuple[str, int, str], list[float]], rows: tuple[int, ...], peaks: list[float]) -> str:
    top = max(peaks)
    lines = [
        "# Products with block-quantised matrices",
        "",
        f"{datetime.date.today()}, {describe_machine()}.",
        f"Command: `{shlex.join(['python', *sys.argv])}`, commit {commit()}, onnxruntime {onnxruntime.__version__}.",
        "",
        f"vpdpbusd on registers alone: {top / 1e9:.0f} G operations a second, the most of {len(peaks)} rounds "
        f"(least {min(peaks) / 1e9:.0f}). Medians of rounds; in brackets the share of that, of ratios the least and "
        "the most.",
    ]
    for shape in SHAPES:
        lines += ["", f"## {shape.name}: {shape.width} by {shape.columns}, {shape.bits}-bit", ""]
        lines += ["| rows | MatMulNBits, ms | prototype, ms | times as fast |", "|---|---|---|---|"]
        for count in rows:
            of_rounds = [times[shape.name, count, system] for system in SYSTEMS]
            operations = 2 * count * shape.width * shape.columns
            medians = [spread(each).median for each in of_rounds]
            cells = [f"{seconds * 1000:.3f} ({operations / seconds / top:.0%})" for seconds in medians]
            gain = spread([stock / other for stock, other in zip(*of_rounds, strict=True)])
            lines.append(f"| {count} | {' | '.join(cells)} | {gain.median:.2f} ({gain.least:.2f}-{gain.most:.2f}) |")
    return "\n".join([*lines, ""])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--include", type=Path, metavar="FOLDER", required=True, help="of onnxruntime_c_api.h")
    parser.add_argument("--rows", type=lengths, default=ROWS)
    add_shared_options(parser, rounds=7)
    arguments = parser.parse_args()
    quiet = Quiet(max_others=arguments.max_others, patience_s=arguments.patience)
    try:
        with tempfile.TemporaryDirectory(prefix="graphport-products-") as folder:
            library = compiled(SOURCES, (f"-I{arguments.include}",), Path(folder))
            sessions = {
                (shape.name, system): opened(
                    Blocks.random(shape.columns, shape.width, shape.bits),
                    library if system == "prototype" else None,
                    arguments.threads,
                )
                for shape in SHAPES
                for system in SYSTEMS
            }
            check(sessions, arguments.rows)
            times: dict[tuple[str, int, str], list[float]] = defaultdict(list)
            peaks = []
            for _ in range(arguments.rounds):
                peaks.append(peak(library, arguments.threads))
                for key, spent in quiet.measured(partial(measure, sessions, arguments.rows)).items():
                    times[key].append(spent)
    except PeerError as error:
        print(f"block_products: error: {error}", file=sys.stderr)
        return 1
    text = report(times, arguments.rows, peaks)
    print(text)
    if arguments.out is not None:
        arguments.out.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
