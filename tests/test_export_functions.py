"""Sources that are functions of a Python file: what they may return and do, and what is refused."""

import sys
from pathlib import Path

import pytest
import torch

from graphport.export.model_export import export
from graphport.export.source import open_source
from graphport.model_def.checkpoint import CheckpointError
from graphport.model_def.signature import FUSIONS_FILE, GRAPH_FILE, WEIGHTS_FILE


def python_source(folder: Path, body: str) -> str:
    path = folder / "model.py"
    path.write_text(
        "from graphport.model_def.config import *\n"
        "from graphport.model_def.transformer import Transformer\n"
        f"def make():\n    {body}\n"
    )
    return f"{path}:make"


CONFIG_TEXT = (
    "TransformerConfig(vocab_size=61, hidden_size=48, max_positions=32, blocks=(BlockConfig("
    "attention=AttentionConfig(num_heads=4, num_kv_heads=2, head_dim=16), feed_forward=FeedForwardConfig(width=40), "
    "norm=NormConfig()),) * 2, final_norm=NormConfig())"
)


def test_two_exports_of_a_seeded_config_are_byte_equal(tmp_path: Path) -> None:
    source = python_source(tmp_path, f"return {CONFIG_TEXT}")
    made = [export(source, tmp_path / f"out{i}", precision="fp32", seed=7, verify=i == 0) for i in (0, 1)]
    for name in (GRAPH_FILE, WEIGHTS_FILE, FUSIONS_FILE):
        assert made[0].manifest.files[name] == made[1].manifest.files[name]
    assert made[0].notes == ("weights are random, drawn with seed 7",)
    weights = [open_source(source, seed=seed).model.embedding.weight for seed in (7, 7, 8)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_a_seeded_source_leaves_the_global_random_state_alone(tmp_path: Path) -> None:
    source = python_source(tmp_path, f"return {CONFIG_TEXT}")
    torch.manual_seed(3)
    wanted = torch.rand(4)
    torch.manual_seed(3)
    open_source(source, seed=7)
    assert torch.equal(torch.rand(4), wanted)


def test_a_function_may_return_a_module(tmp_path: Path) -> None:
    opened = open_source(python_source(tmp_path, f"return Transformer({CONFIG_TEXT}).train()"), seed=0)
    assert not opened.model.training
    assert opened.source["name"] == "model.py:make"
    assert opened.notes == ()


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("return 5", "model.py:make returned int; needed is a graphport TransformerConfig or Transformer"),
        ("return 1 / 0", "model.py:make failed: ZeroDivisionError: division by zero"),
        ("return (", "model.py:make failed: SyntaxError"),
        ("raise SystemExit(0)", "model.py:make failed: SystemExit: 0"),
        ("return NormConfig(epsilon=-1)", "failed: ConfigError: norm epsilon must be a positive number"),
    ],
)
def test_a_function_that_makes_no_model_is_refused(body: str, reason: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=reason):
        open_source(python_source(tmp_path, body), seed=0)


def test_a_function_that_prints_and_changes_folder_disturbs_neither_stdout_nor_the_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    here = Path.cwd()
    with pytest.raises(CheckpointError, match="returned str"):
        open_source(python_source(tmp_path, "import os; os.chdir('/'); print('loading'); return os.getcwd()"), seed=0)
    assert Path.cwd() == here
    assert capsys.readouterr() == ("", "loading\n")


def test_a_function_may_import_from_its_own_folder(tmp_path: Path) -> None:
    before = list(sys.path)
    (tmp_path / "sizes_of_mine.py").write_text("VOCABULARY = 7\n")
    with pytest.raises(CheckpointError, match="returned int"):
        open_source(python_source(tmp_path, "from sizes_of_mine import VOCABULARY; return VOCABULARY"), seed=0)
    assert sys.path == before


def test_a_source_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no file at .*gone.py; SOURCE path/to/file.py:function"):
        open_source(tmp_path / "gone.py:make", seed=0)
    source = python_source(tmp_path, "return 5")
    with pytest.raises(CheckpointError, match="defines no function 'other'"):
        open_source(source.replace(":make", ":other"), seed=0)
    with pytest.raises(CheckpointError, match="no model at"):
        open_source(tmp_path / "nothing", seed=0)
