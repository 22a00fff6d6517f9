"""Devices: one that is asked for is used or refused, ``auto`` says what it took and why, and no CPU is silent."""

import ast
import re
import sys
from pathlib import Path

import bundles
import numpy as np
import onnxruntime
import pytest
import runtimes
import torch
from refusals import refused

import sbkit
from sbkit.export import layout
from sbkit.infer import backends
from sbkit.infer.device import DeviceChoice
from sbkit.infer.engine import Engine
from sbkit.infer.onnx_session import Interface
from sbkit.infer.stream_engine import StreamEngine

ON_THE_CPU = ("cpu", "CPUExecutionProvider")


def where(engine):
    return engine.running.device, engine.running.provider


# ---------------------------------------------------------------- ONNX Runtime


@pytest.mark.parametrize("kind", [Engine, StreamEngine])
@pytest.mark.parametrize("wanted", ["cuda", "cuda:1"])
def test_cuda_on_a_cpu_runtime_is_refused(bundle, kind, wanted):
    assert "CUDAExecutionProvider" not in onnxruntime.get_available_providers()
    with refused("device-unavailable", wording=False):
        kind(bundle, device=wanted)


def test_auto_on_a_cpu_runtime_notes_the_reason(bundle):
    with Engine(bundle, device="auto") as engine:
        assert (where(engine), engine.running.requested) == (ON_THE_CPU, "auto")
        assert "no CUDA" in engine.running.note and "requested: auto" in str(engine.running)
    with Engine(bundle, device="cpu") as engine:
        assert engine.running.note == "" and "requested" not in str(engine.running)


@pytest.mark.parametrize("runtime", runtimes.BROKEN)
@pytest.mark.parametrize("wanted", ["cuda", "cuda:2"])
def test_cuda_that_cannot_be_used_is_refused_with_the_reason(bundle, monkeypatch, runtime, wanted):
    preloaded = runtimes.use(monkeypatch, runtime)
    with refused("device-unavailable") as error:
        Engine(bundle, device=wanted)
    assert error.value.message == f"{wanted} was requested, but {runtimes.BROKEN[runtime].format(file='model.onnx')}"
    assert preloaded, "the CUDA libraries are loaded before the session is made"


@pytest.mark.parametrize("runtime", runtimes.BROKEN)
def test_auto_falls_back_to_the_cpu_with_a_reason(bundle, monkeypatch, runtime):
    runtimes.use(monkeypatch, runtime)
    with Engine(bundle, device="auto") as engine:
        assert (where(engine), engine.running.requested) == (ON_THE_CPU, "auto")
        assert engine.running.note == runtimes.BROKEN[runtime].format(file="model.onnx")
        assert engine.running.note in str(engine.running)
        assert engine.fault is None
        [scores] = engine.run([bundles.say("ab")])
        assert scores.argmax(-1).tolist() == [*bundles.spell("ab"), 0]


@pytest.mark.parametrize("wanted, note", [("cuda:1", ""), ("auto", "a test inference on CUDA succeeded")])
@pytest.mark.parametrize("kind, runtime", [
    (Engine, runtimes.OnCuda), (Engine, runtimes.Silent), (StreamEngine, runtimes.OnCuda)])
def test_cuda_that_works_is_used(bundle, monkeypatch, kind, runtime, wanted, note):
    runtimes.use(monkeypatch, runtime)
    with kind(bundle, device=wanted) as engine:
        running = engine.running
        assert where(engine) == (wanted if wanted != "auto" else "cuda:0", "CUDAExecutionProvider")
        assert running.note == note
        assert ("with 8 of 9 operators" in str(running)) == (runtime is runtimes.OnCuda)
    (provider, options), spare = runtime.asked
    assert (provider, spare) == ("CUDAExecutionProvider", "CPUExecutionProvider")
    assert options == {"device_id": "1" if wanted == "cuda:1" else "0", "use_tf32": "0",
                       "cudnn_conv_algo_search": "HEURISTIC"}


def test_tf32_that_cannot_be_turned_off_is_noted(bundle, monkeypatch):
    runtimes.use(monkeypatch, runtimes.OnCuda)
    monkeypatch.setattr(runtimes.OnCuda, "ignored", ("use_tf32",))
    with Engine(bundle, device="cuda") as engine:
        assert "computes with TF32" in engine.running.note


def test_a_device_that_fails_later_is_a_fault(bundle, monkeypatch):
    """A device that fails later is a fault of the engine, not a slower answer."""
    runtimes.use(monkeypatch, runtimes.OnCuda)
    with Engine(bundle, device="cuda") as engine:
        session = engine.backend._session
        monkeypatch.setattr(runtimes.OnCuda, "run", lambda self, *_: self._drop("CUDA error: an illegal memory access"))
        with pytest.raises(RuntimeError, match="illegal"):
            engine.run([bundles.say("a")])
        assert session.on_cuda and engine.fault == "CUDA error: an illegal memory access"


def test_a_damaged_file_is_not_taken_for_a_broken_device(tmp_path, monkeypatch):
    runtimes.use(monkeypatch, runtimes.OnCuda)
    folder = bundles.make(tmp_path / "b")
    path = folder / "model.onnx"
    path.write_bytes(b"\xff" * path.stat().st_size)
    with refused("damaged-bundle", wording=False):
        Engine(folder, device="auto")


# ---------------------------------------------------------------- 8 bits


@pytest.fixture(scope="module")
def eight_bits(tmp_path_factory):
    return bundles.make(tmp_path_factory.mktemp("bundle") / "b", models={"int8": "model.onnx"})


def test_int8_is_refused_on_cuda(eight_bits, monkeypatch):
    runtimes.use(monkeypatch, runtimes.OnCuda)
    with refused("conflicting-options"):
        Engine(eight_bits, device="cuda:1")


def test_int8_with_auto_runs_on_the_cpu_with_a_reason(eight_bits, monkeypatch):
    runtimes.use(monkeypatch, runtimes.OnCuda)
    with Engine(eight_bits, device="auto") as engine:
        assert runtimes.OnCuda.asked == ["CPUExecutionProvider"]
        assert (where(engine), engine.running.requested) == (ON_THE_CPU, "auto")
        assert (engine.running.model, engine.running.note) == ("int8", "8-bit products run only on the CPU")


# ---------------------------------------------------------------- packages


@pytest.mark.parametrize("wanted", ["cpu", "cuda", "auto"])
@pytest.mark.parametrize("names", [("onnxruntime", "onnxruntime-gpu"), ("onnxruntime-gpu", "onnxruntime-openvino")])
def test_two_builds_of_onnxruntime_are_refused(bundle, monkeypatch, tmp_path, names, wanted):
    monkeypatch.setattr(sys, "path", [str(runtimes.install(tmp_path, *names)), *sys.path])
    with refused("two-onnxruntimes"):
        Engine(bundle, device=wanted)


def test_a_build_in_another_folder_is_accepted(bundle, monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "path", [*sys.path, str(runtimes.install(tmp_path, "onnxruntime-gpu"))])
    with Engine(bundle, device="cpu") as engine:
        assert where(engine) == ON_THE_CPU


def test_an_incomplete_onnxruntime_is_reported(bundle, monkeypatch):
    monkeypatch.delattr(onnxruntime, "InferenceSession")
    with refused("broken-package"):
        Engine(bundle, device="cpu")


# ---------------------------------------------------------------- torch


@pytest.fixture
def a_card(monkeypatch):
    """torch believes in one card, which isn't there."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)


def absent(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.mark.parametrize("built, words", [
    (None, r"this torch \(2\..*\) was built without CUDA"), ("13.0", "torch 2.* sees no CUDA device")])
def test_torch_without_a_gpu_refuses_it_and_auto_says_why(bundle, monkeypatch, built, words):
    absent(monkeypatch)
    monkeypatch.setattr(torch.version, "cuda", built)
    with refused("device-unavailable", wording=False):
        Engine(bundle, model="torch", device="cuda")
    with Engine(bundle, model="torch", device="auto") as engine:
        assert where(engine) == ("cpu", "torch.export")
        assert re.match(words, engine.running.note)


def test_torch_refuses_a_gpu_beyond_those_that_it_sees(bundle, a_card):
    with refused("device-unavailable", wording=False):
        Engine(bundle, model="torch", device="cuda:1")


def test_a_gpu_that_torch_cannot_use_is_refused_and_auto_says_why(bundle, a_card):
    """It is on the list, but the first tensor that is sent there fails."""
    with refused("device-unavailable", wording=False):
        Engine(bundle, model="torch", device="cuda")
    with Engine(bundle, model="torch", device="auto") as engine:
        assert where(engine) == ("cpu", "torch.export") and engine.fault is None
        assert "a test inference of model.pt2 failed on the GPU" in engine.running.note
        [scores] = engine.run([bundles.say("ab")])
        assert scores.argmax(-1).tolist() == [*bundles.spell("ab"), 0]


def torch_backend(bundle, wanted):
    example = {"signals": np.zeros((1, bundles.FRAME), np.float32), "lengths": np.array([bundles.FRAME])}
    return backends.open_graph(bundle / "model.pt2", "torch", DeviceChoice.parse(wanted), None,
                               Interface(example, layout.OUTPUTS))


class Stays(torch.nn.Module):
    """A program that computes where it always did, wherever it is moved."""

    def module(self):
        return self

    def forward(self, signals, lengths):
        return torch.zeros(1, 2, len(bundles.PIECES)), torch.tensor([2])


def test_a_program_that_stays_on_the_cpu_is_refused(bundle, monkeypatch):
    monkeypatch.setattr(backends, "torch_device", lambda gpu: torch.device("cpu" if gpu is None else "meta"))
    monkeypatch.setattr(backends, "move_program", lambda program, _: Stays())
    with refused("device-unavailable", wording=False):
        torch_backend(bundle, "cuda")


@pytest.fixture
def there():
    """A device that isn't the one that programs are traced on, where there is no other."""
    return torch.device("meta")


def test_a_program_runs_on_another_device_than_it_was_traced_on(bundle, there):
    module = backends.move_program(torch.export.load(bundle / "model.pt2"), there).module()
    found = module(torch.zeros(3, 9 * bundles.FRAME, device=there), torch.zeros(3, dtype=torch.long, device=there))
    assert [(each.device.type, list(each.shape)) for each in found] == [
        ("meta", [3, 10, len(bundles.PIECES)]), ("meta", [3])]


def test_a_program_that_cannot_be_moved_is_reported(bundle, a_card, monkeypatch):
    monkeypatch.setattr("torch.export.passes.move_to_device_pass", lambda program, _: program)
    with refused("device-unavailable", wording=False):
        torch_backend(bundle, "cuda")


# ---------------------------------------------------------------- one way for all


def test_a_graph_with_other_inputs_or_outputs_is_refused(bundle):
    interface = Interface({"signals": bundles.say("a")[None]}, ["log_probs"])
    with refused("mismatched-bundle"):
        backends.open_graph(bundle / "model.onnx", "onnx", DeviceChoice.parse("cpu"), None, interface)


@pytest.mark.parametrize("what, place", [
    ("InferenceSession", "onnx_session.py"), ("get_available_providers", "onnx_session.py"),
    ("export.load", "backends.py"), ("cuda.is_available", "backends.py")])
def test_graphs_are_opened_in_one_place(what, place):
    """So a companion, a codec or whatever comes later has the same truth about its device."""
    home = Path(sbkit.__file__).parent
    found = {path.relative_to(home).as_posix() for room in ("infer", "serve") for path in (home / room).rglob("*.py")
             if any(ast.unparse(node).endswith(f".{what}") for node in ast.walk(ast.parse(path.read_text("utf-8")))
                    if isinstance(node, ast.Attribute))}
    assert found == {f"infer/{place}"}


@pytest.mark.parametrize("wrong", ["gpu", "cuda:", "cpu:0", "cuda:x", ""])
def test_device_names_are_parsed_strictly(wrong):
    with refused("bad-value"):
        DeviceChoice.parse(wrong)
