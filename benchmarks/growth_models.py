"""Models for `growth.py`: 6 layers with random weights, heads of 64, a KV head for every 4, in several widths.

`graphport export benchmarks/growth_models.py:width_512 OUT` exports one; its weights are drawn with --seed.
"""

from graphport.model_def.block_config import AttentionConfig, BlockConfig, FeedForwardConfig, NormConfig
from graphport.model_def.config import TransformerConfig
from graphport.model_def.position_config import RotaryPosition

LAYERS, HEAD_DIM, QUERIES_PER_KV_HEAD, VOCAB_SIZE = 6, 64, 4, 4096
MAX_POSITIONS = 8192 + 64


def width_256() -> TransformerConfig:
    return _of_width(256)


def width_512() -> TransformerConfig:
    return _of_width(512)


def width_1024() -> TransformerConfig:
    return _of_width(1024)


def _of_width(width: int) -> TransformerConfig:
    heads = width // HEAD_DIM
    norm = NormConfig()
    attention = AttentionConfig(
        num_heads=heads,
        num_kv_heads=heads // QUERIES_PER_KV_HEAD,
        head_dim=HEAD_DIM,
        rotary=RotaryPosition(theta=10000.0),
    )
    block = BlockConfig(attention=attention, feed_forward=FeedForwardConfig(width=3 * width), norm=norm)
    return TransformerConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=width,
        max_positions=MAX_POSITIONS,
        blocks=(block,) * LAYERS,
        final_norm=norm,
        head="tied",
    )


WIDTHS = {256: width_256, 512: width_512, 1024: width_1024}
