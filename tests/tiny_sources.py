"""A tiny .gguf file that has everything a real one has: weights, tokenizer, end id, chat template.

In: a path. Out: the file, random Llama weights whose vocabulary is the tokenizer's.
"""

from pathlib import Path

import tiny_tokenizers
from gguf import GGUFWriter
from tiny_checkpoints import add_tokenizer, make_model, write_gguf


def write_tiny_source(path: Path, *, chat_template: str = "") -> Path:
    tokenizer = tiny_tokenizers.byte_level()
    model = make_model("llama", vocab_size=tokenizer.get_vocab_size(), max_position_embeddings=128)

    def add_text_side(writer: GGUFWriter) -> None:
        add_tokenizer(writer, tokenizer)
        if chat_template:
            writer.add_chat_template(chat_template)

    write_gguf(path, model, edit=add_text_side)
    return path
