"""Names, shapes and dtypes of the inputs and outputs of a recurrent decoder's graph.

In: a configuration. Out: a `Signature`. Dimensions as in `signature.py`.
"""

from graphport.model_def.config import TransformerConfig
from graphport.model_def.signature import INPUT_IDS, LOGITS, Signature, TensorSpec

NUM_PAST = "num_past"


def past_state(layer: int, part: str) -> str:
    """Input name of layer `layer`'s state before the step; `part` is products or keys."""
    return f"past_state.{layer}.{part}"


def present_state(layer: int, part: str) -> str:
    """Output name of layer `layer`'s state after the step."""
    return f"present_state.{layer}.{part}"


def recurrent_signature(config: TransformerConfig) -> Signature:
    """`input_ids` int64 [batch, sequence], of rows of one length; `num_past` int64 [batch], tokens before them.

    States float32, zeros before the first token: products [batch, heads, head_dim, head_dim] and keys [batch, heads,
    head_dim] of each layer. `logits` float32 [batch, sequence, vocab], then the states after the step.
    """
    inputs = [
        TensorSpec(name=INPUT_IDS, dtype="int64", shape=("batch", "sequence")),
        TensorSpec(name=NUM_PAST, dtype="int64", shape=("batch",)),
    ]
    outputs = [TensorSpec(name=LOGITS, dtype="float32", shape=("batch", "sequence", config.vocab_size))]
    for layer, block in enumerate(config.blocks):
        heads, size = block.attention.num_heads, block.attention.head_dim
        for part, shape in (("products", ("batch", heads, size, size)), ("keys", ("batch", heads, size))):
            inputs.append(TensorSpec(name=past_state(layer, part), dtype="float32", shape=shape))
            outputs.append(TensorSpec(name=present_state(layer, part), dtype="float32", shape=shape))
    return Signature(inputs=tuple(inputs), outputs=tuple(outputs))
