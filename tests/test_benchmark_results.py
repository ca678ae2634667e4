"""Benchmarks: figures, table, picture, environments and the whole command.

In: runs made up by hand, and a tiny .gguf file with its bundle. No peer is installed.
"""

import itertools
import json
import sys
from dataclasses import replace
from pathlib import Path

import compare
import growth
import peer_environments
import pytest
import rounds
from comparison import Comparison, ExportCost, Facts, Fidelity, Run, Start, spread
from comparison_report import markdown
from options import count, lengths, share, table
from peer_process import PeerError
from tiny_bundles import write_tiny_bundle
from tiny_sources import write_tiny_source

from graphport.export import export
from graphport.export.parity import TOLERANCES

BENCHMARKS = Path(compare.__file__).parent


def _comparison() -> Comparison:
    """One bundle, one peer, the reference; two prompts of three runs each. The bundle is twice as fast as the peer."""
    speeds = {"graphport tiny": 2.0, "peer": 1.0, "eager": 0.5}
    runs = [
        Run(system=name, prompt=prompt, first_s=prompt / 100 / speed * noise, rest_s=1 / speed * noise, others=0.02)
        for name, speed in speeds.items()
        for prompt in (10, 40)
        for noise in (1.0, 0.5, 2.0)
    ]
    starts = [
        Start(system=name, prompt=prompt, load_s=1 / speed, answer_s=2 / speed, peak_bytes=prompt << 20, others=0.04)
        for name, speed in speeds.items()
        for prompt in (10, 40)
    ]
    facts = {
        "graphport tiny": Facts(
            versions={"graphport": "1"},
            model="tiny",
            disk_bytes=3 << 20,
            fidelity=Fidelity(kl=0.00123, top1=0.975),
            cost=ExportCost(export_s=33.0, peak_bytes=5 << 20, read_s=1.5),
        ),
        "peer": Facts(versions={"peer": "2"}, model="m.gguf", disk_bytes=1 << 20, fidelity=Fidelity(kl=0.4, top1=0.5)),
        "eager": Facts(versions={"torch": "3"}, model="m.gguf", disk_bytes=1 << 20),
    }
    return Comparison(
        title="m.gguf",
        date="2026-01-02",
        machine="a machine",
        commit="abc",
        command="python benchmarks/compare.py",
        threads=2,
        clock="wall",
        new_tokens=9,
        fidelity_tokens=400,
        max_others=0.1,
        redone=3,
        reference="eager",
        bundles=("graphport tiny",),
        facts=facts,
        runs=tuple(runs),
        starts=tuple(starts),
    )


def _cells(text: str, start: str) -> list[str]:
    (line,) = [line for line in text.splitlines() if line.startswith(f"| {start} |")]
    return line.strip("| ").split(" | ")


def test_figures_are_medians_between_slowest_and_fastest() -> None:
    result = _comparison()
    assert result.prompts == [10, 40]
    assert result.prefill("peer", 40) == spread([100.0, 200.0, 50.0])
    decode = result.decode("graphport tiny", 10)  # eight tokens after the first in half a second, more or less
    assert (decode.least, decode.median, decode.most) == (8.0, 16.0, 32.0)
    assert result.first_token("peer", 40).median == pytest.approx(0.4)
    assert result.load("eager").median == 2.0
    assert result.answer("eager", 10).median == 4.0
    assert result.peak_bytes("peer", 40).most == 40 << 20


def test_figures_of_a_system_that_did_not_run_are_refused() -> None:
    with pytest.raises(ValueError, match="nothing was measured"):
        _comparison().decode("nobody", 10)


def test_the_table_has_each_systems_fidelity_beside_its_speed_and_ratios_to_each_peer() -> None:
    text = markdown(_comparison())
    decode, prefill = text.split("## Decode")[1].split("## Prefill")[0], text.split("## Prefill")[1].split("## ")[0]
    assert _cells(decode, "graphport tiny") == [
        "graphport tiny", "0.0012", "97.5 %", "16.0 (8-32)", "16.0 (8-32)",
    ]  # fmt: skip
    assert _cells(decode, "eager")[1:3] == ["0 (reference)", "100 %"]
    assert _cells(prefill, "peer") == ["peer", "100.0 (50-200)", "100.0 (50-200)"]
    ratios = text.split("## Ratios")[1].split("## ")[0]
    assert _cells(ratios, "graphport tiny | peer")[2:] == ["2.00"] * 4 + ["1.00"] * 2 + ["0.50"]
    assert _cells(ratios, "graphport tiny | eager")[2:] == ["4.00"] * 4 + ["1.00"] * 2 + ["0.25"]
    assert _cells(text.split("## Making")[1], "graphport tiny") == ["graphport tiny", "33", "5", "1.50"]
    assert "Medians of 3 interleaved rounds" in text
    assert "at most 4% of the CPU in any measurement; 3 measurements" in text


def test_the_table_says_when_times_are_cpu_time() -> None:
    text = markdown(replace(_comparison(), clock="cpu", threads=1))
    assert "a machine, 1 thread, CPU time instead of wall time." in text
    assert "The machine was busy: other processes took up to 4% of the CPU." in text


def test_every_table_row_has_as_many_cells_as_its_head() -> None:
    rows = [line.count("|") for line in markdown(_comparison()).replace("\n\n", "\n#\n").splitlines()]
    for before, after in itertools.pairwise(rows):
        assert not before or not after or before == after


def test_the_data_beside_the_table_has_every_run() -> None:
    data = json.loads(_comparison().to_json())
    assert len(data["runs"]) == 18
    assert data["runs"][0] == {"system": "graphport tiny", "prompt": 10, "first_s": 0.05, "rest_s": 0.5, "others": 0.02}
    assert data["facts"]["graphport tiny"]["fidelity"] == {"kl": 0.00123, "top1": 0.975}


def test_growth_finds_the_line_and_tells_a_curve_from_it() -> None:
    def runs(time_ms: list[float]) -> list[Run]:
        seconds = [time * (growth.NEW_TOKENS - 1) / 1000 for time in time_ms]
        return [
            Run(system="x", prompt=prompt, first_s=1.0, rest_s=rest * noise, others=0.0)
            for prompt, rest in zip((128, 1024, 4096, 8192), seconds, strict=True)
            for noise in (1.0, 1.5, 0.9)
        ]

    straight = growth.growth(runs([2 + 0.003 * length for length in (128, 1024, 4096, 8192)]))
    assert straight.a == pytest.approx(2)
    assert straight.b == pytest.approx(3)  # microseconds
    assert straight.deviation < 1e-6
    curve = growth.growth(runs([2 + 1e-6 * length**2 for length in (128, 1024, 4096, 8192)]))
    assert curve.deviation > 0.5
    with pytest.raises(ValueError, match=r"two context lengths, got \[128\]"):
        growth.growth(runs([1.0, 1.0, 1.0, 1.0])[:3])


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Commands of the environments, written down instead of run; the names of what they make are made."""
    ran: list[list[str]] = []

    def record(command: list[str | Path], log: Path) -> None:
        ran.append([str(word) for word in command])
        if "venv" in ran[-1]:
            Path(command[-1]).mkdir(parents=True)
        if "-o" in ran[-1]:
            Path(ran[-1][ran[-1].index("-o") + 1]).mkdir(parents=True)

    monkeypatch.setattr(peer_environments, "_logged", record)
    return ran


def test_an_environment_is_made_once_and_again_when_its_versions_change(
    commands: list[list[str]], tmp_path: Path
) -> None:
    python = peer_environments.environment("llama_cpp", tmp_path)
    assert python == tmp_path / "llama_cpp/bin/python"
    assert [command[0] for command in commands] == [sys.executable, str(python)]
    assert commands[1][-1] == str(BENCHMARKS / "requirements_llama_cpp.txt")
    assert peer_environments.environment("llama_cpp", tmp_path) == python
    assert len(commands) == 2
    (tmp_path / "llama_cpp/installed.txt").write_text("llama-cpp-python==0\n")
    peer_environments.environment("llama_cpp", tmp_path)
    assert len(commands) == 4


def test_a_failed_installation_is_one_line_and_counts_as_not_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_environments.sys, "executable", "/bin/false")
    with pytest.raises(PeerError, match=r"`/bin/false -m venv .*` failed with status 1: nothing \(see .*genai.log\)"):
        peer_environments.environment("genai", tmp_path)
    assert not (tmp_path / "genai/installed.txt").exists()


def test_genais_model_is_made_again_only_when_the_source_changed(commands: list[list[str]], tmp_path: Path) -> None:
    source = tmp_path / "m.gguf"
    source.write_bytes(b"one")
    made = peer_environments.genai_model(source, Path("python"), tmp_path / "peers")
    assert made.is_dir()
    assert [Path(command[1]).name for command in commands] == ["huggingface_folder.py", "-m"]
    assert {"-p", "int4", "-e", "cpu"} <= set(commands[1])
    assert peer_environments.genai_model(source, Path("python"), tmp_path / "peers") == made
    assert len(commands) == 2
    source.write_bytes(b"another")
    peer_environments.genai_model(source, Path("python"), tmp_path / "peers")
    assert len(commands) == 4
    assert [path.name for path in (tmp_path / "peers").iterdir()] == [made.name]


@pytest.mark.parametrize("name", ["requirements_llama_cpp.txt", "requirements_genai.txt"])
def test_peers_are_pinned_exactly(name: str) -> None:
    lines = (BENCHMARKS / name).read_text().splitlines()
    pinned = [line for line in lines if not line.startswith("#")]
    assert pinned
    assert all("==" in line and not set("<>~*") & set(line) for line in pinned)


def test_options_say_what_is_wrong() -> None:
    assert lengths("512,32,512") == (32, 512)
    for parse, text, words in (
        (lengths, "32,,5", "positive number"),
        (count, "0", "positive number"),
        (share, "1.1", "share from 0 to 1"),
        (share, "nan", "share from 0 to 1"),
        (table, "x.txt", r"end in .md, got x.txt"),
    ):
        with pytest.raises(compare.argparse.ArgumentTypeError, match=words):
            parse(text)


def _refusal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *arguments: object) -> str:
    monkeypatch.setattr(sys, "argv", ["compare.py", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        compare.main()
    assert ended.value.code == 2
    return capsys.readouterr().err.splitlines()[-1]


def test_arguments_that_cannot_be_compared_are_refused_before_anything_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    source, folder = tmp_path / "m.gguf", tmp_path / "folder"
    source.touch()
    folder.mkdir()
    assert "owner/name is no .gguf file or folder" in _refusal(capsys, monkeypatch, "owner/name", "a")
    assert "llama.cpp reads .gguf files, got" in _refusal(capsys, monkeypatch, folder, "a")
    assert "different names for the table, got a, a" in _refusal(capsys, monkeypatch, source, "x/a", "y/a")
    assert "unknown peer 'ollama'; known are llama.cpp, genai, or none" in _refusal(
        capsys, monkeypatch, source, "a", "--peers", "ollama"
    )
    assert "give --threads 1 --max-others 1" in _refusal(
        capsys, monkeypatch, source, "a", "--cpu-time", "--threads", "2"
    )
    assert "at least 2 to time decoding" in _refusal(capsys, monkeypatch, source, "a", "--new-tokens", "1")


def test_the_whole_command_on_a_tiny_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib", reason="the plot needs the bench extra")
    source, bundle = tmp_path / "tiny.gguf", tmp_path / "tiny-int8"
    export(write_tiny_source(source), bundle, precision="int8")
    options = ["--peers", "none", "--prompts", "9", "--new-tokens", "3", "--rounds", "1", "--max-others", "1"]
    out = tmp_path / "results/table.md"
    monkeypatch.setattr(rounds, "_others_now", lambda: 0.0)
    monkeypatch.setattr(sys, "argv", ["compare.py", str(source), str(bundle), *options, "--out", str(out)])
    assert compare.main() == 0, capsys.readouterr().err
    assert {path.name for path in out.parent.iterdir()} == {"table.md", "table.png", "table.json"}
    assert out.read_text().startswith(capsys.readouterr().out)
    assert (out.parent / "table.png").read_bytes().startswith(b"\x89PNG")
    data = json.loads((out.parent / "table.json").read_text())
    assert [(run["system"], run["prompt"]) for run in data["runs"]] == [
        ("graphport tiny-int8", 9),
        ("transformers eager fp32", 9),
    ]
    facts = data["facts"]["graphport tiny-int8"]
    assert 0 < facts["fidelity"]["kl"] < TOLERANCES["int8", "kl"]
    assert 0 < facts["cost"]["read_s"] < facts["cost"]["export_s"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["results", "tiny-int8", "tiny.gguf"]


def test_a_missing_plot_library_is_one_line_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setattr(sys, "argv", ["compare.py", str(tmp_path), "bundle", "--peers", "none", "--out", "table.md"])
    assert compare.main() == 1
    line = "compare: error: a plot needs matplotlib; install it with: pip install 'graphport[bench]'\n"
    assert capsys.readouterr().err == line


def test_a_bundle_of_another_model_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write_tiny_source(tmp_path / "tiny.gguf")
    bundle = write_tiny_bundle(tmp_path / "other", tokenizer=True).folder
    options = ["--peers", "none", "--prompts", "9", "--new-tokens", "3"]
    monkeypatch.setattr(sys, "argv", ["compare.py", str(source), str(bundle), *options])
    assert compare.main() == 1
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "error" in line]
    assert line.startswith("compare: error: the models differ in vocabulary, so they are not the same model: {")
