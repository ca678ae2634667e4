"""A bidirectional Transformer over the patches of images: the module that is exported for image encoders.

In: pixels. Out: hidden states, and one vector an image where the config reads one out. It has no weights of its own;
the eager reference is `Transformer` itself.

Shapes: `B` images of one size, `C` channels, `h`, `w` pixels, `S` tokens, `W` hidden size, `D` vector width.
"""

from torch import Tensor, float32, nn

from graphport.model_def.config import TransformerConfig
from graphport.model_def.image_ops import row_lengths
from graphport.model_def.position_config import ConfigError
from graphport.model_def.transformer import Transformer


class ImageEncoder(nn.Module):
    """A Transformer over images of one size at a time. Raises ConfigError for what is no image encoder."""

    def __init__(self, model: Transformer, *, max_length: int) -> None:
        super().__init__()
        check_can_encode_images(model.config, max_length)
        self.model = model

    def forward(self, pixels: Tensor) -> tuple[Tensor, ...]:
        """Pixels [B, C, h, w] to hidden states float32 [B, S, W], and float32 [B, D] where a vector is read out."""
        x = self.model.embed_image(pixels)
        lengths = row_lengths(x)
        for block in self.model.layers:
            attended = block.attention.encode(block.before_attention(x), lengths, None, None)
            x = block.after_attention(x, attended)
        x = self.model.read_out(x)
        readout = self.model.image_readout
        return (x.to(float32),) if readout is None else (x.to(float32), readout(x).to(float32))


def check_can_encode_images(config: TransformerConfig, max_length: int) -> None:
    """Raise ConfigError unless `config` can be exported for images of up to `max_length` tokens."""
    if config.image is None:
        raise ConfigError("an image encoder needs patches; this config reads token ids")
    size, what = config.image.fixed_size or config.image.patch_size, "the smallest image"
    if config.image.fixed_size is not None:
        what = "an image of the fixed size"
    least = config.image.num_tokens(*size)
    if not least <= max_length <= config.max_positions:
        raise ConfigError(
            f"max_length ({max_length}) must lie in {least}, the tokens of {what}, .. {config.max_positions}; "
            "choose it with --context"
        )
