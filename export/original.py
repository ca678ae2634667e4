"""What the original computes, as a certificate holds it: rows of eager PyTorch's logits, ids of texts, written chats.

In: an opened source, and what a bundle is compiled for. Out: a certificate that still lacks the bundle's own figures.
"""

import importlib.metadata
from collections.abc import Sequence
from typing import Any

import jinja2
import torch
from transformers.utils.chat_template_utils import render_jinja_template

from graphport.export.model_kinds import KindEvidence
from graphport.export.plain_tokenizer import plain_tokenizer
from graphport.export.source import SourceModel
from graphport.model_def.certificate import Certificate, Limit
from graphport.model_def.signature import SPECIAL_TOKEN_NAMES
from graphport.model_def.text_corpus import Message, TextEvidence, text_evidence

LIBRARIES = ("torch", "transformers", "tokenizers", "numpy")


def draft_certificate(
    opened: SourceModel,
    evidence: KindEvidence,
    *,
    limits: tuple[Limit, ...],
    files: dict[str, str],
    candidate: dict[str, Any],
) -> Certificate:
    """The original's side of the certificate: its rows made small, and its texts."""
    texts, left_out = reference_texts(opened)
    return Certificate(
        files=files,
        reference={
            "source": opened.source,
            "libraries": {name: importlib.metadata.version(name) for name in LIBRARIES},
            "dtype": str(torch.float32).removeprefix("torch."),
        },
        candidate=candidate,
        inputs=evidence.inputs,
        original=evidence.original,
        limits=limits,
        texts=texts,
        checks=(),
        uncovered=(*evidence.uncovered, *left_out),
    )


def reference_texts(opened: SourceModel) -> tuple[TextEvidence | None, tuple[str, ...]]:
    """Ids of the corpus by the source's tokenizer, chats as transformers writes them; what was left out, in words."""
    if opened.model.config.image is not None:
        return None, ()
    if opened.tokenizer_json is None:
        return None, ("tokenizer: the source has none",)
    tokenizer = plain_tokenizer(opened.tokenizer_json)
    template = opened.chat_template
    writes_chats = opened.model.config.is_decoder and opened.model.config.encoder is None
    if template is None and not writes_chats:
        return text_evidence(tokenizer, None), ()
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
