"""The report in a real browser: renders, no error, no request, recordings play, a phone shows all of it."""

import dataclasses

import chromium
import pytest
import run_folders
from chromium import SCREENS, quiet

from sbkit.score.report import write_report

pytestmark = [pytest.mark.slow,
              pytest.mark.skipif(chromium.find() is None, reason="no chromium here (apt-get install chromium)")]

LOADED = """Promise.all([...document.querySelectorAll("audio")].map((player) => new Promise((done) => {
  if (player.readyState > 0 || player.error) done(); else player.onloadedmetadata = player.onerror = done; })))"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with chromium.Browser(tmp_path_factory.mktemp("profile")) as browser:
        yield browser


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """A page with everything on it, long words and hostile text too."""
    home = tmp_path_factory.mktemp("page")
    heard = run_folders.scored(80, wav=run_folders.sound(home / "sound.wav", 1.5))
    long = "Donaudampfschifffahrtselektrizitätenhauptbetriebswerkbauunterbeamtengesellschaft"
    hostile = f"{long} <script>window.hacked = 1</script>"
    heard[0] = dataclasses.replace(heard[0], reference=hostile, hypothesis=long * 2)
    heard[1] = dataclasses.replace(heard[1], reference="ذهب الولد إلى المدرسة صباحا", hypothesis="ذهب البلد إلى")
    heard = [dataclasses.replace(one, speaker=one.speaker * 12, id=one.id * 9, duration=1.5 + i % 9)
             for i, one in enumerate(heard)]
    better = [dataclasses.replace(one, hypothesis=one.reference) if i % 3 else one for i, one in enumerate(heard)]
    other = run_folders.finished_run(home / "other", better)
    return write_report(run_folders.finished_run(home / "run", heard), against=other).as_uri()


@pytest.mark.slow
@pytest.mark.parametrize("screen", SCREENS)
def test_it_renders_without_an_error_and_without_a_network(browser, page, screen):
    browser.open(page, **SCREENS[screen])
    browser.run(LOADED)
    quiet(browser, page)
    assert not browser.told("Runtime.consoleAPICalled")
    assert browser.run("typeof window.hacked") == "undefined"
    assert browser.run("document.querySelectorAll('section').length") >= 9
    assert browser.run("[...document.querySelectorAll('svg')].every((svg) => svg.getBoundingClientRect().height > 100)")


@pytest.mark.parametrize("screen", SCREENS)
def test_nothing_is_wider_than_the_screen(browser, page, screen):
    browser.open(page, **SCREENS[screen])
    wide = SCREENS[screen].get("width", 1280)
    assert browser.run("[document.documentElement.scrollWidth, innerWidth]") == [wide, wide]
    sticking_out = browser.run(
        f"[...document.querySelectorAll('main *')].filter((e) => !e.closest('.scroll, pre, nav') && "
        f"e.getBoundingClientRect().right > {wide} + 1).map((e) => e.tagName + '.' + e.className).slice(0, 5)")
    assert sticking_out == []


@pytest.mark.parametrize("width", [320, 400])
def test_a_phone_shows_all_of_a_comparison(browser, page, width):
    browser.open(page, width=width, height=800, phone=True)
    cells = browser.run("[...document.querySelectorAll('#against tr > *')].map((e) => "
                        "[e.innerText, e.getBoundingClientRect().right])")
    assert [text for text, _ in cells[3::3]] == ["the other run", "this run", "difference", "95 % interval", "p"]
    assert max(right for _, right in cells) <= width


def test_every_player_has_its_recording_and_plays_it_alone(browser, page):
    browser.open(page)
    browser.run(LOADED)
    lengths = browser.run("[...document.querySelectorAll('audio')].map((player) => player.duration)")
    assert len(lengths) > 20 and all(1.0 < seconds < 2.0 for seconds in lengths)
    assert browser.run("document.querySelectorAll('audio[data-same]').length") > 0
    playing = """(async () => { const [one, two] = document.querySelectorAll("audio"); one.muted = two.muted = true;
      await one.play(); await two.play(); return [one.paused, two.paused, two.error]; })()"""
    assert browser.run(playing) == [True, False, None]


def test_a_pointer_on_a_curve_reads_its_values(browser, page):
    browser.open(page)
    box = browser.run("""(() => { const svg = document.querySelector("figure[data-chart] svg");
      svg.scrollIntoView({behavior: "instant", block: "center"});
      const box = svg.getBoundingClientRect(); return [box.x, box.y, box.width, box.height]; })()""")
    for share, step in ((0.995, "step 120, epoch 6"), (0.5, "step ")):
        browser.send("Input.dispatchMouseEvent", type="mouseMoved", x=box[0] + box[2] * share, y=box[1] + box[3] / 2)
        told = browser.run("document.querySelector('.tip:not([hidden])').innerText")
        assert step in told and "training: " in told and "validation: " in told
    assert browser.run("document.querySelector('.tip:not([hidden])').getBoundingClientRect().right") <= 1280


def test_light_and_dark_differ_and_text_can_be_read_in_both(browser, page):
    contrast = """(() => {
      const style = getComputedStyle(document.body);
      const linear = (v) => v <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4;
      const light = (colour) => {
        const [r, g, b] = colour.match(/[\\d.]+/g).map((v) => linear(v / 255));
        return .2126 * r + .7152 * g + .0722 * b; };
      const [dark, bright] = [light(style.color), light(style.backgroundColor)].sort((a, b) => a - b);
      return [style.backgroundColor, (bright + .05) / (dark + .05)]; })()"""
    browser.open(page)
    light = browser.run(contrast)
    browser.open(page, dark=True)
    dark = browser.run(contrast)
    assert light[0] != dark[0] and light[1] > 7 and dark[1] > 7
