"""Corrections: what a client sends is a corpus, and nobody fills the disk, loses a row or reads another's."""

import contextlib
import errno
import json
import os
from concurrent.futures import ThreadPoolExecutor

import bundles
import httpx
import numpy as np
import pytest
import serving
import soundfile
from refusals import refused
from sounds import contained, speechlike

from sbkit.cli import main
from sbkit.data.corpus import Corpus
from sbkit.decode.spans import Word
from sbkit.serve.corrections import MAX_CHARACTERS, Corrections, worth
from sbkit.serve.errors import ApiError
from sbkit.serve.limits import Limits


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    return bundles.make(tmp_path_factory.mktemp("corrected") / "level")


@pytest.fixture(scope="module")
def server(bundle, tmp_path_factory):
    with serving.serving(bundle, corrections=tmp_path_factory.mktemp("kept")) as server:
        server.folder = tmp_path_factory.getbasetemp() / "kept0"
        yield server


def send(server, said, text, **fields):
    data = serving.wav(said) if isinstance(said, str) else said
    return httpx.post(f"{server.base}/audio/corrections", data={"model": "level", "text": text} | fields,
                      files={"file": ("a.wav", data)}, timeout=60)


def rows(folder):
    return [json.loads(line) for line in (folder / "corrections.jsonl").read_text().splitlines()]


def test_what_is_saved_is_a_corpus_that_training_takes(server, tmp_path):
    for i, text in enumerate(["good people", "birds hear", "hello there"]):
        found = send(server, text, f"  {text.upper()}  now ", heard=text)
        assert found.status_code == 200 and found.json()["text"] == f"{text.upper()} now", found.text
        assert len(rows(server.folder)) == i + 1
    row = rows(server.folder)[0]
    signal, rate = soundfile.read(server.folder / row["audio_filepath"])
    assert rate == bundles.RATE and abs(len(signal) / rate - row["duration"]) < 0.001
    assert (row["heard"], row["model"]) == ("good people", "level")
    corpus = Corpus(str(server.folder / "corrections.jsonl"), "en", tmp_path / "manifests", min_duration=0.0)
    found = corpus.prepare(show_progress=False)
    assert sorted(text for each in found.values() for text in each.texts) == \
        ["birds hear now", "good people now", "hello there now"]


def test_a_recording_that_is_corrected_again_has_the_last_words_and_can_be_forgotten(server):
    before = rows(server.folder)
    with ThreadPoolExecutor(4) as pool:
        sent = [pool.submit(send, server, "good birds", f"words {i}") for i in range(4)]
    [name] = {each.result().json()["id"] for each in sent}
    last = send(server, "good birds", "the last words").json()
    assert rows(server.folder) == [*before, last] and last["id"] == name
    assert (before[0]["corrected"], last["corrected"]) == (1, 5), "whose words were replaced is told that they were"
    assert send(server, "good birds", "the last words").json()["corrected"] == 5
    gone = httpx.delete(f"{server.base}/audio/corrections/{name}")
    assert gone.json() == {"id": name, "deleted": True} and rows(server.folder) == before
    assert not (server.folder / "clips" / f"{name}.wav").exists()
    assert httpx.delete(f"{server.base}/audio/corrections/{name}").status_code == 404


@pytest.mark.parametrize("said, text, fields, status, code", [
    ("good", " \n ", {}, 400, "empty_input"), ("good", "a\0b", {}, 400, "invalid_value"),
    ("good", "a" * (MAX_CHARACTERS + 1), {}, 400, "invalid_value"),
    (serving.silence(31, format="WAV"), "long", {}, 400, "audio_too_long"),
    (contained(speechlike(2.0), 16_000, "m4a")[:-2000], "words", {}, 400, "invalid_audio"),
    (contained(np.zeros(16_000 * 40, np.float32), 16_000, "m4a"), "long", {}, 400, "audio_too_long"),
    (contained(speechlike(4.0, 48_000), 48_000, "webm")[:20_000], "words", {}, 400, "invalid_audio"),
    (serving.wav("good people")[:-9000], "words", {}, 400, "invalid_audio"),
    (b"no audio", "words", {}, 400, "invalid_audio"), ("good", "words", {"model": "other"}, 404, "model_not_found"),
    ("good", "words", {"speaker": "me"}, 400, "unsupported_parameter")])
def test_what_can_not_be_kept_is_refused_with_the_reason(server, said, text, fields, status, code):
    before = sorted(server.folder.rglob("*"))
    found = send(server, said, text, **fields)
    assert found.status_code == status and found.json()["error"]["code"] == code
    assert sorted(server.folder.rglob("*")) == before


def test_a_page_that_is_closed_while_it_sends_leaves_nothing(server):
    before = sorted(server.folder.rglob("*"))
    with serving.uploading(server, 100_000, "/v1/audio/corrections") as client:
        client.send(b'--x\r\ncontent-disposition: form-data; name="text"\r\n\r\nwords\r\n--x\r\n')
        serving.until(lambda: server.counted("sbkit_requests_inside") == 1)
    serving.until(lambda: server.counted("sbkit_requests_inside") == 0)
    assert sorted(server.folder.rglob("*")) == before


def test_they_have_room_of_their_own_and_no_more(bundle, tmp_path):
    with serving.serving(bundle, corrections=tmp_path / "kept", limits=Limits(decoders=1, max_corrections_mb=0.05)) \
            as server:
        answers = [send(server, text, text) for text in ("good people", "birds hear birds", "people hear good birds")]
        assert [each.status_code for each in answers][0::2] == [200, 503]
        assert answers[2].json()["error"]["code"] == "no_room"
        listed = httpx.get(f"{server.base}/models").json()["data"][0]["endpoints"]
        assert "/v1/audio/corrections" in listed
    kept = Corrections(tmp_path / "kept", 1 << 20)  # as a server that starts again finds them
    with refused("folder-in-use", file=tmp_path / "kept"):
        Corrections(tmp_path / "kept", 1 << 20)
    kept.delete(answers[0].json()["id"])
    kept.close()
    (tmp_path / "kept" / "corrections.jsonl").write_text("{}\n")
    with refused("malformed-row", file=tmp_path / "kept"):
        Corrections(tmp_path / "kept", 1 << 20)


def test_without_a_folder_nothing_is_kept(bundle):
    with serving.serving(bundle) as server:
        found = send(server, "good", "words")
        assert found.status_code == 404 and "sbkit serve --corrections FOLDER does" in found.json()["error"]["message"]
        assert "/v1/audio/corrections" not in httpx.get(f"{server.base}/models").json()["data"][0]["endpoints"]


def test_a_server_that_starts_again_finds_every_row_whatever_the_model_heard(tmp_path):
    kept = Corrections(tmp_path, 1 << 20)
    saved = kept.save(np.zeros(160), 16_000, "words", heard="one\u2028two\x85three\rfour " + "long " * MAX_CHARACTERS)
    assert saved["heard"].startswith("one two three four long") and len(saved["heard"]) == MAX_CHARACTERS
    kept.close()
    row = json.dumps(saved | {"heard": "one\u2028two"}, ensure_ascii=False)  # of an older server
    (tmp_path / "corrections.jsonl").write_text(f"{row}\n", encoding="utf-8")
    kept = Corrections(tmp_path, 1 << 20)
    kept.delete(saved["id"])
    kept.close()
    assert not rows(tmp_path) and not list((tmp_path / "clips").iterdir())


def test_on_a_full_disk_nothing_is_kept_in_part_and_a_recording_can_still_be_forgotten(tmp_path, monkeypatch):
    kept = Corrections(tmp_path, 1 << 20)
    name = kept.save(np.zeros(160), 16_000, "words", heard=None)["id"]
    fsync = os.fsync

    def full(handle):
        if "corrections.jsonl" in os.readlink(f"/proc/self/fd/{handle}"):  # or the new list in its place
            raise OSError(errno.ENOSPC, "No space left on device")
        fsync(handle)

    monkeypatch.setattr(os, "fsync", full)
    with refused("no_room", kind=ApiError):
        kept.save(np.ones(160) / 2, 16_000, "others", heard=None)
    assert [each.stem for each in (tmp_path / "clips").iterdir()] == [name] == [row["id"] for row in rows(tmp_path)]
    with refused("no_room", kind=ApiError):
        kept.delete(name)
    assert not list((tmp_path / "clips").iterdir())  # its words go with the next list
    monkeypatch.undo()
    kept.delete(name)
    kept.close()
    assert not rows(tmp_path)


def test_long_words_of_short_recordings_do_not_fill_the_disk_either(tmp_path):
    kept = Corrections(tmp_path, 20_000)
    short = kept.save(np.zeros(1), 16_000, "a", heard=None)["id"]
    for number in range(5):
        kept.save(np.full(1, (number + 1) / 10), 16_000, "a" * MAX_CHARACTERS, heard=None)
    with refused("no_room", kind=ApiError):
        for number in range(5, 10):
            kept.save(np.full(1, (number + 1) / 11), 16_000, "a" * MAX_CHARACTERS, heard="a" * MAX_CHARACTERS)
    with refused("no_room", kind=ApiError):  # nor are they made longer later
        kept.save(np.zeros(1), 16_000, "\U0001f600" * MAX_CHARACTERS, heard=None)
    assert sum(path.stat().st_size for path in tmp_path.rglob("*.*")) <= 20_000
    kept.delete(short)
    kept.close()


def test_a_new_row_is_appended_and_one_that_a_killed_server_left_in_part_is_dropped(tmp_path):
    kept, listed = Corrections(tmp_path, 1 << 20), tmp_path / "corrections.jsonl"
    first = kept.save(np.zeros(160), 16_000, "one", heard=None)
    same = listed.stat().st_ino
    second = kept.save(np.ones(160) / 2, 16_000, "two", heard=None)
    assert listed.stat().st_ino == same and rows(tmp_path) == [first, second], "the list wasn't written anew"
    kept.close()
    with listed.open("a") as out:
        out.write('{"id": "abc", "text": "thr')
    kept = Corrections(tmp_path, 1 << 20)
    third = kept.save(np.ones(160) / 4, 16_000, "three", heard=None)
    kept.close()
    assert rows(tmp_path) == [first, second, third]
    listed.write_bytes(listed.read_bytes()[:-1])  # an editor may leave out the last line break
    kept = Corrections(tmp_path, 1 << 20)
    fourth = kept.save(np.ones(160) / 8, 16_000, "four", heard=None)
    kept.close()
    assert rows(tmp_path) == [first, second, third, fourth]


def test_what_is_doubtful_and_unlike_what_is_corrected_is_worth_most(tmp_path):
    def said(*words):
        return [Word(text, 0.0, 1.0, confidence) for text, confidence in words]

    def value(words):
        return worth(words, kept.words)

    kept = Corrections(tmp_path, 1 << 20)
    sure, unsure = said(("good", 0.9), ("birds", 0.9)), said(("good", 0.9), ("Birds", 0.3))
    assert value(unsure) == pytest.approx(0.4) and value(sure) == pytest.approx(0.1) and value([]) == 0
    name = kept.save(np.zeros(160), 16_000, "birds and BIRDS", heard=None)["id"]
    assert value(unsure) == pytest.approx((0.1 + 0.7 / 3) / 2)
    kept.save(np.zeros(160), 16_000, "bees", heard=None)
    assert value(unsure) == pytest.approx(0.4)
    kept.delete(name)
    kept.close()
    kept = Corrections(tmp_path, 1 << 20)
    assert value(said(("bees", 0.5))) == 0.5
    kept.close()


def test_a_transcript_says_what_its_correction_is_worth_only_where_some_are_kept(server, bundle):
    answers = [server.post("unseen words", response_format="verbose_json").json()]
    with serving.serving(bundle) as other:
        answers.append(other.post("unseen words", response_format="verbose_json").json())
    assert 0 <= answers[0]["worth_correcting"] <= 1 and "worth_correcting" not in answers[1]


def edit(folder, change, in_place=False):
    """Change the rows of a list as an editor does: a new file in its place, or its bytes in place."""
    listed = folder / "corrections.jsonl"
    lines = "".join(f"{json.dumps(row)}\n" for row in change(rows(folder)))
    if in_place:
        listed.write_text(lines)
    else:
        (folder / "new").write_text(lines)
        os.replace(folder / "new", listed)


@pytest.mark.parametrize("in_place", [True, False])
def test_what_the_operator_edits_and_deletes_while_the_server_runs_stays_so(tmp_path, in_place):
    with contextlib.closing(Corrections(tmp_path, 1 << 20)) as kept:
        first, second, third = [kept.save(np.full(160, value), 16_000, text, heard=None)
                                for value, text in ((0.1, "won"), (0.2, "two"), (0.3, "three"))]
        edit(tmp_path, lambda listed: [listed[0] | {"text": "one", "speaker": "me"}, listed[2]], in_place)
        edited = first | {"text": "one", "speaker": "me"}
        fourth = kept.save(np.full(160, 0.4), 16_000, "four", heard=None)  # is appended
        assert rows(tmp_path) == [edited, third, fourth]
        edit(tmp_path, lambda listed: [{**row, "text": row["text"].upper()} for row in listed], in_place)
        again = kept.save(np.full(160, 0.3), 16_000, "free", heard=None)  # costs a new list
        assert again["corrected"] == 2
        assert rows(tmp_path) == [edited | {"text": "ONE"}, again, fourth | {"text": "FOUR"}]
        edit(tmp_path, lambda listed: listed[:2], in_place)
        kept.delete(first["id"])
        assert rows(tmp_path) == [again]
        assert dict(kept.words) == {"free": 1}
        for gone in (second, fourth):
            with refused("not_found", kind=ApiError):
                kept.delete(gone["id"])
        assert kept.save(np.full(160, 0.2), 16_000, "two", heard=None)["corrected"] == 1
    with contextlib.closing(Corrections(tmp_path, 1 << 20)) as kept:
        assert dict(kept.words) == {"free": 1, "two": 1}


def test_an_edit_between_the_look_at_the_list_and_its_replacement_stays(tmp_path, monkeypatch):
    """The operator's editor saves while the new list is being written to the disk."""
    with contextlib.closing(Corrections(tmp_path, 1 << 20)) as kept:
        first, _ = [kept.save(np.full(160, value), 16_000, text, heard=None)
                    for value, text in ((0.1, "one"), (0.2, "two"))]
        fsync, edits = os.fsync, []

        def edit_meanwhile(handle):
            fsync(handle)
            if not edits and ".corrections.jsonl" in os.readlink(f"/proc/self/fd/{handle}"):
                edits.append(edit(tmp_path, lambda listed: [listed[0] | {"text": "won"}, listed[1]]))

        monkeypatch.setattr(os, "fsync", edit_meanwhile)
        again = kept.save(np.full(160, 0.2), 16_000, "too", heard=None)
        assert edits and rows(tmp_path) == [first | {"text": "won"}, again]
        assert sorted(path.name for path in tmp_path.iterdir()) == ["clips", "corrections.jsonl"]


@pytest.mark.parametrize("line", ['{"id": "a", "text": "on', "[1]", '{"id": 1, "text": "a"}', '{"id": "a"}',
                                  '{"id": "a", "text": "\\ud800"}', "[" * 100_000])
def test_a_list_that_an_edit_broke_is_left_as_it_is_and_nothing_is_saved_until_it_is_mended(tmp_path, caplog, line):
    with contextlib.closing(Corrections(tmp_path, 1 << 20)) as kept:
        listed = tmp_path / "corrections.jsonl"
        first = kept.save(np.full(160, 0.1), 16_000, "one", heard=None)
        whole = listed.read_bytes()
        listed.write_bytes(whole + line.encode())
        for call in (lambda: kept.save(np.full(160, 0.2), 16_000, "two", heard=None),
                     lambda: kept.save(np.full(160, 0.1), 16_000, "won", heard=None),
                     lambda: kept.delete(first["id"])):
            with refused("corrections_unreadable", kind=ApiError) as error:
                call()
            assert error.value.status == 503
        assert listed.read_bytes() == whole + line.encode() and "line 2" in caplog.text
        assert [path.stem for path in (tmp_path / "clips").iterdir()] == [first["id"]]
        listed.write_bytes(whole[:-1])  # mended, without the last line break
        second = kept.save(np.full(160, 0.2), 16_000, "two", heard=None)
        assert rows(tmp_path) == [first, second]
        listed.unlink()
        third = kept.save(np.full(160, 0.3), 16_000, "three", heard=None)
        assert rows(tmp_path) == [third] and dict(kept.words) == {"three": 1}
    assert f"deleted rows: {', '.join(sorted([first['id'], second['id']]))}" in caplog.text


def test_a_list_that_became_a_pipe_saves_nothing_until_it_is_a_file_again(tmp_path):
    with contextlib.closing(Corrections(tmp_path, 1 << 20)) as kept:
        first = kept.save(np.full(160, 0.1), 16_000, "one", heard=None)
        listed = tmp_path / "corrections.jsonl"
        listed.rename(tmp_path / "aside")
        os.mkfifo(listed)
        with refused("corrections_unreadable", kind=ApiError) as error:
            kept.save(np.full(160, 0.2), 16_000, "two", heard=None)
        assert error.value.status == 503
        listed.unlink()
        (tmp_path / "aside").rename(listed)
        second = kept.save(np.full(160, 0.2), 16_000, "two", heard=None)
        assert rows(tmp_path) == [first, second]


def test_the_last_line_that_is_no_row_is_logged_when_it_is_cut_off(tmp_path, caplog):
    with contextlib.closing(Corrections(tmp_path, 1 << 20)) as kept:
        kept.save(np.full(160, 0.1), 16_000, "one", heard=None)
    with open(tmp_path / "corrections.jsonl", "a") as out:
        out.write('{"id": "mine", "text": "my typed row",}')
    Corrections(tmp_path, 1 << 20).close()
    assert "my typed row" in caplog.text and len(rows(tmp_path)) == 1


def test_words_that_no_correction_has_any_more_are_forgotten(tmp_path):
    with contextlib.closing(Corrections(tmp_path, 1 << 20)) as kept:
        for number in range(20):
            name = kept.save(np.zeros(160), 16_000, f"word{number} other{number} the", heard=None)["id"]
            assert dict(kept.words) == {f"word{number}": 1, f"other{number}": 1, "the": 1}
        kept.delete(name)
        assert not kept.words


ROW = {"id": "a", "audio_filepath": "clips/a.wav", "duration": 1.0, "text": "good"}


@pytest.mark.parametrize("line", [
    "[" * 100_000, json.dumps(ROW)[:-1] + ', "x": ' + "[" * 90_000 + "]" * 90_000 + "}",
    json.dumps(ROW | {"text": "a\0b"}), json.dumps(ROW | {"text": "a\x1b]0;b"}), json.dumps(ROW | {"heard": "a\ud800"}),
    "\0" + json.dumps(ROW), json.dumps(ROW | {"text": 5}), json.dumps(ROW | {"id": []}), "[1]",
    json.dumps(ROW | {"id": "../../others"}),
])
def test_a_line_that_nobody_should_have_written_is_named(tmp_path, line):
    (tmp_path / "corrections.jsonl").write_text(f"{json.dumps(ROW | {'id': 'first'})}\n\n{line}\n")
    with refused("malformed-row"):
        Corrections(tmp_path, 1 << 20)


def test_what_a_client_says_of_a_recording_can_be_read_back(tmp_path):
    corrections = Corrections(tmp_path, 1 << 20)
    corrections.save(np.zeros(800, np.float32), 8000, "good", heard="a\x1b]0;b \u200c c")
    corrections.close()
    Corrections(tmp_path, 1 << 20).close()
    assert rows(tmp_path)[0]["heard"] == "a\\x1b]0;b \u200c c"


@pytest.mark.parametrize("place", [".", "kept", "kept/further"])
def test_a_folder_inside_a_bundle_is_refused(bundle, place, capsys):
    (bundle.parent / "link").unlink(missing_ok=True)
    (bundle.parent / "link").symlink_to(bundle)
    for name in ("level", "link"):
        folder = bundle.parent / name / place
        # An address of nobody's, so that no server starts if the folder is accepted.
        assert main(["serve", str(bundle), "--host", "203.0.113.1", "--corrections", str(folder)]) == 2
        assert "[bad-option]" in capsys.readouterr().err
        assert not (bundle / "kept").exists()


def test_files_that_a_killed_server_left_unfinished_are_removed_at_the_next_start(tmp_path):
    Corrections(tmp_path, 1 << 20).close()
    for left in (tmp_path / ".corrections.jsonl.abcdefgh.partial", tmp_path / "clips" / ".a.wav.abcdefgh.partial"):
        left.write_bytes(b"half")
    Corrections(tmp_path, 1 << 20).close()
    assert [path.name for path in tmp_path.rglob("*")] == ["clips"]
