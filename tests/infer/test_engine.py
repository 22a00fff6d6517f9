"""The engine: right answers to many threads at once, one thread for the model."""

import subprocess
import sys
import threading
import weakref
import zipfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import bundles
import numpy as np
import pytest
import torch
from refusals import refused

import sbkit.export.graph  # noqa: F401  with speechbrain's lazy modules: conftest puts them away before hypothesis looks
from sbkit.infer import backends
from sbkit.infer.bundle_engine import Worker
from sbkit.infer.device import OutOfMemory
from sbkit.infer.engine import Engine


def labels(scores):
    return scores.argmax(-1).tolist()


@pytest.mark.parametrize("model", ["onnx", "torch"])
def test_32_threads_get_their_own_results(bundle, model):
    """Each thread asks many times, with batches of its own; no answer is another's."""
    with Engine(bundle, model=model, device="cpu", threads=1) as engine:
        begin = threading.Barrier(32)

        def ask(seed):
            rng = np.random.default_rng(seed)
            begin.wait()
            for _ in range(10):
                said = [rng.integers(0, len(bundles.PIECES), rng.integers(1, 30)).tolist()
                        for _ in range(rng.integers(1, 4))]
                found = engine.run([bundles.voiced(ids) for ids in said])
                # One frame more than levels: the one that begins where the signal ends.
                assert [labels(each) for each in found] == [[*ids, 0] for ids in said]
            return threading.get_ident()

        with ThreadPoolExecutor(32) as pool:
            idents = set(pool.map(ask, range(32)))
        assert len(idents) == 32


@pytest.mark.parametrize("model", ["onnx", "torch"])
def test_everything_runs_in_one_thread(bundle, model, monkeypatch):
    """Loading, warm-up and all runs: the same thread, and not the caller's."""
    seen = []
    kind = backends.Onnx if model == "onnx" else backends.Torch
    init, call = kind.__init__, kind.__call__
    monkeypatch.setattr(kind, "__init__", lambda self, *a: (seen.append(threading.get_ident()), init(self, *a))[1])
    monkeypatch.setattr(kind, "__call__", lambda self, *a: (seen.append(threading.get_ident()), call(self, *a))[1])
    with Engine(bundle, model=model, device="cpu") as engine:
        loaded = len(seen)
        assert loaded >= 2, "warmed up before anybody asks"
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda _: engine.run([bundles.say("ab")]), range(8)))
    assert len(seen) == loaded + 8
    assert len(set(seen)) == 1 and threading.get_ident() not in seen


def test_a_model_whose_outputs_depend_on_the_others_in_a_batch_runs_each_alone(tmp_path, monkeypatch):
    rows, run_batch = [], Engine.run_batch
    monkeypatch.setattr(Engine, "run_batch", lambda self, batch: rows.append(len(batch)) or run_batch(self, batch))
    with Engine(bundles.make(tmp_path / "b", batching=False), device="cpu") as engine:
        assert len(engine.run([bundles.say("a"), bundles.say("bc")])) == 2 and rows[-2:] == [1, 1]


def test_closing_ends_the_thread_and_refuses_further_calls(bundle):
    engine = Engine(bundle, device="cpu")
    thread = engine.worker.submit(threading.current_thread).result()
    engine.close()
    assert not thread.is_alive()
    with refused("model-closed"):
        engine.run([bundles.say("a")])


@pytest.mark.long
@pytest.mark.slow
def test_a_process_can_load_and_train_after_a_program_was_closed(bundle):
    """torch 2.11 crashes there if the thread that was the first to use its fake tensors has ended."""
    code = f"""import torch; from sbkit.infer.engine import Engine
for _ in range(2): Engine({str(bundle)!r}, 'torch', 'cpu').close()
torch.nn.Linear(4, 4)(torch.ones(2, 4)).sum().backward()"""
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_calls_after_a_scripts_last_line_are_answered(bundle):
    code = f"""import concurrent.futures, bundles; from sbkit.infer.engine import Engine
engine, pool = Engine({str(bundle)!r}, device='cpu'), concurrent.futures.ThreadPoolExecutor(1)
for _ in range(2): pool.submit(lambda: print(len(engine.run([bundles.say('a')]))))"""
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parents[1])
    assert said.stdout == "1\n1\n", said.stderr


def test_an_engine_can_be_closed_from_its_own_thread(bundle):
    engine = Engine(bundle, device="cpu")
    engine.worker.submit(engine.close).result(10)
    with refused("model-closed"):
        engine.run([bundles.say("a")])


def test_a_garbage_collected_engine_ends_its_thread(bundle):
    engine = Engine(bundle, device="cpu")
    thread = engine.worker.submit(threading.current_thread).result()
    del engine
    thread.join(5)
    assert not thread.is_alive()


def test_a_cancelled_call_is_not_run(bundle):
    with Engine(bundle, device="cpu") as engine:
        hold = threading.Event()
        engine.worker.submit(hold.wait)
        first, second = (engine.submit([bundles.say(word)]) for word in ("a", "b"))
        assert second.cancel()
        hold.set()
        assert labels(first.result()[0])[0] == 3


def test_invalid_signals_raise_in_submit(bundle):
    with Engine(bundle, device="cpu") as engine:
        for signal in (np.zeros(100), np.zeros((2, 100), np.float32), np.zeros(0, np.float32)):
            with pytest.raises(ValueError, match="float32"):
                engine.run([signal])


# ---------------------------------------------------------------- a GPU


@pytest.mark.gpu(values=True)
@pytest.mark.parametrize("compile", [None, "reduce-overhead"])
def test_a_torch_program_has_the_same_output_on_a_gpu(bundle, compile):
    signals = [bundles.say("a word"), bundles.say("and another")]
    with Engine(bundle, model="torch", device="cpu") as here, Engine(
            bundle, model="torch", device="cuda", compile=compile, buckets=[(2, 2.0)] if compile else None) as there:
        assert there.running.device == "cuda:0"
        for mine, theirs in zip(here.run(signals), there.run(signals), strict=True):
            np.testing.assert_allclose(theirs, mine, atol=1e-3)


def test_no_run_follows_a_device_fault(bundle):
    """After a device-side assert the CUDA context is gone: what comes after must not look like bad luck."""
    with Engine(bundle, device="cpu") as engine:
        def broken(*_):
            raise RuntimeError("CUDA error: device-side assert triggered\nmore")

        engine.backend, working = broken, engine.backend
        with pytest.raises(RuntimeError):
            engine.run([bundles.say("a")])
        engine.backend = working
        assert engine.fault == "CUDA error: device-side assert triggered"
        with refused("device-fault"):
            engine.run([bundles.say("a")])


class OnnxRuntimesOwn(Exception):
    """An error as ONNX Runtime raises it, which is no RuntimeError."""

    __module__ = "onnxruntime.capi.onnxruntime_pybind11_state"


@pytest.mark.parametrize("error", [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79 GiB"),
    RuntimeError("CUDA error: out of memory"), RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED"), MemoryError(),
    OnnxRuntimesOwn("[ONNXRuntimeError] : 6 : RUNTIME_EXCEPTION : Failed to allocate memory for requested buffer")])
def test_out_of_memory_fails_one_run_and_frees_its_memory(bundle, error):
    freed = []
    with Engine(bundle, device="cpu") as engine:
        working = engine.backend

        class Full:
            running, free = working.running, lambda self: freed.append(gone() is None)

            def __call__(self, *inputs):
                nonlocal gone
                computed = np.zeros(1)[:]
                gone = weakref.ref(computed)
                raise error

        engine.backend, gone = Full(), None
        with refused("out-of-memory", kind=OutOfMemory):
            engine.run([bundles.say("a")])
        assert freed == [True], "what was computed so far is released before cached memory is"
        engine.backend = working
        assert engine.fault is None and len(engine.run([bundles.say("a")])) == 1


# ---------------------------------------------------------------- compiled models


@pytest.mark.gpu
def test_cuda_graphs_are_replayed_in_each_worker_whatever_else_compiled(monkeypatch):
    """torch gives their state to one thread of a process, and each worker makes its own."""
    replays, replay = Counter(), torch.cuda.CUDAGraph.replay

    def counted(graph):
        replays[threading.current_thread().name] += 1
        replay(graph)

    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", counted)
    signal = torch.ones(4, 8, device="cuda")
    torch.compile(lambda x: x * 2 + 1, mode="reduce-overhead")(signal)
    for name, size in (("first", 8), ("second", 16)):  # one size would be compiled once, for both
        worker = Worker(name)
        module = torch.nn.Linear(8, size).cuda().requires_grad_(False)
        compiled = worker.submit(backends.compile_module, module, "reduce-overhead").result()
        for _ in range(3):
            worker.submit(compiled, signal).result()
        worker.close()
    assert set(replays) == {"first", "second"}


def test_a_compiled_model_is_warmed_up_in_every_bucket_and_batches_are_padded_to_one(bundle, monkeypatch):
    shapes = []
    call = backends.Torch.__call__

    def recorded(self, signals, lengths):
        shapes.append(signals.shape)
        return call(self, signals, lengths)

    monkeypatch.setattr(backends.Torch, "__call__", recorded)
    monkeypatch.setattr(backends, "compile_module", lambda module, mode: module)
    buckets = [(1, 1.0), (4, 1.0), (1, 3.0)]
    with Engine(bundle, model="torch", device="cpu", compile="default", buckets=buckets) as engine:
        assert sorted(shapes) == [(1, 16000), (1, 48000), (4, 16000)]
        shapes.clear()
        found = engine.run([bundles.say("ab"), bundles.say("b")])
        assert shapes == [(4, 16000)] and len(found) == 2
        assert labels(found[1]) == [*bundles.spell("b"), 0]
        engine.run([bundles.voiced([5] * 30)])
        assert shapes[-1] == (1, 48000)
        with refused("audio-too-long"):
            engine.run([bundles.voiced([5] * 100)])


@pytest.mark.long
@pytest.mark.slow
def test_a_compiled_model_answers_many_threads(bundle):
    with Engine(bundle, model="torch", device="cpu", compile="default", buckets=[(2, 1.0)], threads=1) as engine:
        with ThreadPoolExecutor(8) as pool:
            found = list(pool.map(lambda i: labels(engine.run([bundles.voiced([i + 1] * 5)])[0]), range(16)))
    assert found == [[i + 1] * 5 + [0] for i in range(16)]


@pytest.mark.parametrize("threads, said, expected", [(None, None, 1), (None, "2", 2), (2, None, 2)])
def test_threads_default_to_the_containers_cpu_quota(bundle, monkeypatch, threads, said, expected):
    monkeypatch.setattr("sbkit.system.cores.quotas", lambda: [1.5])
    monkeypatch.setattr("os.sched_getaffinity", lambda process: {0, 1, 2, 3}, raising=False)
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if said:
        monkeypatch.setenv("OMP_NUM_THREADS", said)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        with Engine(bundle, model="torch", device="cpu", threads=threads) as engine:
            assert engine.running.threads == expected
    finally:
        torch.set_num_threads(before)
    with Engine(bundle, model="onnx", device="cpu", threads=threads) as engine:
        assert engine.running.threads == expected


# ---------------------------------------------------------------- files


def test_a_graph_of_another_width_is_refused_at_start(tmp_path):
    folder = bundles.make(tmp_path / "b", width=len(bundles.PIECES) + 4)
    with refused("mismatched-bundle"):
        Engine(folder)


def test_a_wrong_width_at_run_time_is_refused(bundle):
    with Engine(bundle, device="cpu") as engine:
        wide = engine.backend
        engine.backend = lambda *a: (np.zeros((1, 3, 99), np.float32), np.array([3]))
        with refused("mismatched-bundle"):
            engine.run([bundles.say("a")])
        engine.backend = wide


def test_a_missing_or_truncated_file_is_reported_before_loading(tmp_path):
    folder = bundles.make(tmp_path / "b")
    data = (folder / "model.onnx").read_bytes()
    (folder / "model.onnx").write_bytes(data[:-10])
    with refused("damaged-bundle"):
        Engine(folder)
    (folder / "model.onnx").unlink()
    with refused("damaged-bundle"):
        Engine(folder)


@pytest.mark.parametrize("entry, payload, code", [
    ("m/data/sample_inputs/model.pt", b"\x80\x02.", "pickle-in-bundle"),
    ("m/weights/model.pt", b"x", "pickle-in-bundle"), ("m/data/constants/custom_obj_0", b"x", "pickle-in-bundle"),
    ("m/data/weights/model_weights_config.json", b'{"config": {"w": {"use_pickle": true}}}', "pickle-in-bundle"),
    ("m/data/weights/model_weights_config.json", b"[1]", "damaged-bundle"),
    ("m/extra/code.py", b"x", "pickle-in-bundle"),
])
def test_programs_with_pickles_are_refused(tmp_path, entry, payload, code):
    path = tmp_path / "model.pt2"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(entry, payload)
    with refused(code, file=path):
        backends.check_no_pickles(path)


def test_a_program_of_this_torch_has_no_pickle_in_it(bundle):
    backends.check_no_pickles(bundle / "model.pt2")
    with zipfile.ZipFile(bundle / "model.pt2") as archive:
        assert not [name for name in archive.namelist() if archive.read(name)[:2] in (b"\x80\x02", b"\x80\x04", b"PK")]


@pytest.mark.parametrize("options, code", [
    ({"model": "int8"}, "missing-format"), ({"model": "tflite"}, "bad-value"),
    ({"compile": "default"}, "conflicting-options"),
])
def test_missing_formats_and_wrong_options_are_refused(bundle, options, code):
    with refused(code):
        Engine(bundle, **options)
