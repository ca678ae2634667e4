"""What an image encoder has beyond its blocks: patches, positions, what is read out, how pictures become pixels.

In: numbers and kinds. Out: frozen records, validated at construction. Torch-free; the formulas stand in `image_ops.py`
and `vision.py`, the pictures in `runtime/preprocessing.py`.
"""

from dataclasses import dataclass
from typing import Literal, get_args

from graphport.model_def.position_config import ConfigError, require_choice, require_count, require_positive
from graphport.model_def.readout_config import Transform

Size = tuple[int, int]  # height, width
Selection = Literal["class", "class_and_distillation", "class_and_patches", "patches", "attention"]

# Positions are interpolated to any size; this only keeps the number of tokens within int32 and reason.
MOST_TOKENS = 1 << 16

_CLASS_TOKENS = {"class": 1, "class_and_distillation": 2, "class_and_patches": 1, "patches": 0, "attention": 0}
_RESAMPLINGS = range(6)  # of Pillow: nearest, lanczos, bilinear, bicubic, box, hamming


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionPoolConfig:
    """One learned query attends over all tokens: y + feed_forward(norm(y)) (SigLIP)."""

    num_heads: int
    feed_forward_width: int
    activation: str
    epsilon: float

    def __post_init__(self) -> None:
        require_count("pooling num_heads", self.num_heads)
        require_count("pooling feed_forward_width", self.feed_forward_width)
        require_positive("pooling epsilon", self.epsilon)


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageReadoutConfig:
    """One vector an image: activation(linear(norm(select(x)))), each left out where it is None.

    class: the first token; class_and_distillation: the first two joined; class_and_patches: the first, and the mean of
    the patches, joined; patches: their mean; attention: `pool`. With `labels` the vector is their logits.
    """

    select: Selection = "class"
    norm_epsilon: float | None = None
    width: int | None = None
    bias: bool = True
    activation: Transform | None = None
    pool: AttentionPoolConfig | None = None
    labels: tuple[str, ...] = ()
    multi_label: bool = False

    def __post_init__(self) -> None:
        require_choice("image selection", self.select, get_args(Selection))
        if self.norm_epsilon is not None:
            require_positive("readout norm_epsilon", self.norm_epsilon)
        if self.width is not None:
            require_count("readout width", self.width)
        if self.activation is not None:
            require_choice("readout activation", self.activation, get_args(Transform))
        if (self.select == "attention") != (self.pool is not None):
            raise ConfigError("selection 'attention' needs pool, and the others have none")
        if self.labels and len(self.labels) != self.width:
            raise ConfigError(f"{len(self.labels)} labels need a linear layer of that width, got {self.width}")
        if not all(isinstance(label, str) for label in self.labels):
            raise ConfigError(f"labels must be texts, got {self.labels!r:.200}")

    def vector_width(self, hidden_size: int) -> int:
        """Numbers an image is read out as."""
        if self.width is not None:
            return self.width
        return hidden_size * (2 if "_and_" in self.select else 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class PreprocessingConfig:
    """How a picture becomes pixels, in this order; None leaves a step out.

    `convert_rgb`; `resize` to height and width, or of the shorter edge to a number; `resample`, Pillow's filter;
    center `crop`, with zeros where the picture is smaller; values times `rescale`; (x - `mean`) / `std` a channel.
    """

    convert_rgb: bool = True
    resize: Size | int | None = None
    resample: int = 3
    crop: Size | None = None
    rescale: float | None = None
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.resample, int) or self.resample not in _RESAMPLINGS:
            raise ConfigError(f"resample must be one of Pillow's filters 0 to 5, got {self.resample!r}")
        for name, size in (("resize", self.resize), ("crop", self.crop)):
            for edge in size if isinstance(size, tuple) else () if size is None else (size,):
                require_count(name, edge)
        if (self.mean is None) != (self.std is None) or len(self.mean or ()) != len(self.std or ()):
            raise ConfigError("mean and std go together, one number each a channel")
        for value in self.std or ():
            require_positive("std", value)


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageConfig:
    """Images as tokens: `prefix_tokens` (class, distillation), then the patches row by row.

    `grid`: rows and columns of the table of positions, that of the images it was trained on; other sizes interpolate
    it. `fixed_size`: the only height and width that a graph takes, None: any whole number of patches.
    """

    patch_size: Size
    grid: Size
    channels: int = 3
    prefix_tokens: int = 1
    patch_bias: bool = True
    fixed_size: Size | None = None
    readout: ImageReadoutConfig | None = None
    preprocessing: PreprocessingConfig | None = None

    def __post_init__(self) -> None:
        require_count("channels", self.channels)
        for name, pair in (("patch_size", self.patch_size), ("grid", self.grid)):
            if len(pair) != 2:
                raise ConfigError(f"{name} needs a height and a width, got {pair!r}")
            for number in pair:
                require_count(name, number)
        needed = _CLASS_TOKENS[self.readout.select] if self.readout else 0
        if self.prefix_tokens < needed:
            raise ConfigError(f"what is read out needs {needed} tokens before the patches, got {self.prefix_tokens}")
        if self.fixed_size is not None and (problem := self.size_problem(*self.fixed_size)) is not None:
            raise ConfigError(problem)

    @property
    def native_size(self) -> Size:
        """Height and width of the images that the positions were trained on."""
        return self.grid[0] * self.patch_size[0], self.grid[1] * self.patch_size[1]

    def num_tokens(self, height: int, width: int) -> int:
        """Tokens of an image."""
        return self.prefix_tokens + (height // self.patch_size[0]) * (width // self.patch_size[1])

    def size_problem(self, height: int, width: int) -> str | None:
        """Why an image of this size cannot be cut into patches, or is not the fixed one; None when it can."""
        rows, columns = self.patch_size
        if height < rows or width < columns or height % rows or width % columns:
            return f"an image of {height} x {width} is no whole number of patches of {rows} x {columns}"
        if self.fixed_size is not None and (height, width) != self.fixed_size:
            fixed = f"{self.fixed_size[0]} x {self.fixed_size[1]}"
            return f"an image of {height} x {width} is not of the size {fixed} that was fixed at export"
        return None
