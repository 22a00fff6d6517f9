"""Loaders: the same batches whatever the number of workers, exact restarts, and orderly ends."""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import re
import resource
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import soundfile
import torch
from batches import tensors_by_field
from processes import Beside
from refusals import refused
from sounds import encoded, speechlike

from sbkit.data import reader
from sbkit.data.audio import read_audio
from sbkit.data.augment import Augment, Gain, SpeedPerturb
from sbkit.data.batch import DUMMY_ID, dummy_batch
from sbkit.data.loader import EvalLoader, TrainLoader, eval_batches
from sbkit.data.manifest import Manifest
from sbkit.data.plan import Batching, Plan
from sbkit.data.shapes import Shape


class Letters:
    """A stand-in tokenizer: one token per character."""

    def encode(self, text: str) -> list[int]:
        return [ord(letter) - 90 for letter in text]


LETTERS = Letters()


class Broken:
    def encode(self, text: str) -> list[int]:
        raise TypeError("no tokens today")


class Deadly:
    def __init__(self, signum: int):
        self.signum = signum

    def encode(self, text: str) -> list[int]:
        os.kill(os.getpid(), self.signum)


@pytest.fixture(scope="module")
def manifest(tmp_path_factory) -> Manifest:
    """24 clips of 0.3 to 1.4 s."""
    folder = tmp_path_factory.mktemp("clips")
    seconds = 0.3 + np.random.default_rng(0).permutation(24) * 0.05
    for i, length in enumerate(seconds):
        (folder / f"{i}.wav").write_bytes(encoded(speechlike(length, seed=i), 16000))
    return Manifest(ids=[f"u{i}" for i in range(24)], durations=seconds,
                    wavs=[str(folder / f"{i}.wav") for i in range(24)],
                    texts=["hello" + "s" * i for i in range(24)])


def damage(manifest: Manifest, rows: list[int], tmp_path: Path) -> Manifest:
    broken = tmp_path / "broken.mp3"
    broken.write_bytes(b"no audio")
    return manifest.replace(wavs=[str(broken) if i in rows else wav for i, wav in enumerate(manifest.wavs)])


def make(manifest: Manifest, tokenizer=LETTERS, batching: Batching | None = None, round_seconds: float = 0.0,
         **options) -> TrainLoader:
    plan = Plan(manifest.durations, batching or Batching(max_batch_seconds=4, step_seconds=8),
                round_seconds=round_seconds)
    return TrainLoader(manifest, tokenizer, plan, **{"workers": 0, **options})


def same(a, b) -> bool:
    return (a.ids, a.texts, a.step, a.micro, a.micros, a.weight, a.samples, a.damaged) == (
        b.ids, b.texts, b.step, b.micro, b.micros, b.weight, b.samples, b.damaged,
    ) and all(torch.equal(x, y) for x, y in zip(a.tensors(), b.tensors(), strict=True))


# ---------------------------------------------------------------- what is in a batch


def test_a_batch_holds_the_plans_utterances_padded_with_zeros(manifest):
    loader = make(manifest)
    seen = []
    for batch in loader.at(1):
        assert batch.signals.dtype == torch.float32 and batch.padded_seconds <= 4.4
        for i, name in enumerate(batch.ids):
            row = int(name[1:])
            size, tokens = int(batch.signal_lengths[i]), int(batch.token_lengths[i])
            assert np.array_equal(batch.signals[i, :size].numpy(), read_audio(manifest.wavs[row]))
            assert not batch.signals[i, size:].any() and not batch.tokens[i, tokens:].any()
            assert batch.tokens[i, :tokens].tolist() == LETTERS.encode(manifest.texts[row])
            assert batch.texts[i] == manifest.texts[row]
        assert batch.samples == int(batch.signal_lengths.sum())
        seen += batch.ids
    assert sorted(seen) == sorted(manifest.ids)
    for batch in make(manifest, tokenizer=None).at(1):
        assert batch.tokens.shape == (len(batch), 0) and batch.token_lengths.tolist() == [0] * len(batch)


def test_batches_are_padded_to_a_multiple_as_far_as_the_limit_allows(manifest):
    limit = float(manifest.durations.max()) + 0.01  # the longest have no room to be rounded in
    plain, rounded = (list(make(manifest, batching=Batching(limit), round_seconds=each).at(1)) for each in (0, 0.32))
    assert sorted(name for batch in rounded for name in batch.ids) == sorted(manifest.ids)
    at_limit = 0
    for batch in rounded:
        longest, width = int(batch.signal_lengths.max()), batch.signals.shape[1]
        unit = 5120 // 2 ** sum(longest < limit for limit in (40960, 20480, 10240, 5120))  # an eighth of it at most
        assert (width % unit == 0 and width - longest < unit) or (len(batch) == 1 and width == longest)
        assert not batch.signals[:, longest:].any() and batch.padded_seconds <= limit
        at_limit += width % unit > 0
    shapes = [{batch.signals.shape for batch in batches} for batches in (plain, rounded)]
    assert at_limit > 0 and len(shapes[1]) < len(shapes[0])


@pytest.mark.parametrize("world", [1, 3])
def test_batches_are_padded_to_the_shapes_of_the_plan(manifest, world, tmp_path):
    broken = damage(manifest, [3, 4], tmp_path)
    tokens = [len(LETTERS.encode(text)) for text in manifest.texts]
    plain = {name: signal[:size] for batch in make(manifest).at(1)
             for name, signal, size in zip(batch.ids, batch.signals, batch.signal_lengths, strict=True)}
    seen, shapes = [], set()
    for rank in range(world):
        loader = make(broken, rank=rank, world=world, damaged_floor=9)
        loader.plan.pad_to_shapes(np.array(tokens))
        for batch in loader.at(1):
            shape = loader.epoch_plan(1).shape(batch.step, world)
            assert batch.signals.shape == (shape.rows, shape.samples(16000)) and batch.weight == 1
            assert batch.tokens.shape == (shape.rows, shape.tokens) and len(batch.ids) == shape.rows
            assert batch.samples == int(batch.signal_lengths[batch.real].sum())
            for row, name in enumerate(batch.ids):
                size = int(batch.signal_lengths[row])
                assert bool(batch.real[row]) == (name in plain) and not batch.signals[row, size:].any()
                assert torch.equal(batch.signals[row, :size], plain[name]) if batch.real[row] else size and not \
                    batch.texts[row]
            seen += [name for name in batch.ids if name in plain]
            shapes.add(tuple(each.shape for each in batch.tensors()))
        assert {shape for _, shape in loader.epoch_plan(1).largest(np.array(tokens), world)} <= set(
            loader.plan.shapes(world).of_bucket)
    assert sorted(seen) == sorted(name for name in manifest.ids if name not in ("u3", "u4"))
    assert len(shapes) <= len(set(loader.plan.shapes(world).of_bucket))


class Counting:
    """Letters, and how many texts all processes together have encoded."""

    def __init__(self):
        self.count = torch.zeros((), dtype=torch.int64).share_memory_()

    def encode(self, text):
        self.count += 1
        return LETTERS.encode(text)


def test_workers_begin_the_next_epoch_while_the_run_validates(manifest):
    tokenizer = Counting()

    def comes(loader, epoch, step=0):
        expected = [batch for batch in make(manifest).at(epoch) if batch.step >= step]
        return all(itertools.starmap(same, zip(loader.at(epoch, step), expected, strict=True)))

    with make(manifest, tokenizer, workers=1, epochs=2) as loader:
        assert comes(loader, 1)
        deadline = time.monotonic() + 20
        while tokenizer.count <= len(manifest) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert tokenizer.count > loader.state_dict()["read"] == len(manifest), "which counts what the run got"
        assert comes(loader, 2)
        time.sleep(0.2)
        assert tokenizer.count == 2 * len(manifest), "nothing is read twice, and nothing after the last epoch"
        assert comes(loader, 1, 1) and comes(loader, 2, 3) and comes(loader, 1), "what was begun is dropped"


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("workers", [0, 1])
def test_recordings_of_16_bits_go_to_a_gpu_as_they_are_and_are_the_same_there(manifest, tmp_path, workers, padded):
    odd = tmp_path / "odd.wav"
    soundfile.write(odd, speechlike(manifest.durations[0]), 16000, subtype="FLOAT")
    mixed = manifest.replace(wavs=[str(odd), *manifest.wavs[1:]])
    kinds = set()
    loader = make(mixed, workers=workers, pin_memory=True)
    for one in (plain := make(mixed), loader) if padded else ():
        one.plan.pad_to_shapes(np.array([len(text) for text in mixed.texts]))
    with loader:
        for float_batch, batch in zip(plain.at(1) if padded else make(mixed).at(1), loader.at(1), strict=True):
            kinds.add(batch.signals.dtype)
            assert ("u0" in batch.ids) == (batch.signals.dtype == torch.float32)
            real, there = batch.real, batch.to("cpu")
            assert there.signals.dtype == torch.float32
            assert torch.equal(there.signals[real], float_batch.signals[real])
    assert kinds == {torch.int16, torch.float32}


def test_a_dummy_batch_has_the_tensors_of_a_batch_that_was_read(manifest):
    """A field that only one of them fills would be missing on a rank that has nothing to read."""
    read = reader.Reader(manifest, LETTERS).read(reader.ReadRequest(1, 0, 0, 1, np.arange(2)))
    assert tensors_by_field(read) == tensors_by_field(dummy_batch(utterances=2))


def test_a_batch_that_is_larger_than_its_shape_says_so(manifest):
    for seconds, tokens, beyond in ((2.0, 60, False), (0.2, 60, True), (2.0, 3, True)):
        request = reader.ReadRequest(1, 0, 0, 1, np.arange(2), 0, Shape(4, seconds, tokens))
        batch = reader.Reader(manifest, LETTERS).read(request)
        assert batch.beyond_shape == beyond and batch.to("cpu").beyond_shape == beyond
        assert batch.signals.shape[1] >= max(batch.signal_lengths) and len(batch) == 4


def test_what_changes_signals_reads_numbers(manifest):
    assert next(make(manifest, pin_memory=True, augment=Augment([Gain()])).at(1)).signals.dtype == torch.float32
    faster = make(manifest, pin_memory=True, augment=Augment([SpeedPerturb([1.1])]))
    assert next(faster.at(1)).signals.dtype == torch.float32


def test_batches_have_the_rate_that_was_asked_for(manifest):
    class Heard:
        sample_rate = None

        def __call__(self, signal, rng):
            return signal

    stage = Heard()
    for batch in make(manifest, augment=Augment([stage]), sample_rate=8000).at(1):
        assert batch.sample_rate == stage.sample_rate == 8000
        for name, samples in zip(batch.ids, batch.signal_lengths.tolist(), strict=True):
            assert samples / 8000 == pytest.approx(manifest.durations[manifest.ids.index(name)], abs=1e-3)
        assert batch.seconds == pytest.approx(sum(batch.signal_lengths.tolist()) / 8000)


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize("workers", [1, 3])
def test_the_number_of_workers_changes_nothing(manifest, workers):
    augment = Augment([SpeedPerturb(), Gain()])
    alone = list(make(manifest, augment=augment).at(2))
    with make(manifest, augment=augment, workers=workers) as loader:
        together = list(loader.at(2))
        again = list(loader.at(2))
    assert len(alone) == len(together) and all(map(same, alone, together)) and all(map(same, alone, again))
    assert all(batch.signals.is_shared() and batch.signals.is_contiguous() for batch in together if batch.weight)


@pytest.mark.parametrize("workers", [0, 2])
def test_starts_at_any_step_without_those_before_it(manifest, workers, monkeypatch):
    whole = list(make(manifest).at(3))
    with make(manifest, workers=workers) as loader:
        asked = []
        plan = loader.epoch_plan(3)
        places = plan.micro_batches
        monkeypatch.setattr(plan, "micro_batches", lambda step, *rest: asked.append(step) or places(step, *rest))
        rest = list(loader.at(3, 2))
        assert asked[0] == 2 and min(asked) == 2
        assert all(map(same, rest, [batch for batch in whole if batch.step >= 2]))
        assert next(iter(loader.at(3, 1))).step == 1  # the iteration above may be left at any time
        assert list(loader.at(3, loader.steps(3))) == []
    with refused("corpus-changed"):
        loader.at(3, 999)


def test_ranks_and_micro_batches_share_out_each_step(manifest):
    alone: dict[int, set] = {}
    several = Batching(max_batch_seconds=4, step_seconds=8, max_batch_utterances=1)  # micro-batches on three ranks, too
    for batch in make(manifest, batching=several).at(1):
        alone.setdefault(batch.step, set()).update(batch.ids)
    ranks = [list(make(manifest, batching=several, rank=rank, world=3).at(1)) for rank in range(3)]
    places = [[(batch.step, batch.micro, batch.micros) for batch in rank] for rank in ranks]
    assert max(batch.micros for batch in ranks[0]) > 1
    assert places[0] == places[1] == places[2]
    shared: dict[int, list] = {}
    for batch in itertools.chain(*ranks):
        if batch.weight:
            shared.setdefault(batch.step, []).extend(batch.ids)
        else:
            assert batch.ids == [DUMMY_ID] and batch.seconds == 0
    assert {step: set(ids) for step, ids in shared.items()} == alone
    assert sorted(itertools.chain(*shared.values())) == sorted(manifest.ids)
    assert [batch.last for batch in ranks[0]] == [batch.micro == batch.micros - 1 for batch in ranks[0]]


def test_the_global_generator_is_left_alone(manifest):
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    with make(manifest, workers=1) as loader:
        for epoch in (1, 2):
            next(iter(loader.at(epoch)))
    assert torch.equal(torch.rand(1), expected)


def test_segments_of_one_recording_are_read_by_place(tmp_path):
    path = tmp_path / "long.wav"
    path.write_bytes(encoded(speechlike(10), 16000))
    whole = read_audio(path)
    manifest = Manifest(ids=["a", "b"], durations=[1.0, 2.0], wavs=[str(path)] * 2, texts=["x", "y"],
                        starts=[3.0, 6.5])
    batch = next(iter(make(manifest).at(1)))
    for i, name in enumerate(batch.ids):
        first, size = {"a": (48000, 16000), "b": (104000, 32000)}[name]
        assert int(batch.signal_lengths[i]) == size
        assert np.array_equal(batch.signals[i, :size].numpy(), whole[first : first + size])


def test_augmentation_differs_by_epoch_and_is_repeated_under_resume(manifest):
    options = {"augment": Augment([SpeedPerturb([0.9, 1.1]), Gain()])}
    first, second = ({name: batch.signals[i] for batch in make(manifest, **options).at(epoch)
                      for i, name in enumerate(batch.ids)} for epoch in (1, 2))
    changed = [name for name in first if not torch.equal(first[name], second[name][: len(first[name])])]
    assert len(changed) > 20
    resumed = list(make(manifest, **options).at(2, 2))
    for batch in resumed:
        for i, name in enumerate(batch.ids):
            size = int(batch.signal_lengths[i])
            assert torch.equal(batch.signals[i, :size], second[name][:size])


# ---------------------------------------------------------------- evaluation


@pytest.mark.parametrize("world", [1, 2, 5, 30])
def test_evaluation_reads_every_utterance_once_over_all_ranks(manifest, world):
    seen, cost = [], []
    for rank in range(world):
        loader = EvalLoader(manifest, LETTERS, max_batch_seconds=5, rank=rank, world=world, workers=0)
        batches = list(loader)
        assert len(batches) == len(loader)
        assert all(batch.padded_seconds <= 5 for batch in batches)
        seen += [name for batch in batches for name in batch.ids]
        cost.append(sum(batch.padded_seconds for batch in batches))
        lengths = [batch.signals.shape[1] for batch in batches]
        assert lengths == sorted(lengths, reverse=True)
    assert sorted(seen) == sorted(manifest.ids)
    if world <= 5:
        assert max(cost) < 2.5 * np.mean(cost)


def test_an_utterance_longer_than_the_limit_is_evaluated_alone():
    batches = eval_batches(np.array([1.0, 40.0, 2.0, 2.0], np.float32), 10)
    assert [batch.tolist() for batch in batches] == [[1], [2, 3, 0]]
    assert eval_batches(np.zeros(0, np.float32), 10) == []


# ---------------------------------------------------------------- damage


@pytest.mark.parametrize("workers", [0, 2])
def test_damaged_recordings_are_left_out_and_named(manifest, workers, tmp_path, caplog):
    loud = tmp_path / "loud.wav"  # a float file can hold what no model can take
    soundfile.write(loud, np.full(32_000, 1e30, np.float32), 16_000, subtype="FLOAT")
    hurt = damage(manifest, [3, 11], tmp_path)
    hurt = hurt.replace(wavs=[str(loud) if i == 7 else wav for i, wav in enumerate(hurt.wavs)])
    with make(hurt, workers=workers) as loader:
        batches = list(loader.at(1))
    assert {name for batch in batches for name in batch.ids} == set(manifest.ids) - {"u3", "u7", "u11"}
    named = dict(pair for batch in batches for pair in batch.damaged)
    assert named == loader.damaged and set(named) == {"u3", "u7", "u11"}
    assert named.pop("u7").endswith("loud.wav: has samples as large as 1e+30; full scale is 1")
    assert all("broken.mp3: cannot be decoded" in reason for reason in named.values())
    assert "left out: u3" in caplog.text


def shorter(manifest: Manifest, rows: list[int], **columns) -> Manifest:
    """A list that gives these rows half of their recordings."""
    durations = manifest.durations.copy()
    durations[rows] /= 2
    return manifest.replace(durations=durations, **columns)


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_a_row_shorter_than_its_recording_is_named_once(manifest, workers, caplog):
    rows = sorted(np.argsort(manifest.durations)[-3:].tolist())
    with make(shorter(manifest, rows), workers=workers) as loader:
        for epoch in (1, 2):
            list(loader.at(epoch))
    told = [line for line in caplog.messages if "only its beginning is read" in line]
    assert sorted(line.split(":")[0] for line in told) == sorted(manifest.ids[row] for row in rows)
    row = rows[0]
    line, = (line for line in told if line.startswith(f"{manifest.ids[row]}: "))
    seconds = manifest.durations[row]
    assert f"its row says {seconds / 2:.2f} s, but {manifest.wavs[row]} has {seconds:.2f} s" in line
    assert "check_audio: all" in line


def test_of_many_rows_shorter_than_their_recordings_a_few_are_named(manifest, caplog):
    long = np.flatnonzero(manifest.durations > 0.6)
    list(make(shorter(manifest, long)).at(1))
    assert len(long) > 10 and sum("only its beginning is read" in line for line in caplog.messages) == 5


@pytest.mark.parametrize("rows, starts", [([], None), ([20], [0.0] * 23 + [0.1])], ids=["whole", "segments"])
def test_whole_recordings_and_segments_are_not_named(manifest, rows, starts, caplog):
    columns = {} if starts is None else {"starts": starts}
    list(make(shorter(manifest, rows, **columns)).at(1))
    assert "only its beginning" not in caplog.text


def test_a_share_that_is_all_damaged_becomes_a_dummy_batch(manifest, tmp_path):
    hurt = damage(manifest, list(range(24)), tmp_path)
    loader = make(hurt, damaged_floor=100)
    batches = list(loader.at(1))
    assert batches and all(batch.weight == 0 and batch.damaged for batch in batches)
    assert sorted(loader.damaged) == sorted(manifest.ids)


@pytest.mark.parametrize("workers", [0, 2])
def test_too_much_damage_ends_the_run_and_names_the_first(manifest, workers, tmp_path):
    hurt = damage(manifest, list(range(20)), tmp_path)
    with make(hurt, workers=workers) as loader, refused("too-much-damaged-audio", wording=False) as caught:
        list(loader.at(1))
    assert "broken.mp3" in str(caught.value) and len(loader.damaged) <= 20


def test_a_resumed_run_counts_on(manifest, tmp_path):
    hurt = damage(manifest, [1, 2, 3], tmp_path)
    options = {"damaged_floor": 3, "max_damaged_share": 0}
    list((stopped := make(hurt, **options)).at(1))
    resumed = make(hurt, **options)
    resumed.load_state_dict(json.loads(json.dumps(stopped.state_dict())))
    assert resumed.damaged == stopped.damaged and len(resumed.damaged) == 3
    with refused("too-much-damaged-audio"):
        list(resumed.at(2))


# ---------------------------------------------------------------- errors and ends


class BrokenStage:
    def __call__(self, signal, rng):
        raise TypeError("no noise today")


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(("broken", "source"), [
    ({"augment": Augment([BrokenStage()])}, 'raise TypeError("no noise today")'), ({"tokenizer": Broken()}, "")],
    ids=["augmentation", "encoding"])
def test_an_error_in_a_worker_arrives_with_its_cause(manifest, workers, broken, source):
    with make(manifest, workers=workers, **broken) as loader, refused("task-code-failed") as caught:
        list(loader.at(1))
    assert source in str(caught.value.__cause__)


@pytest.mark.parametrize("signum, said", [(signal.SIGKILL, "SIGKILL"), (signal.SIGRTMIN + 1, r"signal \d+")])
def test_a_worker_that_is_killed_is_reported_with_what_it_read_last(manifest, signum, said):
    with make(manifest, Deadly(signum), workers=1) as loader:
        first = next(iter(make(manifest).at(1))).ids[-1]  # all of a batch are read, then it is encoded
        with refused("worker-died", wording=False) as caught:
            list(loader.at(1))
    wav = manifest.wavs[manifest.ids.index(first)]
    assert re.match(rf"a data worker died: number 0 of 1 \(process \d+\) was killed by {said}; it last read "
                    rf"{first} \({wav}\); \S", str(caught.value)), caught.value


@pytest.mark.slow
def test_workers_that_hang_end_the_run(manifest, monkeypatch):
    monkeypatch.setattr(reader.Reader, "signals", lambda *_: time.sleep(600))  # as a dead file server would
    with make(manifest, workers=1, timeout=2) as loader:
        with refused("worker-hangs"):
            list(loader.at(1))
        (worker,) = multiprocessing.active_children()
    worker.join(10)
    assert not alive(worker.pid)


def test_batches_need_no_room_in_the_folder_of_shared_memory(manifest, monkeypatch):
    nothing_free = SimpleNamespace(f_bavail=1, f_frsize=4096)
    monkeypatch.setattr(os, "statvfs", lambda path: nothing_free)
    names = [each for batch in make(manifest).at(1) for each in batch.ids]
    with make(manifest, workers=2) as loader:
        assert [each for batch in loader.at(1) for each in batch.ids] == names


def test_a_limit_of_files_below_a_batch_is_said_before_the_first(manifest):
    """A worker would fail at the first large batch with a message about a file that nobody knows."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, before[1]))
        with refused("ulimit-too-low"):
            make(manifest, workers=1)
        assert len(next(iter(make(manifest).at(1))).ids), "without workers there is no such file"
        resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, before[1]))
        with make(manifest, workers=1) as loader:
            assert len(list(loader.at(1))) > 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_an_older_iteration_ends_when_a_new_one_begins(manifest):
    loader = make(manifest)
    old = loader.at(1)
    next(old)
    new = loader.at(2)
    next(new)
    with pytest.raises(RuntimeError, match="a newer one"):
        next(old)
    assert next(new).step >= 0


def test_close_ends_the_workers_and_the_loader_can_begin_anew(manifest):
    loader = make(manifest, workers=2)
    batch = next(iter(loader.at(1)))
    workers = [worker.pid for worker in multiprocessing.active_children()]
    loader.close()
    assert not any(map(alive, workers))
    assert same(next(iter(loader.at(1))), batch)
    loader.close()
    loader.close()


def test_a_plan_of_another_corpus_is_refused(manifest):
    with pytest.raises(ValueError, match="a plan for 1 utterances, a manifest of 24"):
        TrainLoader(manifest, None, Plan([1.0], Batching(4)))


def _reads_on(pipe, path, method):
    """A run that reads until it is stopped, and then ends in order."""
    multiprocessing.set_start_method(method, force=True)
    loader, epoch = make(Manifest.read(path), None, Batching(4), workers=2), 0
    try:
        while True:
            epoch += 1
            for batch in loader.at(epoch):
                if epoch == 1 and batch.step == 0:
                    pipe.send([worker.pid for worker in multiprocessing.active_children()])
                time.sleep(0.01)
    except KeyboardInterrupt:
        for _ in loader.at(epoch + 1):  # its workers still serve it
            pass
        pipe.send("ended in order")
    loader.close()  # as the exit of a program does


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (OSError, ProcessLookupError):
        return False


@pytest.fixture
def path(manifest, tmp_path):
    manifest.write(tmp_path / "m.csv")
    return str(tmp_path / "m.csv")


@pytest.mark.slow
def test_ctrl_c_reaches_the_run_and_leaves_no_workers(path):
    with Beside(_reads_on, path, "fork") as run:
        workers = run.pipe.recv()
        assert len(workers) == 2 and all(map(alive, workers))
        os.killpg(run.process.pid, signal.SIGINT)  # as a terminal does: to the run and its workers
        run.process.join(90)
        assert run.process.exitcode == 0 and run.pipe.recv() == "ended in order"
        assert not any(map(alive, workers))


def _starts_slowly(say):
    say.send("begun")
    time.sleep(1)
    reader.init_worker(0)
    say.send("ready")


@pytest.mark.parametrize("number", sorted(reader.GROUP_SIGNALS))
def test_a_worker_that_is_still_starting_does_not_die_of_what_is_meant_for_its_run(number):
    fork = multiprocessing.get_context("fork")
    hear, say = fork.Pipe(duplex=False)
    with reader.starting_workers():
        worker = fork.Process(target=_starts_slowly, args=(say,))
        worker.start()
    assert hear.recv() == "begun"
    os.kill(worker.pid, number)
    assert hear.poll(10) and hear.recv() == "ready"
    worker.join(10)
    assert worker.exitcode == 0


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_workers_end_when_their_run_is_killed(path, method):
    with Beside(_reads_on, path, method) as run:
        workers = run.pipe.recv()
        assert len(workers) == 2 and all(map(alive, workers))
        run.kill()
        deadline = time.monotonic() + 20
        while any(map(alive, workers)) and time.monotonic() < deadline:
            time.sleep(0.2)
        assert not any(map(alive, workers))


@pytest.mark.slow
def test_workers_serve_on_after_sigterm_and_end_soon(manifest, tmp_path, monkeypatch):
    monkeypatch.setattr(reader, "SECONDS_AFTER_SIGTERM", 2)
    with make(manifest, workers=1, prefetch=1) as loader:
        batches = loader.at(1)
        next(batches)
        (worker,) = multiprocessing.active_children()
        worker.terminate()
        assert next(batches).ids and alive(worker.pid)
        worker.join(10)
        assert not alive(worker.pid)
