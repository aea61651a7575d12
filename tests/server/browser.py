"""A headless Chromium for tests of the page. Where there is none, the tests are skipped and say what is missing."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

_FLAGS = (
    "--headless", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage", "--force-device-scale-factor=1",
)  # fmt: skip


@contextmanager
def chromium(profile, size=(1000, 900)) -> Iterator:
    """A selenium driver. `profile` is an empty folder; selenium is told where everything is, and looks for nothing."""
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    driver = shutil.which("chromedriver")
    missing = [name for name, path in (("chromium", browser), ("chromedriver", driver)) if path is None]
    if missing:
        pytest.skip(f"the page's tests need {' and '.join(missing)} on PATH: apt install chromium chromium-driver")
    selenium = pytest.importorskip("selenium.webdriver", reason="the page's tests need selenium: pip install selenium")
    from selenium.webdriver.chrome.service import Service

    options = selenium.ChromeOptions()
    options.binary_location = browser
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    alone = ("--no-sandbox",) if os.geteuid() == 0 else ()  # which refuses to run as root
    for flag in (*_FLAGS, *alone, f"--user-data-dir={profile}", "--window-size={},{}".format(*size)):
        options.add_argument(flag)
    running = selenium.Chrome(options=options, service=Service(driver))
    try:
        yield running
    finally:
        running.quit()
