"""What Hugging Face files call the matrices of experts: one tensor an expert, or one of three axes for all.

In: a naming and one of our parameters. Out: where it is in the files. It reads no weights by itself.

Shapes: `E` experts, `W` width of the stream, `F` width of an expert.
"""

import dataclasses
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch

from graphport.model_def.expert_config import ExpertsConfig
from graphport.model_def.microscaled_parts import BLOCKS, MicroscaledPart
from graphport.model_def.stored_parts import Part, StackedPart, StoredPart

EXPERTS = "feed_forward.experts."


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertTensors:
    """How a family names its experts, below `blocks`.{i}.

    `gate`, `up` and `down` hold {} for the number of an expert, and end in .weight then; or each is one tensor of all
    experts, whose bias is called with _bias behind. Where gate and up have one name its rows are both: gate before up
    (`halves`), or by turns (`turns`). `is_transposed`: matrices are [E, in, out]. `is_microscaled`: they are in
    blocks of 4 bits, [E, out, in] (see `microscaled_parts.py`). `modules` are those beside the experts, from ours to
    theirs.
    """

    gate: str
    up: str
    down: str
    order: Literal["halves", "turns"] = "halves"
    is_transposed: bool = False
    is_microscaled: bool = False
    modules: Mapping[str, str] = field(default_factory=dict)

    def is_in(self, names: Collection[str], prefix: str, layer: int) -> bool:
        """Whether files with tensors called `names` use this naming in `layer`."""
        ending = ".weight" if self._is_each else BLOCKS if self.is_microscaled else ""
        return f"{prefix}.{layer}.{self.down.format(0)}{ending}" in names

    @property
    def _is_each(self) -> bool:
        return "{}" in self.down

    def part(self, name: str, prefix: str, experts: ExpertsConfig) -> Part:
        """Where the parameter `name`, "blocks.3.feed_forward.experts.gate.weight", is."""
        _, layer, rest = name.split(".", 2)
        matrix, kind = rest.removeprefix(EXPERTS).split(".")
        theirs = f"{prefix}.{layer}.{ {'gate': self.gate, 'up': self.up, 'down': self.down}[matrix] }"
        if self._is_each:
            return StackedPart(tuple(f"{theirs.format(index)}.{kind}" for index in range(experts.num_experts)))
        stored = theirs if kind == "weight" else f"{theirs}_bias"
        rows = None
        if self.gate == self.up and matrix != "down":
            first = torch.arange(experts.width)
            index = 0 if matrix == "gate" else 1
            rows = first + index * experts.width if self.order == "halves" else 2 * first + index
        if self.is_microscaled and kind == "weight":
            return MicroscaledPart(stored, rows)
        return StoredPart(stored, rows, is_transposed=self.is_transposed and kind == "weight", axis=1)


_GATE_UP, _DOWN = "mlp.experts.gate_up_proj", "mlp.experts.down_proj"
_ROUTER = {"feed_forward.router": "mlp.gate"}
_QWEN = _ROUTER | {
    "feed_forward.shared.gate": "mlp.shared_expert.gate_proj",
    "feed_forward.shared.up": "mlp.shared_expert.up_proj",
    "feed_forward.shared.down": "mlp.shared_expert.down_proj",
    "feed_forward.shared_gate": "mlp.shared_expert_gate",
}

# of each family: as the hub has it, and as transformers 5 has it in memory
MIXTRAL = (
    ExpertTensors(
        gate="block_sparse_moe.experts.{}.w1",
        up="block_sparse_moe.experts.{}.w3",
        down="block_sparse_moe.experts.{}.w2",
        modules={"feed_forward.router": "block_sparse_moe.gate"},
    ),
    ExpertTensors(gate=_GATE_UP, up=_GATE_UP, down=_DOWN, modules=_ROUTER),
)
QWEN_MOE = (
    ExpertTensors(
        gate="mlp.experts.{}.gate_proj", up="mlp.experts.{}.up_proj", down="mlp.experts.{}.down_proj", modules=_QWEN
    ),
    ExpertTensors(gate=_GATE_UP, up=_GATE_UP, down=_DOWN, modules=_QWEN),
)
_DEEPSEEK = _ROUTER | {
    "feed_forward.correction": "mlp.gate.e_score_correction_bias",
    **{f"feed_forward.shared.{part}": f"mlp.shared_experts.{part}_proj" for part in ("gate", "up", "down")},
}
DEEPSEEK = tuple(dataclasses.replace(naming, modules=_DEEPSEEK) for naming in QWEN_MOE)
_GPT_OSS = ExpertTensors(
    gate=_GATE_UP,
    up=_GATE_UP,
    down=_DOWN,
    order="turns",
    is_transposed=True,
    modules={"feed_forward.router": "mlp.router"},
)
GPT_OSS = (_GPT_OSS, dataclasses.replace(_GPT_OSS, is_transposed=False, is_microscaled=True))
