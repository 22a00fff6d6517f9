"""torch's own CUDA code on a card that computes nothing, each time in processes of its own."""

import importlib.util
import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
from torch.distributed import TCPStore

from sbkit.rehearsal.cards import CARDS
from sbkit.rehearsal.fake_gpu import environment
from sbkit.system.processes import torchrun_environment

LIBRARIES = Path(importlib.util.find_spec("torch").origin).parent / "lib"
pytestmark = [pytest.mark.slow,
              pytest.mark.skipif(not (LIBRARIES / "libtorch_cuda.so").exists() or platform.system() != "Linux",
                                 reason="needs Linux and a CUDA build of torch")]
START = "import json, os, torch\nfrom sbkit.rehearsal.fake_gpu import active, counters, errors, lacks\n"


@pytest.fixture
def run(server, tmp_path):
    """What a script prints as JSON, one answer after the other, of one process or of several ranks."""

    def run(code, card="H100", count=1, *, ranks=1, patience=120, expected=0, **variables):
        base = os.environ | {"TMPDIR": str(tmp_path)} | variables
        # As torchrun has it: outside of the ranks, of which the first may end while another still asks.
        store, jobs = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False), []
        for rank in range(ranks):
            place = torchrun_environment(rank, ranks, store.port) if ranks > 1 else {}
            place["TORCHELASTIC_USE_AGENT_STORE"] = "True"
            made = environment(CARDS[card], count, base=base | place, patience=patience)
            jobs.append((START + code, made, str(tmp_path / f"out{rank}"), str(tmp_path / f"err{rank}")))
        server.stdin.write(json.dumps(jobs) + "\n")
        server.stdin.flush()
        codes = json.loads(server.stdout.readline())
        assert codes == [expected] * ranks, "".join(Path(err).read_text() for *_, err in jobs)
        lines = [line for *_, out, _ in jobs for line in Path(out).read_text().splitlines()]
        return [json.loads(line) for line in lines if line.startswith(("{", "["))]

    return run


def test_the_card_is_the_one_that_was_asked_for_and_refuses_what_does_not_fit(run):
    [found] = run("""
card = torch.cuda.get_device_properties(1)
try: torch.empty(16 << 30, dtype=torch.uint8, device="cuda"); refused = ""
except torch.OutOfMemoryError as error: refused = str(error)
free, total = torch.cuda.mem_get_info()
kept = torch.empty(4 << 30, dtype=torch.uint8, device="cuda")
print(json.dumps([active(), torch.cuda.device_count(), card.total_memory, card.multi_processor_count,
                  [card.major, card.minor], refused, free < total, free - torch.cuda.mem_get_info()[0]]))
""", "T4", 2)
    card = CARDS["T4"]
    assert found[:5] == [True, 2, card.memory, card.multiprocessors, list(card.capability)]
    assert "Tried to allocate 16.00 GiB" in found[5] and found[6:] == [True, 4 << 30]


@pytest.mark.parametrize(("listed", "count"), [("", 0), ("1", 1), ("0,3", 2), ("-1", 0)])
def test_cards_can_be_hidden_as_real_ones_are(run, listed, count):
    assert run("print([torch.cuda.device_count()])", "L4", 4, CUDA_VISIBLE_DEVICES=listed) == [[count]]


def test_copies_are_made_and_kernels_are_counted_but_change_nothing(run):
    [found] = run("""
values = torch.arange(5.).pin_memory().to("cuda", non_blocking=True)
before = counters()
added = values.add_(1)
launched = (counters() - before).launches
print(json.dumps([values.cpu().tolist(), torch.zeros(3, device="cuda").cpu().tolist(), launched,
                  (counters() - before).copies, (counters() - before).synchronisations, errors()]))
""")
    assert found == [[0, 1, 2, 3, 4], [0, 0, 0], 1, 2, 2, []]


@pytest.mark.parametrize(("grid", "block", "shared", "why"), [
    ((0, 1, 1), (32, 1, 1), 0, "nothing to launch"), ((1, 65536, 1), (32, 1, 1), 0, "x 65535 blocks"),
    ((1, 1, 1), (64, 32, 1), 0, "at most 1024 threads"), ((1, 1, 1), (32, 1, 1), 49153, "shared memory")])
def test_a_launch_that_a_card_refuses_is_refused_with_the_reason(run, grid, block, shared, why):
    [[error]] = run(f"""
import ctypes
driver, kernel, module = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p(), ctypes.c_void_p()
driver.cuModuleGetFunction(ctypes.byref(kernel), module, b"of_ours")
assert driver.cuLaunchKernel(kernel, *{grid}, *{block}, {shared}, None, None, None) and len(errors()) == 1
assert driver.cuLaunchKernel(kernel, 1, 1, 1, 32, 1, 1, 0, None, None, None) == 0 and len(errors()) == 1
print(json.dumps(errors()))
""")
    assert error.startswith("invalid launch of of_ours: ") and why in error


def test_a_graph_is_captured_and_launched_at_once_and_waits_break_it(run):
    [found] = run("""
layer, x, graph = torch.nn.Linear(8, 8).cuda(), torch.ones(4, 8, device="cuda"), torch.cuda.CUDAGraph()
layer(x)
before = counters()
with torch.cuda.graph(graph):
    for _ in range(50): layer(x)
captured, before = counters() - before, counters()
graph.replay()
replayed = counters() - before
try:
    with torch.cuda.graph(torch.cuda.CUDAGraph()): torch.cuda.synchronize()
    said = ""
except RuntimeError as error: said = str(error)
print(json.dumps([captured.captures, captured.launches, replayed.launches, said, errors()]))
""")
    # Beside the graph torch fills the seeds of its random numbers.
    assert found[0] == 1 and found[1] < 5 and 1 <= found[2] < 5 and "capture" in found[3]
    assert found[4] == ["cudaDeviceSynchronize while a CUDA graph is captured"]


def test_a_forked_process_has_no_card_if_its_parent_asked_the_driver(run):
    [found] = run("""
import ctypes
ctypes.CDLL("libcuda.so.1").cuInit(0)
reading, writing = os.pipe()
if os.fork() == 0:
    try: torch.zeros(1, device="cuda"); said = "works"
    except RuntimeError as error: said = str(error)
    os.write(writing, said.encode()); os._exit(0)
os.wait()
print(json.dumps([os.read(reading, 1000).decode()]))
""")
    assert "initialization failed" in found[0]


RANKS = """
import torch.distributed as dist
rank = int(os.environ["RANK"])
torch.cuda.set_device(rank)
dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
"""


def test_ranks_train_together_exchange_objects_and_have_groups_of_their_own(run, tmp_path):
    found = run(RANKS + """
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8).cuda())
model(torch.ones(2, 8, device="cuda")).sum().backward()
objects, group = [None, None], dist.new_group([0, 1])
dist.all_gather_object(objects, {"of": rank})
dist.all_reduce(torch.ones(5, device="cuda", dtype=torch.bfloat16), dist.ReduceOp.MAX, group=group)
torch.cuda.synchronize()
os.write(1, (json.dumps([objects, errors()]) + "\\n").encode())
dist.destroy_process_group()
""", "H100", 2, ranks=2)
    assert found == [[[{"of": 0}, {"of": 1}], []]] * 2
    assert not list(tmp_path.glob("*nccl*"))  # what ranks share goes with them


def test_a_collective_that_one_rank_never_calls_ends_and_names_who_waits_for_whom(run):
    found = run(RANKS + """
dist.all_reduce(torch.ones(3, device="cuda"))
torch.cuda.synchronize()
if rank == 0:
    try: dist.all_reduce(torch.ones(7, device="cuda")); torch.cuda.synchronize()
    except RuntimeError as error: print(json.dumps([str(error), errors()]), flush=True)
dist.distributed_c10d._get_default_store().set(f"done {rank}", "")
dist.distributed_c10d._get_default_store().wait(["done 0", "done 1"])
os._exit(0)
""", "H100", 2, ranks=2, patience=8)
    assert len(found) == 1 and "timeout" in found[0][0]
    assert found[0][1] == ["rank 0 of 2 waits in its call 2 of NCCL, all_reduce of 7 float32, for rank 1 (1 calls, "
                           "the latest all_reduce of 3 float32), which did not join in 8 seconds"]


def test_what_only_a_real_card_has_is_no_error_of_the_program(run):
    [found] = run("""
import ctypes
before, driver = lacks(), ctypes.CDLL("libcuda.so.1")
print(json.dumps([before, driver.cuMemCreate(), lacks(), errors()]))
""")
    assert found == [[], 801, ["cuMemCreate"], []]


def test_a_rehearsal_leaves_out_what_needs_a_function_that_only_a_real_card_has(run, tmp_path):
    run("""
from sbkit.rehearsal import rank
def work(job, diary):
    diary.begin_stage("export")
    try: torch.linalg.eigh(torch.ones(3, 3, device="cuda"))
    except RuntimeError as error: raise ValueError("the statistics are wrong") from error
rank.LAUNCHES["export"] = work
rank.run_rank("export", 0, {"folder": os.environ["TMPDIR"]})
""", expected=1)
    lines = [json.loads(line) for line in (tmp_path / "export.0.jsonl").read_text().splitlines()]
    assert not any("finding" in line for line in lines)
    assert any(line.get("skip", "").startswith("the fake GPU has no cusolver") for line in lines)


def test_a_text_is_aligned_where_it_is_computed_on_the_cpu(run):
    assert run("""
from sbkit.decode import greedy
from sbkit.rehearsal import no_values
no_values.install()
scores = torch.eye(4)[[0, 2, 0, 3]].log_softmax(-1)[None]
given = torch.tensor([4]), torch.tensor([[2, 3]]), torch.tensor([2])
found = greedy.align(scores, *given) + greedy.greedy(scores, given[0])
print(json.dumps([spans.ids.tolist() for spans in found]))
""") == [[[2, 3], []]]


def test_a_voice_speaks_a_frame_though_nothing_computed_how_many(run):
    assert run("""
from sbkit.nn.codec import CodecDecoder, FiniteScalars, WaveHead
from sbkit.nn.voice import CodeHead, Durations, FrameDecoder, TextEncoder
from sbkit.nn.voice.voice import VoiceModel
from sbkit.rehearsal import no_values
no_values.install()
quantiser = FiniteScalars([4, 3], 2)
voice = VoiceModel(TextEncoder(12, 16, 24, 1), Durations(16, 12, 16, 1), FrameDecoder(16, 20, 24, 1),
                   CodeHead(20, quantiser), quantiser, CodecDecoder(quantiser.size, 12, 16, 1, 1, fold=2),
                   WaveHead(12, 40, 160)).eval()
given = torch.ones(2, 3, dtype=torch.long), torch.tensor([3, 2]), torch.tensor([0, 0]), torch.ones(2)
sound, samples, frames = voice.cuda()(*(each.cuda() for each in given))
print(json.dumps([list(sound.shape), samples.tolist(), list(frames.shape)]))
""") == [[[2, 80], [80, 80], [2, 3]]]


def test_weights_are_still_there_once_ranks_have_taken_those_of_the_first(run):
    found = run(RANKS + """
from sbkit.rehearsal import no_values
no_values.install()
layers = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8))
before = [tensor.clone() for tensor in layers.state_dict().values()]
model = torch.nn.parallel.DistributedDataParallel(layers.cuda())
print(json.dumps([torch.equal(a, b.cpu()) for a, b in zip(before, layers.state_dict().values(), strict=True)])
      + "\\n", end="", flush=True)
dist.distributed_c10d._get_default_store().set(f"done {rank}", "")
dist.distributed_c10d._get_default_store().wait(["done 0", "done 1"])
os._exit(0)
""", "H100", 2, ranks=2)
    assert found == [[True] * 7] * 2


def test_recurrent_layers_keep_their_weights_and_train(run):
    found = run("""
for layer in (torch.nn.LSTM(5, 8, 3, bidirectional=True, proj_size=3), torch.nn.GRU(6, 7, 2), torch.nn.RNN(4, 4)):
    before = [weight.detach().clone() for weight in layer.parameters()]
    layer.cuda()
    kept = all(torch.equal(a, b.detach().cpu()) for a, b in zip(before, layer.parameters(), strict=True))
    started, held = counters(), torch.cuda.memory_allocated()
    out, _ = layer(torch.ones(50, 2, layer.input_size, device="cuda"))
    reserved = torch.cuda.memory_allocated() - held
    out.sum().backward()
    print(json.dumps([kept, list(out.shape), reserved, all(p.grad.shape == p.shape for p in layer.parameters()),
                      (counters() - started).launches > 3, lacks(), errors()]))
""")
    assert [line[:2] for line in found] == [[True, [50, 2, 6]], [True, [50, 2, 7]], [True, [50, 2, 4]]]
    assert all(line[2] > 50 * 2 * 4 * 4 and line[3:] == [True, True, [], []] for line in found)


def test_what_the_libraries_ask_for_beside_their_outputs_is_no_number_by_chance(run):
    assert run("""
norm, scores = torch.nn.BatchNorm1d(32).cuda(), torch.zeros(20, 2, 5, device="cuda", requires_grad=True)
x = torch.zeros(4, 32, 1000, device="cuda", requires_grad=True)
norm(x).sum().backward()
targets, *lengths = [torch.full((many,), size, dtype=torch.int32, device="cuda")
                     for many, size in ((6, 1), (2, 20), (2, 3))]
torch.nn.functional.ctc_loss(scores.log_softmax(-1), targets, *lengths).backward()
print(json.dumps([torch.cuda.max_memory_allocated() < 4 * 4 * x.numel(), x.grad is not None, lacks(), errors()]))
""") == [[True, True, [], []]]


def test_what_kernels_copy_for_themselves_is_in_the_estimate_of_memory(run):
    found = run("""
from torch.nn import functional as F
from sbkit.recipe import cost, flops, trace

def made(*shape):
    return torch.zeros(shape, device="cuda", requires_grad=True)

def columns(*shape):
    return made(*shape).transpose(1, 2)

WAYS = {"norm": lambda: F.layer_norm(columns(8, 512, 2048), (512,), made(512), made(512)),
        "convolution": lambda: F.conv1d(columns(8, 2048, 512), made(512, 512, 3)),
        "image": lambda: F.conv2d(made(4, 32, 512, 64).to(memory_format=torch.channels_last), made(8, 32, 3, 3)),
        "softmax": lambda: F.softmax(columns(8, 512, 2048), -1),
        "log_softmax": lambda: F.log_softmax(columns(8, 512, 2048), -1),
        "cumsum": lambda: columns(8, 512, 2048).cumsum(-1)}
for name, compute in WAYS.items():
    def loss():
        return compute().sum()
    loss().backward()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    loss().backward()
    peak = torch.cuda.max_memory_allocated() - before
    with trace.fake_tensors(), cost.MemoryCounter() as counted:
        flops.backward(loss)
    print(json.dumps([name, counted.peak, peak]))
""")
    assert len(found) == 6
    for name, counted, peak in found:
        assert counted == pytest.approx(peak, rel=0.05), name


def test_an_allocator_that_maps_memory_piece_by_piece_is_not_used():
    """Which torch reads as it is imported."""
    code = START + "print(json.dumps([torch.ones(1 << 20, device='cuda').numel(), lacks()]))"
    made = environment(CARDS["H100"], 1, base={**os.environ, "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"})
    done = subprocess.run([sys.executable, "-c", code], env=made, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == [1 << 20, []]


@pytest.mark.long
def test_it_is_compiled_once_by_processes_that_start_together(tmp_path):
    code = "from sbkit.rehearsal.fake_gpu import build; print(build())"
    home = {**os.environ, "SBKIT_CACHE": str(tmp_path)}
    running = [subprocess.Popen([sys.executable, "-c", code], env=home, stdout=subprocess.PIPE, text=True)
               for _ in range(2)]
    paths = {process.communicate(timeout=300)[0].strip() for process in running}
    assert len(paths) == 1 and [str(path) for path in (tmp_path / "kernels").iterdir()] == list(paths)


def test_a_command_runs_on_it_and_what_was_set_before_stays():
    code = "import os, torch; print(torch.cuda.device_count(), os.environ['LD_PRELOAD'], os.environ['OF_MINE'])"
    before = {**os.environ, "LD_PRELOAD": "libm.so.6", "OF_MINE": "kept"}
    command = ["-m", "sbkit.rehearsal.fake_gpu", "--cards", "3xA10", "--"]
    done = subprocess.run([sys.executable, *command, sys.executable, "-c", code], env=before, capture_output=True,
                          text=True, check=True)
    count, preloaded, kept = done.stdout.split()
    assert (count, kept) == ("3", "kept") and preloaded.endswith(".so:libm.so.6")
