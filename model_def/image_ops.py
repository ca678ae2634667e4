"""Ops between pixels and tokens as PyTorch sees them: schema, fake kernel and eager reference of each.

In: tensors. Out: tensors. The ONNX side stands in `export/translations.py` and `export/portable_image_ops.py`.

Shapes: `B` images, `C` channels, `h` and `w` height and width in pixels, `P` patches, `W` hidden size, `S` tokens.
"""

import torch
from torch import Tensor
from torch.nn import functional


@torch.library.custom_op("graphport::image_patches", mutates_args=())
def image_patches(pixels: Tensor, patch_height: int, patch_width: int) -> Tensor:
    """Cut pixels [B, C, h, w] into patches [B, P, C * patch_height * patch_width], row by row.

    A linear layer over them is the convolution with a stride of its own size (Dosovitskiy et al. 2020, equation 1).
    """
    batch, channels, height, width = pixels.shape
    rows, columns = height // patch_height, width // patch_width
    cut = pixels.reshape(batch, channels, rows, patch_height, columns, patch_width)
    patches = cut.permute(0, 2, 4, 1, 3, 5).reshape(batch, rows * columns, -1)
    return patches.clone(memory_format=torch.contiguous_format)  # of a single patch it would be a view


@image_patches.register_fake
def _(pixels: Tensor, patch_height: int, patch_width: int) -> Tensor:
    batch, channels, height, width = pixels.shape
    num_patches = (height // patch_height) * (width // patch_width)
    return pixels.new_empty((batch, num_patches, channels * patch_height * patch_width))


@torch.library.custom_op("graphport::patch_positions", mutates_args=())
def patch_positions(
    table: Tensor, pixels: Tensor, patch_height: int, patch_width: int, rows: int, columns: int
) -> Tensor:
    """The table of positions [rows * columns, W] interpolated to the patches of `pixels` [B, C, h, w], [P, W].

    Bicubic with a = -0.75, edges repeated, pixel centres aligned, in float32 whatever the table's type; the table
    itself for images of its own size. (`interpolate_pos_encoding` of transformers.)
    """
    size = (pixels.shape[2] // patch_height, pixels.shape[3] // patch_width)
    wide = table.to(torch.float32).reshape(1, rows, columns, -1).permute(0, 3, 1, 2)
    resized = functional.interpolate(wide, size=size, mode="bicubic", align_corners=False)
    return resized[0].flatten(1).T.to(table.dtype).contiguous()


@patch_positions.register_fake
def _(table: Tensor, pixels: Tensor, patch_height: int, patch_width: int, rows: int, columns: int) -> Tensor:
    num_patches = (pixels.shape[2] // patch_height) * (pixels.shape[3] // patch_width)
    return table.new_empty((num_patches, table.shape[1]))


@torch.library.custom_op("graphport::row_lengths", mutates_args=())
def row_lengths(x: Tensor) -> Tensor:
    """S for each row of x [B, S, W], int32 [B]: rows that are whole, for ops that take rows of different lengths."""
    return torch.full((x.shape[0],), x.shape[1], dtype=torch.int32, device=x.device)


@row_lengths.register_fake
def _(x: Tensor) -> Tensor:
    return x.new_empty((x.shape[0],), dtype=torch.int32)
