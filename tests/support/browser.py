"""A Chromium of this machine, for tests of pages; they are skipped without one."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from .waiting import HANG, wait_until

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")


@contextmanager
def chromium() -> Iterator[Any]:
    """A started browser of playwright."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="the pages are not tested in a browser: no playwright")
    program = next(filter(None, map(shutil.which, NAMES)), None)
    if program is None:
        pytest.skip(f"the pages are not tested in a browser: none of {', '.join(NAMES)} is in PATH")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield browser
        browser.close()


def new_page(browser: Any, **options: Any) -> Any:
    """A page in a context of its own, with the options of the context; a busy machine may take its time."""
    context = browser.new_context(**options)
    context.set_default_timeout(1000 * HANG)
    return context.new_page()


class Late:
    """The answers to the requests that match a pattern: the program gives them, and the page gets them later."""

    def __init__(self, page: Any, pattern: str) -> None:
        self.page, self.pattern = page, pattern
        self.answers: list[tuple[Any, Any]] = []
        page.route(pattern, lambda route: self.answers.append((route, route.fetch())))

    def wait(self, count: int = 1) -> None:
        """Wait until the program has given as many."""
        wait_until(lambda: self.page.wait_for_timeout(20) or len(self.answers) >= count)

    def deliver(self) -> None:
        """Give the page all of them, the newest first, and later ones at once."""
        while self.answers:
            route, answer = self.answers.pop()
            route.fulfill(response=answer)
        self.page.unroute(self.pattern)
