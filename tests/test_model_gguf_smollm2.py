"""SmolLM2's GGUF file loads whole, and in little memory."""

import subprocess
import sys
from pathlib import Path

import pytest

from graphport.model_def.checkpoint import load_checkpoint


@pytest.mark.real
def test_smollm2_loads_with_every_weight_and_its_end_id(smollm2_gguf: Path) -> None:
    checkpoint = load_checkpoint(smollm2_gguf)
    attention = checkpoint.config.blocks[0].attention
    assert (checkpoint.config.num_layers, attention.num_heads, attention.num_kv_heads) == (30, 9, 3)
    assert checkpoint.config.head == "tied"
    assert sum(weight.numel() for weight in checkpoint.weights.values()) == 134_515_008
    assert checkpoint.generation.eos_token_ids == (2,)
    assert checkpoint.chat_template is not None
    assert "<|im_start|>" in checkpoint.chat_template


# VmHWM, not getrusage: ru_maxrss of a child starts at its parent's size, so that beneath a large one nothing shows
_MEASURE = """
import sys
from graphport.model_def.checkpoint import load_checkpoint

def peak():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) * 1024

before = peak()
checkpoint = load_checkpoint(sys.argv[1])
print((peak() - before) / sum(weight.nbytes for weight in checkpoint.weights.values()))
"""


@pytest.mark.real
def test_smollm2_loads_below_twice_its_size(smollm2_gguf: Path) -> None:
    """Measured: 1.23 times. How long it takes stands in `benchmarks/`."""
    run = subprocess.run(
        [sys.executable, "-c", _MEASURE, str(smollm2_gguf)], check=True, capture_output=True, text=True
    )
    assert 1 < float(run.stdout) < 2
