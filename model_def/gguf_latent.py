"""Multi-head latent attention in GGUF metadata: ranks and the parts of a head.

In: metadata keys. Out: a record and numbers (see `latent_config.py`).
"""

from graphport.model_def.checkpoint_record import CheckpointError
from graphport.model_def.gguf_keys import GgufKeys
from graphport.model_def.latent_config import LatentConfig


def read_latent(keys: GgufKeys) -> tuple[LatentConfig, int]:
    """The record, and the size of a head of queries and keys.

    Files that hold keys and values apart (attn_k_b, attn_v_b) state heads as _mla, and beside them, as key_length and
    value_length, what a cache of latent vectors would hold. Raises CheckpointError where both do not fit.
    """
    rank = keys.integer("attention.kv_lora_rank")
    query_rank = None if keys.get("attention.q_lora_rank") is None else keys.integer("attention.q_lora_rank")
    key_length, value_length = keys.integer("attention.key_length"), keys.integer("attention.value_length")
    if keys.get("attention.key_length_mla") is not None:
        cached = (rank + keys.integer("rope.dimension_count"), rank)
        if (key_length, value_length) != cached:
            raise CheckpointError(
                f"{keys.file.path}: key_length {key_length} and value_length {value_length} beside key_length_mla must "
                f"be those of latent vectors, {cached[0]} and {cached[1]}"
            )
        key_length, value_length = (
            keys.integer("attention.key_length_mla"),
            keys.integer("attention.value_length_mla"),
        )
    return LatentConfig(key_value_rank=rank, value_dim=value_length, query_rank=query_rank), key_length
