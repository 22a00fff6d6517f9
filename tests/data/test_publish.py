"""A bundle at its place is whole or as it was, whatever ends an export, and the next one tidies up."""

import contextlib
import errno
import itertools
import os
import signal
from pathlib import Path

import pytest
from kill_points import Copying, Disturber, disturbed

from sbkit.data import publish
from sbkit.errors import SbkitError
from sbkit.export import layout
from sbkit.export.layout import Config

FILES = (layout.CONFIG, layout.TOKENS, layout.MODELS[layout.ONNX])


def fill(folder, number):
    for name in FILES:
        (folder / name).write_text(str(number))


def export(to, number, force=True):
    """What an export does around its work."""
    publish.clean_up(to)
    with publish.temporary_folder(to) as aside:
        fill(aside, number)
        publish.publish(aside, to, force)


def bundle(to):
    """Which export's bundle stands at its place, None for none; one of two would be wrong."""
    if not to.exists():
        return None
    found = {(to / name).read_text() for name in FILES}
    assert len(found) == 1 and len(list(to.iterdir())) == len(FILES)
    return int(found.pop())


def hidden(to):
    return [path.name for path in to.parent.iterdir() if path != to]


class Failing(Disturber):
    """Operation number ``at`` is refused, and with ``after`` every one behind it."""

    def __init__(self, at, after):
        self.at, self.after = at, after
        super().__init__()

    def tick(self, name):
        super().tick(name)
        if self.done == self.at or (self.after and self.done > self.at):
            raise OSError(errno.EIO, os.strerror(errno.EIO))


def disturbing(to, disturb, exchange):
    """What disturbed an export over another one."""
    with disturbed((publish, "exchange")):
        disturber, swap = disturb(), publish.exchange
        publish.exchange = lambda *names: exchange and (disturber.tick("exchange"), swap(*names))[1]
        with contextlib.suppress(SbkitError, OSError):
            export(to, 2)
            assert bundle(to) == 2
    return disturber


def tidied(to, exchange):
    """The bundle that stands there once the next export has tidied up."""
    assert bundle(to) is not None or not exchange
    publish.clean_up(to)
    assert hidden(to) == []
    return bundle(to)


exchanges = pytest.mark.parametrize("exchange", [True, False], ids=["exchange", "two renames"])


@exchanges
def test_killed_at_every_operation_the_bundle_is_whole_or_as_it_was(tmp_path, exchange):
    to = tmp_path / "there" / "b"
    export(to, 1)
    copies = disturbing(to, lambda: Copying(to.parent), exchange).copies
    found = [tidied(Path(copy) / "b", exchange) for copy in copies]
    assert len(found) > 8 and found == sorted(found) and set(found) == {1, 2} and bundle(to) == 2


@exchanges
@pytest.mark.parametrize("after", [False, True], ids=["one error", "errors from there on"])
def test_with_errors_at_every_operation_the_bundle_is_whole_or_as_it_was(tmp_path, exchange, after):
    to, found = tmp_path / "b", []
    for at in itertools.count(1):
        export(to, 1)
        if disturbing(to, lambda at=at: Failing(at, after), exchange).done < at:
            break
        found.append(tidied(to, exchange))
    assert len(found) > 8 and set(found) == {1, 2}


@exchanges
def test_what_is_replaced_can_be_kept_and_changes_places_with_what_replaced_it(tmp_path, monkeypatch, exchange):
    to, before = tmp_path / "b", publish.previous(tmp_path / "b")
    if not exchange:
        monkeypatch.setattr(publish, "exchange", lambda one, other: False)
    for number in (1, 2, 3):
        with publish.temporary_folder(to) as aside:
            fill(aside, number)
            publish.publish(aside, to, force=True, keep=before)
    assert (bundle(to), bundle(before)) == (3, 2)
    for found in ((2, 3), (3, 2)):
        publish.publish(before, to, force=True, keep=before)
        assert (bundle(to), bundle(before)) == found and hidden(to) == [before.name]


def test_what_a_killed_export_left_is_said_at_the_next(tmp_path, caplog):
    to = tmp_path / "b"
    export(to, 1)

    if (pid := os.fork()) == 0:
        with publish.temporary_folder(to):
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
    left, = hidden(to)
    export(to, 2)
    assert f"Removed {to.parent / left}, left by a process that was killed" in caplog.text
    assert bundle(to) == 2 and hidden(to) == []


def test_a_bundle_that_a_killed_export_was_replacing_is_named_and_put_back(tmp_path, caplog):
    to = tmp_path / "b"
    export(to, 1)
    os.rename(to, publish.replaced(to))
    with pytest.raises(SbkitError, match=r"b does not exist; an export that was killed left .* at .*/\.b\.replaced"):
        Config.read(to)
    publish.clean_up(to)
    assert bundle(to) == 1 and "the old version is restored" in caplog.text


def test_the_room_of_an_export_under_way_stays(tmp_path):
    to = tmp_path / "b"
    with publish.temporary_folder(to) as aside:
        fill(aside, 1)
        publish.clean_up(to)
        publish.publish(aside, to, False)
    assert bundle(to) == 1 and hidden(to) == []


def test_a_place_taken_meanwhile_is_not_replaced_unasked(tmp_path):
    to = tmp_path / "b"
    with pytest.raises(SbkitError, match="cannot be put in place"), publish.temporary_folder(to) as aside:
        fill(aside, 2)
        to.mkdir()
        fill(to, 1)
        publish.publish(aside, to, False)
    assert bundle(to) == 1 and hidden(to) == []


@pytest.mark.parametrize("names", [[f"{i}" for i in range(150)], ["a", "below/b"]], ids=["many files", "a folder"])
def test_many_files_and_those_below_are_synced_at_once(tmp_path, monkeypatch, names):
    synced = []
    monkeypatch.setattr(publish.disk, "sync_file_system", synced.append)
    with publish.temporary_folder(tmp_path / "b") as aside:
        (aside / "below").mkdir()
        for name in names:
            (aside / name).write_text(name)
        publish.publish(aside, tmp_path / "b", False)
    assert synced == [aside]
    assert all((tmp_path / "b" / name).read_text() == name for name in names)
