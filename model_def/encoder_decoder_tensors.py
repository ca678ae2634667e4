"""Which tensors of a Hugging Face encoder-decoder's files are its parameters, and what its head is.

In: the files' inventory, a family, a config. Out: where each parameter is, and notes. It reads no weights but those
that decide whether two tensors are one.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from graphport.model_def.checkpoint_record import CheckpointError, account_for_tensors
from graphport.model_def.config import HeadKind, TransformerConfig
from graphport.model_def.encoder_decoder_family import EncoderDecoderFamily, StackTensors
from graphport.model_def.positions import sinusoidal_table
from graphport.model_def.safetensors_files import WeightFiles, check_dtypes
from graphport.model_def.transformer import parameter_shapes

# what old versions of transformers saved beside the parameters; computed or unused here
_HARMLESS = ("encoder.version", "decoder.version", "EncDecAttention.relative_attention_bias.weight")
_ENCODER = "encoder."


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredEncoderDecoder:
    """The files of an encoder-decoder, and how its family names what is in them."""

    files: WeightFiles
    family: EncoderDecoderFamily

    @property
    def has_head_bias(self) -> bool:
        """Whether the files add a bias to the logits."""
        return self.family.head_bias is not None and self.family.head_bias in self.files.tensors

    def head_kind(self, values: Mapping[str, Any]) -> HeadKind:
        """Tied or separate: separate where the files have a head that is not the decoder's embedding.

        Raises CheckpointError when the config says something else.
        """
        flag = values.get("tie_word_embeddings")
        head = self.family.head
        if head not in self.files.tensors:
            if flag is False and self.family.positions != "relative":
                raise CheckpointError(
                    f"tie_word_embeddings is false and {head} is missing; set the flag if the head is the embedding, "
                    "or fetch the missing tensor"
                )
            return "tied"
        embedding = self._embedding(self.family.decoder)
        is_same = embedding in self.files.tensors and self._are_equal(head, embedding)
        if is_same or embedding not in self.files.tensors:
            return "tied"
        if flag is True or (flag is None and self.family.positions != "relative"):
            raise CheckpointError(
                f"tie_word_embeddings is true, but {head} and {embedding} are different tensors; set the flag to "
                "false if the head was trained"
            )
        return "separate"

    def find(self, where: str, config: TransformerConfig) -> tuple[dict[str, str], list[str]]:
        """The stored name of each parameter of `config`, and notes on what is ignored or converted.

        Raises CheckpointError for what is missing, extra or of the wrong shape.
        """
        shapes = parameter_shapes(config)
        names = {ours: self._name(ours, config) for ours in shapes if self._is_stored(ours)}
        needed = {theirs: _stored_shape(ours, shapes[ours]) for ours, theirs in names.items()}
        if self.family.head_bias in needed:
            needed[str(self.family.head_bias)] = (1, *shapes["head.bias"])
        stored = self.files.tensors
        left_out = sorted(name for name in stored if name not in needed and self._is_second_copy(name, config))
        present = {name: tensor for name, tensor in stored.items() if name not in left_out}
        account_for_tensors(where, found={name: tensor.shape for name, tensor in present.items()}, needed=needed)
        notes = check_dtypes(Path(where), present)
        return names, [*notes, f"ignored tensors: {', '.join(left_out)}"] if left_out else notes

    def read(self, names: Mapping[str, str], config: TransformerConfig) -> dict[str, Tensor]:
        """The parameters as float32; what two of them share is read once."""
        shapes, read = parameter_shapes(config), {name: self.files.read(name) for name in set(names.values())}
        return {
            ours: _as_linear(read[names[ours]]).reshape(shape) if ours in names else torch.zeros(shape)
            for ours, shape in shapes.items()
        }

    def _is_stored(self, ours: str) -> bool:
        return self.family.key_bias or not ours.endswith("attention.key.bias")

    def _name(self, ours: str, config: TransformerConfig) -> str:
        if ours == "head.weight":
            return self.family.head
        if ours == "head.bias":
            return str(self.family.head_bias)
        is_encoder = ours.startswith(_ENCODER)
        stack = self.family.encoder if is_encoder else self.family.decoder
        inner = ours.removeprefix(_ENCODER)
        module, _, kind = inner.rpartition(".")
        if module == "embedding":
            return self._embedding(stack)
        if inner in stack.outer:
            return stack.outer[inner]
        if module in stack.outer:
            return f"{stack.outer[module]}.{kind}"
        _, layer, part = module.split(".", 2)
        dense = config.blocks[0].dense
        is_gated = dense is not None and dense.gated
        modules = {**stack.modules, **stack.gated} if is_gated else stack.modules
        return f"{stack.blocks}.{layer}.{modules[part]}.{kind}"

    def _embedding(self, stack: StackTensors) -> str:
        """The stack's own embedding where the files have it, else the shared one, else the head that is tied to it."""
        own, shared = f"{stack.outer['embedding']}.weight", f"{self.family.shared}.weight"
        if own in self.files.tensors:
            return own
        has_shared = shared in self.files.tensors or self.family.head not in self.files.tensors
        return shared if has_shared else self.family.head

    def _is_second_copy(self, name: str, config: TransformerConfig) -> bool:
        """Whether a tensor that is no parameter's repeats one, or is computed here: then it is left out.

        Raises CheckpointError for a position table that is not the one that is computed.
        """
        family = self.family
        if name.endswith(_HARMLESS):
            return True
        copies = {f"{family.shared}.weight", family.head if config.head == "tied" else ""}
        if name in copies:
            stacks = [stack for stack in (family.decoder, family.encoder) if "embedding" in stack.outer]
            others = [self._embedding(stack) for stack in stacks]
            return any(other in self.files.tensors and self._are_equal(name, other) for other in others)
        tables = {f"{stack.outer.get('position')}.weight" for stack in (family.encoder, family.decoder)}
        if family.positions == "sinusoidal" and name in tables:
            self._require_computed(name, config)
            return True
        return False

    def _require_computed(self, name: str, config: TransformerConfig) -> None:
        rows = self.files.tensors[name].shape[0]
        computed = sinusoidal_table(rows, config.hidden_size, halves=True)
        stored = self.files.read(name)
        if stored.shape != computed.shape or not torch.allclose(stored, computed, rtol=0, atol=1e-3):
            raise CheckpointError(f"{name} is not the table of sines and cosines that the family computes")

    def _are_equal(self, name: str, other: str) -> bool:
        tensors = self.files.tensors
        return tensors[name].shape == tensors[other].shape and torch.equal(
            self.files.read(name), self.files.read(other)
        )


def _stored_shape(ours: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of a parameter in the files: a convolution's three neighbours are their last axis there."""
    is_convolution = ".frames." in f".{ours}" and ours.endswith(".weight")
    return (shape[0], shape[1] // 3, 3) if is_convolution else shape


def _as_linear(stored: Tensor) -> Tensor:
    """A convolution's weight [W, C, 3] as [W, 3, C], see `frames.py`; others as they are."""
    return stored.transpose(1, 2) if stored.dim() == 3 else stored
