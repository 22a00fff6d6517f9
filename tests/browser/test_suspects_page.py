"""The page of suspected labels in a real browser: keys move, play and decide, and what is saved is the list."""

import chromium
import pytest
import run_folders
from chromium import SCREENS, WAIT, quiet

from sbkit.data.manifest import Manifest
from sbkit.data.suspects import DROP, KEEP, Exclusions, Suspect
from sbkit.score.report import suspect_page

pytestmark = pytest.mark.skipif(chromium.find() is None, reason="no chromium here (apt-get install chromium)")

LABELS = {"a": "=seven quiet \"horses\"", "b": "a <script>window.hacked = 1</script>", "c": "green, river"}
#: Catches what would be downloaded.
CATCH = """URL.createObjectURL = (blob) => { blob.text().then((text) => { window.saved = text; }); return "#"; };
HTMLAnchorElement.prototype.click = () => {}; 1"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with chromium.Browser(tmp_path_factory.mktemp("profile")) as browser:
        yield browser


def written(folder, count=3):
    wav = run_folders.sound(folder / "sound.wav", 1.5)
    train = Manifest(ids=list(LABELS), durations=[1.5] * 3, wavs=[wav] * 3, texts=list(LABELS.values()))
    rows = [Suspect(name, KEEP if name == "c" else DROP, "other words", 9.0, 0.01, label, 'seven "quiet" horses', "",
                    wav, "/data/mine") for name, label in LABELS.items()]
    suspect_page.write(folder / "suspects.html", rows[:count], train, [str(folder)])
    return (folder / "suspects.html").as_uri()


@pytest.fixture
def page(tmp_path):
    return written(tmp_path)


def press(browser, *keys):
    for key in keys:
        browser.run(f"document.activeElement.dispatchEvent(new KeyboardEvent('keydown', "
                    f"{{key: '{key}', bubbles: true, cancelable: true}})); 1")


def saved(browser, path):
    browser.run(CATCH)
    press(browser, "s")
    path.write_text(browser.run(WAIT % "window.saved"))
    return path


@pytest.mark.slow
@pytest.mark.parametrize("screen", SCREENS)
def test_it_renders_and_asks_for_nothing(browser, page, screen):
    browser.open(page, **SCREENS[screen])
    quiet(browser, page)
    assert browser.run("typeof window.hacked") == "undefined"
    wide = SCREENS[screen].get("width", 1280)
    assert browser.run("document.documentElement.scrollWidth") == wide


def test_decisions_by_key_are_saved_as_the_list_that_a_corpus_takes(browser, page, tmp_path):
    browser.open(page)
    assert browser.run("document.querySelector('output').textContent") == "drop 2 · keep 1"
    assert browser.run("document.activeElement === document.querySelector('article')"), "the row that keys are for"
    assert Exclusions.read(saved(browser, tmp_path / "list.csv")).labels.keys() == {"a", "b"}
    press(browser, "o", "x", "f")  # a is right after all, b is not, c will be corrected
    assert browser.run("document.activeElement.value") == 'seven "quiet" horses'
    browser.run("document.activeElement.value = 'green rivers'; "
                "document.activeElement.dispatchEvent(new Event('input')); 1")
    press(browser, "Enter")
    browser.run("window.saved = undefined; 1")
    path = saved(browser, tmp_path / "list.csv")
    found = Exclusions.read(path)
    assert found.labels == {name: LABELS[name] for name in "bc"} and found.corpus == "/data/mine"
    assert '"green rivers"' in path.read_text()
    browser.open(page)  # again: the browser has kept what was decided
    assert browser.run("document.querySelector('output').textContent") == "keep 1 · drop 1 · fix 1"
    browser.run("localStorage.clear(); 1")


def test_no_suspects_are_a_list_too(browser, tmp_path):
    browser.open(written(tmp_path, 0))
    browser.run(f"{CATCH}; document.querySelector('#save').click(); 1")
    (tmp_path / "list.csv").write_text(browser.run(WAIT % "window.saved"))
    assert Exclusions.read(tmp_path / "list.csv").labels == {}


@pytest.mark.slow
def test_space_plays_the_row_in_hand_and_moving_on_stops_it(browser, page):
    browser.open(page)
    playing = "[...document.querySelectorAll('audio')].map((player) => !player.paused)"
    press(browser, "j", " ")
    assert browser.run(WAIT % f"{playing}[1] && {playing}") == [False, True, False]
    press(browser, "k")
    assert browser.run(playing) == [False, False, False]
