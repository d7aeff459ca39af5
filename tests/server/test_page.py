"""The page at ``/``: its files, and how it works in a real browser."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from html.parser import HTMLParser
from pathlib import Path

import httpx2 as httpx
import pytest
from selenium.common.exceptions import ElementClickInterceptedException, ElementNotInteractableException
from selenium.webdriver import Chrome, ChromeOptions, ChromeService
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement

from hardpoint.server import page
from tests.support.engines import until
from tests.support.serving import RunningServer, running_server

PROGRAMS = {name: shutil.which(name) for name in ("chromium", "chromedriver")}
needs_chromium = pytest.mark.skipif(
    None in PROGRAMS.values(),
    reason="no Chromium here; on Debian: apt-get install chromium chromium-driver (.ci/run does)",
)
QUIET = "headless=new no-sandbox disable-gpu disable-quic no-first-run disable-background-networking "
QUIET += "disable-component-update disable-sync"
SIZES = {"desktop": (1280, 1000), "phone": (390, 844)}


def test_the_files(server: RunningServer) -> None:
    for path in page.PATHS:
        answer = server.get(path)
        assert answer.status_code == 200, path
        assert "default-src 'none'" in answer.headers["content-security-policy"]
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert httpx.head(server.url + path, timeout=60).status_code == 200
    assert server.get("/page/../app.py").status_code == 404
    assert server.get("/page/app.py").status_code == 404


def test_nothing_is_asked_of_anybody_else(server: RunningServer) -> None:
    allowed = {"http://www.w3.org/2000/svg"}
    for path in page.PATHS:
        assert set(re.findall(r"https?://[^\s\"'<>]+", server.get(path).text)) <= allowed, path


def test_every_field_has_a_label(server: RunningServer) -> None:
    labelled, fields = set(), set()

    class Reader(HTMLParser):
        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            given = dict(attrs)
            if tag == "label":
                labelled.add(given["for"])
            if tag in ("input", "textarea", "select"):
                fields.add(given["id"])
            assert not [name for name in given if name == "style" or name.startswith("on")], "the policy forbids it"

    Reader().feed(server.get("/").text)
    assert fields
    assert fields == labelled


@pytest.fixture(scope="module")
def locked_server() -> Iterator[RunningServer]:
    with running_server("--api-key", "secret") as running:
        yield running


def test_a_key_is_needed_for_all_but_the_files(locked_server: RunningServer) -> None:
    assert all(locked_server.get(path).status_code == 200 for path in page.PATHS)
    assert locked_server.get("/metrics").status_code == 401
    assert locked_server.get("/page/app.py").status_code == 401


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Callable[[str, bool], Chrome]]:
    """Opens browsers of a size, light or dark; each is closed in the end."""
    opened: list[Chrome] = []

    def open_one(size: str, dark: bool) -> Chrome:
        options = ChromeOptions()
        options.binary_location = str(PROGRAMS["chromium"])
        for flag in (*QUIET.split(), f"user-data-dir={tmp_path / f'profile{len(opened)}'}"):
            options.add_argument(f"--{flag}")
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        opened.append(Chrome(options, ChromeService(str(PROGRAMS["chromedriver"]))))
        width, height = SIZES[size]
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": size == "phone"}
        opened[-1].execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        opened[-1].execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": scheme})
        return opened[-1]

    yield open_one
    for each in opened:
        each.quit()


def shown(driver: Chrome, selector: str) -> list[WebElement]:
    return [element for element in driver.find_elements(By.CSS_SELECTOR, selector) if element.is_displayed()]


def text_of(driver: Chrome, selector: str) -> str:
    return driver.find_element(By.CSS_SELECTOR, selector).text


@needs_chromium
@pytest.mark.parametrize(("size", "dark"), [("desktop", False), ("phone", True)], ids=["desktop", "phone"])
def test_somebody_chats(
    server: RunningServer, browser: Callable[[str, bool], Chrome], tmp_path: Path, size: str, dark: bool
) -> None:
    driver = browser(size, dark)
    driver.get(server.url)
    until(lambda: text_of(driver, "#status") == "ready")
    rows = server.get("/v1/hardpoint/explain").json()["rows"]
    assert len(driver.find_elements(By.CSS_SELECTOR, "#rows tr")) == len(rows)
    driver.find_element(By.ID, "filter").send_keys("attention")
    assert 0 < len(shown(driver, "#rows tr")) < len(rows)
    drawn = server.sample("hardpoint_generated_tokens_total")

    message = driver.find_element(By.ID, "message")
    message.send_keys("Tell me about the sea.", Keys.ENTER)
    until(lambda: "tokens in" in text_of(driver, ".turn.assistant .facts"))
    assert text_of(driver, ".turn.assistant .text")
    assert text_of(driver, ".turn.user .text") == "Tell me about the sea."
    until(lambda: text_of(driver, "#rate") not in ("–", "0"))  # noqa: RUF001  # the page's own dash
    until(lambda: int(text_of(driver, "#generated").replace(",", "")) > drawn)

    driver.find_element(By.ID, "max-tokens").clear()
    driver.find_element(By.ID, "max-tokens").send_keys("1500")
    message.send_keys("And <b>the</b> whale?", Keys.ENTER)
    until(lambda: len(shown(driver, ".turn")) == 4)
    assert text_of(driver, ".turn:nth-child(3) .text") == "And <b>the</b> whale?", "text, never markup"
    with suppress(ElementNotInteractableException, ElementClickInterceptedException):  # the answer may have ended
        driver.find_element(By.ID, "stop").click()
    until(lambda: text_of(driver, ".turn:last-child .facts") != "")

    width = driver.execute_script("return document.documentElement.scrollWidth")
    assert width <= SIZES[size][0], "nothing sticks out"
    driver.save_screenshot(str(tmp_path / f"{size}.png"))
    assert not [entry for entry in driver.get_log("browser") if entry["level"] == "SEVERE"]  # type: ignore[no-untyped-call]


@needs_chromium
def test_somebody_has_a_key(
    locked_server: RunningServer, browser: Callable[[str, bool], Chrome], tmp_path: Path
) -> None:
    driver = browser("desktop", True)
    driver.get(locked_server.url)
    until(lambda: bool(shown(driver, "#key")))
    driver.find_element(By.ID, "key").send_keys("guess", Keys.ENTER)
    until(lambda: "not one of this server's" in text_of(driver, "#key-note"))
    driver.find_element(By.ID, "key").send_keys("secret", Keys.ENTER)
    until(lambda: bool(driver.find_elements(By.CSS_SELECTOR, "#rows tr")))
    assert not shown(driver, "#key")
    driver.find_element(By.ID, "message").send_keys("Hello", Keys.ENTER)
    until(lambda: "tokens in" in text_of(driver, ".turn.assistant .facts"))
    driver.save_screenshot(str(tmp_path / "key.png"))


MARKDOWN = """# Title
Some **bold *both***, _em_ and `a <b> c`, ~~no~~ and snake_case_name, 2 * 3 * 4.
Again [a link](https://example.org/x) but [none](javascript:alert(1)) <img src=x onerror=alert(1)>

1. one
   - in *one*
2. two

| a | b |
|---|:-:|
| 1 | x\\|y |

> quoted

```python
print("<hi>")
"""
RENDERED = (
    "<h3>Title</h3><p>Some <strong>bold <em>both</em></strong>, <em>em</em> and "
    "<code>a &lt;b&gt; c</code>, <del>no</del> and snake_case_name, 2 * 3 * 4.\nAgain "
    '<a href="https://example.org/x" target="_blank" rel="noopener noreferrer nofollow">a link</a> but '
    "[none](javascript:alert(1)) &lt;img src=x onerror=alert(1)&gt;</p>"
    '<ol start="1"><li>one<ul><li>in <em>one</em></li></ul></li><li>two</li></ol>'
    '<div class="scroll"><table><thead><tr><th>a</th><th>b</th></tr></thead><tbody><tr><td>1</td><td>x|y</td></tr>'
    "</tbody></table></div><blockquote><p>quoted</p></blockquote>"
    '<div class="code"><div class="code-head"><span>python</span><i></i></div>'
    '<pre><code>print("&lt;hi&gt;")</code></pre></div>'
)
RENDER = """
const [text, done] = arguments;
import("./page/markdown.js").then(({ markdown }) => {
  const made = document.createElement("div");
  made.append(markdown(text, () => document.createElement("i")));
  done(made.innerHTML);
}, (error) => done(String(error)));
"""


@needs_chromium
def test_markdown_becomes_elements_and_nothing_else_does(
    server: RunningServer, browser: Callable[[str, bool], Chrome]
) -> None:
    driver = browser("desktop", False)
    driver.get(server.url)
    assert driver.execute_async_script(RENDER, MARKDOWN.removesuffix("\n")) == RENDERED
    for hostile in (
        "*" * 3000,
        "_a" * 3000,
        "[" * 3000,
        "> " * 500,
        "- " * 500,
        "`" * 3000,
        "**a " * 1000,
        "|-" * 1000,
    ):
        rendered = driver.execute_async_script(RENDER, hostile)
        assert "Error" not in rendered, hostile[:8]


def ask(driver: Chrome, text: str, num_turns: int) -> None:
    """Send a message, and wait for the end of its answer."""
    driver.find_element(By.ID, "message").send_keys(text, Keys.ENTER)
    until(lambda: has_answered(driver, num_turns))


def has_answered(driver: Chrome, num_turns: int) -> bool:
    """Whether nothing is under way, and there are so many turns."""
    quiet = "document.getElementById('log').ariaBusy === 'false'"
    found = driver.execute_script(f"return {quiet} && document.querySelectorAll('.turn').length")
    return bool(found == num_turns)


def press(driver: Chrome, selector: str, text: str) -> None:
    """Press the button of that text."""
    (button,) = [each for each in shown(driver, f"{selector} button") if each.text == text]
    driver.execute_script("arguments[0].click()", button)  # wherever the log is scrolled to


@needs_chromium
def test_somebody_comes_back_to_a_conversation(
    server: RunningServer, browser: Callable[[str, bool], Chrome], tmp_path: Path
) -> None:
    """Answered again, edited, kept, exported, deleted; settings hold, and errors lose no text."""
    driver = browser("desktop", False)
    downloads = {"behavior": "allow", "downloadPath": str(tmp_path)}
    driver.execute_cdp_cmd("Browser.setDownloadBehavior", downloads)
    driver.get(server.url)
    until(lambda: text_of(driver, "#status") == "ready")
    driver.find_element(By.CSS_SELECTOR, "#settings summary").click()
    for field, value in (("system", "Be short."), ("seed", "7"), ("max-tokens", "12"), ("top-p", "0.9")):
        driver.find_element(By.ID, field).clear()
        driver.find_element(By.ID, field).send_keys(value)
    before = server.sample("hardpoint_served_prompt_tokens_total")
    ask(driver, "Tell me about the sea.", 2)
    facts = text_of(driver, ".turn.assistant .facts")
    assert re.search(r"12 tokens in [0-9.]+ s, [0-9.]+ tokens/s, first after [0-9.]+ s", facts)
    prompt = int(server.sample("hardpoint_served_prompt_tokens_total") - before)
    assert f"{prompt + 12} of 2,048 tokens" in facts
    assert driver.find_element(By.CSS_SELECTOR, ".facts meter").get_attribute("value") == str(prompt + 12)
    answered = text_of(driver, ".turn.assistant .text")
    press(driver, ".turn.assistant", "Regenerate")
    until(lambda: has_answered(driver, 2))
    assert text_of(driver, ".turn.assistant .text") == answered, "the seed is the same"
    ask(driver, "And of ships?", 4)

    press(driver, ".turn.user:nth-child(3)", "Edit")
    assert driver.find_element(By.ID, "message").get_attribute("value") == "And of ships?"
    driver.find_element(By.ID, "message").clear()
    ask(driver, "And of fish?", 4)
    assert text_of(driver, ".turn:nth-child(3) .text") == "And of fish?"
    texts = [text_of(driver, f".turn:nth-child({number}) .text") for number in range(1, 5)]

    driver.find_element(By.ID, "export").click()
    until(lambda: bool(list(tmp_path.glob("conversation-*.json"))))
    exported = json.loads(next(tmp_path.glob("conversation-*.json")).read_text())
    assert [each["role"] for each in exported["messages"]] == ["user", "assistant"] * 2
    assert exported["messages"][2]["content"] == "And of fish?"
    assert (exported["system"], exported["sampling"]["seed"], exported["sampling"]["top_p"]) == ("Be short.", 7, 0.9)

    driver.refresh()
    until(lambda: text_of(driver, "#status") == "ready")
    assert driver.find_element(By.ID, "system").get_attribute("value") == "Be short."
    driver.find_element(By.CSS_SELECTOR, "#kept summary").click()
    press(driver, "#kept-list", "Tell me about the sea.")
    assert [text_of(driver, f".turn:nth-child({number}) .text") for number in range(1, 5)] == texts

    driver.execute_script("document.getElementById('system').value = 'far too long '.repeat(2000)")
    ask(driver, "This is too much.", 4)
    assert "maximum context length is 2048 tokens" in text_of(driver, "#error")
    assert driver.find_element(By.ID, "message").get_attribute("value") == "This is too much."
    area = driver.find_element(By.ID, "error").rect
    height = driver.execute_script("return document.documentElement.clientHeight")
    assert area["y"] + area["height"] < height, "the error is in sight"

    press(driver, "#kept-list", "Delete")
    assert (text_of(driver, "#kept-count"), shown(driver, ".turn")) == ("0", [])
    driver.save_screenshot(str(tmp_path / "back.png"))
