"""Common Voice: every version's columns, both shapes of a download, and archives that mean harm."""

from __future__ import annotations

import gzip
import io
import shutil
import tarfile
from pathlib import Path

import numpy as np
import pytest
from corpora import NEW_COLUMNS, OLD_COLUMNS, SECONDS, archive, common_voice, prepared
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refused

from sbkit.data.sources import archive as archive_module
from sbkit.data.sources import check_exists, open_source
from sbkit.data.sources.archive import is_unpacked
from sbkit.system import disk, processes

SENTENCES = ['He said "no', "a, b; c", "costs $word", "", "last one\u2028really"]


def read(path: Path, split: str = "train", language: str | None = None, cache: Path | None = None):
    return open_source(path, language=language, cache=cache or path.parent / "cache").read(split, False)


@pytest.mark.parametrize("columns", [
    NEW_COLUMNS, OLD_COLUMNS, ("path", "sentence"), tuple(reversed(NEW_COLUMNS)), (*NEW_COLUMNS, "new one")])
@pytest.mark.parametrize(("end", "bom"), [("\n", False), ("\r\n", True)])
def test_columns_of_any_version_by_name(tmp_path, columns, end, bom):
    home = common_voice(tmp_path, columns=columns, end=end, bom=bom, train=SENTENCES)
    rows = read(home)
    assert list(rows.texts) == SENTENCES  # a quotation mark is a character, a comma too
    assert rows.ids[0] == "common_voice_en_train0"
    assert rows.wavs[0] == f"{home}/clips/common_voice_en_train0.mp3"
    assert rows.malformed == []
    if "client_id" in columns:
        assert rows.speakers[1] == "speaker1" and rows.meta["gender"][0] == "female_feminine"
        assert rows.meta["accent"][0] == ("Scottish" if "accents" in columns else "scotland")
    assert ("language" in rows.meta) == ("locale" in columns)


@pytest.mark.parametrize("header", ["duration[ms]", "duration [ms]", "duration", None])
def test_listed_durations_under_every_header(tmp_path, header):
    home = common_voice(tmp_path, durations=header, train=SENTENCES)
    expected = np.nan if header is None else SECONDS
    np.testing.assert_array_equal(read(home).durations, [expected] * 5)


def test_durations_that_are_absent_zero_or_nonsense_are_unknown(tmp_path):
    home = common_voice(tmp_path, train=SENTENCES)
    (home / "clip_durations.tsv").write_text("clip\tduration[ms]\ncommon_voice_en_train0.mp3\t1500\n"
                                             "common_voice_en_train1.mp3\t0\ncommon_voice_en_train2.mp3\tlong\n")
    np.testing.assert_array_equal(read(home).durations, [1.5] + [np.nan] * 4)


def test_rows_with_too_few_or_too_many_fields_are_malformed_and_named(tmp_path):
    home = common_voice(tmp_path, columns=("path", "sentence"), train=["a", "b"])
    with open(home / "train.tsv", "a") as file:
        file.write("only one\n\ntoo\tmany\tfields\n")
    rows = read(home)
    assert len(rows) == 2
    assert rows.malformed == [("train.tsv line 4", "1 fields instead of 2"),
                              ("train.tsv line 6", "3 fields instead of 2")]


@settings(max_examples=60, deadline=None)
@given(rows=st.lists(st.lists(st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\r\n\0")),
                              min_size=1, max_size=4), max_size=6))
def test_no_line_is_lost_whatever_it_holds(tmp_path_factory, rows):
    home = tmp_path_factory.mktemp("cv")
    (home / "clips").mkdir()
    lines = ["\t".join(fields) for fields in rows]
    (home / "train.tsv").write_bytes("\n".join(["path\tsentence", *lines, ""]).encode())
    result = read(home)
    assert len(result) + len(result.malformed) == sum(line != "" for line in lines)


def test_clip_names_as_copies_of_releases_write_them(tmp_path):
    home = common_voice(tmp_path, columns=("path", "sentence"), durations=None, train=["a"])
    (home / "train.tsv").write_text("path\tsentence\nclips/a.mp3\tx\nb\ty\nc.wav\tz\n")
    assert [Path(wav).name for wav in read(home).wavs] == ["a.mp3", "b.mp3", "c.wav"]


def test_the_release_root_its_parent_and_the_language_folder_are_the_same(tmp_path):
    home = common_voice(tmp_path / "cv-corpus-21.0", "fr", train=["a"])
    for place in (home, home.parent, home.parent.parent):
        assert list(read(place, language="fr").wavs) == [f"{home}/clips/common_voice_fr_train0.mp3"]
        assert len(read(place)) == 1
    common_voice(tmp_path / "cv-corpus-21.0", "de", train=["a", "b"])
    assert len(read(home.parent, language="de")) == 2
    with refused("ambiguous-corpus"):
        read(home.parent)
    with refused("ambiguous-corpus", key="language", value="it"):
        read(home.parent, language="it")
    common_voice(tmp_path / "cv-corpus-20.0", "de", train=["a"])
    check_exists(tmp_path)  # of two releases, the language is in one
    assert len(read(tmp_path, language="fr")) == 1


def test_a_language_that_is_another_than_the_clips_is_warned_of(tmp_path, caplog):
    home = common_voice(tmp_path, "zh-CN", train=["a"])
    read(home, language="zh")
    assert not caplog.records
    read(home, language="en")
    assert "holds zh-CN, but the language is set to en" in caplog.text


@pytest.mark.parametrize("column", ["path", "sentence"])
def test_a_needed_column_that_is_not_there_is_named(tmp_path, column):
    home = common_voice(tmp_path, columns=tuple(c for c in NEW_COLUMNS if c != column), train=["a"])
    with refused("missing-column", file=home / "train.tsv", key=column):
        read(home)


def test_text_that_is_not_utf8_is_named_by_line(tmp_path):
    home = common_voice(tmp_path, columns=("path", "sentence"), train=["a"])
    with open(home / "train.tsv", "ab") as file:
        file.write(b"x.mp3\t\xe9t\xe9\n")
    with refused("not-utf8", file=home / "train.tsv", line=3, key="sentence"):
        read(home)


def test_folders_that_are_no_release_say_what_was_expected(tmp_path):
    with refused("unknown-corpus-format"):
        open_source(tmp_path, cache=tmp_path)
    (tmp_path / "train.tsv").write_text("path\tsentence\n")
    with refused("unknown-corpus-format"):
        open_source(tmp_path, cache=tmp_path)
    with refused("no-such-path"):
        open_source(tmp_path / "absent", cache=tmp_path)


# ---------------------------------------------------------------- archives


@pytest.fixture
def download(tmp_path) -> Path:
    common_voice(tmp_path / "cv-corpus-21.0", "fr", train=SENTENCES, dev=["x"], test=["y"])
    path = archive(tmp_path / "cv-corpus-21.0", tmp_path / "cv 21 fr.tar.gz")
    return path


def test_an_archive_trains_as_it_was_downloaded(download, tmp_path, monkeypatch):
    manifests = prepared(download, tmp_path / "m")[1]
    assert len(manifests["train"]) == 4 and Path(manifests["train"].wavs[0]).is_file()
    assert Path(manifests["train"].wavs[0]).is_relative_to(tmp_path / "m" / "audio")
    monkeypatch.setattr(archive_module, "_unpack", lambda *_: pytest.fail("unpacked twice"))
    prepared(download, tmp_path / "m", max_duration=9.0)
    assert prepared(download, tmp_path / "m", max_duration=9.0)[1]["train"].ids == manifests["train"].ids
    _, shared = prepared(download, tmp_path / "other", cache_folder=tmp_path / "m" / "audio")
    assert shared["train"].wavs == manifests["train"].wavs


def test_unpacked_audio_that_is_gone_is_unpacked_again(download, tmp_path):
    prepared(download, tmp_path / "m")
    shutil.rmtree(tmp_path / "m" / "audio")
    assert Path(prepared(download, tmp_path / "m")[1]["train"].wavs[0]).is_file()


def test_a_new_download_under_the_same_name_replaces_the_old(download, tmp_path):
    prepared(download, tmp_path / "m")
    common_voice(tmp_path / "cv-corpus-22.0", "fr", train=["only this"], dev=["x"], test=["y"])
    download.unlink()
    archive(tmp_path / "cv-corpus-22.0", download)
    assert list(prepared(download, tmp_path / "m")[1]["train"].texts) == ["only this"]


def test_a_corpus_that_lies_where_an_archive_would_be_unpacked_is_not_replaced(download, tmp_path):
    notes = tmp_path / "mine" / "cv 21 fr" / "notes.txt"
    notes.parent.mkdir(parents=True)
    notes.write_text("years of listening")
    with refused("output-exists"):
        prepared(download, tmp_path / "m", cache_folder=tmp_path / "mine")
    assert [path.name for path in notes.parent.iterdir()] == ["notes.txt"]


def test_a_damaged_download_is_named_and_an_interrupted_unpacking_goes_on(download, tmp_path, monkeypatch):
    whole = download.read_bytes()
    download.write_bytes(whole[: len(whole) * 2 // 3])
    with refused("damaged-download"):
        prepared(download, tmp_path / "m")
    assert [p.name for p in (tmp_path / "m" / "audio").glob("cv*")] == ["cv 21 fr.partial"]
    download.write_bytes(whole)

    written, copy = [], shutil.copyfileobj

    def stop_after_three(source, file, size):
        if len(written) == 3:
            raise KeyboardInterrupt
        hidden = Path(file.name)
        written.append(hidden.with_name(hidden.name.removeprefix(".").removesuffix(".part")))
        copy(source, file, size)

    monkeypatch.setattr(shutil, "copyfileobj", stop_after_three)
    with pytest.raises(KeyboardInterrupt):
        prepared(download, tmp_path / "m")
    times = {path: path.stat().st_mtime_ns for path in written}
    monkeypatch.setattr(shutil, "copyfileobj", copy)
    prepared(download, tmp_path / "m")
    final = tmp_path / "m" / "audio" / "cv 21 fr"
    partial = tmp_path / "m" / "audio" / "cv 21 fr.partial"
    assert all((final / path.relative_to(partial)).stat().st_mtime_ns == when for path, when in times.items())
    assert not partial.exists()


def test_clips_are_on_the_disk_before_they_are_stamped_and_that_before_the_name(download, tmp_path, monkeypatch):
    """A power cut takes what was not synced; the order of these calls is what can be tested without one."""
    done, final = [], tmp_path / "m" / "audio" / "cv 21 fr"
    for name in ("sync_file_system", "sync_folder"):
        call = getattr(disk, name)

        def noted(path, name=name, call=call):
            call(path)
            done.append((name, Path(path), is_unpacked(download, Path(path)), final.exists()))

        monkeypatch.setattr(disk, name, noted)
    prepared(download, tmp_path / "m")
    partial = final.with_name("cv 21 fr.partial")
    assert done[:3] == [("sync_file_system", partial, False, False), ("sync_folder", partial, True, False),
                        ("sync_folder", final.parent, False, True)]


def test_what_was_unpacked_before_the_machine_went_down_is_not_trusted(download, tmp_path, monkeypatch):
    """Its files may have their size and none of their bytes."""
    sync = disk.sync_file_system
    monkeypatch.setattr(disk, "sync_file_system", lambda _: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        prepared(download, tmp_path / "m")
    clips = list((tmp_path / "m" / "audio" / "cv 21 fr.partial").rglob("*.mp3"))
    for clip in clips:
        clip.write_bytes(bytes(clip.stat().st_size))
    monkeypatch.setattr(disk, "sync_file_system", sync)
    monkeypatch.setattr(processes, "machine", lambda: "another")
    wavs = prepared(download, tmp_path / "m")[1]["train"].wavs
    assert len(clips) > 3 and all(any(Path(wav).read_bytes()) for wav in wavs)


def hostile(path: Path, *members: tuple[tarfile.TarInfo, bytes]) -> Path:
    with tarfile.open(path, "w:gz") as tar:
        for member, data in members:
            member.size = len(data) if member.isreg() else 0
            tar.addfile(member, io.BytesIO(data))
    return path


def member(name: str, kind: bytes = tarfile.REGTYPE, link: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, link
    return info


@pytest.mark.parametrize("entry", [
    member("../../evil.tsv"), member("/tmp/evil.tsv"), member("cv/clips/../../../evil.tsv"),
    member("cv\\..\\evil.tsv"), member("cv/clips/a.mp3", tarfile.SYMTYPE, "/etc/passwd"),
    member("cv/clips/a.mp3", tarfile.LNKTYPE, "../../evil"), member("cv/clips/a.mp3", tarfile.CHRTYPE),
    member("cv/clips/a.mp3", tarfile.FIFOTYPE)], ids=lambda m: f"{m.name} {m.type.decode()}")
def test_refuses_archives_with_links_devices_or_paths_outside_the_folder(tmp_path, entry):
    path = hostile(tmp_path / "evil.tar.gz", (member("cv/train.tsv"), b"path\tsentence\n"), (entry, b"x"))
    with refused("suspicious-file"):
        prepared(path, tmp_path / "m")
    assert not list(tmp_path.rglob("evil.tsv")) and not list(tmp_path.rglob("a.mp3"))


def test_a_bomb_is_stopped(tmp_path, monkeypatch):
    monkeypatch.setattr(archive_module, "ALWAYS_ALLOWED", 1 << 20)
    path = hostile(tmp_path / "bomb.tar.gz", (member("cv/clips/a.mp3"), bytes(30 << 20)))
    assert path.stat().st_size < 100_000
    with refused("suspicious-file"):
        prepared(path, tmp_path / "m")
    assert sum(file.stat().st_size for file in (tmp_path / "m").rglob("*") if file.is_file()) < 4 << 20


def test_a_note_that_would_fill_the_memory_is_refused(tmp_path):
    header = tarfile.TarInfo("long")
    header.type, header.size = tarfile.XHDTYPE, 5 << 20
    path = tmp_path / "bomb.tar.gz"
    path.write_bytes(gzip.compress(header.tobuf(tarfile.USTAR_FORMAT) + bytes(6 << 20)))
    with refused("damaged-download"):
        prepared(path, tmp_path / "m")


def test_only_clips_and_tables_are_unpacked(tmp_path):
    home = common_voice(tmp_path / "cv", "fr", train=["a"], dev=["b"], test=["c"])
    (home / "README.txt").write_text("hello")
    (home / "._train.tsv").write_text("what macOS leaves behind")
    prepared(archive(tmp_path / "cv", tmp_path / "x.tgz"), tmp_path / "m")
    names = {path.name for path in (tmp_path / "m" / "audio").rglob("*") if path.is_file()}
    assert "train.tsv" in names and not names & {"README.txt", "._train.tsv"}


def test_a_disk_that_is_too_small_is_reported_before(download, tmp_path, monkeypatch):
    monkeypatch.setattr(disk, "free", lambda _: 10)
    with refused("disk-full", wording=False):
        prepared(download, tmp_path / "m")


@pytest.mark.parametrize("packed", [True, False])
def test_damage_anywhere_in_an_archive_is_reported(tmp_path, packed):
    """tarfile alone ends in silence at a damaged header, as if there were no more clips."""
    home = common_voice(tmp_path / "release", train=["one", "two"], dev=["three"], test=["four"])
    whole = archive(home, tmp_path / "whole.tar.gz").read_bytes()
    whole = whole if packed else gzip.decompress(whole)
    path = tmp_path / ("damaged.tar.gz" if packed else "damaged.tar")
    with tarfile.open(tmp_path / "whole.tar.gz") as tar:
        headers = [member.offset for member in tar]
    places = range(40, len(whole) - 8, len(whole) // 15) if packed else headers
    for at in places:
        path.write_bytes(whole[:at] + bytes(x ^ 0x5A for x in whole[at : at + 8]) + whole[at + 8 :])
        with refused("damaged-download", wording=False, file=path):
            open_source(path, cache=tmp_path / "cache", show_progress=False).names()
        assert not (tmp_path / "cache" / "damaged").exists()
    path.write_bytes(whole)
    assert open_source(path, cache=tmp_path / "cache", show_progress=False).names() == ["dev", "test", "train"]


def test_an_archive_of_something_else_is_named(tmp_path):
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "readme.txt").write_text("no release")
    path = archive(tmp_path / "notes", tmp_path / "notes.tar.gz")
    with refused("unknown-corpus-format", file=tmp_path / "cache" / "notes"):
        open_source(path, cache=tmp_path / "cache", show_progress=False).names()
