"""Debian's chromium in headless mode, driven by chromedriver, for tests of the dashboard. Nothing is downloaded."""

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from selenium import webdriver
from selenium.common.exceptions import NoSuchElementException, StaleElementReferenceException
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webelement import WebElement

T = TypeVar("T")


class Page:
    """A browser at a server's dashboard.

    ``patience`` is the number of seconds in which an expected element must appear.
    """

    patience = 30.0

    def __init__(self, downloads: Path) -> None:
        driver = shutil.which("chromedriver")
        assert driver is not None, "there is no chromedriver: apt-get install chromium chromium-driver"
        options = webdriver.ChromeOptions()
        for argument in ("--headless=new", "--disable-dev-shm-usage", "--no-proxy-server", "--window-size=1280,900"):
            options.add_argument(argument)
        if os.geteuid() == 0:
            options.add_argument("--no-sandbox")  # chromium refuses to run as root in a sandbox
        options.add_experimental_option("prefs", {"download.default_directory": str(downloads)})
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        self.driver = webdriver.Chrome(options, webdriver.ChromeService(driver))

    def close(self) -> None:
        self.driver.quit()

    def open(self, url: str, view: str = "") -> None:
        """Open the dashboard as in a new tab, without the API key of an earlier page."""
        self.driver.get(f"{url}/dashboard")
        self.driver.execute_script("sessionStorage.clear()")
        self.driver.get("about:blank")
        self.driver.get(f"{url}/dashboard{view}")

    def prefer(self, scheme: str) -> None:
        """Set the preferred color scheme, ``light`` or ``dark``."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})

    def enter_key(self, key: str) -> None:
        self.find("#key").send_keys(key)
        self.click("#key-form button")

    def view(self, name: str) -> None:
        """Click the view's name in the navigation."""
        self.until(lambda: next(each for each in self.all("#views a") if each.text == name).click() or True)

    def all(self, selector: str) -> list[WebElement]:
        return self.driver.find_elements(By.CSS_SELECTOR, selector)

    def find(self, selector: str) -> WebElement:
        return self.until(lambda: self.driver.find_element(By.CSS_SELECTOR, selector))

    def click(self, selector: str) -> None:
        self.until(lambda: self.find(selector).click() or True)

    def text(self, selector: str) -> str:
        return self.until(lambda: self.find(selector).text)

    def script(self, text: str) -> object:
        return self.driver.execute_script(text)

    def until(self, look: Callable[[], T]) -> T:
        """Call ``look`` until it returns something true, and return that. The page polls the server all the time."""
        deadline = time.monotonic() + self.patience
        while True:
            try:
                found = look()
                if found:
                    return found
            except (NoSuchElementException, StaleElementReferenceException, StopIteration):
                if time.monotonic() > deadline:
                    raise
            if time.monotonic() > deadline:
                raise AssertionError(f"it did not come: {self.driver.find_element(By.TAG_NAME, 'body').text}")
            time.sleep(0.05)

    def complaints(self) -> list[str]:
        """Return the errors in the browser's console since the last call."""
        return [entry["message"] for entry in self.driver.get_log("browser") if entry["level"] == "SEVERE"]
