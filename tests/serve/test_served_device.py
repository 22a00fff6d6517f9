"""The device of each model of a server: what was asked for is met at the start, or the server doesn't start."""

import threading

import bundles
import httpx
import pytest
import runtimes
import serving
from refusals import refused

from sbkit.serve import registry
from sbkit.serve.served import BundleOptions


@pytest.mark.parametrize("runtime", runtimes.BROKEN)
def test_a_device_that_cannot_be_used_ends_the_start(bundle, monkeypatch, runtime):
    runtimes.use(monkeypatch, runtime)
    with refused("device-unavailable"):
        registry.load({"level": bundle}, BundleOptions(device="cuda"))


def test_auto_says_on_health_and_in_the_metrics_what_it_took_and_why(bundle, monkeypatch):
    runtimes.use(monkeypatch, runtimes.WithoutLibraries)
    with serving.serving(bundle, device="auto") as server:
        found = httpx.get(f"{server.url}/health").json()["models"]["level"]
        assert (found["asked"], found["device"], found["provider"]) == ("auto", "cpu", "CPUExecutionProvider")
        assert found["note"] == "onnxruntime fell back to CPUExecutionProvider"
        assert ('sbkit_model_device{asked="auto",device="cpu",file="model.onnx",model="level",'
                'provider="CPUExecutionProvider"} 1') in httpx.get(f"{server.url}/metrics").text


def test_a_gpu_that_works_is_told_with_its_share_of_the_operators(tmp_path, monkeypatch):
    runtimes.use(monkeypatch, runtimes.OnCuda)
    with serving.serving(bundles.make(tmp_path / "b"), device="cuda:1") as server:
        found = httpx.get(f"{server.url}/health").json()["models"]["level"]
        assert (found["device"], found["note"]) == ("cuda:1", "")
        assert found["operators"] == {"CUDAExecutionProvider": 8, "CPUExecutionProvider": 1}


class NotForStreams(runtimes.OnCuda):
    """CUDA runs the model for whole recordings, but not its streaming graph."""

    def run(self, *args):
        if self.on_cuda and self.get_inputs()[0].name == "samples":
            self._drop("CUDNN_STATUS_EXECUTION_FAILED")
        return super().run(*args)


def test_the_graph_for_streams_is_told_apart_and_ends_the_start_as_well(tmp_path, monkeypatch):
    runtimes.use(monkeypatch, NotForStreams)
    folder = bundles.make(tmp_path / "b", streams=True)
    with serving.serving(folder, device="auto") as server:
        found = httpx.get(f"{server.url}/health").json()["models"]["level"]
        assert (found["device"], found["streams"]["device"]) == ("cuda:0", "cpu")
        assert found["streams"]["note"] == runtimes.BROKEN[runtimes.FailsToRun].format(file="stream.onnx")
        told = httpx.get(f"{server.url}/metrics").text
        for file, device in (("model.onnx", "cuda:0"), ("stream.onnx", "cpu")):
            assert f'asked="auto",device="{device}",file="{file}"' in told
    before = set(threading.enumerate())
    with refused("device-unavailable"):
        registry.load({"level": folder}, BundleOptions(device="cuda"))
    assert set(threading.enumerate()) <= before, "the model that was loaded is closed"
