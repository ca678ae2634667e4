"""README and docs: their Python runs as it stands, on tiny models; their commands, options and links exist."""

import re
import shutil
from pathlib import Path

import pytest
import soundfile
import typer
from PIL import Image
from test_masked_heads import save_masked
from tiny_encoder_decoders import language_tokenizer, make_encoder_decoder
from tiny_encoders import make_encoder, save_sentence_folder, word_piece
from tiny_joined import make_llava
from tiny_sources import write_tiny_source
from tiny_speech import RATE, recording, save_speech_folder
from tiny_vision import make_vision, save_vision_folder

from graphport.cli import app
from graphport.export import export

CHECKOUT = Path(__file__).resolve().parent.parent
PAGES = (
    "README.md",
    "docs/export.md",
    "docs/quantisation.md",
    "docs/runtime.md",
    "docs/parity.md",
    "docs/encoders.md",
    "docs/encoder_decoders.md",
    "docs/vision.md",
    "docs/blocks.md",
)
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def _blocks() -> list[tuple[str, str]]:
    found = []
    for page in PAGES:
        text = (CHECKOUT / page).read_text(encoding="utf-8")
        blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
        found += [(f"{page}[{number}]", block) for number, block in enumerate(blocks)]
    return found


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the pages name: `model.gguf`, its bundle in `build/model`, encoders in `minilm`, `clip`, `vit`, others."""
    folder = tmp_path_factory.mktemp("docs")
    write_tiny_source(folder / "model.gguf", chat_template=TEMPLATE)
    (folder / "build/downloads").mkdir(parents=True)
    shutil.copy(folder / "model.gguf", folder / "build/downloads/SmolLM2-135M-Instruct.Q4_1.gguf")
    save_sentence_folder(folder / "minilm", make_encoder("bert"))
    save_masked(folder / "masked", "bert")
    make_encoder_decoder("mbart").save_pretrained(folder / "mbart")
    language_tokenizer().save(str(folder / "mbart/tokenizer.json"))
    save_speech_folder(folder / "whisper")
    soundfile.write(folder / "speech.wav", recording(12_000), RATE)
    save_vision_folder(folder / "clip", make_vision("clip"))
    word_piece().save(str(folder / "clip/tokenizer.json"))
    save_vision_folder(folder / "vit", make_vision("vit classifier"))
    Image.effect_noise((57, 41), 60).convert("RGB").save(folder / "cat.png")
    make_llava().save_pretrained(folder / "llava")
    shutil.copytree(CHECKOUT / "examples", folder / "examples")
    export(folder / "model.gguf", folder / "build/model", precision="int8")
    return folder


@pytest.mark.parametrize(("name", "code"), _blocks(), ids=[name for name, _ in _blocks()])
def test_python_of_the_pages_runs(
    name: str, code: str, workplace: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    shutil.copytree(workplace, tmp_path / "here")
    monkeypatch.chdir(tmp_path / "here")
    exec(compile(code, "page", "exec"), {"__name__": "page"})


_PAGES = sorted(path.relative_to(CHECKOUT) for path in (CHECKOUT / "README.md", *(CHECKOUT / "docs").glob("*.md")))


@pytest.mark.parametrize("page", _PAGES, ids=str)
def test_commands_in_the_pages_exist(page: Path) -> None:
    text = (CHECKOUT / page).read_text()
    code = "\n".join(re.findall(r"^```(?:sh|console)\n(.*?)^```", text, re.MULTILINE | re.DOTALL))
    code += "\n" + "\n".join(re.findall(r"(?<!`)`((?:make|graphport) [^`]+)`", text))
    targets = set(re.findall(r"^\.PHONY: (.+)$", (CHECKOUT / "Makefile").read_text(), re.MULTILINE))
    commands = typer.main.get_command(app).commands
    for line in code.splitlines():
        words = line.split()
        if words[:1] == ["make"]:
            assert words[1] in targets, line
        if words[:1] == ["graphport"] and words[1].islower():
            options = {
                name for parameter in commands[words[1]].params for name in parameter.opts + parameter.secondary_opts
            }
            for option in re.findall(r"--[a-z-]+", line):
                assert option in options | {"--help"}, line
    assert code.strip(), f"{page} shows no command"


@pytest.mark.parametrize("page", _PAGES, ids=str)
def test_links_in_the_pages_lead_to_files(page: Path) -> None:
    for link in re.findall(r"\]\(([^)#]+)[^)]*\)", (CHECKOUT / page).read_text()):
        if "://" not in link:
            assert (CHECKOUT / page.parent / link).exists(), link
