"""The tensors of Hugging Face image encoders as our parameters, and folders of them as checkpoints.

In: a folder with config.json, safetensors and preprocessor_config.json. Out: `Checkpoint`. Layer scales are folded into
the matrices before them, class tokens get their positions added, two heads of one sum become one.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from torch import Tensor, cat

from graphport.model_def.checkpoint_record import (
    Checkpoint,
    CheckpointError,
    Shape,
    account_for_tensors,
    read_json,
)
from graphport.model_def.config import TransformerConfig
from graphport.model_def.huggingface_values import Values
from graphport.model_def.huggingface_vision import VisionFacts, VisionFamily, read_vision_config
from graphport.model_def.position_config import ConfigError
from graphport.model_def.safetensors_files import WeightFiles, check_dtypes
from graphport.model_def.signature import GenerationDefaults
from graphport.model_def.transformer import parameter_shapes

PREPROCESSOR_FILE = "preprocessor_config.json"

_VIT_BLOCKS = {
    **{f"attention.{part}": f"attention.attention.{part}" for part in ("query", "key", "value")},
    "attention.output": "attention.output.dense",
    "attention_norm": "layernorm_before",
    "feed_forward.up": "intermediate.dense",
    "feed_forward.down": "output.dense",
    "feed_forward_norm": "layernorm_after",
}
_DINO_BLOCKS = {
    **_VIT_BLOCKS,
    "attention_norm": "norm1",
    "feed_forward.up": "mlp.fc1",
    "feed_forward.down": "mlp.fc2",
    "feed_forward_norm": "norm2",
}
CLIP_BLOCKS = {
    "attention.query": "self_attn.q_proj",
    "attention.key": "self_attn.k_proj",
    "attention.value": "self_attn.v_proj",
    "attention.output": "self_attn.out_proj",
    "attention_norm": "layer_norm1",
    "feed_forward.up": "mlp.fc1",
    "feed_forward.down": "mlp.fc2",
    "feed_forward_norm": "layer_norm2",
}
# stored scales by the module whose output they multiply
_LAYER_SCALES = {"attention.output": "layer_scale1.lambda1", "feed_forward.down": "layer_scale2.lambda1"}

_BESIDE = ("text_model.", "text_projection.", "logit_scale", "logit_bias")
_LEFT_OUT = (*_BESIDE, "pooler.", "decoder.", "head.")
_MASK_TOKEN = "embeddings.mask_token"
_POSITION_IDS = "embeddings.position_ids"


class Source(NamedTuple):
    """Where a parameter comes from: stored tensors with the shapes they must have, and how they make it."""

    needed: Mapping[str, Shape]
    make: Callable[..., Tensor]


def load_image_encoder(
    folder: Path, values: Values, family: VisionFamily, files: WeightFiles, *, name: str | None, has_text: bool
) -> Checkpoint:
    """Read the image encoder in `folder`; `has_text`: what is not its own is read beside it.

    Raises CheckpointError before a weight is read where that is possible.
    """
    facts = VisionFacts(
        has_pooler=any(tensor.endswith("pooler.dense.weight") for tensor in files.tensors),
        has_projection="visual_projection.weight" in files.tensors,
    )
    try:
        config, notes = read_vision_config(values, family, read_json(folder / PREPROCESSOR_FILE), facts)
    except ConfigError as error:
        raise CheckpointError(f"{folder / 'config.json'}: {error}") from error
    sources = _Names(config, family, files).sources(parameter_shapes(config))
    needed = {stored: shape for source in sources.values() for stored, shape in source.needed.items()}
    left_out = sorted(stored for stored in files.tensors if stored not in needed and _is_left_out(stored, family))
    present = {stored: tensor for stored, tensor in files.tensors.items() if stored not in left_out}
    account_for_tensors(str(folder), found={key: tensor.shape for key, tensor in present.items()}, needed=needed)
    notes += check_dtypes(folder, present)
    parts = sorted({_part_of(stored, family) for stored in left_out if not (has_text and stored.startswith(_BESIDE))})
    return Checkpoint(
        config=config,
        weights={
            ours: source.make(*(files.read(stored) for stored in source.needed)).contiguous()
            for ours, source in sources.items()
        },
        generation=GenerationDefaults(),
        tokenizer_json=None,
        chat_template=None,
        special_tokens={},
        source={"format": "huggingface", "name": name or folder.resolve().name, "sha256": files.sha256()},
        notes=(*notes, *files.notes, *([f"left out, not of the image encoder: {', '.join(parts)}"] if parts else [])),
    )


def _is_left_out(stored: str, family: VisionFamily) -> bool:
    inner = stored.removeprefix(family.prefix)
    if inner in (_MASK_TOKEN, _POSITION_IDS):
        return True
    # a classifier reads other states than the pooling head and the norm before it give
    return inner.startswith((*_LEFT_OUT, "post_layernorm.")) or stored == "visual_projection.weight"


def _part_of(stored: str, family: VisionFamily) -> str:
    inner = stored.removeprefix(family.prefix)
    return inner if inner.startswith("embeddings.") else inner.split(".", maxsplit=1)[0]


class _Names:
    """The stored names of one folder's parameters."""

    def __init__(self, config: TransformerConfig, family: VisionFamily, files: WeightFiles) -> None:
        self._config, self._family = config, family
        has_prefix = any(stored.startswith(family.prefix) for stored in files.tensors)
        self._prefix = family.prefix if has_prefix else ""
        self._is_clip = family.layout == "clip"
        self._has_scales = family.model_type == "dinov2"
        blocks = _DINO_BLOCKS if self._has_scales else _VIT_BLOCKS
        self._blocks = CLIP_BLOCKS if self._is_clip else blocks

    def sources(self, shapes: Mapping[str, Shape]) -> dict[str, Source]:
        """Where each of our parameters comes from."""
        return {ours: self._source(ours, shape) for ours, shape in shapes.items()}

    def _source(self, ours: str, shape: Shape) -> Source:
        if ours.startswith("blocks."):
            return self._of_block(ours, shape)
        if ours.startswith("patches."):
            return self._of_patches(ours, shape)
        if ours.startswith("image_readout."):
            return self._of_readout(ours.removeprefix("image_readout."), shape)
        module, _, kind = ours.rpartition(".")
        stored = {
            "embedding_norm": "pre_layrnorm",
            "final_norm": "post_layernorm" if self._is_clip else "layernorm",
        }[module]
        return _one(f"{self._prefix}{stored}.{kind}", shape)

    def _of_block(self, ours: str, shape: Shape) -> Source:
        _, layer, rest = ours.split(".", 2)
        module, _, kind = rest.rpartition(".")
        place = f"{self._prefix}encoder.{'layers' if self._is_clip else 'layer'}.{layer}."
        dense = self._config.blocks[int(layer)].dense
        gated = dense is not None and dense.gated
        if gated and module in ("feed_forward.gate", "feed_forward.up"):
            half = 0 if module == "feed_forward.gate" else 1
            return Source(
                {f"{place}mlp.weights_in.{kind}": (2 * shape[0], *shape[1:])}, lambda both: both.chunk(2)[half]
            )
        stored = "mlp.weights_out" if gated and module == "feed_forward.down" else self._blocks[module]
        if self._has_scales and module in _LAYER_SCALES:
            needed = {f"{place}{stored}.{kind}": shape, f"{place}{_LAYER_SCALES[module]}": (shape[0],)}
            return Source(needed, lambda tensor, scale: tensor * scale.reshape(-1, *[1] * (tensor.ndim - 1)))
        return _one(f"{place}{stored}.{kind}", shape)

    def _of_patches(self, ours: str, shape: Shape) -> Source:
        image = self._config.image
        assert image is not None
        place, width, count = f"{self._prefix}embeddings.", self._config.hidden_size, image.prefix_tokens
        rows = count + image.grid[0] * image.grid[1]
        table: dict[str, Shape] = {f"{place}position_embedding.weight": (rows, width)}
        if not self._is_clip:
            table = {f"{place}position_embeddings": (1, rows, width)}
        if ours == "patches.positions":
            return Source(table, lambda stored: stored.reshape(rows, width)[count:])
        if ours == "patches.prefix":
            names = [f"{place}class_embedding"] if self._is_clip else [f"{place}cls_token"]
            names += [f"{place}distillation_token"] if count == 2 else []
            tokens = dict.fromkeys(names, (width,) if self._is_clip else (1, 1, width))
            return Source(
                {**table, **tokens},
                lambda stored, *each: (
                    cat([token.reshape(1, width) for token in each]) + stored.reshape(rows, width)[:count]
                ),
            )
        kind = ours.rpartition(".")[2]
        stored = f"{place}{'patch_embedding' if self._is_clip else 'patch_embeddings.projection'}.{kind}"
        if kind == "bias":
            return _one(stored, shape)
        kernel = (width, image.channels, *image.patch_size)
        return Source({stored: kernel}, lambda tensor: tensor.reshape(shape))

    def _of_readout(self, ours: str, shape: Shape) -> Source:
        readout = self._config.image.readout if self._config.image else None
        assert readout is not None
        module, _, kind = ours.rpartition(".")
        if module == "norm":
            return _one(f"{self._prefix}post_layernorm.{kind}", shape)
        if module.startswith("pool") or ours.startswith("pool"):
            return self._of_attention_pool(ours.removeprefix("pool."), shape)
        if readout.select == "class_and_distillation":
            # the mean of two heads is one head over both tokens, with half the weights
            half = (shape[0], shape[1] // 2) if kind == "weight" else shape
            needed = {f"cls_classifier.{kind}": half, f"distillation_classifier.{kind}": half}
            if kind == "weight":
                return Source(needed, lambda first, second: cat([first, second], dim=1) / 2)
            return Source(needed, lambda first, second: (first + second) / 2)
        if readout.labels:
            return _one(f"classifier.{kind}", shape)
        return _one(f"visual_projection.{kind}" if self._is_clip else f"{self._prefix}pooler.dense.{kind}", shape)

    def _of_attention_pool(self, ours: str, shape: Shape) -> Source:
        place = f"{self._prefix}head."
        if ours == "probe":
            return _one(f"{place}probe", shape)
        module, _, kind = ours.rpartition(".")
        if module in ("query", "key", "value"):
            part = ("query", "key", "value").index(module)
            needed = {f"{place}attention.in_proj_{kind}": (3 * shape[0], *shape[1:])}
            return Source(needed, lambda packed: packed.chunk(3)[part])
        stored = {
            "output": "attention.out_proj",
            "norm": "layernorm",
            "feed_forward.up": "mlp.fc1",
            "feed_forward.down": "mlp.fc2",
        }[module]
        return _one(f"{place}{stored}.{kind}", shape)


def _one(stored: str, shape: Shape) -> Source:
    return Source({stored: shape}, lambda tensor: tensor)
