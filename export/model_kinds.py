"""What differs between kinds of models, decoders, encoders and others, on the way to a bundle: one record a kind.

In: a configuration. Out: its kind's record. `model_export.py` orders the steps; this file says what a kind traces and
what it is compared on.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import onnx_ir as ir
from torch import nn

from graphport.export.decoder_evidence import DecoderEvidence
from graphport.export.encoder_decoder_evidence import EncoderDecoderEvidence
from graphport.export.encoder_evidence import EncoderEvidence, Feed
from graphport.export.graph_pass import CompilePlan
from graphport.export.image_feed import ImageFeed
from graphport.export.recurrent_feed import RecurrentFeed
from graphport.export.text_feed import TextFeed
from graphport.export.window_caches import window_layers
from graphport.model_def.certificate import Check, Limit
from graphport.model_def.certified_inputs import Inputs
from graphport.model_def.compact_rows import CompactRows
from graphport.model_def.conditioning import Conditioning
from graphport.model_def.config import TransformerConfig
from graphport.model_def.encoder import Encoder, check_can_encode
from graphport.model_def.played_runs import Evidence
from graphport.model_def.recurrent_decoder import RecurrentDecoder, check_can_recur
from graphport.model_def.recurrent_signature import recurrent_signature
from graphport.model_def.signature import Kind, Signature, decoder_signature, encoder_signature, image_signature
from graphport.model_def.source_encoder import check_can_translate
from graphport.model_def.transformer import CachedDecoder, Transformer, check_can_decode
from graphport.model_def.vision import ImageEncoder, check_can_encode_images


class KindEvidence(Protocol):
    """What a kind of model is compared on, and the evidence of each stage.

    `inputs`: what the certificate's runs feed. `uncovered`: what they do not reach, in words. `original`: by output,
    rows of the eager module. `layers`: by graph, errors of each place. `source`: the exported graph of the encoder that
    an encoder-decoder has beside the traced one.
    """

    @property
    def inputs(self) -> Inputs: ...  # noqa: D102 - above, as the next four

    @property
    def uncovered(self) -> tuple[str, ...]: ...  # noqa: D102

    @property
    def original(self) -> Mapping[str, CompactRows]: ...  # noqa: D102

    @property
    def layers(self) -> Mapping[str, Any]: ...  # noqa: D102

    @property
    def source(self) -> ir.Model | None: ...  # noqa: D102

    def conditioning(self, *, measure: bool = False) -> Conditioning | None:
        """What float32 itself loses, where a check missed its absolute limit, or with `measure` where one would."""

    def limits(self, plan: CompilePlan) -> tuple[Limit, ...]:
        """What a bundle made by `plan` is held to."""

    def certify_stages(
        self, exported: ir.Model, plan: CompilePlan, *, folder: Path, observe: Callable[[str], None]
    ) -> tuple[Check, ...]:
        """Check the exported graph and its fp32 compilation against eager."""

    def certify_cache(
        self, exported: ir.Model, plan: CompilePlan, *, folder: Path, observe: Callable[[str], None]
    ) -> tuple[Check, ...]:
        """Check the KV cache of what ships in `folder`, where there is one that rounds."""

    def play(
        self, plan: CompilePlan, *, folder: Path, limits: Sequence[Limit], observe: Callable[[str], None]
    ) -> tuple[tuple[Check, ...], Evidence]:
        """Play the certificate's runs on the graph in `folder`; also checks of whole rows, which are not shipped."""


class MakesEvidence(Protocol):
    """Chooses what to compare `model` on, unless `inputs` say it."""

    def __call__(  # noqa: D102 - stands for itself
        self,
        config: TransformerConfig,
        tokenizer_json: str | None,
        /,
        *,
        max_length: int,
        seed: int,
        model: Transformer,
        inputs: Inputs | None = None,
    ) -> KindEvidence: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelKind:
    """One kind of model.

    `check` refuses a configuration and longest length that cannot be exported; `module` is what is traced, with the
    inputs and outputs of `traced`; `shipped` are those after compilation. `sizes`: example sizes for the trace, of
    dimensions for which not every number will do.
    """

    name: Kind
    has_cache: bool
    check: Callable[[TransformerConfig, int], None]
    module: Callable[[Transformer, int], nn.Module]
    traced: Callable[[TransformerConfig], Signature]
    shipped: Callable[[CompilePlan], Signature]
    evidence: MakesEvidence
    sizes: Callable[[TransformerConfig], Mapping[str, int]] = lambda _: {}


def _shipped_decoder(plan: CompilePlan) -> Signature:
    return decoder_signature(
        plan.config, plan.cache_dtype, samples=plan.target.samples_on_device, window_layers=window_layers(plan)
    )


DECODER = ModelKind(
    name="decoder",
    has_cache=True,
    check=check_can_decode,
    module=lambda model, max_length: CachedDecoder(model, max_length=max_length),
    traced=decoder_signature,
    shipped=_shipped_decoder,
    evidence=DecoderEvidence,
)


def _evidence_on(make: Callable[..., Feed]) -> MakesEvidence:
    def evidence(
        config: TransformerConfig,
        tokenizer_json: str | None,
        /,
        *,
        max_length: int,
        seed: int,
        model: Transformer,
        inputs: Inputs | None = None,
    ) -> KindEvidence:
        feed = make(config, tokenizer_json, max_length=max_length, seed=seed, inputs=inputs)
        return EncoderEvidence(config, feed, model=model, seed=seed)

    return evidence


ENCODER = ModelKind(
    name="encoder",
    has_cache=False,
    check=check_can_encode,
    module=lambda model, max_length: Encoder(model, max_length=max_length),
    traced=encoder_signature,
    shipped=lambda plan: encoder_signature(plan.config),
    evidence=_evidence_on(TextFeed),
)


RECURRENT_DECODER = ModelKind(
    name="recurrent_decoder",
    has_cache=False,
    check=check_can_recur,
    module=lambda model, max_length: RecurrentDecoder(model, max_length=max_length),
    traced=recurrent_signature,
    shipped=lambda plan: recurrent_signature(plan.config),
    evidence=_evidence_on(RecurrentFeed),
)


def _image_sizes(config: TransformerConfig) -> dict[str, int]:
    """Whole numbers of patches, different ones in each direction."""
    assert config.image is not None
    return {"height": 3 * config.image.patch_size[0], "width": 5 * config.image.patch_size[1]}


IMAGE_ENCODER = ModelKind(
    name="image_encoder",
    has_cache=False,
    check=check_can_encode_images,
    module=lambda model, max_length: ImageEncoder(model, max_length=max_length),
    traced=image_signature,
    shipped=lambda plan: image_signature(plan.config),
    evidence=_evidence_on(ImageFeed),
    sizes=_image_sizes,
)


# what is traced here is the decoder; `source_graph.py` has the encoder
ENCODER_DECODER = dataclasses.replace(
    DECODER,
    name="encoder_decoder",
    check=check_can_translate,
    evidence=EncoderDecoderEvidence,
)


def kind_of(config: TransformerConfig) -> ModelKind:
    """The kind of model that `config` describes: what goes on with a text over a cache is a decoder."""
    if config.image is not None:
        return IMAGE_ENCODER
    if config.encoder is not None:
        return ENCODER_DECODER
    if config.is_recurrent:
        return RECURRENT_DECODER
    return DECODER if config.is_decoder else ENCODER
