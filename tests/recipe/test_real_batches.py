"""A batch of one, padding that changes results, and a metric that no validation gives are found before a run starts."""

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
from torch import nn
from written import Head, changed

from sbkit.data.columns import LabelColumn
from sbkit.errors import SbkitError
from sbkit.recipe import real_batches
from sbkit.recipe.check import check
from sbkit.recipe.keys import key
from sbkit.tasks.ctc import CTC
from sbkit.tasks.task import Metric

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("without_cost")]


class OneVector(Head):
    """A head with a vector per utterance, which BatchNorm normalises over the batch."""

    def __init__(self, input_size, n_neurons):
        super().__init__(input_size, n_neurons)
        self.norm = nn.BatchNorm1d(input_size)

    def forward(self, x):
        return super().forward(x + self.norm(x[:, 0])[:, None])


class Unmasked(Head):
    """A head that takes the mean over all frames, those of padding among them."""

    def forward(self, x):
        return super().forward(x + 10 * x.mean(1, keepdim=True))


class Drawing(Head):
    """A head whose outputs are drawn anew each time, with or without padding."""

    def forward(self, x):
        return super().forward(x + torch.rand_like(x))


class Chooses(CTC):
    """A task whose best checkpoint is chosen by a number that its validation may not have."""

    metric = Metric("F1")

    @classmethod
    def is_prepared(cls, keys):
        return True

    def compute_objectives(self, predictions, batch, stage):
        if stage.name == "VALID":
            self.rows.append(SimpleNamespace(id="clip"))
            return torch.zeros(())
        return super().compute_objectives(predictions, batch, stage)

    def stats(self, rows):
        return {"precision": 0.5, "recall": 0.5}


class Complete(Chooses):
    def stats(self, rows):
        return {**super().stats(rows), "F1": 0.5}


class Unfinished(Complete):
    def results(self, rows, loss, unread):
        return rows[0].kind


class Wordless(Complete):
    def results(self, rows, loss, unread):
        raise SbkitError("nothing-to-score", "there is nothing to score")


class Reads(Chooses):
    def compute_objectives(self, predictions, batch, stage):
        loss = super().compute_objectives(predictions, batch, stage)
        assert predictions.ctc.abs().max().item() < 1e9
        return loss


class ReadsWell(Reads):
    metric = Metric("precision")

    def results(self, rows, loss, unread):
        return rows


class CountsNothing(CTC):
    def compute_objectives(self, predictions, batch, stage):
        return super().compute_objectives(predictions, batch, stage)._replace(count=0)


class Forgets(CTC):
    def compute_objectives(self, predictions, batch, stage):
        super().compute_objectives(predictions, batch, stage)


class Weighs(CTC):
    def compute_objectives(self, predictions, batch, stage):
        return 0.5 * super().compute_objectives(predictions, batch, stage) + 0.01


class NeedsSpeech(Chooses):
    def stats(self, rows):
        raise ValueError("nothing was said")


@dataclass(kw_only=True)
class SpeakersKeys(CTC.Keys):
    speakers: list[str] | None = key("the training set's speakers; null: all of them", None)


class NamesSpeakers(Chooses):
    Keys = SpeakersKeys
    columns: ClassVar = {"speaker": LabelColumn("speakers")}

    def stats(self, rows):
        return {"F1": len(self.keys.speakers)}


def checked(tmp_path, head="", brain="", batching=""):
    instead = {"max_batch_seconds: 40": f"max_batch_seconds: 40{batching}"}
    if head:
        instead["ctc_lin: !new:speechbrain.nnet.linear.Linear"] = f"ctc_lin: !new:test_real_batches.{head}"
    if brain:
        instead["brain: !name:sbkit.tasks.ctc.CTC"] = f"brain: !name:test_real_batches.{brain}"
    report = check(changed(tmp_path, instead), {"output_folder": str(tmp_path / "out")})
    return report, [(each.code, each.message) for each in [*report.errors, *report.warnings]]


def test_a_batch_of_one_is_tried_unless_the_plan_has_none(tmp_path):
    _, ((code, message),) = checked(tmp_path, "OneVector")
    assert code == "one-utterance" and "Expected more than 1 value per channel" in message
    report, found = checked(tmp_path, "OneVector", batching="\n    min_batch_utterances: 2")
    assert found == [] and "size of a micro-batch change the training" in report.sections["devices"].remarks[-1]


RAISED = 1 + Path(__file__).read_text().splitlines().index('        raise ValueError("nothing was said")')


@pytest.mark.parametrize("head, brain, expected", [
    ("Unmasked", "", [("padding", "an utterance's outputs depend on its padding")]), ("Drawing", "", []),
    ("", "Chooses", [("metric", "by 'F1', and its validations return loss, precision, recall")]), ("", "Complete", []),
    ("", "Unfinished", [("validation", "has no attribute 'kind'")]), ("", "Wordless", []),
    ("", "NeedsSpeech", [("validation", f"test_real_batches.py:{RAISED}: ValueError: nothing was said")]),
    ("", "Forgets", [("forward", "returned a loss of NoneType")]), ("", "Weighs", []),
    ("", "CountsNothing", [("loss", "count of 0, so nothing is learnt")])])
def test_what_noise_shows(tmp_path, head, brain, expected):
    report, found = checked(tmp_path, head, brain)
    assert [code for code, _ in found] == [code for code, _ in expected]
    assert all(said in message for (_, message), (_, said) in zip(found, expected, strict=True))
    assert brain != "Wordless" or not any("of noise" in note for note in report.notes)


def test_a_list_of_labels_that_follows_from_the_corpus_is_not_blamed_on_its_column(tmp_path):
    report, found = checked(tmp_path, brain="NamesSpeakers")
    assert found == [] and any("speakers is null, so its labels are those of the corpus" in note
                               for note in report.notes)


def test_padding_is_tried_on_the_layers_that_run(tmp_path, monkeypatch):
    monkeypatch.setattr(real_batches, "TOLERANCE", 1e-4)
    report, found = checked(tmp_path)
    assert found == [] and not any("noise" in note for note in report.notes), "SpeechBrain's own are some per cent off"
    _, ((code, _),) = checked(tmp_path, "Unmasked")
    assert code == "padding"


def test_a_loss_that_reads_values_leaves_out_only_fake_tensors(tmp_path):
    report, ((code, message),) = checked(tmp_path, brain="Reads")
    assert code == "metric" and "by 'F1', and its validations return loss, precision" in message
    assert any("the loss after brain" in note or "reads values of tensors on the host" in note for note in report.notes)
    assert any(f"{Path(__file__).name}:" in note and "so the cost is unknown" in note for note in report.notes)
    report, found = checked(tmp_path, brain="ReadsWell")
    assert found == [] and "nothing wrong in what could be checked" in report.verdict()
