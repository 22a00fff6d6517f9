"""A disk that is full or nearly so: all is written or it is said, and what all may take together is bounded."""

import contextlib
import errno
import io
import tempfile

import numpy as np
import pytest
import serving
from refusals import refused
from test_decoders import upload

from sbkit.serve import decoder_process, disk
from sbkit.serve.decoders import Decoders, Wave
from sbkit.serve.disk import Disk, DiskReservation
from sbkit.serve.errors import ApiError
from sbkit.serve.job import Job
from sbkit.serve.limits import MEGABYTE, Limits


class Nearly(io.BytesIO):
    """Takes a part of what is written, as files on a disk that is nearly full do, and then nothing."""

    def __init__(self, most, part):
        super().__init__()
        self.most, self.part = most, part

    def write(self, data):
        if self.tell() >= self.most:
            raise OSError(errno.ENOSPC, "No space left on device")
        return super().write(bytes(data[: min(self.part, self.most - self.tell())]))


def test_all_is_written_however_little_is_taken_at_once():
    out = Nearly(1 << 30, 1001)
    answer = decoder_process.decode(io.BytesIO(serving.wav("hello")), out, 16_000, 60.0)
    assert len(out.getvalue()) == 4 * answer["samples"] > 0


def test_a_disk_that_fills_up_is_said():
    answer = decoder_process.decode(io.BytesIO(serving.wav("hello")), Nearly(10_000, 4_000), 16_000, 60.0)
    assert answer["code"] == decoder_process.DISK_FULL


def test_samples_that_are_not_there_are_an_error_and_no_wait():
    wave = Wave(upload(np.zeros(1000, dtype=np.float32).tobytes()), 1500, DiskReservation(Disk(1 << 20)))
    with pytest.raises(RuntimeError, match="last 500 of 1500 decoded samples"):
        list(wave.blocks())
    wave.close()


def test_parts_are_promised_up_to_the_bound_and_given_back(monkeypatch):
    free = 1 << 40
    monkeypatch.setattr(disk.shutil, "disk_usage", lambda path: type("Usage", (), {"free": free}))
    room = Disk(10 * MEGABYTE)
    first, second = DiskReservation(room), DiskReservation(room)
    first.grow(6 * MEGABYTE)
    first.grow(MEGABYTE)  # it has more
    with refused("no_room", kind=ApiError) as caught:
        second.grow(5 * MEGABYTE)
    assert caught.value.status == 503 and caught.value.headers["retry-after"]
    first.resize(MEGABYTE)
    second.grow(5 * MEGABYTE)
    first.close()
    second.close()
    second.close()
    assert room.reserved == 0
    free = MEGABYTE
    with refused("no_room", kind=ApiError):
        first.grow(MEGABYTE)  # half of what is free is not ours


def test_a_decoder_asks_for_room_by_the_header_and_gives_back_what_it_did_not_need():
    disk = Disk(4 * MEGABYTE)
    with contextlib.closing(Decoders(Limits(decoders=1), disk=disk)) as decoders, \
            upload(serving.silence(120, 16_000)) as large, upload(serving.wav("hello")) as small:
        with refused("no_room", kind=ApiError) as caught:  # 7.7 MB of samples
            decoders.decode(large, 16_000, Job())
        assert caught.value.status == 503 and disk.reserved == 0
        wave = decoders.decode(small, 16_000, Job())
        assert disk.reserved == 4 * wave.samples
        wave.close()
        assert disk.reserved == 0


def test_a_request_beyond_the_bound_gets_503_and_the_next_one_is_answered(bundle):
    with serving.serving(bundle, limits=Limits(decoders=1, max_disk_mb=2)) as server:
        for data in (bytes(3 * MEGABYTE), serving.silence(60, 16_000)):  # too much itself, and too much decoded
            answer = server.post(data)
            assert answer.status_code == 503 and answer.headers["retry-after"]
            assert answer.json()["error"]["code"] == "no_room" and "of this server's disk" in answer.text
        assert server.post("good").json()["text"] == "good"
        assert server.state.disk.reserved == 0 and server.counted("sbkit_requests_inside") == 0


@pytest.mark.parametrize("code, words", [(errno.ENOSPC, "temporary folder is full"),
                                         (errno.EMFILE, "its limit of open files")])
def test_an_upload_that_finds_no_room_is_told_so(server, monkeypatch, code, words):
    """Starlette keeps large uploads in a file of its own."""
    def full(*_):
        raise OSError(code, "no")

    monkeypatch.setattr(tempfile.SpooledTemporaryFile, "rollover", full)
    for data in (bytes(2 * MEGABYTE), serving.wav("small")):
        answer = server.post(data)
        assert answer.status_code == 503 and words in answer.json()["error"]["message"]
    monkeypatch.undo()
    assert server.post("good").json()["text"] == "good"
