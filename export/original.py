"""What the original computes, as a certificate holds it: rows of eager PyTorch's logits, ids of texts, written chats.

In: an opened source, and what a bundle is compiled for. Out: a certificate that still lacks the bundle's own figures.
"""

import importlib.metadata
from collections.abc import Sequence
from typing import Any

import jinja2
import numpy as np
import torch
from numpy.typing import NDArray
from transformers.utils.chat_template_utils import render_jinja_template

from graphport.export.parity import TOLERANCES
from graphport.export.plain_tokenizer import plain_tokenizer
from graphport.export.source import SourceModel
from graphport.export.targets import CacheFormat, Precision
from graphport.model_def.certificate import Certificate, Limit
from graphport.model_def.certified_runs import uncovered
from graphport.model_def.compact_logits import compact_rows
from graphport.model_def.signature import SPECIAL_TOKEN_NAMES
from graphport.model_def.text_corpus import Message, TextEvidence, text_evidence

LIBRARIES = ("torch", "transformers", "tokenizers", "numpy")

_SAME_KERNELS = Limit(against="shipped", figure="rms", tolerance=TOLERANCES["repeated", "rms"], where="same kernels")
_OTHER_KERNELS = Limit(against="shipped", figure="kl", tolerance=TOLERANCES["repeated", "kl"])


def limits_of(precision: Precision, cache: CacheFormat | None) -> tuple[Limit, ...]:
    """What a bundle of this precision and cache is held to."""
    if cache is None and precision.weight_bits is None and precision.activations == "float32":
        exact = [
            Limit(against="original", figure=figure, tolerance=TOLERANCES["compiled", figure])
            for figure in ("max_abs", "rms")
        ]
        return (*exact, _SAME_KERNELS)
    weights = 0.0 if precision.name == "fp32" else TOLERANCES[precision.name, "kl"]
    rounding = weights + (0.0 if cache is None else TOLERANCES[f"{cache.name} cache", "kl"])
    return (Limit(against="original", figure="kl", tolerance=rounding), _OTHER_KERNELS, _SAME_KERNELS)


def draft_certificate(
    opened: SourceModel,
    logits: NDArray[np.float32],
    ids: Sequence[int],
    *,
    max_length: int,
    limits: tuple[Limit, ...],
    files: dict[str, str],
    candidate: dict[str, Any],
    seed: int,
) -> Certificate:
    """The original's side of the certificate: its `logits` [L, V] of `ids` [L] made small, and its texts."""
    texts, left_out = reference_texts(opened)
    length = len(ids)
    origin = f"seeded random ids ({seed})"
    if texts is not None and all(a == b for a, b in zip(texts.ids[-1], ids, strict=False)):
        origin = "the shipped English text"
    return Certificate(
        files=files,
        reference={
            "source": opened.source,
            "libraries": {name: importlib.metadata.version(name) for name in LIBRARIES},
            "dtype": str(torch.float32).removeprefix("torch."),
        },
        candidate=candidate,
        ids=tuple(ids),
        origin=origin,
        original=compact_rows(logits, range(length), seed=seed),
        limits=limits,
        texts=texts,
        checks=(),
        uncovered=(*uncovered(opened.model.config, max_length, length), *left_out),
    )


def reference_texts(opened: SourceModel) -> tuple[TextEvidence | None, tuple[str, ...]]:
    """Ids of the corpus by the source's tokenizer, chats as transformers writes them; what was left out, in words."""
    if opened.tokenizer_json is None:
        return None, ("tokenizer: the source has none",)
    tokenizer = plain_tokenizer(opened.tokenizer_json)
    template = opened.chat_template
    if template is None:
        return text_evidence(tokenizer, None), ("chat template: the source has none",)
    unnamed = not opened.special_tokens and any(name in template for name in SPECIAL_TOKEN_NAMES)
    if unnamed or "strftime_now" in template:
        why = "needs special tokens that the source does not name" if unnamed else "writes the date"
        return text_evidence(tokenizer, None), (f"chat template: it {why}",)

    special: dict[str, Any] = dict(opened.special_tokens)  # texts; typed as what else a template may be given

    def render(chat: Sequence[Message]) -> str | None:
        try:
            rendered: Any = render_jinja_template(
                [[dict(message) for message in chat]],
                chat_template=template,
                add_generation_prompt=True,
                **special,
            )
        except (jinja2.TemplateError, TypeError):  # the template refuses this kind of chat
            return None
        return str(rendered[0][0])

    return text_evidence(tokenizer, render), ()
