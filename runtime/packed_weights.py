"""Minima of blocks, written into the matrices that ONNX Runtime's CPU kernels have packed for themselves.

In: a packed graph on disk, and the bare graph it was packed from. Out: the same files, whose kernels add the minima.
Nothing is guessed: matrices change only where every number found equals what layout and zero points foretell.

Kernels for activations rounded to 8 bits compute the sum over blocks of scale_a * scale_b * (a . q) + sum_a * sum_b:
sum_a is what the rounded activations of a block add up to, sum_b = -scale_b * zero_point a float32 that is packed with
the codes (MLAS, PackedQuantBDataStruct). A block w = scale * (q - zero_point) + minimum needs sum_b + minimum, no more.
J blocks a row, N rows; layout: codes [N * J * bytes a block], sums in tiles [ceil(N / 16), J, 16] on 64 bytes.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from graphport.model_def.signature import MINIMA, MINIMA_TRANSPOSED, WEIGHTS_FILE
from graphport.runtime.graph_file import GraphHeader, NodeHeader, Place

Floats = NDArray[np.float32]

_TILE = 16  # rows whose sums lie together
_ALIGNMENT = 64  # bytes


class PackingError(RuntimeError):
    """ONNX Runtime packs matrices in another way than is known here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Product:
    """A matrix with minima: N rows of J blocks, and where its parts lie."""

    name: str
    shape: tuple[int, int]
    block_bytes: int
    packed: Place
    scales: Floats
    zero_points: NDArray[np.uint8]
    minima: Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphFiles:
    """A graph on disk and what its header says."""

    path: Path
    header: GraphHeader

    def read(self, name: str, dtype: type[np.generic]) -> NDArray[Any]:
        """The values of the constant called `name`, flat. Raises PackingError when it lies in typed fields."""
        place = self.header.tensors[name].place
        if place is None or place.length is None:
            raise PackingError(f"{name} has no bytes of its own in {self.path}")
        file = self.path if place.location is None else self.path.with_name(place.location)
        return np.fromfile(file, dtype, count=place.length // np.dtype(dtype).itemsize, offset=place.offset)


def add_minima(packed: GraphFiles, bare: GraphFiles) -> int:
    """Let the matrices of `packed` have the minima that the `bare` graph holds; returns the number of matrices.

    Raises PackingError, with nothing changed, when a matrix does not lie as foretold.
    """
    products = list(_products(packed, bare))
    if not products:
        return 0
    data = np.memmap(packed.path.with_name(WEIGHTS_FILE), dtype=np.uint8, mode="r+")
    sums = [_sums(data, product) for product in products]  # all are checked before one is changed
    for product, found in zip(products, sums, strict=True):
        exact = _plain_sums(product).astype(np.float64) + product.minima
        found[...] = _tiled(exact.astype(np.float32))
    data.flush()
    return len(products)


def _sums(data: NDArray[np.uint8], product: _Product) -> Floats:
    """The sums of one matrix in the file, [ceil(N / 16), J, 16]."""
    rows, blocks = product.shape
    codes = rows * blocks * product.block_bytes
    begin = product.packed.offset + -(-codes // _ALIGNMENT) * _ALIGNMENT
    tiles = (-(-rows // _TILE), blocks, _TILE)
    length = 4 * int(np.prod(tiles))
    expected = _tiled(_plain_sums(product))
    found = data[begin : begin + length]
    if begin + length > product.packed.offset + (product.packed.length or 0) or not np.array_equal(
        found.view(np.float32).reshape(tiles), expected
    ):
        raise PackingError(f"{product.name} is not packed with its sums of blocks where they were looked for")
    return found.view(np.float32).reshape(tiles)


def _plain_sums(product: _Product) -> Floats:
    """-scale * zero_point, [N, J]."""
    return -product.scales * product.zero_points.astype(np.float32)


def _tiled(sums: Floats) -> Floats:
    """[N, J] as tiles of 16 rows, the last one filled up with zeros."""
    rows, blocks = sums.shape
    filled = np.zeros((-(-rows // _TILE) * _TILE, blocks), np.float32)
    filled[:rows] = sums
    return filled.reshape(-1, _TILE, blocks).transpose(0, 2, 1)


def _products(packed: GraphFiles, bare: GraphFiles) -> Iterator[_Product]:
    """Matrices with minima; one that several nodes read is packed once."""
    seen = set()
    for node in packed.header.nodes_of("MatMulNBits"):
        codes = node.inputs[1]
        minima = _minima(node, bare)
        if minima is not None and codes not in seen:
            seen.add(codes)
            yield _product(node, packed, minima)


def _shape(node: NodeHeader) -> tuple[int, int]:
    return node.integers["N"], -(-node.integers["K"] // node.integers["block_size"])


def _minima(node: NodeHeader, bare: GraphFiles) -> Floats | None:
    """The minima [N, J] of a product's matrix, None if it has none."""
    rows, blocks = _shape(node)
    name = node.inputs[1].removesuffix(f"_q{node.integers['bits']}")
    if name + MINIMA in bare.header.tensors:
        return bare.read(name + MINIMA, np.float32).reshape(rows, blocks)
    if name + MINIMA_TRANSPOSED in bare.header.tensors:
        return bare.read(name + MINIMA_TRANSPOSED, np.float32).reshape(blocks, rows).T
    return None


def _product(node: NodeHeader, packed: GraphFiles, minima: Floats) -> _Product:
    codes, scales, zero_points = node.inputs[1:4]
    places = packed.header.tensors[codes].packed
    if len(places) != 1:
        raise PackingError(f"{codes} is packed into {len(places)} parts, 1 is known")
    bits = node.integers["bits"]
    return _Product(
        name=codes,
        shape=_shape(node),
        block_bytes=node.integers["block_size"] * bits // 8,
        packed=places[0],
        scales=packed.read(scales, np.float32).reshape(_shape(node)),
        zero_points=_unpacked(packed.read(zero_points, np.uint8), _shape(node), bits),
        minima=minima,
    )


def _unpacked(zero_points: NDArray[np.uint8], shape: tuple[int, int], bits: int) -> NDArray[np.uint8]:
    """[N, J], of which 4-bit ones lie two a byte."""
    rows = zero_points.reshape(shape[0], -1)
    if bits == 4:
        rows = np.stack((rows & 15, rows >> 4), axis=-1).reshape(shape[0], -1)
    return rows[:, : shape[1]]
