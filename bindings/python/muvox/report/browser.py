"""The page in a headless Chromium, driven by selenium: for pictures of it and for its test."""

import base64
import contextlib
import os
import shutil
import time
from pathlib import Path

from ..errors import UserError

WIDTH, HEIGHT = 1300, 2200  # pixels; all of a page
PATIENCE = 60  # s; 3-D is drawn by the CPU here


class BrowserError(UserError):
    """No browser, or a page that it cannot show."""


def check() -> None:
    """Raises BrowserError unless Chromium, its driver and selenium are there."""
    try:
        import selenium  # noqa: F401
    except ImportError:
        raise BrowserError("a picture of the page needs selenium: pip install selenium") from None
    if None in _programs():
        raise BrowserError("a picture of the page needs chromium and chromedriver, Debian's chromium-driver, in PATH")


def _programs() -> tuple[str | None, str | None]:
    names = ("chromium", "chromium-browser", "google-chrome")
    return next(filter(None, map(shutil.which, names)), None), shutil.which("chromedriver")


@contextlib.contextmanager
def opened(path):
    """Yields selenium's driver with the page in a window of WIDTH × HEIGHT, when all of it is drawn.

    Nothing is fetched from the network. Raises BrowserError.
    """
    check()
    from selenium import webdriver
    from selenium.common.exceptions import WebDriverException

    options, (browser, driver) = webdriver.ChromeOptions(), _programs()
    options.binary_location = browser
    for argument in (
        "headless=new",
        f"window-size={WIDTH},{HEIGHT}",
        "force-device-scale-factor=1",
        "hide-scrollbars",
        "use-angle=swiftshader",  # 3-D without a GPU
        "enable-unsafe-swiftshader",
        "disable-dev-shm-usage",
        "host-resolver-rules=MAP * ~NOTFOUND",
        *(["no-sandbox"] if os.geteuid() == 0 else []),  # Chromium's sandbox refuses root
    ):
        options.add_argument(f"--{argument}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    try:
        window = webdriver.Chrome(options, webdriver.ChromeService(driver))
    except WebDriverException as error:
        raise BrowserError(f"Chromium does not start: {str(error.msg).splitlines()[0]}") from None
    try:
        window.get(Path(path).absolute().as_uri())
        wait(window)
        yield window
    finally:
        window.quit()


def wait(window) -> None:
    """Until the page has drawn what was asked for last. Raises BrowserError."""
    end = time.monotonic() + PATIENCE
    while window.execute_script("return document.body.dataset.state") != "drawn":
        if time.monotonic() > end:
            raise BrowserError(f"the page is not drawn after {PATIENCE} s: {window.get_log('browser')}")
        time.sleep(0.05)


def photograph(window) -> bytes:
    """PNG of the whole page in a window of `opened`, from top to bottom."""
    height = window.execute_script("return Math.ceil(document.body.getBoundingClientRect().bottom + scrollY)")
    view = {"x": 0, "y": 0, "width": WIDTH, "height": height, "scale": 1}
    options = {"format": "png", "clip": view, "captureBeyondViewport": True}
    return base64.b64decode(window.execute_cdp_cmd("Page.captureScreenshot", options)["data"])
