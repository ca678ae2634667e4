"""A tokenizer that changes no text: neither cut off nor filled up, whatever its file asks for.

In: the text of a tokenizer.json. Out: a `Tokenizer` of the tokenizers library. The runtime has its own.
"""

from tokenizers import Tokenizer


def plain_tokenizer(tokenizer_json: str) -> Tokenizer:
    """The tokenizer without truncation and padding, which a checkpoint may bring along."""
    tokenizer = Tokenizer.from_str(tokenizer_json)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer
