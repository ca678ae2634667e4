"""A stack of linear attention as one step over its states: the module that is exported, and its inputs and outputs.

In: ids and states. Out: logits, and the states after the ids. The runtime's KV cache holds no such states: whoever
steps keeps them.

Shapes: `B` rows, `S` new tokens, `N` heads, `H` head size, `V` vocabulary.
"""

from torch import Tensor, arange, float32, nn

from graphport.model_def.config import TransformerConfig
from graphport.model_def.linear_attention import LinearState
from graphport.model_def.position_config import ConfigError
from graphport.model_def.transformer import Transformer


class RecurrentDecoder(nn.Module):
    """A Transformer of linear attention over states. Raises ConfigError for other configs."""

    def __init__(self, model: Transformer, *, max_length: int) -> None:
        super().__init__()
        check_can_recur(model.config, max_length)
        self.model = model

    def forward(self, input_ids: Tensor, num_past: Tensor, *past: Tensor) -> tuple[Tensor, ...]:
        """input_ids int64 [B, S], num_past int64 [B], tokens that the states hold, to logits float32 [B, S, V].

        `past`: products [B, N, H, H] and keys [B, N, H] of layer 0, 1, ...; those after the step follow the logits.
        """
        x = self.model.embed(input_ids, num_past[:, None] + arange(input_ids.shape[1]))
        present: list[Tensor] = []
        for layer, block in enumerate(self.model.layers):
            state = LinearState(past[2 * layer], past[2 * layer + 1])
            attended, state = block.attention.recur(block.before_attention(x), state)
            present += state
            x = block.after_attention(x, attended)
        return self.model.read_out(x).to(float32), *present


def check_can_recur(config: TransformerConfig, max_length: int) -> None:
    """Raise ConfigError unless `config` is a stack of linear attention that serves `max_length` positions."""
    if not config.is_recurrent:
        raise ConfigError("a recurrent decoder has linear attention in every block")
    if not 1 <= max_length <= config.max_positions:
        raise ConfigError(
            f"max_length ({max_length}) must lie in 1 .. max_positions ({config.max_positions}); "
            "choose it with --context"
        )
