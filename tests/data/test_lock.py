"""Locks of the kernel: held by one process, and by nothing that it forks."""

import os
import signal
import time

from sbkit.data.lock import Lock, remove_unheld


def test_what_is_forked_from_a_holder_holds_nothing(tmp_path):
    with Lock(tmp_path) as lock, Lock(tmp_path) as other:
        assert lock.acquire() is True and other.acquire() is False
        child = os.fork()
        if child == 0:
            time.sleep(60)
            os._exit(0)
        try:
            assert other.acquire() is False
            os.close(lock.handle)  # as the kernel does when the holder dies
            lock.handle = None
            assert other.acquire(wait=True) is True
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def test_many_may_share_what_nobody_holds_alone(tmp_path):
    with Lock(tmp_path) as one, Lock(tmp_path) as two, Lock(tmp_path) as alone:
        assert one.acquire(shared=True) and two.acquire(shared=True) and alone.acquire() is False


def test_what_was_open_is_not_what_has_its_name_by_now(tmp_path):
    (tmp_path / "folder").mkdir()
    with Lock(tmp_path / "folder") as lock:
        assert lock.is_at(tmp_path / "folder")
        (tmp_path / "folder").rename(tmp_path / "other")
        assert not lock.is_at(tmp_path / "folder")
        (tmp_path / "folder").mkdir()
        assert not lock.is_at(tmp_path / "folder")


def test_a_folder_made_anew_while_its_lock_was_asked_for_is_not_removed(tmp_path, monkeypatch):
    """By one that removed the old one and holds the new one by now."""
    folder, held, take = tmp_path / "folder", [], Lock.acquire
    folder.mkdir()

    def late(self, **how):
        monkeypatch.setattr(Lock, "acquire", take)
        folder.rmdir()
        folder.mkdir()
        held.append(Lock(folder))
        assert held[0].acquire()
        return take(self, **how)

    monkeypatch.setattr(Lock, "acquire", late)
    assert not remove_unheld(folder) and held[0].is_at(folder)
    held[0].close()
    assert remove_unheld(folder) and not folder.exists()
