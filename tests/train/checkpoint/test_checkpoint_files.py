"""Checkpoint folders on disk: whole or absent, and never someone else's."""

import contextlib
import errno
import json
import os
import threading
import zipfile

import pytest
from hypothesis import given
from hypothesis import strategies as st
from processes import Beside
from refusals import refused

from sbkit.train.checkpoint import files

NAME = "CKPT+2025-01-01+00-00-00+00"


def written(folder, text="weights", name=NAME):
    path, lock = files.create_hidden(folder, name)
    (path / "model.ckpt").write_bytes(text if isinstance(text, bytes) else text.encode())
    files.seal(path, {"unixtime": 1.0})
    lock.close()
    return path


def published(folder, text="weights", name=NAME):
    files.publish(written(folder, text, name), folder / name)
    return folder / name


def test_meta_is_the_last_file_written(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(os.readlink(f"/proc/self/fd/{fd}")))
    published(tmp_path)
    names = [os.path.basename(path) for path in synced]
    assert names == ["model.ckpt", "CKPT.sums.json", "CKPT.yaml", files.WRITING + NAME, tmp_path.name]


def test_files_in_folders_are_summed_too(tmp_path):
    path, lock = files.create_hidden(tmp_path, NAME)
    (path / "lm.ckpt").mkdir()
    (path / "lm.ckpt" / "weights").write_bytes(b"x" * 10)
    files.seal(path, {"unixtime": 1.0})
    lock.close()
    assert files.damage(path) is None
    (path / "lm.ckpt" / "weights").write_bytes(b"x" * 9 + b"y")
    assert files.damage(path) == "lm.ckpt/weights does not match its checksum"


@given(data=st.binary(min_size=1, max_size=2000), where=st.floats(0, 0.999), bit=st.integers(0, 7))
def test_any_flipped_bit_is_found(tmp_path_factory, data, where, bit):
    path = written(tmp_path_factory.mktemp("c"), data)
    assert files.damage(path) is None
    broken = bytearray(data)
    broken[int(where * len(data))] ^= 1 << bit
    (path / "model.ckpt").write_bytes(broken)
    assert files.damage(path) is not None


@pytest.mark.parametrize("sums", ["", "[]", "{}", '{"files": {"model.ckpt": 3}}', "\x00"])
def test_broken_sums_are_damage_and_no_crash(tmp_path, sums):
    path = published(tmp_path)
    (path / files.SUMS_NAME).write_text(sums)
    assert "can't be read" in files.damage(path)


def test_a_pipe_in_place_of_a_file_is_damage_and_not_waited_for(tmp_path):
    path = written(tmp_path, "")
    (path / "model.ckpt").unlink()
    os.mkfifo(path / "model.ckpt")
    assert files.damage(path) == "model.ckpt is missing"


@pytest.mark.parametrize("method", [8, 12, 99], ids=["deflated", "bzip2", "unknown"])
def test_an_archive_that_lies_about_its_compression_is_damage(tmp_path, method):
    path = written(tmp_path)
    (path / files.SUMS_NAME).unlink()
    with zipfile.ZipFile(path / "model.ckpt", "w") as archive:
        archive.writestr("data", b"weights" * 100)
    data = bytearray((path / "model.ckpt").read_bytes())
    data[8] = data[data.index(b"PK\1\2") + 10] = method
    (path / "model.ckpt").write_bytes(data)
    assert files.damage(path).startswith("model.ckpt is cut off or damaged")


def test_a_size_that_is_no_number_is_told_in_one_short_line(tmp_path):
    path = published(tmp_path)
    (path / files.SUMS_NAME).write_text(json.dumps({"files": {"model.ckpt": {"bytes": ["x\n" * 50] * 500}}}))
    assert len(files.damage(path)) < 200 and "\n" not in files.damage(path)


def writes(pipe, folder):
    """Write a checkpoint, and stay between the two renames of its publication."""
    path, lock = files.create_hidden(folder, NAME)
    (path / "model.ckpt").write_text("of the first run")
    os.rename(folder / NAME, folder / (files.REPLACED + NAME))
    pipe.send("writes")
    pipe.recv()
    lock.close()


def test_a_folder_that_a_living_process_writes_is_refused_to_a_second_one(tmp_path):
    published(tmp_path)
    with Beside(writes, tmp_path) as other:
        assert other.pipe.recv() == "writes"
        with refused("folder-in-use", kind=files.CheckpointError, file=tmp_path):
            files.create_hidden(tmp_path, NAME)
        path = tmp_path / (files.WRITING + NAME)
        assert (path / "model.ckpt").read_text() == "of the first run"
        other.kill()
        files.create_hidden(tmp_path, NAME)[1].close()
        assert list(path.iterdir()) == []


def test_sweep_leaves_a_living_process_between_the_two_renames_of_a_replacement(tmp_path):
    published(tmp_path)
    with Beside(writes, tmp_path) as other:
        assert other.pipe.recv() == "writes"
        assert files.sweep(tmp_path) == []
        assert sorted(path.name for path in tmp_path.iterdir()) == [files.REPLACED + NAME, files.WRITING + NAME]
        other.kill()
        assert files.sweep(tmp_path) == [files.WRITING + NAME]
        assert (tmp_path / NAME / "model.ckpt").read_text() == "weights"


def test_many_that_begin_the_same_checkpoint_never_share_its_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "PATIENCE", 0.0)
    for attempt in range(30):
        (tmp_path / str(attempt)).mkdir()
        (tmp_path / str(attempt) / (files.WRITING + NAME)).mkdir()  # of a killed one
        together, began = threading.Barrier(4), []

        def begin(folder=tmp_path / str(attempt), together=together, began=began):
            together.wait()
            with contextlib.suppress(files.CheckpointError):
                began.append(files.create_hidden(folder, NAME))

        threads = [threading.Thread(target=begin) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(began) <= 1
        assert all(lock.is_at(path) for path, lock in began)
        for _, lock in began:
            lock.close()


def test_sweep_touches_nothing_else(tmp_path):
    others = [".git", ".tmp-notes", "CKPT+x", "notes", ".CKPT"]
    for name in others:
        (tmp_path / name).mkdir()
    assert files.sweep(tmp_path) == [] and sorted(p.name for p in tmp_path.iterdir()) == sorted(others)


def test_a_rename_that_fails_puts_the_old_one_back(tmp_path, monkeypatch):
    published(tmp_path, "old")
    new = written(tmp_path, "new")
    rename = os.rename
    monkeypatch.setattr(files.os, "rename", lambda a, b: rename(a, b) if str(a) != str(new) else refuse())
    with pytest.raises(OSError):
        files.publish(new, tmp_path / NAME)
    assert (tmp_path / NAME / "model.ckpt").read_text() == "old"


def refuse():
    raise OSError(errno.EROFS, os.strerror(errno.EROFS))


def test_a_deleted_checkpoint_leaves_its_name_before_its_files_go(tmp_path, monkeypatch):
    path = published(tmp_path)
    monkeypatch.setattr(files.shutil, "rmtree", lambda path: refuse())
    with pytest.raises(OSError):
        files.delete(path)
    assert not path.exists() and json.loads((tmp_path / (files.DELETED + NAME) / files.SUMS_NAME).read_text())


def test_a_read_only_folder_can_be_swept(tmp_path, monkeypatch):
    written(tmp_path)
    monkeypatch.setattr(files.shutil, "rmtree", lambda path: refuse())
    assert files.sweep(tmp_path) == []
