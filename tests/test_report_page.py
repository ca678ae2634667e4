"""`report --html`: one page that works offline and without a pointer, and says what the bundle's files say."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from tiny_graphs import tiny_model

from graphport.cli import main
from graphport.export import export
from graphport.runtime.bundle_files import open_bundle
from graphport.runtime.op_times import measure_ops


class Page(HTMLParser):
    """Tags, attributes, and the visible text of a page; refuses tags that are not closed."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.names: set[str] = set()
        self.text = ""
        self._open: list[str] = []
        self.feed(path.read_text(encoding="utf-8"))
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.names |= {name for name, _ in attrs}
        if tag not in ("meta", "circle"):
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in ("meta", "circle"):
            assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._open[-1:] != ["style"]:
            self.text += data + "\n"


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("page <b>&")
    return {
        kind: export(tiny_model(kind), folder / kind, precision="fp32", verify=kind == "gemma").path
        for kind in ("gemma", "mixed")
    }


def test_the_page_shows_graph_certificate_and_times(
    bundles: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "page.html"
    assert main(["report", str(bundles["gemma"]), "--html", str(path), "--times"]) == 0
    assert capsys.readouterr().out == f"{path}\n"
    page = Page(path)
    for words in (
        "page <b>&",  # escaped in the file
        "prefill: max_abs against eager PyTorch",
        "window of 6: largest difference of a logit by position in the text, logarithmic",
        "Not covered: tokenizer: the source has none.",
        "layer 1 attention",
        "the graph that ships: largest relative error by place, from the embedding to the logits, logarithmic",
        "prompt of 28",
        "step 4",
        "RotaryCachedAttention",
        "GroupQueryAttention",
        "packed_qkv",
        "CPU",
    ):
        assert words in page.text, words
    certificate = json.loads((bundles["gemma"] / "certificate.json").read_text(encoding="utf-8"))
    layers = certificate["layers"]
    assert list(layers) == ["the same passes in fp32", "the graph that ships"]
    assert page.tags.count("svg") == len(certificate["errors"]) + 2
    dots = [len(run["positions"]) for run in certificate["errors"].values()] + [
        len(e["sites"]) for e in layers.values()
    ]
    assert page.tags.count("circle") == sum(dots)
    assert list(tmp_path.iterdir()) == [path]


def test_it_needs_no_network_no_script_and_no_pointer(bundles: dict[str, Path], tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    assert main(["report", str(bundles["gemma"]), "--html", str(path)]) == 0
    page = Page(path)
    assert not {"script", "link", "img", "iframe", "a"} & set(page.tags)
    assert not {"src", "href", "title", "onclick", "onmouseover"} & page.names
    assert not re.search(r"https?://|url\(|@import", path.read_text(encoding="utf-8"))
    assert "Times were not measured; add --times." in page.text


def test_a_miss_is_shown_with_the_check_and_the_value(bundles: dict[str, Path], tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    assert main(["report", str(bundles["mixed"]), "--html", str(path)]) == 0
    text = Page(path).text
    assert "None: nothing in this bundle says that it is the original model." in text
    assert re.search(r"attention left layer 2 attention: needs that .*, found .*12", text)


def test_times_name_every_place_that_computes_and_where_it_ran(bundles: dict[str, Path]) -> None:
    times = measure_ops(open_bundle(bundles["gemma"]), threads=1)
    assert {"GroupQueryAttention", "MatMul"} <= {time.op for time in times}
    assert {time.provider for time in times} == {"CPUExecutionProvider"}
    assert all(time.microseconds >= 0 for time in times)
    assert len({time.name for time in times}) == len(times)


def test_a_file_that_cannot_be_written_is_refused(
    bundles: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bundle = str(bundles["mixed"])
    for path, words in ((tmp_path / "no" / "page.html", "there is no folder"), (tmp_path, "is a folder")):
        assert main(["report", bundle, "--html", str(path)]) == 1
        assert words in capsys.readouterr().err
    assert main(["report", bundle, "--times"]) == 2
    assert "--times needs --html FILE" in capsys.readouterr().err
