"""The page of a server with a voice, in a real browser: what is written is read aloud, and what can't be is told."""

import bundles
import chromium
import pytest
import serving
import voices
from chromium import SCREENS, WAIT, opened, quiet

pytestmark = [pytest.mark.slow,
              pytest.mark.skipif(chromium.find() is None, reason="no chromium here (apt-get install chromium)")]

STATE = "document.getElementById('speech-state').innerText"


@pytest.fixture(scope="module")
def voice(tmp_path_factory):
    return voices.make(tmp_path_factory.mktemp("page") / "voice")


@pytest.fixture(scope="module")
def both(tmp_path_factory, voice):
    level = bundles.make(tmp_path_factory.mktemp("page") / "level")
    with serving.serving({"level": level, "tts": voice}) as server:
        yield server


@pytest.fixture(scope="module")
def alone(voice):
    with serving.serving({"tts": voice, "other": voice}) as server:
        yield server


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    flags = ("--autoplay-policy=no-user-gesture-required",)
    with chromium.Browser(tmp_path_factory.mktemp("profile"), flags=flags) as browser:
        yield browser


def read(browser, text, voice=None, speed="1"):
    browser.run(f"""(() => {{ document.getElementById("text").value = {text!r};
      document.getElementById("speed").value = {speed};
      document.getElementById("speed").dispatchEvent(new Event("input"));
      if ({"true" if voice else "false"}) document.getElementById("voice").selectedIndex =
        [...document.getElementById("voice").options].findIndex((each) => each.text === {voice!r});
      document.getElementById("speech-state").textContent = ""; document.getElementById("read").click(); }})()""")
    assert browser.run(WAIT % "!document.getElementById('read').disabled")
    return browser.run(STATE)


@pytest.mark.slow
@pytest.mark.parametrize("screen", SCREENS)
def test_it_fits_the_screen_and_asks_nobody_else(browser, both, screen):
    opened(browser, both, **SCREENS[screen])
    read(browser, "Good bye. Hello.")
    wide = SCREENS[screen].get("width", 1280)
    assert browser.run("[document.documentElement.scrollWidth, innerWidth]") == [wide, wide]
    assert browser.run("[...document.querySelectorAll('#speech *')].every((each) => "
                       f"each.getBoundingClientRect().right <= {wide})")
    quiet(browser, both.url, "blob:")


def test_what_is_written_is_read_aloud_in_the_voice_and_speed_that_are_chosen(browser, both):
    opened(browser, both)
    before = both.counted("sbkit_spoken_seconds_total")
    seconds = 7 * voices.SYMBOL_SECONDS / 2
    assert read(browser, "goodbye", "ben", "2").startswith("0.")
    assert both.counted("sbkit_spoken_seconds_total") - before == pytest.approx(seconds, abs=0.001)
    assert browser.run("document.getElementById('times').innerText") == "2×"
    assert browser.run("document.getElementById('player').duration") == pytest.approx(seconds, abs=0.15)
    assert browser.run(WAIT % "document.getElementById('player').currentTime > 0"), "it plays"
    quiet(browser, both.url, "blob:")


def test_what_can_t_be_spoken_is_told_in_words(browser, both):
    opened(browser, both)
    assert "has no symbols for '7' (character 3)" in read(browser, "a 7")
    assert "the text is empty" in read(browser, "")
    assert browser.run("document.getElementById('speech-state').className") == "bad"
    assert read(browser, "fine").endswith("s. Save")
    assert browser.run("document.getElementById('speech-state').className") == ""


def test_a_server_that_only_speaks_shows_nothing_to_speak_into(browser, alone):
    opened(browser, alone)
    assert browser.run("document.querySelector('h1').innerText") == "Text to speech"
    hidden = browser.run("['models', 'drop', 'words', 'save'].map((id) => document.getElementById(id).hidden)")
    assert hidden == [True] * 4
    assert browser.run("[...document.getElementById('voice').options].map((each) => each.text)") == [
        "tts: anna", "tts: ben", "other: anna", "other: ben"]
    assert read(browser, "fine", "other: ben").endswith("s. Save")


def test_a_server_that_only_hears_shows_nothing_to_write_into(browser, tmp_path):
    with serving.serving(bundles.make(tmp_path / "level")) as server:
        opened(browser, server)
        assert browser.run("document.getElementById('speech').hidden")
