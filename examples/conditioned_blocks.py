"""The blocks of a small diffusion transformer as a file of your own: adaptive norms set by one vector a text.

    graphport export examples/conditioned_blocks.py:blocks build/conditioned --precision fp32

In: ids, a conditioning vector for each text. Out: hidden states, by `hidden_states(texts, conditioning=...)` of the
loaded bundle. The weights are random.
"""

from graphport.model_def.block_config import AttentionConfig, BlockConfig, FeedForwardConfig, NormConfig
from graphport.model_def.config import TransformerConfig
from graphport.model_def.position_config import SinusoidalPosition


def blocks() -> TransformerConfig:
    """Two layers, each with shift, scale and gate of attention and of the feed-forward from the conditioning."""
    norm = NormConfig(kind="layer")
    attention = AttentionConfig(num_heads=4, num_kv_heads=4, head_dim=16, causal=False, qkv_bias=True, output_bias=True)
    feed_forward = FeedForwardConfig(width=256, activation="gelu_tanh", gated=False, bias=True)
    return TransformerConfig(
        vocab_size=100,
        hidden_size=64,
        max_positions=128,
        blocks=(BlockConfig(attention=attention, feed_forward=feed_forward, norm=norm),) * 2,
        position=SinusoidalPosition(max_positions=128),
        final_norm=norm,
        head="none",
        conditioned=True,
    )
