"""The trunk of a small structure model as a file of your own: gated attention with a bias from pairs of residues.

    graphport export examples/structure_trunk.py:trunk build/trunk --precision fp32

In: ids of residues. Out: a state for each, by `hidden_states` of the loaded bundle. The weights are random.
"""

from graphport.model_def.block_config import AttentionConfig, BlockConfig, FeedForwardConfig, NormConfig
from graphport.model_def.config import TransformerConfig
from graphport.model_def.pair_config import PairConfig


def trunk() -> TransformerConfig:
    """Two layers over residues, each with a bias projected from the pairs and a gate on what it attends to."""
    norm = NormConfig(kind="layer", epsilon=1e-5, bias=True)
    attention = AttentionConfig(num_heads=4, num_kv_heads=4, head_dim=16, causal=False, output_bias=True, gate=True)
    feed_forward = FeedForwardConfig(width=128, activation="relu", gated=False, bias=True)
    return TransformerConfig(
        vocab_size=24,
        hidden_size=64,
        max_positions=128,
        blocks=(BlockConfig(attention=attention, feed_forward=feed_forward, norm=norm),) * 2,
        final_norm=norm,
        head="none",
        pair=PairConfig(width=32, max_distance=32),
    )
