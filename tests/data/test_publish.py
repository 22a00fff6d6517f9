"""A bundle at its place is whole or as it was, whatever ends an export; the next one tidies up, and no file of others
is ever lost."""

import contextlib
import ctypes
import errno
import itertools
import json
import os
import shutil
import signal
import stat
from pathlib import Path

import pytest
from kill_points import Copying, Disturber, disturbed
from refusals import refused

from sbkit.data import publish
from sbkit.errors import SbkitError
from sbkit.export import layout
from sbkit.export.layout import FOLDER, Config

FILES = (layout.TOKENS, layout.MODELS[layout.ONNX])


def fill(folder, number):
    for name in FILES:
        (folder / name).write_text(str(number))
    listed = {"format": layout.FORMAT, "files": {name: {} for name in FILES}, "number": number}
    (folder / layout.CONFIG).write_text(json.dumps(listed))


def export(to, number, force=True, keep=None):
    """What an export does around its work."""
    publish.clean_up(to, FOLDER)
    with publish.temporary_folder(to, FOLDER) as aside:
        fill(aside, number)
        publish.publish(aside, to, FOLDER, force, keep)


def roll_back(to):
    publish.clean_up(to, FOLDER)
    publish.publish(publish.previous(to), to, FOLDER, force=True, keep=publish.previous(to))


def bundle(to):
    """Which export's bundle stands at its place, None for none; one of two would be wrong."""
    if not to.exists():
        return None
    found = {(to / name).read_text() for name in FILES}
    found.add(str(json.loads((to / layout.CONFIG).read_text())["number"]))
    assert len(found) == 1 and len(list(to.iterdir())) == len(FILES) + 1
    return int(found.pop())


def hidden(to):
    return [path.name for path in to.parent.iterdir() if path.name.startswith(".")]


class Failing(Disturber):
    """Operation number ``at`` is refused, and with ``after`` every one behind it."""

    def __init__(self, at, after):
        self.at, self.after = at, after
        super().__init__()

    def tick(self, name):
        super().tick(name)
        if self.done == self.at or (self.after and self.done > self.at):
            raise OSError(errno.EIO, os.strerror(errno.EIO))


class Library:
    """The C library, whose renameat2 is counted as an operation, and fails with ``number`` if there is one."""

    def __init__(self, real, number, tick):
        self.real, self.number, self.tick = real, number, tick

    def __getattr__(self, name):
        return getattr(self.real, name)

    def renameat2(self, *names):
        if self.number is None:
            self.tick("renameat2")
            return self.real.renameat2(*names)
        ctypes.set_errno(self.number)
        return -1


def disturbing(disturb, number, act):
    """What disturbed ``act``, on a disk that exchanges folders, or whose refusal has this number."""
    with disturbed((ctypes, "CDLL")):
        disturber, real = disturb(), ctypes.CDLL(None, use_errno=True)
        ctypes.CDLL = lambda *args, **options: Library(real, number, disturber.tick)
        with contextlib.suppress(SbkitError, OSError):
            act()
    return disturber


def tidied(to, number):
    """The bundle that stands there once the next export has tidied up, and the one that is kept."""
    assert bundle(to) is not None or number is not None, "the place is never empty where folders are exchanged"
    publish.clean_up(to, FOLDER)
    assert hidden(to) == [] and to.stat().st_mode & 0o7777 == 0o755
    return bundle(to), bundle(publish.previous(to))


refusals = pytest.mark.parametrize("number", [None, errno.EINVAL, errno.ENOSYS], ids=["exchange", "EINVAL", "ENOSYS"])


@refusals
def test_killed_at_every_operation_the_bundle_is_whole_or_as_it_was(tmp_path, number):
    to = tmp_path / "there" / "b"
    export(to, 1)
    copies = disturbing(lambda: Copying(to.parent), number, lambda: export(to, 2)).copies
    found = [tidied(Path(copy) / "b", number)[0] for copy in copies]
    assert len(found) > 8 and found == sorted(found) and set(found) == {1, 2} and bundle(to) == 2


@refusals
@pytest.mark.parametrize("kept", [False, True], ids=["nothing kept yet", "one kept"])
def test_killed_at_every_operation_the_bundle_that_is_replaced_is_kept(tmp_path, number, kept):
    to = tmp_path / "there" / "b"
    before = publish.previous(to)
    export(to, 1)
    if kept:
        export(to, 2, keep=before)
    old, older = bundle(to), bundle(before)
    copies = disturbing(lambda: Copying(to.parent), number, lambda: export(to, 3, keep=before)).copies
    found = [tidied(Path(copy) / "b", number) for copy in copies]
    assert len(found) > 12 and set(found) == {(old, older), (3, old)} and found == sorted(found)
    assert tidied(to, number) == (3, old)


@refusals
def test_killed_at_every_operation_a_rollback_loses_neither_bundle(tmp_path, number):
    to = tmp_path / "there" / "b"
    export(to, 1)
    export(to, 2, keep=publish.previous(to))
    copies = disturbing(lambda: Copying(to.parent), number, lambda: roll_back(to)).copies
    found = [tidied(Path(copy) / "b", number) for copy in copies]
    assert set(found) == {(2, 1), (1, 2)} and tidied(to, number) == (1, 2)


@refusals
def test_what_is_started_again_after_a_kill_publishes_once_and_keeps_the_old_bundle(tmp_path, number):
    """As ``sbkit improve`` does: a mark, written when the bundle is ready, says whether it is in place already."""
    to, published = tmp_path / "there" / "b", []

    def improve(to):
        mark = to.with_name("mark")
        publish.clean_up(to, FOLDER)
        if mark.exists() and mark.read_bytes() == (to / layout.CONFIG).read_bytes():
            return
        with publish.temporary_folder(to, FOLDER) as aside:
            fill(aside, 3)

            def ready():
                temporary = to.with_name("mark.part")
                temporary.write_bytes((aside / layout.CONFIG).read_bytes())
                temporary.replace(mark)

            publish.publish(aside, to, FOLDER, True, publish.previous(to), ready)
        published.append(to)

    export(to, 1)
    export(to, 2, keep=publish.previous(to))
    copies = disturbing(lambda: Copying(to.parent), number, lambda: improve(to)).copies
    published.clear()
    for copy in copies:
        disturbing(Disturber, number, lambda copy=copy: improve(Path(copy) / "b"))
        assert tidied(Path(copy) / "b", number) == (3, 2)
    assert 0 < len(published) < len(copies), "some kills came after the exchange"


@refusals
def test_killed_again_while_tidying_up_nothing_is_lost(tmp_path, number):
    to = tmp_path / "there" / "b"
    before = publish.previous(to)
    export(to, 1)
    export(to, 2, keep=before)
    copies = disturbing(lambda: Copying(to.parent), number, lambda: export(to, 3, keep=before)).copies
    found = set()
    for copy in copies:
        at = Path(copy) / "b"
        again = disturbing(lambda at=at: Copying(at.parent), number, lambda at=at: publish.clean_up(at, FOLDER)).copies
        found |= {tidied(Path(each) / "b", number) for each in again}
    assert found == {(2, 1), (3, 2)}


@refusals
@pytest.mark.parametrize("kept", [False, True], ids=["not kept", "kept"])
@pytest.mark.parametrize("after", [False, True], ids=["one error", "errors from there on"])
def test_with_errors_at_every_operation_the_bundle_is_whole_or_as_it_was(tmp_path, number, kept, after):
    found = set()
    for at in itertools.count(1):
        to = tmp_path / f"{at}" / "b"
        before = publish.previous(to) if kept else None
        export(to, 0)
        export(to, 1, keep=before)
        if disturbing(lambda at=at: Failing(at, after), number,
                      lambda to=to, before=before: export(to, 2, keep=before)).done < at:
            break
        found.add(tidied(to, number))
    assert at > 8 and found == ({(1, 0), (2, 1)} if kept else {(1, None), (2, None)})


@refusals
def test_what_is_replaced_can_be_kept_and_changes_places_with_what_replaced_it(tmp_path, number):
    to, before = tmp_path / "b", publish.previous(tmp_path / "b")

    def act():
        for turn in (1, 2, 3):
            export(to, turn, keep=before)
        assert (bundle(to), bundle(before)) == (3, 2)
        for found in ((2, 3), (3, 2)):
            roll_back(to)
            assert (bundle(to), bundle(before)) == found and hidden(to) == []

    disturbing(Disturber, number, act)
    assert (bundle(to), bundle(before)) == (3, 2)


# ----------------------------------------------------------------- files of others

TRANSFORMERS = json.dumps({"model_type": "wav2vec2", "files": ["thesis.tex"]})


@pytest.mark.parametrize("config, others", [
    (TRANSFORMERS, {"thesis.tex": "years"}),
    ('{"format": "sbkit codes"}', {}),
    ("[", {}),
    (None, {"thesis.tex": "years"}),
    ('{"format": "sbkit bundle", "files": {"a": {}}}', {"a": "", "thesis.tex": "years", "data/a": ""}),
    ('{"format": "sbkit bundle", "files": {"data": {}}}', {"data/thesis.tex": "years"}),
    ('{"format": "sbkit bundle", "files": {"../b/thesis.tex": {}}}', {"thesis.tex": "years"}),
])
@pytest.mark.parametrize("place", ["to", "keep"])
def test_refuses_to_replace_folders_and_files_of_others(tmp_path, config, others, place):
    to = tmp_path / "b"
    export(to, 1)
    at = to if place == "to" else publish.previous(to)
    shutil.rmtree(at, ignore_errors=True)
    if config is not None:
        others = {**others, layout.CONFIG: config}
    for name, text in others.items():
        (at / name).parent.mkdir(parents=True, exist_ok=True)
        (at / name).write_text(text)
    with refused("output-exists", file=at):
        FOLDER.check_replaceable(at)
    with refused("output-exists", file=at):
        export(to, 2, keep=publish.previous(to))
    assert {str(path.relative_to(at)): path.read_text() for path in at.rglob("*") if path.is_file()} == others
    assert hidden(to) == []


@refusals
def test_keeps_a_file_added_during_the_export(tmp_path, number, caplog):
    to = tmp_path / "b"
    export(to, 1)

    class Writing(Disturber):
        """Once the old folder has left its place."""

        def tick(self, name):
            if name == "fsync" and (old := publish.replaced(to)).exists() and not (old / "thesis.tex").exists():
                shutil.copy(old / layout.TOKENS, old / "thesis.tex")

    def act():
        publish.clean_up(to, FOLDER)
        with publish.temporary_folder(to, FOLDER) as aside:
            fill(aside, 2)
            publish.publish(aside, to, FOLDER, True)
            for old in to.parent.glob(".b.making-*"):
                (old / "thesis.tex").write_text("years")

    disturbing(Writing, number, act)
    publish.clean_up(to, FOLDER)
    assert bundle(to) == 2
    assert len(list(tmp_path.rglob("thesis.tex"))) == 1 and "so it is kept: thesis.tex" in caplog.text


def test_what_a_killed_export_left_is_said_at_the_next(tmp_path, caplog):
    to = tmp_path / "b"
    export(to, 1)

    if (pid := os.fork()) == 0:
        with publish.temporary_folder(to, FOLDER):
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
    left, = hidden(to)
    export(to, 2)
    assert f"Removed {to.parent / left}, left by a process that was killed" in caplog.text
    assert bundle(to) == 2 and hidden(to) == []


@pytest.mark.parametrize("left", [publish.replaced, publish.kept_meanwhile])
def test_a_bundle_that_a_killed_export_was_replacing_is_named_and_put_back(tmp_path, caplog, left):
    to = tmp_path / "b"
    export(to, 1)
    os.rename(to, left(to))
    with pytest.raises(SbkitError, match=rf"b does not exist; an export that was killed left .* at .*/{left(to).name}"):
        Config.read(to)
    publish.clean_up(to, FOLDER)
    assert bundle(to) == 1 and "the old version is restored" in caplog.text


def test_the_room_of_an_export_under_way_stays(tmp_path):
    to = tmp_path / "b"
    with publish.temporary_folder(to, FOLDER) as aside:
        fill(aside, 1)
        publish.clean_up(to, FOLDER)
        publish.publish(aside, to, FOLDER, False)
    assert bundle(to) == 1 and hidden(to) == []


def test_a_place_taken_meanwhile_is_not_replaced_unasked(tmp_path):
    to = tmp_path / "b"
    with refused("not-writable"), publish.temporary_folder(to, FOLDER) as aside:
        fill(aside, 2)
        to.mkdir()
        fill(to, 1)
        publish.publish(aside, to, FOLDER, False)
    assert bundle(to) == 1 and hidden(to) == []


@pytest.mark.parametrize("names", [[f"{i}" for i in range(150)], ["a", "below/b"]], ids=["many files", "a folder"])
def test_many_files_and_those_below_are_synced_at_once(tmp_path, monkeypatch, names):
    synced = []
    monkeypatch.setattr(publish.disk, "sync_file_system", synced.append)
    with publish.temporary_folder(tmp_path / "b", FOLDER) as aside:
        (aside / "below").mkdir()
        for name in names:
            (aside / name).write_text(name)
        publish.publish(aside, tmp_path / "b", FOLDER, False)
    assert synced == [aside]
    assert all((tmp_path / "b" / name).read_text() == name for name in names)


def test_tidying_up_leaves_the_permissions_of_a_folder_of_the_users_own(tmp_path):
    for name, mode in (("shared", 0o1777), ("own", 0o1755)):
        (tmp_path / name).mkdir()
        (tmp_path / name).chmod(mode)
        publish.clean_up(tmp_path / name, FOLDER)
        assert stat.S_IMODE((tmp_path / name).stat().st_mode) == mode
