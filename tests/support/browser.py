"""A headless Chromium that is installed already, for tests of pages. It goes nowhere but to this machine."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from playwright.sync_api import Browser, BrowserContext, ConsoleMessage, Page, expect, sync_playwright

from tests.support.patience import patient

_ARGUMENTS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
PATIENCE_MS = round(1000 * patient(30))
"""Other tests run beside, and pages that got no answer wait before they ask again."""
PHONE = (390, 844)
DESK = (1200, 900)


def chromium() -> str | None:
    """The program: what ``CHROMIUM`` names, or one on the path."""
    return os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")


@dataclass
class Visit:
    """A page in a browser without a past, with what its console has said; not of addresses with ``without``."""

    page: Page
    screenshots: Path
    without: tuple[str, ...] = ()
    complaints: list[str] = field(default_factory=list)

    def hear(self, message: ConsoleMessage) -> None:
        """Remembers errors and warnings."""
        url = message.location.get("url", "")
        if message.type in ("error", "warning") and not any(part in url for part in self.without):
            self.complaints.append(f"{message.type}: {message.text} ({url})")

    def shot(self, name: str) -> None:
        """Keeps a picture of the whole page, if ``CKPT_SCREENSHOTS`` is set."""
        if "CKPT_SCREENSHOTS" not in os.environ:
            return
        self.screenshots.mkdir(parents=True, exist_ok=True)
        self.page.screenshot(path=self.screenshots / f"{name}.png", full_page=True)


@contextmanager
def open_browser() -> Iterator[Browser]:
    """Ends with everything that it started."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium(), args=list(_ARGUMENTS))
        try:
            yield browser
        finally:
            browser.close()


@contextmanager
def visit(
    browser: Browser,
    screenshots: Path,
    *,
    size: tuple[int, int] = DESK,
    dark: bool = False,
    without: tuple[str, ...] = (),
) -> Iterator[Visit]:
    """A page that fails its test for everything that goes wrong in it, unless the test has taken it off the list."""
    context: BrowserContext = browser.new_context(
        viewport={"width": size[0], "height": size[1]}, color_scheme="dark" if dark else "light", device_scale_factor=1
    )
    context.set_default_timeout(PATIENCE_MS)
    expect.set_options(timeout=PATIENCE_MS)
    try:
        found = Visit(context.new_page(), screenshots, without)
        found.page.on("pageerror", lambda error: found.complaints.append(f"error: {error}"))
        found.page.on("console", found.hear)
        yield found
        assert not found.complaints, "\n".join(found.complaints)
    finally:
        context.close()
