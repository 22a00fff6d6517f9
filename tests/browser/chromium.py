"""A page in a headless Chromium: the screens that it is looked at on, and what each page must do."""

from __future__ import annotations

from tools.chromium import WAIT, Browser, find

__all__ = ["SCREENS", "WAIT", "Browser", "find", "opened", "quiet"]

#: Screens to look at a page on.
SCREENS = {"desktop": {}, "desktop, dark": {"dark": True}, "phone": {"width": 390, "height": 844, "phone": True},
           "small phone, dark": {"width": 320, "height": 568, "phone": True, "dark": True}}


def quiet(browser: Browser, *places: str) -> None:
    """No error, and nobody asked but these places."""
    assert not browser.told("Runtime.exceptionThrown")
    assert not [event["entry"] for event in browser.told("Log.entryAdded")]
    asked = {event["request"]["url"] for event in browser.told("Network.requestWillBeSent")}
    assert all(url.startswith((*places, "data:")) for url in asked), asked


def opened(browser: Browser, server, **screen) -> None:
    """Open a server's page, and wait until it is ready."""
    browser.open(f"{server.url}/", **screen)
    assert browser.run(WAIT % "document.getElementById('state').innerText === 'Ready.'")
