"""The page in a real browser: it lists the models, streams an answer, shows its speed, stops, and shows refusals.

Chromium is taken from GRAPHPORT_CHROMIUM, else from where Debian installs it; without one the tests are skipped, and
where the variable names a file that is not there, they fail.
"""

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from headless_chromium import Page, browsing
from tiny_bundles import write_tiny_bundle
from tiny_server import TinyServer, serving, wait_until

from graphport.runtime.server_settings import ServerSettings

KEY = "a-key-that-is-long-enough"
ASKED = {"model": "tiny", "messages": [{"role": "user", "content": "the cat"}], "max_tokens": 20, "temperature": 0}


@pytest.fixture(scope="module")
def browser() -> Path:
    given = os.environ.get("GRAPHPORT_CHROMIUM")
    path = Path(given or "/usr/bin/chromium")
    if not path.is_file():
        message = f"{path} does not exist; install Debian's package chromium, or set GRAPHPORT_CHROMIUM"
        (pytest.fail if given else pytest.skip)(message)
    return path


@pytest.fixture(scope="module")
def page(browser: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with browsing(browser, tmp_path_factory.mktemp("profile")) as opened:
        yield opened


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TinyServer]:
    folder = tmp_path_factory.mktemp("server")
    chatty = write_tiny_bundle(folder / "tiny", tokenizer=True).folder
    plain = write_tiny_bundle(folder / "plain", tokenizer=False).folder
    settings = ServerSettings(api_keys=(KEY,))
    with serving({"tiny": chatty, "plain": plain}, settings, prefix_cache_bytes=0) as running:
        yield running


def until(page: Page, condition: str) -> None:
    page.value(f"new Promise((done) => {{ const look = () => ({condition}) ? done() : setTimeout(look, 5); look(); }})")


def ask(page: Page, text: str, tokens: int) -> None:
    page.value(f"by('tokens').value = {tokens}; by('temperature').value = 0; by('prompt').value = {text!r}")
    page.value("by('send').click()")


def test_the_page_asks_streams_measures_and_stops(page: Page, server: TinyServer) -> None:
    page.open(server.url)
    until(page, "by('status').textContent.includes('API key')")  # what the server says without one
    page.value(f"by('key').value = '{KEY}'; by('key').dispatchEvent(new Event('change'))")
    until(page, "by('model').options.length === 2")
    assert page.value("[...by('model').options].map((each) => each.value).join()") == "tiny,plain"

    expected = server.ask("/v1/chat/completions", ASKED, authorization=f"Bearer {KEY}").text
    page.value(
        "window.lengths = []; new MutationObserver(() => lengths.push(by('turns').textContent.length))"
        ".observe(by('turns'), { subtree: true, childList: true, characterData: true })"
    )
    ask(page, "the cat", 20)
    until(page, "by('status').textContent.includes('(length)') && !running")
    assert page.value("document.querySelector('.assistant').textContent") == expected
    assert page.value("/^20 tokens, [0-9.]+ tokens.s .length.$/.test(by('status').textContent)")
    assert page.value("new Set(lengths).size") > 3  # it grew piece by piece

    markup = "<img src=x onerror='window.bad = 1'>"
    page.value(f"by('prompt').value = {markup!r}; by('send').click()")
    until(page, "!running && document.querySelectorAll('.assistant').length === 2")
    assert page.value("document.querySelectorAll('img').length") == 0
    assert page.value("window.bad ?? 0") == 0

    page.value("by('clear').click()")
    engine = server.decoder.lm._engine
    assert engine is not None
    step = engine.step

    def slowly() -> None:
        time.sleep(0.02)
        step()

    try:
        engine.step = slowly  # type: ignore[method-assign]
        ask(page, "go on", 90)
        until(page, "document.querySelector('.assistant')?.textContent.length > 2")
        page.value("by('stop').click()")
        until(page, "by('status').textContent === 'stopped'")
        wait_until(lambda: server.places == 0, "the place is free")
    finally:
        engine.step = step  # type: ignore[method-assign]

    page.value("by('clear').click()")
    ask(page, "too much", 5000)
    until(page, "document.querySelector('.assistant.error')")
    assert "room for 128 tokens" in page.value("by('status').textContent")
