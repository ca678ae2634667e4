# ruff: noqa: N802  # a function's name here is the name of the ONNX op
"""The `graphport` ops between pixels and tokens as ONNX functions made of standard ops (opset 23).

In: the op's inputs and attributes. Out: the op's outputs, equal to `model_def/image_ops.py`; see `portable_ops.py`.

Shapes: `B` images, `C` channels, `h` and `w` height and width in pixels, `P` patches, `W` hidden size, `S` tokens.
"""

from onnxscript import FLOAT, INT32, INT64, script
from onnxscript import opset23 as op

from graphport.export.portable_ops import GRAPHPORT


@script(GRAPHPORT, default_opset=op)
def ImagePatches(pixels: FLOAT, patch_height: int, patch_width: int) -> FLOAT:
    """Pixels [B, C, h, w] cut into patches [B, P, C * patch_height * patch_width], row by row."""
    high = op.Reshape(op.Constant(value_int=patch_height), [1])
    wide = op.Reshape(op.Constant(value_int=patch_width), [1])
    batch, channels = op.Shape(pixels, start=0, end=1), op.Shape(pixels, start=1, end=2)
    rows = op.Div(op.Shape(pixels, start=2, end=3), high)
    columns = op.Div(op.Shape(pixels, start=3, end=4), wide)
    cut = op.Reshape(pixels, op.Concat(batch, channels, rows, high, columns, wide, axis=0))
    turned = op.Transpose(cut, perm=[0, 2, 4, 1, 3, 5])
    return op.Reshape(turned, op.Concat(batch, op.Mul(rows, columns), channels * high * wide, axis=0))


@script(GRAPHPORT, default_opset=op)
def CubicWeights(new: INT64, old: INT64) -> FLOAT:
    """The matrix [new, old] that resamples `old` values as `new` ones: bicubic, a = -0.75, edges repeated.

    (Keys 1981, equation 4.) The sum over the four taps is a product: a ReduceSum over a middle axis needs cuDNN.
    """
    step = op.Cast(old, to=1) / op.Cast(new, to=1)  # [1]
    source = (op.Cast(op.Range(0, op.Squeeze(new), 1), to=1) + 0.5) * step - 0.5  # [new]
    first = op.Unsqueeze(op.Floor(source), [1])  # [new, 1]
    taps = op.Constant(value_floats=[-1.0, 0.0, 1.0, 2.0])
    distance = op.Abs(op.Unsqueeze(source, [1]) - first - taps)  # [new, 4]
    near = (1.25 * distance - 2.25) * distance * distance + 1.0
    far = ((3.75 - 0.75 * distance) * distance - 6.0) * distance + 3.0
    weights = op.Where(distance <= 1.0, near, far)
    last = op.Cast(op.Squeeze(old), to=1) - 1.0
    place = op.Unsqueeze(op.Min(op.Max(first + taps, 0.0), last), [2])  # [new, 4, 1]
    known = op.Cast(op.Range(0, op.Squeeze(old), 1), to=1)  # [old]
    is_there = op.Cast(op.Abs(place - known) < 0.5, to=1)  # [new, 4, old]
    return op.Squeeze(op.MatMul(op.Unsqueeze(weights, [1]), is_there), [1])


@script(GRAPHPORT, default_opset=op)
def PatchPositions(table: FLOAT, pixels: FLOAT, patch_height: int, patch_width: int, rows: int, columns: int) -> FLOAT:
    """The table [rows * columns, W] interpolated to the patches of pixels [B, C, h, w], [P, W]: a product an axis."""
    old_rows = op.Reshape(op.Constant(value_int=rows), [1])
    old_columns = op.Reshape(op.Constant(value_int=columns), [1])
    new_rows = op.Div(op.Shape(pixels, start=2, end=3), op.Constant(value_int=patch_height))
    new_columns = op.Div(op.Shape(pixels, start=3, end=4), op.Constant(value_int=patch_width))
    width = op.Shape(table, start=1, end=2)
    lines = op.Reshape(op.Cast(table, to=1), op.Concat(old_rows, old_columns * width, axis=0))
    stretched = op.MatMul(CubicWeights(new_rows, old_rows), lines)  # [new rows, columns * W]
    squares = op.Reshape(stretched, op.Concat(new_rows, old_columns, width, axis=0))
    resized = op.MatMul(CubicWeights(new_columns, old_columns), squares)  # [new rows, new columns, W]
    return op.CastLike(op.Reshape(resized, op.Concat(new_rows * new_columns, width, axis=0)), table)


@script(GRAPHPORT, default_opset=op)
def RowLengths(x: FLOAT) -> INT32:
    """S for each row of x [B, S, W], [B]."""
    return op.Expand(op.Cast(op.Shape(x, start=1, end=2), to=6), op.Shape(x, start=0, end=1))


IMAGE_FUNCTIONS = (ImagePatches, CubicWeights, PatchPositions, RowLengths)
