"""Tiny transformers models that join several: a text model that looks at images.

In: nothing. Out: random models. Nothing is fetched; everything is seeded.
"""

from typing import Any

from tiny_encoders import randomise
from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

_TEXT: dict[str, Any] = {
    "vocab_size": 90,
    "hidden_size": 48,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
_IMAGES: dict[str, Any] = {
    "hidden_size": 40,
    "intermediate_size": 56,
    "num_hidden_layers": 2,
    "num_attention_heads": 5,
    "image_size": 32,
    "patch_size": 8,
}


def make_llava() -> Any:
    """LLaVA: a Llama with a head of its own behind a CLIP image tower."""
    config = LlavaConfig(
        text_config=LlamaConfig(**_TEXT),
        vision_config=CLIPVisionConfig(**_IMAGES),
        image_token_index=89,
        tie_word_embeddings=False,
    )
    return randomise(LlavaForConditionalGeneration(config).eval())
