"""The server's page in a real browser: a file and a microphone become words, on a screen and on a phone."""

import base64
import io
import json
import time

import bundles
import chromium
import numpy as np
import pytest
import serving
import soundfile
from chromium import SCREENS, WAIT, opened, quiet

pytestmark = [pytest.mark.slow,
              pytest.mark.skipif(chromium.find() is None, reason="no chromium here (apt-get install chromium)")]

SAID = ["hello there", "good people"]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with serving.serving(bundles.make(tmp_path_factory.mktemp("page") / "level")) as server:
        yield server


@pytest.fixture(scope="module")
def streaming(tmp_path_factory):
    """A server whose model hears live speech chunk by chunk."""
    with serving.serving(bundles.make(tmp_path_factory.mktemp("page") / "level", streams=True)) as server:
        yield server


@pytest.fixture(scope="module")
def spoken(tmp_path_factory):
    """What the browser's microphone hears, at the rate that its sound has, so that levels stay what they are."""
    pause = np.zeros(bundles.RATE, np.float32)
    signal = np.concatenate([pause, *(part for text in SAID for part in (bundles.say(text, hold=4), pause, pause))])
    path = tmp_path_factory.mktemp("spoken") / "said.wav"
    soundfile.write(path, np.repeat(signal, 3), 48_000, subtype="PCM_16")
    return path


@pytest.fixture(scope="module")
def browser(tmp_path_factory, spoken):
    flags = ("--use-fake-device-for-media-stream", "--use-fake-ui-for-media-stream",
             f"--use-file-for-fake-audio-capture={spoken}%noloop", "--autoplay-policy=no-user-gesture-required")
    with chromium.Browser(tmp_path_factory.mktemp("profile"), flags=flags) as browser:
        yield browser


@pytest.mark.slow
@pytest.mark.parametrize("screen", SCREENS)
def test_it_renders_without_an_error_and_without_a_network(browser, server, screen):
    opened(browser, server, **SCREENS[screen])
    quiet(browser, server.url, "blob:")
    wide = SCREENS[screen].get("width", 1280)
    assert browser.run("[document.documentElement.scrollWidth, innerWidth]") == [wide, wide]
    assert browser.run("document.getElementById('model').value") == "level"
    assert browser.run("[...document.querySelectorAll('header *, #drop button')].every((each) => "
                       f"each.getBoundingClientRect().right <= {wide})")


def drop(browser, data, name, **more):
    """As if a person let go of files over the page."""
    files = json.dumps([[data, name], *([each, name] for name, each in more.items())])
    browser.run(f"""(() => {{ const transfer = new DataTransfer(); for (const [data, name] of {files})
        transfer.items.add(new File([Uint8Array.from(atob(data), (c) => c.charCodeAt(0))], name));
      document.dispatchEvent(new DragEvent("drop", {{dataTransfer: transfer, bubbles: true, cancelable: true}}));
    }})()""")


def encoded(data):
    return base64.b64encode(data).decode()


def test_a_file_that_is_dropped_becomes_words(browser, server):
    opened(browser, server)
    drop(browser, encoded(serving.wav(" ".join(SAID))), "talk.wav")
    assert browser.run(WAIT % "document.getElementById('state').innerText.startsWith('talk.wav: ')")
    assert browser.run("document.getElementById('words').innerText") == " ".join(SAID)
    assert browser.run("[...document.querySelectorAll('#save button')].map((each) => each.hidden)") == [False] * 4
    quiet(browser, server.url, "blob:")


def test_a_file_that_is_no_audio_is_told_in_words(browser, server):
    opened(browser, server)
    drop(browser, encoded(b"<script>window.hacked = 1</script>"), "<img src=x onerror='window.hacked = 1'>.wav")
    assert browser.run(WAIT % "document.getElementById('state').classList.contains('bad')")
    assert "Format not recognised" in browser.run("document.getElementById('state').innerText")
    assert browser.run("typeof window.hacked") == "undefined"
    drop(browser, encoded(serving.wav("again")), "b.wav")
    assert browser.run(WAIT % "document.getElementById('words').innerText === 'again'")


@pytest.fixture
def correcting(tmp_path):
    """A server that keeps what people correct, and where."""
    with serving.serving(bundles.make(tmp_path / "level"), corrections=tmp_path / "kept") as server:
        yield server, tmp_path / "kept" / "corrections.jsonl"


def press(browser, key, code, **how):
    for kind in ("keyDown", "keyUp"):
        browser.send("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code, **how)


WORDS = "[...document.querySelectorAll('#fields input')].map((each) => each.value)"
HELD = "document.activeElement.id || document.activeElement.parentElement.id"


def test_words_are_corrected_heard_saved_and_deleted_by_keyboard_alone(browser, correcting, tmp_path):
    server, rows = correcting
    opened(browser, server)
    drop(browser, encoded(serving.wav("good people")), "talk.wav")
    assert browser.run(WAIT % "!document.getElementById('correct').hidden")
    assert browser.run(WORDS) == ["good", "people"]
    while browser.run(HELD) != "fields":
        press(browser, "Tab", 9)
    browser.send("Input.insertText", text="kind")
    press(browser, "Enter", 13, text="\r")
    assert browser.run(WAIT % "said.played.length > 0 && said.paused"), "the word was heard, and no more"
    assert browser.run("said.currentTime < said.duration")
    press(browser, "Tab", 9)
    browser.send("Input.insertText", text="old people")
    press(browser, "Enter", 13, modifiers=2)
    assert browser.run(WAIT % "document.getElementById('correct-state').innerText.startsWith('Saved')")
    [row] = map(json.loads, rows.read_text().splitlines())
    assert (row["text"], row["heard"]) == ("kind old people", "good people")
    browser.picture(tmp_path / "page.png")
    while browser.run(HELD) != "forget":
        press(browser, "Tab", 9)
    press(browser, "Enter", 13, text="\r")
    assert browser.run(WAIT % "document.getElementById('correct-state').innerText.startsWith('Deleted')")
    assert rows.read_text() == ""
    quiet(browser, server.url, "blob:")


def unsure(text):
    """A recording that spells a text between two letters: the model doubts it."""
    file = io.BytesIO()
    soundfile.write(file, bundles.say(text) + 0.45 / bundles.LEVELS, bundles.RATE, format="WAV", subtype="PCM_16")
    return file.getvalue()


def test_of_several_recordings_the_doubtful_come_first_and_the_next_is_a_key_away(browser, correcting):
    server, rows = correcting
    opened(browser, server)
    drop(browser, encoded(serving.wav("sure")), "sure.wav", bad=encoded(b"no audio"), doubt=encoded(unsure("doubt")),
         long=encoded(serving.silence(31)))
    assert browser.run(WAIT % "!document.getElementById('correct').hidden")
    told = browser.run("document.getElementById('state').innerText")
    assert told.startswith("Recordings to correct: 2") and "bad: " in told and "long: longer than 30 s" in told
    assert browser.run("document.getElementById('correct-state').innerText") == "doubt"
    assert browser.run(WORDS) == ["doubt"]
    browser.run("document.querySelector('#fields input').focus()")
    press(browser, "Enter", 13, modifiers=2)
    assert browser.run(WAIT % "document.activeElement.id === 'next'")
    press(browser, "Enter", 13, text="\r")
    assert browser.run(WORDS) == ["sure"] and browser.run(HELD) == "fields"
    press(browser, "Enter", 13, modifiers=2)
    assert browser.run(WAIT % "document.getElementById('correct-state').innerText.startsWith('Saved')")
    assert [json.loads(row)["text"] for row in rows.read_text().splitlines()] == ["doubt", "sure"]
    assert browser.run("document.getElementById('next').hidden")
    browser.run("document.querySelector('#fields input').focus()")
    browser.send("Input.insertText", text="un")
    press(browser, "Enter", 13, modifiers=2)
    assert browser.run(WAIT % "document.getElementById('correct-state').innerText.includes('Other words were saved')")


def test_what_was_spoken_can_be_corrected_too(browser, correcting):
    speak(browser, correcting[0])
    assert browser.run(WAIT % "!document.getElementById('correct').hidden")
    assert browser.run(WAIT % "said.duration > 1") and browser.run(WORDS)


def test_without_a_folder_for_them_nothing_is_corrected(browser, server):
    opened(browser, server)
    drop(browser, encoded(serving.wav("good people")), "talk.wav")
    assert browser.run(WAIT % "document.getElementById('state').innerText.startsWith('talk.wav: ')")
    assert browser.run("document.getElementById('correct').hidden")


LINES = "document.getElementById('words').innerText.split('\\n').filter(Boolean)"


def speak(browser, server):
    """What stood there when all was said, and what stood there before it was settled."""
    opened(browser, server)
    browser.run("""window.soft = []; window.both = []; window.heard = []; new MutationObserver(() => {
      const [firm, soft] = ["firm", "soft"].map((name) => document.querySelector("#words ." + name)?.innerText.trim());
      if (soft) window.soft.push(soft);
      window.heard.push([document.getElementById("heard").innerText, Boolean(soft || firm)]);
      if (firm) window.both.push([firm, soft]);
    }).observe(document.getElementById("words"), {subtree: true, childList: true, characterData: true})""")
    browser.run("document.getElementById('speak').click()")
    browser.run(WAIT % f"{LINES}.length >= 2 && document.querySelector('#words .soft').innerText === ''")
    assert browser.run("document.getElementById('speak').innerText") == "Stop"
    browser.run("document.getElementById('speak').click()")
    assert browser.run(WAIT % "/^[0-9.]+ s\\.$/.test(document.getElementById('state').innerText)")
    return browser.run(LINES), browser.run("window.soft")


@pytest.mark.slow
def test_what_is_spoken_appears_while_it_is_spoken(browser, server):
    end = time.monotonic() + 120  # a busy machine's pretended microphone loses sound, so it may be said again
    lines, soft = speak(browser, server)
    while lines != SAID and time.monotonic() < end:
        lines, soft = speak(browser, server)
    assert lines == SAID
    assert any(SAID[0].startswith(text) and text != SAID[0] for text in soft), "word by word"
    heard = browser.run("window.heard")
    assert ["Speech is heard.", True] in heard and ["Nobody is heard speaking.", False] in heard
    serving.until(lambda: server.counted("sbkit_live_sessions") == 0)
    quiet(browser, server.url, "blob:")


COLOURS = """["firm", "soft"].map((name) => getComputedStyle(document.querySelector("#words ." + name)).color)"""


@pytest.mark.slow
def test_settled_words_of_a_line_are_told_from_those_that_may_change(browser, streaming):
    end = time.monotonic() + 120
    lines, _ = speak(browser, streaming)
    while lines != SAID and time.monotonic() < end:
        lines, _ = speak(browser, streaming)
    assert lines == SAID
    both = browser.run("window.both")
    assert {firm for firm, _ in both} == {"hello", "good"}, "the words that are followed by another in their line"
    assert all("there".startswith(soft) or "people".startswith(soft) for _, soft in both)
    firm, soft = browser.run(COLOURS)
    assert firm != soft
    quiet(browser, streaming.url, "blob:")


def test_a_server_with_a_key_asks_for_it(browser, tmp_path):
    with serving.serving(bundles.make(tmp_path / "level"), keys=["sesame"]) as server:
        browser.open(f"{server.url}/")
        assert browser.run(WAIT % "!document.getElementById('locked').hidden")
        for key, state in (("wrong", "The server does not accept this key."), ("sesame", "Ready.")):
            browser.run(f"""(() => {{ document.getElementById("key").value = "{key}";
                document.getElementById("locked").requestSubmit(); }})()""")
            assert browser.run(WAIT % f"document.getElementById('state').innerText === '{state}'")
        drop(browser, encoded(serving.wav("open")), "a.wav")
        assert browser.run(WAIT % "document.getElementById('words').innerText === 'open'")
        assert browser.run(WAIT % "!document.getElementById('speak').disabled")
        browser.run("document.getElementById('speak').click()")
        assert browser.run(WAIT % "document.getElementById('state').innerText.startsWith('Speak.')")
        browser.run("document.getElementById('speak').click()")
        assert browser.run(WAIT % "document.getElementById('speak').innerText === 'Speak'")
