"""The page at ``/``: its files, and how it works in a real browser."""

from __future__ import annotations

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
