"""The engine: right answers to many threads at once, one thread for the model, no silent other device."""

import subprocess
import sys
import textwrap
import threading
import zipfile
from concurrent.futures import ThreadPoolExecutor

import bundles
import numpy as np
import onnxruntime
import pytest
import torch

import sbkit.export.graph  # noqa: F401  with speechbrain's lazy modules: conftest puts them away before hypothesis looks
from sbkit.errors import SbkitError
from sbkit.infer import backends, device
from sbkit.infer.engine import Engine
from sbkit.infer.worker import Worker


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    return bundles.make(tmp_path_factory.mktemp("bundle") / "b", torch_too=True)


def labels(scores):
    return scores.argmax(-1).tolist()


@pytest.mark.parametrize("model", ["onnx", "torch"])
def test_32_threads_at_once_each_get_their_own_answer(bundle, model):
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


def test_closing_ends_the_thread_and_refuses_further_calls(bundle):
    engine = Engine(bundle, device="cpu")
    thread = engine._worker._thread
    engine.close()
    assert not thread.is_alive()
    with pytest.raises(RuntimeError, match="closed"):
        engine.run([bundles.say("a")])


def test_an_engine_that_is_forgotten_ends_its_thread(bundle):
    engine = Engine(bundle, device="cpu")
    thread = engine._worker._thread
    del engine
    thread.join(5)
    assert not thread.is_alive()


def test_a_cancelled_call_is_not_run(bundle):
    with Engine(bundle, device="cpu") as engine:
        hold = threading.Event()
        engine._worker.submit(hold.wait)
        first, second = (engine.submit([bundles.say(word)]) for word in ("a", "b"))
        assert second.cancel()
        hold.set()
        assert labels(first.result()[0])[0] == 3


def test_signals_of_the_wrong_kind_are_refused_where_they_are_given(bundle):
    with Engine(bundle, device="cpu") as engine:
        for signal in (np.zeros(100), np.zeros((2, 100), np.float32), np.zeros(0, np.float32)):
            with pytest.raises(ValueError, match="float32"):
                engine.run([signal])


# ---------------------------------------------------------------- devices


def test_cuda_on_a_cpu_runtime_is_refused(bundle):
    assert "CUDAExecutionProvider" not in onnxruntime.get_available_providers()
    for wanted in ("cuda", "cuda:1"):
        with pytest.raises(SbkitError, match=f"{wanted} was requested.*no CUDA.*onnxruntime-gpu"):
            Engine(bundle, device=wanted)


def test_auto_on_a_cpu_runtime_says_so(bundle):
    with Engine(bundle, device="auto") as engine:
        running = engine.running
        assert (running.asked, running.device, running.provider) == ("auto", "cpu", "CPUExecutionProvider")
        assert "no CUDA" in running.note and "requested: auto" in str(running)
    with Engine(bundle, device="cpu") as engine:
        assert engine.running.note == "" and "requested" not in str(engine.running)


class Dropping(onnxruntime.InferenceSession):
    """As ONNX Runtime with missing CUDA libraries: the provider is on the list, the session runs on the CPU."""

    asked = None

    def __init__(self, path, options, providers, enable_fallback=1):
        Dropping.asked = providers
        super().__init__(path, options, providers=["CPUExecutionProvider"])


class Cuda(onnxruntime.InferenceSession):
    """As ONNX Runtime on a card: it says that it took CUDA, with the options that it was given and its own defaults."""

    asked = ignored = ()

    def __init__(self, path, options, providers, enable_fallback=1):
        assert enable_fallback == 0
        Cuda.asked = providers
        super().__init__(path, options, providers=["CPUExecutionProvider"])

    def get_providers(self):
        return [each if isinstance(each, str) else each[0] for each in self.asked]

    def get_provider_options(self):
        given = {name: value for name, value in self.asked[0][1].items() if name not in self.ignored}
        return {"CUDAExecutionProvider": {"use_tf32": "1", **given}, "CPUExecutionProvider": {}}


@pytest.fixture
def claims_cuda(monkeypatch):
    providers = ["CUDAExecutionProvider", "CPUExecutionProvider"]
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: providers)
    preloaded = []
    monkeypatch.setattr(onnxruntime, "preload_dlls", lambda: preloaded.append(1), raising=False)
    return preloaded


def test_a_session_that_dropped_cuda_in_silence_is_refused(bundle, monkeypatch, claims_cuda):
    monkeypatch.setattr(onnxruntime, "InferenceSession", Dropping)
    with pytest.raises(SbkitError, match=r"cuda:2 was requested, but onnxruntime fell back to CPUExecutionProvider"):
        Engine(bundle, device="cuda:2")
    assert Dropping.asked[0][0] == "CUDAExecutionProvider" and Dropping.asked[0][1]["device_id"] == "2"
    assert claims_cuda, "the CUDA libraries are loaded before the session is made"


@pytest.mark.parametrize("ignored, told", [((), ""), (("use_tf32",), "computes with TF32")])
def test_a_session_on_cuda_is_told_not_to_round_to_tf32_and_read_back(bundle, monkeypatch, claims_cuda, ignored, told):
    monkeypatch.setattr(onnxruntime, "InferenceSession", Cuda)
    monkeypatch.setattr(Cuda, "ignored", ignored)
    with Engine(bundle, device="cuda:1") as engine:
        running = engine.running
        assert (running.device, running.provider) == ("cuda:1", "CUDAExecutionProvider")
        assert told in running.note and bool(told) == bool(running.note)
    (provider, options), spare = Cuda.asked
    assert (provider, spare) == ("CUDAExecutionProvider", "CPUExecutionProvider")
    assert options == {"device_id": "1", "use_tf32": "0", "cudnn_conv_algo_search": "HEURISTIC"}


@pytest.fixture(scope="module")
def eight_bits(tmp_path_factory):
    return bundles.make(tmp_path_factory.mktemp("bundle") / "b", models={"int8": "model.onnx"})


def test_eight_bits_are_refused_on_a_gpu_where_their_products_would_run_on_the_cpu(eight_bits, claims_cuda):
    with pytest.raises(SbkitError, match=r"cuda:1 was requested.*8-bit products only on the CPU; use --model onnx"):
        Engine(eight_bits, device="cuda:1")


def test_eight_bits_by_themselves_go_to_the_cpu_and_say_why(eight_bits, monkeypatch, claims_cuda):
    monkeypatch.setattr(onnxruntime, "InferenceSession", Dropping)
    with Engine(eight_bits, device="auto") as engine:
        assert Dropping.asked == ["CPUExecutionProvider"]
        assert (engine.running.asked, engine.running.device) == ("auto", "cpu")
        assert engine.running.note == "8-bit products run only on the CPU"


def test_auto_tells_that_cuda_was_dropped(bundle, monkeypatch, claims_cuda):
    monkeypatch.setattr(onnxruntime, "InferenceSession", Dropping)
    with Engine(bundle, device="auto") as engine:
        assert engine.running.device == "cpu" and "fell back to CPUExecutionProvider" in engine.running.note


def test_cuda_that_fails_at_start_is_an_error_when_asked_for_and_a_note_otherwise(bundle, monkeypatch, claims_cuda):
    session = onnxruntime.InferenceSession

    def failing(path, options, providers, enable_fallback=1):
        assert enable_fallback == 0, "ONNX Runtime must not choose another provider by itself"
        if providers != ["CPUExecutionProvider"]:
            raise RuntimeError("CUDA failure 35: driver is too old\nand more")
        return session(path, options, providers=providers)

    monkeypatch.setattr(onnxruntime, "InferenceSession", failing)
    with pytest.raises(SbkitError, match=r"cuda can't be used: CUDA failure 35: driver is too old$"):
        Engine(bundle, device="cuda")
    with Engine(bundle, device="auto") as engine:
        assert "driver is too old" in engine.running.note


def test_both_builds_of_onnxruntime_are_an_error_that_says_what_to_remove(bundle, monkeypatch):
    monkeypatch.setattr(device.metadata, "version", lambda name: "1.0")
    with pytest.raises(SbkitError, match="pip uninstall -y onnxruntime onnxruntime-gpu"):
        Engine(bundle, device="cpu")


def test_torch_refuses_a_gpu_that_is_not_there(bundle):
    if torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(SbkitError, match=r"cuda was requested.*sees 0 CUDA devices"):
        Engine(bundle, model="torch", device="cuda")


@pytest.fixture
def on_meta(monkeypatch):
    """A device that isn't the one that programs are traced on, where there is no other."""
    monkeypatch.setattr(backends, "_torch_device", lambda *_: (torch.device("meta"), ""))
    return torch.zeros(3, 9 * bundles.FRAME, device="meta"), torch.zeros(3, dtype=torch.long, device="meta")


def test_a_program_runs_on_another_device_than_it_was_traced_on(bundle, on_meta):
    backend = backends.Torch(bundle / "model.pt2", "torch", device.DeviceChoice.parse("cuda"), None, Worker(), None)
    assert backend.running.device == "meta"
    assert [(each.device.type, list(each.shape)) for each in backend._module(*on_meta)] == [
        ("meta", [3, 10, len(bundles.PIECES)]), ("meta", [3])]


def test_a_torch_that_leaves_parts_behind_says_what_is_needed(bundle, on_meta, monkeypatch):
    monkeypatch.setattr("torch.export.passes.move_to_device_pass", lambda program, _: program)
    with pytest.raises(SbkitError, match=r"torch 2\..* leaves part of the model on cpu; pip install 'torch>=2\.9"):
        backends.Torch(bundle / "model.pt2", "torch", device.DeviceChoice.parse("cuda"), None, Worker(), None)


@pytest.mark.gpu
@pytest.mark.parametrize("compile", [None, "reduce-overhead"])
def test_a_program_says_the_same_on_a_card(bundle, compile):
    signals = [bundles.say("a word"), bundles.say("and another")]
    with Engine(bundle, model="torch", device="cpu") as here, Engine(
            bundle, model="torch", device="cuda", compile=compile, buckets=[(2, 2.0)] if compile else None) as there:
        assert there.running.device == "cuda:0"
        for mine, theirs in zip(here.run(signals), there.run(signals), strict=True):
            np.testing.assert_allclose(theirs, mine, atol=1e-3)


@pytest.mark.parametrize("wrong", ["gpu", "cuda:", "cpu:0", "cuda:x", ""])
def test_devices_are_read_exactly(wrong):
    with pytest.raises(SbkitError, match="there is no device"):
        device.DeviceChoice.parse(wrong)


def test_a_broken_device_is_remembered(bundle):
    """After a device-side assert the CUDA context is gone: what comes after must not look like bad luck."""
    with Engine(bundle, device="cpu") as engine:
        def broken(*_):
            raise RuntimeError("CUDA error: device-side assert triggered\nmore")

        engine._backend, working = broken, engine._backend
        with pytest.raises(RuntimeError):
            engine.run([bundles.say("a")])
        engine._backend = working
        assert engine.fault == "CUDA error: device-side assert triggered"
        with pytest.raises(SbkitError, match="failed earlier"):
            engine.run([bundles.say("a")])


# ---------------------------------------------------------------- compiled models


def test_cuda_graphs_live_in_the_worker_alone():
    """torch keeps their state in the thread that imports them first: reachable within it, and from nowhere else."""
    code = textwrap.dedent("""
        import sys
        from sbkit.infer.worker import Worker
        from sbkit.infer import backends

        worker = Worker()

        def import_first():
            import torch
            return backends.compiled(torch.nn.Identity(), "reduce-overhead", worker) is not None

        assert worker.submit(import_first).result()
        from torch._inductor import cudagraph_trees
        container = worker.submit(cudagraph_trees.get_container, 0).result()
        assert container is worker.submit(cudagraph_trees.get_container, 0).result()
        import torch
        if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13):
            try:
                cudagraph_trees.get_container(0)
            except (AssertionError, AttributeError):
                print("refused outside")
        else:
            print("refused outside")
    """)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert "refused outside" in done.stdout, done.stderr


def test_compiling_outside_of_the_worker_is_refused():
    worker = Worker()
    try:
        for mode in backends.COMPILE_MODES:
            with pytest.raises(SbkitError, match="outside the thread"):
                backends.compiled(torch.nn.Identity(), mode, worker)
    finally:
        worker.close()


def test_a_compiled_model_is_warmed_up_in_every_bucket_and_batches_are_padded_to_one(bundle, monkeypatch):
    shapes = []
    call = backends.Torch.__call__

    def recorded(self, signals, lengths):
        shapes.append(signals.shape)
        return call(self, signals, lengths)

    monkeypatch.setattr(backends.Torch, "__call__", recorded)
    monkeypatch.setattr(backends, "compiled", lambda module, mode, worker: module)
    buckets = [(1, 1.0), (4, 1.0), (1, 3.0)]
    with Engine(bundle, model="torch", device="cpu", compile="default", buckets=buckets) as engine:
        assert sorted(shapes) == [(1, 16000), (1, 48000), (4, 16000)]
        shapes.clear()
        found = engine.run([bundles.say("ab"), bundles.say("b")])
        assert shapes == [(4, 16000)] and len(found) == 2
        assert labels(found[1]) == [*bundles.spell("b"), 0]
        engine.run([bundles.voiced([5] * 30)])
        assert shapes[-1] == (1, 48000)
        with pytest.raises(SbkitError, match="fits no shape"):
            engine.run([bundles.voiced([5] * 100)])


@pytest.mark.slow
def test_a_compiled_model_answers_many_threads(bundle):
    with Engine(bundle, model="torch", device="cpu", compile="default", buckets=[(2, 1.0)], threads=1) as engine:
        with ThreadPoolExecutor(8) as pool:
            found = list(pool.map(lambda i: labels(engine.run([bundles.voiced([i + 1] * 5)])[0]), range(16)))
    assert found == [[i + 1] * 5 + [0] for i in range(16)]


@pytest.mark.parametrize("threads, said, expected", [(None, None, 1), (None, "2", 2), (2, None, 2)])
def test_a_containers_quota_is_kept_to_unless_somebody_says_otherwise(bundle, monkeypatch, threads, said, expected):
    monkeypatch.setattr("sbkit.system.cores._quotas", lambda: [1.5])
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
        assert engine.running.threads == (threads or 1)


def test_compile_is_for_torch(bundle):
    with pytest.raises(SbkitError, match="compile only works with the model torch"):
        Engine(bundle, compile="default")


# ---------------------------------------------------------------- files


def test_a_width_that_is_not_the_tables_is_refused_at_start(tmp_path):
    folder = bundles.make(tmp_path / "b", width=len(bundles.PIECES) + 4)
    with pytest.raises(SbkitError, match=r"34 scores per frame, but tokens.txt has 30 tokens"):
        Engine(folder)


def test_a_width_that_shows_only_when_it_runs_is_refused_too(bundle):
    with Engine(bundle, device="cpu") as engine:
        wide = engine._backend
        engine._backend = lambda *a: (np.zeros((1, 3, 99), np.float32), np.array([3]))
        with pytest.raises(SbkitError, match="99 scores per frame, but there are 30 tokens"):
            engine.run([bundles.say("a")])
        engine._backend = wide


def test_a_file_that_was_cut_off_or_is_missing_is_told_before_it_is_loaded(tmp_path):
    folder = bundles.make(tmp_path / "b")
    data = (folder / "model.onnx").read_bytes()
    (folder / "model.onnx").write_bytes(data[:-10])
    with pytest.raises(SbkitError, match=r"has \d+ bytes, but the export wrote"):
        Engine(folder)
    (folder / "model.onnx").unlink()
    with pytest.raises(SbkitError, match="is missing"):
        Engine(folder)


def test_a_damaged_model_of_the_right_size_is_a_plain_error(tmp_path):
    folder = bundles.make(tmp_path / "b")
    path = folder / "model.onnx"
    path.write_bytes(b"\xff" * path.stat().st_size)
    with pytest.raises(SbkitError, match="can't be loaded"):
        Engine(folder)


@pytest.mark.parametrize("entry, payload", [
    ("m/data/sample_inputs/model.pt", b"\x80\x02."), ("m/weights/model.pt", b"x"),
    ("m/data/constants/custom_obj_0", b"x"),
    ("m/data/weights/model_weights_config.json", b'{"config": {"w": {"use_pickle": true}}}'),
    ("m/data/weights/model_weights_config.json", b"[1]"), ("m/extra/code.py", b"x"),
])
def test_what_could_be_unpickled_is_never_read(tmp_path, entry, payload):
    path = tmp_path / "model.pt2"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(entry, payload)
    with pytest.raises(SbkitError):
        backends.refuse_pickles(path)


def test_a_program_of_this_torch_has_no_pickle_in_it(bundle):
    backends.refuse_pickles(bundle / "model.pt2")
    with zipfile.ZipFile(bundle / "model.pt2") as archive:
        assert not [name for name in archive.namelist() if archive.read(name)[:2] in (b"\x80\x02", b"\x80\x04", b"PK")]


def test_models_that_are_not_there_are_named(bundle):
    with pytest.raises(SbkitError, match=r"has no model int8.*onnx, torch"):
        Engine(bundle, model="int8")
    with pytest.raises(SbkitError, match="there is no model 'tflite'"):
        Engine(bundle, model="tflite")
