"""What a tokenizer's vocabulary is held to: every token's spelling and ids, and the rules by which text becomes tokens.

In: a tokenizer. Out: `VocabularyEvidence`, small enough to ship, and which ids another has otherwise. What surrounds
the model (normalisers, added ends) shows in texts (see `text_corpus.py`).
"""

import base64
import binascii
import hashlib
import itertools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import tokenizers


@dataclass(frozen=True, slots=True, kw_only=True)
class VocabularyEvidence:
    """Hashes of a vocabulary.

    `tokens`: SHA-256 (hex) over every id in order, how its token is spelled, and the ids of that token's own text, for
    which a token needs the merges that make it. `marks`: a byte of the same an id, which says where two vocabularies
    differ. `rules`: SHA-256 of the model's merges in their order, or of its scores by id; None where it has neither.
    """

    tokens: str
    marks: bytes
    rules: str | None

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON data; marks as base64."""
        return {"tokens": self.tokens, "marks": base64.b64encode(self.marks).decode("ascii"), "rules": self.rules}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "VocabularyEvidence":
        """What `to_dict` wrote. Raises ValueError, KeyError or TypeError for anything else."""
        rules = None if data["rules"] is None else str(data["rules"])
        return cls(tokens=str(data["tokens"]), marks=base64.b64decode(data["marks"], validate=True), rules=rules)

    def other_ids(self, found: "VocabularyEvidence") -> list[int]:
        """Ids whose tokens are marked otherwise in `found`; one difference in 256 leaves no mark."""
        pairs = itertools.zip_longest(self.marks, found.marks)
        return [number for number, (wanted, mark) in enumerate(pairs) if wanted != mark]


def vocabulary_evidence(tokenizer: tokenizers.Tokenizer) -> VocabularyEvidence:
    """The evidence of a tokenizer without truncation or padding."""
    spellings = sorted((number, token) for token, number in tokenizer.get_vocab(with_added_tokens=True).items())
    texts = tokenizer.decode_batch([[number] for number, _ in spellings], skip_special_tokens=False)
    digest, marks = hashlib.sha256(), bytearray(spellings[-1][0] + 1 if spellings else 0)
    encodings = tokenizer.encode_batch(texts, add_special_tokens=False)
    for (number, token), encoding in zip(spellings, encodings, strict=True):
        line = f"{number} {len(token)} {token} {encoding.ids}\n".encode()
        digest.update(line)
        marks[number] = binascii.crc32(line, marks[number]) & 0xFF
    return VocabularyEvidence(tokens=digest.hexdigest(), marks=bytes(marks), rules=_rules_hash(tokenizer))


def _rules_hash(tokenizer: tokenizers.Tokenizer) -> str | None:
    model = json.loads(tokenizer.to_str())["model"]
    rules: Any = None
    if "merges" in model:
        rules = _ordered_merges([tuple(merge) for merge in model["merges"]])
    elif isinstance(model["vocab"], list):  # of [token, score]
        rules = model["vocab"]
    return None if rules is None else hashlib.sha256(json.dumps(rules).encode()).hexdigest()


def _ordered_merges(merges: list[tuple[str, ...]]) -> list[list[tuple[str, ...]]]:
    """Merges by what they make, in the order of their rank.

    Which of two neighbours that make the same token comes first is left to whoever writes the list from scores.
    """
    return [sorted(group) for _, group in itertools.groupby(merges, "".join)]
