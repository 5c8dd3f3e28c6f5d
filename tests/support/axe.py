"""The rules of axe-core on a page in a browser: contrast, names of what the keyboard reaches, order of headings."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
from playwright.sync_api import Page

_RULES = {"runOnly": ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "best-practice"]}


def findings(page: Page, where: str, within: str | None = None) -> list[str]:
    """What the rules find on the page, or in the element ``within``; each finding begins with ``where``.

    The test is left out when the rules are not installed.
    """
    found = find_spec("axe_playwright_python")
    if found is None or found.origin is None:
        pytest.skip("axe-playwright-python is not installed")
    page.evaluate((Path(found.origin).parent / "axe.min.js").read_text())
    asked = "([within, rules]) => axe.run(within ? document.querySelector(within) : document, rules)"
    return [
        f"{where}: {finding['id']}: {finding['help']}: {node['html'][:200]} {node['failureSummary']}"
        for finding in page.evaluate(asked, [within, _RULES])["violations"]
        for node in finding["nodes"]
    ]
