"""Decoding apart from the server: what dies, hangs or eats memory is replaced, and the next one is decoded."""

import contextlib
import io
import os
import re
import resource
import sys
import tempfile
import textwrap
import threading
import time

import bundles
import numpy as np
import pytest
import serving
from refusals import refused

from sbkit.infer.recordings import Recording
from sbkit.serve import decoder_process
from sbkit.serve import decoders as decoders_module
from sbkit.serve.decoders import Decoders
from sbkit.serve.errors import ApiError
from sbkit.serve.job import Cancelled, Job
from sbkit.serve.limits import Limits

pytestmark = pytest.mark.slow  # each takes a fraction of a second, and there are many


def upload(data):
    file = tempfile.TemporaryFile()  # noqa: SIM115
    file.write(data)
    file.flush()
    return file


@pytest.fixture(scope="module")
def decoders():
    with contextlib.closing(Decoders(Limits(decoders=1, max_audio_seconds=60))) as decoders:
        yield decoders


@pytest.fixture
def started():
    """Starts decoders, which end with the test."""
    with contextlib.ExitStack() as all_:
        yield lambda restarted=lambda: None, command=None, **limits: all_.enter_context(contextlib.closing(Decoders(
            Limits(**{"decoders": 1} | limits), restarted, *([] if command is None else [command]))))


def acting(tmp_path, code, once=True):
    """A decoder that first, or always, does something else with its arguments; once it did, it is a good one."""
    script = tmp_path / "decoder.py"
    script.write_text(textwrap.dedent(f"""
        import sys, os, time, socket
        from pathlib import Path
        from sbkit.serve import decoder_process
        real = decoder_process.decode
        seen = Path({str(tmp_path / "seen")!r})
        def act(*args):
            if {once} and seen.exists():
                return real(*args)
            seen.touch()
            {code}
            return real(*args)
        decoder_process.decode = act
        decoder_process.main(*map(int, sys.argv[1:4]))
    """))
    return [sys.executable, str(script)]


def decode(decoders, data, job=None):
    with upload(data) as file:
        wave = decoders.decode(file, bundles.RATE, job or Job())
    signal = np.concatenate(list(wave.blocks()))
    assert len(signal) == wave.samples
    wave.close()
    return signal


@pytest.mark.parametrize("rate", [8_000, 16_000, 44_100])
def test_samples_are_those_that_transcribe_hears(decoders, rate):
    data = serving.wav("hello", rate=rate)
    np.testing.assert_array_equal(decode(decoders, data), np.concatenate(list(Recording(data).blocks(bundles.RATE))))


@pytest.mark.parametrize("action, words", [
    ("os._exit(1)", "the decoder ended"), ("os.kill(os.getpid(), 11)", "the decoder ended"),
    ("time.sleep(60)", "took too long"), ("while True: pass", "the decoder ended|took too long"),
    ("return {'code': 'invalid_audio', 'message': str(len(bytearray(1 << 34)))}", "the decoder ended"),
    ("open('/proc/self/fd/%d' % args[1].fileno(), 'wb').write(bytes(1 << 28))", "the decoder ended"),
])
def test_a_decoder_that_goes_wrong_is_replaced(started, tmp_path, action, words):
    restarts = []
    decoders = started(lambda: restarts.append(1), acting(tmp_path, action), decode_seconds=1,
                       max_audio_seconds=60)
    with refused("invalid_audio", wording=False, kind=ApiError) as error:  # a busy loop may reach either limit
        decode(decoders, serving.wav("a"))
    assert error.value.status == 400 and re.search(words, str(error.value)) and restarts == [1]
    assert len(decode(decoders, serving.wav("b"))) == len(bundles.say("b"))


def test_a_decoder_that_died_while_nobody_asked_is_replaced_and_no_file_blamed_for_it(started):
    """Whether it had done something before or not."""
    restarts = []
    decoders = started(lambda: restarts.append(1))
    decoders.check()
    for text in ("a", "b"):
        [decoder] = decoders.running
        decoder.process.kill()
        decoder.process.wait()
        assert len(decode(decoders, serving.wav(text))) == len(bundles.say(text))
    assert restarts == [1, 1]


def test_a_file_is_blamed_once_a_fresh_decoder_died_of_it_too(started, tmp_path):
    """The first was good for one file, and what it left behind might be what killed it."""
    restarts = []
    decoders = started(lambda: restarts.append(1), acting(
        tmp_path, "args[0].read() == b'deadly' and os._exit(1); args[0].seek(0)", once=False))
    decode(decoders, serving.wav("a"))
    with refused("invalid_audio", kind=ApiError) as error:
        decode(decoders, b"deadly")
    assert error.value.code == "invalid_audio" and restarts == [1, 1]
    with refused("invalid_audio", kind=ApiError):
        decode(decoders, b"deadly")
    assert restarts == [1, 1, 1], "it was fresh"
    assert len(decode(decoders, serving.wav("b"))) == len(bundles.say("b"))


def test_a_decoder_that_never_starts_is_no_files_fault(started, tmp_path):
    flag = tmp_path / "broken"
    code = f"import os, sys\nif os.path.exists({str(flag)!r}): sys.exit()\n" \
           "from sbkit.serve import decoder_process\ndecoder_process.main(*map(int, sys.argv[1:4]))"
    decoders = started(command=[sys.executable, "-c", code])
    decoders.check()
    flag.touch()
    for each in decoders.running:
        each.process.kill()
        each.process.wait()
    with refused("not_ready", kind=ApiError) as error:
        decode(decoders, serving.wav("a"))
    assert error.value.status == 503
    flag.unlink()
    with contextlib.suppress(ApiError):  # the one that was started meanwhile
        decode(decoders, serving.wav("a"))
    assert len(decode(decoders, serving.wav("b"))) == len(bundles.say("b"))


def test_a_client_that_leaves_ends_the_decoder(started, tmp_path):
    decoders = started(command=acting(tmp_path, "time.sleep(60)"))
    decoders.check()
    job, began = Job(), time.monotonic()
    threading.Timer(0.3, job.cancel).start()
    with pytest.raises(Cancelled):
        decode(decoders, serving.wav("a"), job)
    assert time.monotonic() - began < 20
    assert len(decode(decoders, serving.wav("b"))) == len(bundles.say("b"))


def test_a_machine_without_room_for_a_process_costs_a_request_and_not_the_server(started, tmp_path, monkeypatch):
    """A decoder that cannot be replaced at once is replaced when it is needed."""
    decoders = started(command=acting(tmp_path, "os._exit(1)"))
    real = decoders_module._Decoder
    full = []

    def failing(*args):
        if full:
            raise full[0]
        return real(*args)

    monkeypatch.setattr(decoders_module, "_Decoder", failing)
    full.append(BlockingIOError(11, "Resource temporarily unavailable"))
    with refused("invalid_audio", kind=ApiError):
        decode(decoders, serving.wav("a"))
    with pytest.raises(BlockingIOError):
        decode(decoders, serving.wav("b"))
    full[:] = [OSError(24, "Too many open files")]
    with refused("no_room", kind=ApiError) as error:
        decode(decoders, serving.wav("b"))
    assert error.value.status == 503
    full.clear()
    assert len(decode(decoders, serving.wav("c"))) == len(bundles.say("c"))


def test_a_decoder_that_cannot_start_is_told_at_the_start(started):
    decoders = started(command=[sys.executable, "-c", "raise SystemExit"])
    with refused("decoder-not-started"):
        decoders.check()


def test_decoders_are_told_no_secret_and_have_limits(started, tmp_path, monkeypatch):
    """Its environment has no key, and the kernel bounds its memory, its time and what it writes."""
    monkeypatch.setenv("SBKIT_API_KEY", "secret")
    out = tmp_path / "told"
    code = (f"import resource; Path({str(out)!r}).write_text(str(sorted(os.environ)) + str([resource.getrlimit(each) "
            "for each in (resource.RLIMIT_AS, resource.RLIMIT_FSIZE, resource.RLIMIT_CORE, resource.RLIMIT_CPU)]))")
    decode(started(command=acting(tmp_path, code), max_upload_mb=1, max_audio_seconds=60, decode_seconds=7),
           serving.wav("a"))
    told = out.read_text()
    assert "SBKIT_API_KEY" not in told and "OMP_NUM_THREADS" in told
    memory, size, core, cpu = eval(told[told.index("]") + 1:])
    assert memory == ((1 << 30) + (4 << 20),) * 2 and size == (4 * 192_000 * 120,) * 2 and core == (0, 0)
    assert 7 <= cpu[0] <= 20


def test_a_decoder_imports_nothing_from_the_folder_that_the_server_was_started_in(started, tmp_path, monkeypatch):
    for name in ("soxr", "numpy", "sbkit"):
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    monkeypatch.chdir(tmp_path)
    assert len(decode(started(), serving.wav("a"))) == len(bundles.say("a"))
    assert not (tmp_path / "ran").exists()


def test_a_recording_is_counted_while_it_is_decoded_whatever_its_header_says(monkeypatch):
    monkeypatch.setattr(decoder_process.audio, "audio_info", lambda data: (1.0, 16_000, 1))
    out = io.BytesIO()
    answer = decoder_process.decode(io.BytesIO(serving.silence(100)), out, 16_000, 30.0)
    assert answer["code"] == decoder_process.AUDIO_TOO_LONG and len(out.getvalue()) <= 4 * 16_000 * 30


def test_decodes_when_its_descriptors_are_above_1023(started):
    """As on a server with many connections, which replaces a decoder."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 1_200:
        pytest.skip("this process may not open so many files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 1_200), hard))
    try:
        with contextlib.ExitStack() as stack:
            for _ in range(1_030):
                stack.enter_context(open(os.devnull))
            assert len(decode(started(), serving.wav("a"))) == len(bundles.say("a"))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_nothing_stays_behind(decoders):
    """Neither open files nor processes, after good and bad uploads."""
    decode(decoders, serving.wav("a"))
    before = len(os.listdir("/proc/self/fd"))
    for data in (serving.wav("b"), b"junk", serving.silence(100)):
        with contextlib.suppress(ApiError):
            decode(decoders, data)
    assert len(os.listdir("/proc/self/fd")) == before
