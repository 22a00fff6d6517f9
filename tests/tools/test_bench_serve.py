"""The benchmark of live sessions: what its clients see, what they call lost, and its table."""

import threading
import time

import bundles
import numpy as np
import pytest
import serving

from sbkit.serve.limits import Limits
from tools.bench.serving import live, models, speakers


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    return bundles.make(tmp_path_factory.mktemp("bench") / "level", streams=True)


@pytest.fixture(scope="module")
def audio(tmp_path_factory):
    path = tmp_path_factory.mktemp("audio") / "audio.raw"
    pause = np.zeros(bundles.RATE, np.float32)
    said = np.concatenate([part for text in ("hello there", "good people") for part in (bundles.say(text), pause)])
    path.write_bytes(np.round(32767 * said).astype("<i2").tobytes())
    return path


def plan(server, audio, **changes):
    return speakers.Plan(**{"host": "127.0.0.1", "port": server.port, "model": "level", "audio": str(audio),
                            "rate": bundles.RATE, "sessions": 4, "seconds": 3.0, "packet": 320, "chunk_ms": 160,
                            "begins": 0.5, "count": 4} | changes)


@pytest.mark.slow
def test_each_session_speaks_at_real_time_and_is_heard_to_its_end(bundle, audio):
    with serving.serving(bundle) as server:
        found = speakers.run(plan(server, audio))
    assert found.lost == [] and found.finals >= 4
    assert len(found.late) == 4 * 150, "packets"
    assert len(found.latencies) > 8 and min(found.latencies) > 0, "nothing is heard before it is said"
    assert np.median(found.latencies) < 3


def stop_when_all_speak(state, sessions):
    while state.live_sessions.active < sessions:
        time.sleep(0.01)
    time.sleep(1)
    state.stop()


def test_a_session_that_is_cut_short_is_lost(bundle, audio):
    with serving.serving(bundle) as server:
        stopper = threading.Thread(target=stop_when_all_speak, args=(server.state, 4))
        stopper.start()
        found = speakers.run(plan(server, audio, seconds=20.0))
        stopper.join()
    assert len(found.lost) == 4 and all(" s of 20 s" in why for why in found.lost)


def test_a_server_that_refuses_a_session_ends_the_measurement(bundle, audio):
    with serving.serving(bundle, limits=Limits(decoders=1, max_live=2)) as server, \
            pytest.raises(SystemExit, match=r"refuses a session.* 429"):
        speakers.run(plan(server, audio))


def test_a_bundle_without_its_graph_for_streams_is_otherwise_the_same(bundle, tmp_path):
    left = models.without_streams(bundle, tmp_path / "tail")
    assert {path.name for path in left.iterdir()} == {path.name for path in bundle.iterdir()} - {"stream.onnx"}
    with serving.serving(left) as server:
        assert next(iter(server.state.registry)).streams is None


@pytest.mark.long
def test_both_ways_are_measured_in_one_run(bundle, capfd):
    asked = live.Live(bundle, None, [2], 2.0, 20.0, None, ["--device", "cpu", "--threads", "1"], 2)
    assert live.bench(asked) == 0
    rows = [line.split() for line in capfd.readouterr().out.splitlines()[2:]]
    assert [row[:2] for row in rows] == [["2", "stream"], ["2", "tail"]]
