"""A recogniser that trains in chunks: which steps see which, on any number of ranks and after resuming."""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path

import pytest
import torch
from batches import noise
from conformers import conformer
from host_syncs import HostSyncs
from hypothesis import given, settings
from hypothesis import strategies as st
from letters import Letters
from processes import results
from speechbrain.core import Stage
from speechbrain.utils.dynamic_chunk_training import DynChunkTrainConfig
from speechbrain.utils.epoch_loop import EpochCounter

from sbkit.decode.beam import BeamSearch
from sbkit.nn.accelerate import accelerate
from sbkit.nn.chunks import ChunkConfig, Chunks
from sbkit.recipe.check import check
from sbkit.runs.evaluation_options import tune_search
from sbkit.tasks.ctc import CTC
from sbkit.tasks.recognise.acoustic_model import AcousticModel
from sbkit.train.checkpoint import Checkpointer
from sbkit.train.distributed import ranks

SMALL = Path(__file__).parents[2] / "recipe" / "small.yaml"
STREAMING = Path(__file__).parents[3] / "hparams" / "streaming.yaml"
WIDTH, LABELS = 8, 6


def encoder(layers=2):
    torch.manual_seed(0)
    return conformer(WIDTH, LABELS, num_encoder_layers=layers)


class Features(torch.nn.Module):
    """Eight samples are a frame."""

    def forward(self, signals):
        return torch.nn.functional.pad(signals, (0, WIDTH - signals.shape[1] % WIDTH)).unflatten(1, (-1, WIDTH))


class Spelling:
    model_type = "char"

    def decode(self, ids):
        return "a" * len(ids)

    def entropy(self, texts):
        return 1.0


def brain(chunks, cls=CTC, folder=None, every=0, **keys):
    net = encoder()
    head = torch.nn.Linear(16, LABELS)
    model = torch.nn.ModuleList([net, head])
    hparams = {
        "compute_features": Features(), "Transformer": net, "ctc_lin": head, "n_mels": WIDTH, "sample_rate": 1000,
        "hop_length": WIDTH, "output_neurons": LABELS, "tokenizer": Spelling(), "modules": {"model": model},
        "chunks": chunks, "seed": 3, "precision": "fp32", **keys}
    checkpointer = folder and Checkpointer(folder, {"model": model, "counter": hparams["epoch_counter"]})
    return cls({"model": model}, partial(torch.optim.SGD, lr=0.01), hparams,
               {"device": "cpu", "noprogressbar": True, "ckpt_interval_steps": every}, checkpointer)


def batch(lengths, **place):
    n = len(lengths)
    return noise(*lengths, tokens=[[2, 3]] * n, texts=["aa"] * n, level=1.0, **place)


CHUNKS = Chunks(sizes=[2, 4], left_context=[4, 8], whole=0.3, validate=4)


# ------------------------------------------------------------ what a stage sees


def seen(made, stage, monkeypatch):
    found, encode = [], made.acoustic_model.encode
    with monkeypatch.context() as patch:
        patch.setattr(made.acoustic_model, "encode", lambda *args: (found.append(args[2]), encode(*args))[1])
        scores = made.compute_forward(batch([160, 40]), stage)
    return found[0], scores


def test_each_stage_sees_what_it_is_to_see(monkeypatch):
    made = brain(CHUNKS)
    for step in range(6):
        made.train_state.optimizer_step = step
        assert seen(made, Stage.TRAIN, monkeypatch)[0] == CHUNKS.at(3, step)
    assert seen(made, Stage.VALID, monkeypatch)[0] == ChunkConfig(4, 2)
    assert seen(made, Stage.TEST, monkeypatch)[0] is None
    made.transcriber.use_chunks([16])
    assert seen(made, Stage.TEST, monkeypatch)[0] == ChunkConfig(2, 4)
    assert seen(brain(None), Stage.TRAIN, monkeypatch)[0] is None


def test_a_search_is_tuned_in_chunks_of_the_first_size(monkeypatch):
    """Whole utterances would give other weights of the language model than those that a stream needs."""
    made = brain(CHUNKS)
    made.transcriber.use_chunks([16])
    made.transcriber.search = BeamSearch(Letters(["<unk>", "a", "b"]))
    made.transcriber.spelling = made.transcriber.search.spelling(0.016)

    class Evaluated(Exception):
        pass

    def evaluate(manifest):
        assert seen(made, Stage.TEST, monkeypatch)[0] == ChunkConfig(2, 4)
        raise Evaluated

    with pytest.raises(Evaluated):
        tune_search(made, [], evaluate)
    assert made.transcriber.live is not None


def test_inner_layers_have_their_loss_in_chunks_too():
    made = brain(Chunks(sizes=[2], left_context=[2], whole=0.0, validate=2), intermediate_ctc=0.3)
    made.modules.train()
    scores = made.compute_forward(batch([160, 40]), Stage.TRAIN)
    assert len(scores.intermediate) == 1 and not torch.equal(scores.intermediate[0], scores.ctc)
    made.compute_objectives(scores, batch([160, 40]), Stage.TRAIN).total.backward()
    grads = [p.grad for p in made.modules.parameters() if p.grad is not None]
    assert grads and all(grad.isfinite().all() for grad in grads)


def test_a_frame_hears_nothing_behind_its_chunk():
    made = brain(CHUNKS)
    made.modules.eval()
    x = batch([160]).signals
    later = torch.cat([x[:, :64], x[:, 64:] + 1.0], 1)
    with torch.no_grad():
        one, other = (made.acoustic_model.outputs(signals, torch.tensor([160]), CHUNKS.config(4))[0]
                      for signals in (x, later))
    assert torch.equal(one[:, :8], other[:, :8]) and not torch.allclose(one[:, 8], other[:, 8])


# ------------------------------------------------------------ batches


@torch.no_grad()
@settings(deadline=None, max_examples=30)
@given(st.lists(st.integers(1, 35), min_size=1, max_size=5), st.integers(1, 9), st.integers(0, 4))
@pytest.mark.slow
def test_an_utterance_scores_the_same_alone_and_in_any_batch(lengths, size, left):
    torch.manual_seed(0)
    net = encoder().eval()
    accelerate(net)
    model = AcousticModel(torch.nn.Identity(), net, torch.nn.Linear(16, LABELS))
    config, feats = DynChunkTrainConfig(size, left), torch.zeros(len(lengths), max(lengths), WIDTH)
    for row, n in enumerate(lengths):
        feats[row, :n] = torch.randn(n, WIDTH)
    together, _ = model.encode(feats, torch.tensor(lengths), config)
    for row, n in enumerate(lengths):
        alone, _ = model.encode(feats[row : row + 1, :n], torch.tensor([n]), config)
        torch.testing.assert_close(together[row, :n], alone[0], atol=2e-5, rtol=1e-4)


def test_chunks_never_make_the_host_wait():
    net = encoder()
    accelerate(net)
    model = AcousticModel(torch.nn.Identity(), net, torch.nn.Linear(16, LABELS))
    feats, frames = torch.randn(2, 20, WIDTH), torch.tensor([20, 7])
    with HostSyncs() as syncs:
        model.encode(feats, frames, DynChunkTrainConfig(4, 1))[0].sum().backward()
    assert not syncs.found, syncs.found


# ------------------------------------------------------------ ranks and resuming


class Noting(CTC):
    """Writes down what each micro-batch saw; may end at a step."""

    last_step = None

    def compute_forward(self, batch, stage):
        if stage == Stage.TRAIN:
            if self.optimizer_step == self.last_step:
                raise KeyboardInterrupt
            context = self.contexts.visible(batch, stage, self.optimizer_step, None)
            self.noted = [*getattr(self, "noted", []), (self.optimizer_step, context)]
        return super().compute_forward(batch, stage)


@dataclasses.dataclass
class Loader:
    """Steps of two micro-batches on each rank."""

    count: int = 4

    def steps(self, epoch):
        return self.count

    def at(self, epoch, step=0):
        for number in range(step, self.count):
            for micro in range(2):
                yield batch([80 + 8 * number, 40 + 8 * micro + ranks.rank()], step=number, micro=micro, micros=2)


def trained():
    """What each of its micro-batches saw, and the weights."""
    made = brain(CHUNKS, Noting)
    made.fit(range(1, 3), Loader())
    return made.noted, {name: value.clone() for name, value in made.modules.state_dict().items()}


def test_a_resumed_run_sees_what_one_that_was_never_stopped_sees(tmp_path):
    made = brain(CHUNKS, Noting, tmp_path, every=3, epoch_counter=EpochCounter(2))
    made.last_step = 5
    with pytest.raises(KeyboardInterrupt):
        made.fit(made.keys.epoch_counter, Loader())
    resumed = brain(CHUNKS, Noting, tmp_path, epoch_counter=EpochCounter(2))
    resumed.fit(resumed.keys.epoch_counter, Loader())
    begun = resumed.noted[0][0]
    assert 0 < begun <= 5
    assert resumed.noted == [(step, CHUNKS.at(3, step)) for step in range(begun, 8) for _ in range(2)]


def test_all_micro_batches_of_a_step_see_the_same():
    noted, _ = trained()
    assert noted == [(step, CHUNKS.at(3, step)) for step in range(8) for _ in range(2)]
    assert len({str(config) for _, config in noted}) > 2


@pytest.mark.slow
def test_all_ranks_see_the_same():
    alone, _ = trained()
    (first, weights), (second, others) = results(trained, world=2)
    assert first == second == alone
    assert all(torch.equal(weights[name], others[name]) for name in weights)


# ------------------------------------------------------------ the check


def test_chunks_are_told_in_milliseconds():
    lines, _ = brain(CHUNKS).describe()
    assert lines[1:] == ["trained to run live in chunks of 16, 32 ms, each with 32, 64 ms of left context"]
    assert len(brain(None).describe()[0]) == 1


@pytest.mark.parametrize("given, told", [
    ({"encoder_module": "transformer", "causal": False}, "but the encoder is a TransformerEncoder"),
    ({"attention_type": "regularMHA", "causal": False}, "regularMHA needs to know where an utterance begins or ends"),
])
def test_the_check_refuses_encoders_that_have_no_chunks(given, told, tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(f"recipe: !include:{SMALL}\n    ctc_weight: 1.0\n    chunks: !new:sbkit.nn.chunks.Chunks\n")
    found = [error for error in check(path, {"Transformer": given}).errors if error.key.startswith("Transformer")]
    assert len(found) == 1 and found[0].code == "chunks" and told in found[0].message


@pytest.mark.long
@pytest.mark.slow
def test_memory_is_counted_for_the_chunks_that_need_the_most_whatever_a_step_draws(tmp_path):
    def counted(sizes, whole):
        given = {"sizes": sizes, "whole": whole, "validate": None, "lookahead": 0}
        report = check(STREAMING, {"chunks": given, "output_folder": str(tmp_path), "num_encoder_layers": 2})
        return report.sections["cost"].values["batch_bytes"]

    peaks = {size: counted([size], 0.0) for size in (8, 32)}
    assert counted([8, 32], 0.999) == peaks[8] > peaks[32]
