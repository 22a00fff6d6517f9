"""An enhancer is served as models that give tensors are: an upload comes back as a WAV without its noise."""

import io

import enhancers
import httpx
import numpy as np
import pytest
import serving
import soundfile
import torch

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with serving.serving({"clean": enhancers.make(tmp_path_factory.mktemp("enhancer") / "bundle")}) as server:
        yield server


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [0.3, 9.7])
def test_an_upload_comes_back_as_the_checkpoint_would_make_it(server, seconds):
    noisy = (0.1 * np.random.default_rng(0).standard_normal(round(seconds * enhancers.RATE))).astype(np.float32)
    file = io.BytesIO()
    soundfile.write(file, noisy, enhancers.RATE, format="WAV", subtype="FLOAT")
    answer = httpx.post(f"{server.base}/audio/outputs", data={"model": "clean", "response_format": "wav"}, timeout=60,
                        files={"file": ("noisy.wav", file.getvalue())})
    assert answer.status_code == 200 and answer.headers["content-type"] == "audio/wav"
    sound, rate = soundfile.read(io.BytesIO(answer.content), dtype="float32")
    with torch.no_grad():
        known = enhancers.enhancer()(torch.from_numpy(noisy)[None], torch.tensor([len(noisy)]))[0].numpy()
    assert rate == enhancers.RATE
    np.testing.assert_allclose(sound, known, atol=1e-3)  # of 16 bits


def test_it_hears_no_words(server):
    answer = httpx.post(f"{server.base}/audio/transcriptions", data={"model": "clean"}, files={"file": ("a.wav", b"x")})
    assert answer.status_code == 400 and "ask it at /v1/audio/outputs" in answer.json()["error"]["message"]
