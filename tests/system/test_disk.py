"""Full disks in one message, whoever met them; what was synced stays."""

import errno
import os
import resource

import pytest
from refusals import refused

from sbkit.errors import SbkitError
from sbkit.system import disk
from sbkit.system.console import atomic_write


def test_the_oserror_of_a_full_disk_is_found_behind_other_errors():
    try:
        try:
            raise OSError(errno.ENOSPC, "full")
        except OSError:
            raise RuntimeError("unexpected pos 64 vs 0")  # noqa: B904  torch's zip writer does just this
    except RuntimeError as error:
        assert disk.disk_error(error).errno == errno.ENOSPC
    assert disk.disk_error(Exception("I/O error: No space left on device (os error 28)")).errno == errno.ENOSPC
    assert disk.disk_error(OSError(errno.ENOENT, "no such file")) is None
    assert disk.disk_error(ValueError("x")) is None


@pytest.mark.parametrize("place, code", [
    ("file/out/x.json", "not-writable"), (f"{'a' * 300}/x.json", "not-writable"), ("x.json", "not-a-file")],
    ids=["in a file", "a long name", "a folder"])
def test_a_place_that_cannot_be_written_is_an_error_of_the_users(tmp_path, place, code):
    (tmp_path / "file").touch()
    (tmp_path / "x.json").mkdir()
    with refused(code, file=tmp_path / place):
        disk.check_writable(tmp_path / place, "--to")


def test_a_disk_error_names_the_path_and_the_free_space(tmp_path):
    with refused("disk-full", file=tmp_path / "a.json", wording=False) as error, \
            disk.disk_errors_as_user_error(tmp_path / "a.json"):
        raise OSError(errno.ENOSPC, "as write() says it, without a name")
    assert str(error.value).startswith(f"{tmp_path / 'a.json'} could not be written: No space left on device (free: ")
    with refused("not-writable", file=f"{tmp_path}/inner", wording=False), \
            disk.disk_errors_as_user_error(tmp_path):
        raise OSError(errno.EROFS, "", f"{tmp_path}/inner")
    assert "it needs about 4.0 MB, free: " in disk.explain(OSError(errno.EDQUOT, ""), tmp_path / "new" / "x", 4_000_000)


@pytest.mark.parametrize("error", [FileNotFoundError(errno.ENOENT, "none"), ValueError("x"),
                                   SbkitError("bad-value", "mine")])
def test_other_errors_are_not_changed(tmp_path, error):
    with pytest.raises(type(error)) as found, disk.disk_errors_as_user_error(tmp_path):
        raise error
    assert found.value is error


def test_a_file_is_on_the_disk_before_its_name_and_the_name_before_going_on(tmp_path, monkeypatch):
    """A power cut takes what was not synced; the order of these calls is what can be tested without one."""
    done = []
    for name in ("fsync", "replace"):
        call = getattr(os, name)

        def noted(*args, name=name, call=call):
            what = os.readlink(f"/proc/self/fd/{args[0]}") if name == "fsync" else ""
            done.append((name, os.path.isdir(what)))
            return call(*args)

        monkeypatch.setattr(os, name, noted)
    with atomic_write(tmp_path / "a.txt") as file:
        file.write("whole")
    assert done == [("fsync", False), ("replace", False), ("fsync", True)]


def test_a_file_that_is_longer_than_the_shell_allows_is_said_with_that_limit(tmp_path):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1_000, before[1]))
        with refused("disk-full", file=tmp_path / "x", wording=False) as caught:
            with disk.disk_errors_as_user_error(tmp_path / "x"), open(tmp_path / "x", "wb", buffering=0) as file:
                while True:
                    file.write(bytes(700))
        assert "as files may only have 1.0 kB here: raise that by ulimit -f" in caught.value.message
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_all_of_a_disk_is_synced_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda handle: pytest.fail("one by one"))
    disk.sync_file_system(tmp_path)
    monkeypatch.setattr(disk.ctypes, "CDLL", lambda *args, **options: object())  # a system without syncfs
    called = []
    monkeypatch.setattr(os, "sync", lambda: called.append(True))
    disk.sync_file_system(tmp_path)
    assert called
