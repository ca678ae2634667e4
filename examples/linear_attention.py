"""A small decoder of linear attention as a file of your own: no KV cache, but a state of fixed size for each layer.

    graphport export examples/linear_attention.py:decoder build/linear --precision fp32

In: ids, and the state after those before them. Out: logits and the state after, by `step` of the loaded bundle;
or prompts of ids and their continuations, by `generate`. The weights are random.
"""

from graphport.model_def.block_config import AttentionConfig, BlockConfig, FeedForwardConfig, NormConfig
from graphport.model_def.config import TransformerConfig
from graphport.model_def.position_config import LearnedPosition


def decoder() -> TransformerConfig:
    """Two layers with learned positions."""
    norm = NormConfig(kind="layer", epsilon=1e-5, bias=True)
    attention = AttentionConfig(num_heads=4, num_kv_heads=4, head_dim=16, linear=True, qkv_bias=True, output_bias=True)
    feed_forward = FeedForwardConfig(width=256, activation="gelu", gated=False, bias=True)
    return TransformerConfig(
        vocab_size=100,
        hidden_size=64,
        max_positions=128,
        blocks=(BlockConfig(attention=attention, feed_forward=feed_forward, norm=norm),) * 2,
        position=LearnedPosition(max_positions=128),
        final_norm=norm,
        head="separate",
    )
