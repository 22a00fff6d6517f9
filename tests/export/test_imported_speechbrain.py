"""Folders for SpeechBrain's EncoderASR become bundles that say what SpeechBrain says."""

import json

import encoders
import hub
import numpy as np
import onnxruntime
import published
import pytest
import speechbrain_models
import torch
from refusals import check_wording

import sbkit.infer
from sbkit.data.piece_model import piece_model
from sbkit.errors import SbkitError
from sbkit.export import imported, layout
from sbkit.export.imported import ImportRequest, import_model
from sbkit.runs.initial import published as published_sources
from sbkit.score.metric import Metric
from sbkit.score.weights import ChosenWeights

pytestmark = pytest.mark.slow

LENGTHS = (16_000, 4_000, 23_457, 9_999)


@pytest.mark.parametrize("kind", ["pieces", pytest.param("labels", marks=pytest.mark.long)])
def test_a_bundle_says_of_each_clip_what_speechbrain_says(tmp_path, kind):
    """Of its own encoder and pieces, and of a pretrained one with an adapter and labels.

    The latter is long: test_imported.py has such an encoder, and a blank that is the last.
    """
    more = {"num_hidden_layers": 1, "add_adapter": True, "num_adapter_layers": 1}
    pretrained = encoders.make(tmp_path / "encoder", "wav2vec2-layer", **more) if kind == "labels" else None
    folder = speechbrain_models.make(tmp_path / "model", kind == "labels", pretrained=pretrained)
    bundle = tmp_path / "bundle"
    assert import_model(ImportRequest(str(folder), bundle, trust_code=True, formats=["onnx"])) == 0
    graph = onnxruntime.InferenceSession(bundle / "model.onnx")
    recogniser = sbkit.infer.load(bundle, model=layout.ONNX, device="cpu")
    config, heard = layout.Config.read(bundle), set()
    last = config.vocabulary - 1
    order = [last, *range(last)] if kind == "labels" else list(range(last + 1))
    signals = [published.spoken(samples, seed) for seed, samples in enumerate(LENGTHS)]
    for signal, (expected, text) in zip(signals, speechbrain_models.theirs(folder, signals, tmp_path / "room"),
                                        strict=True):
        samples = len(signal)
        found, (frames,) = graph.run(None, {"signals": signal[None], "lengths": np.array([samples])})
        assert frames == len(expected)
        np.testing.assert_allclose(found[0, :frames], expected[:, order], atol=2e-3)
        assert recogniser.transcribe(signal).text.split() == text.replace("<bos>", "").split()
        heard |= set(expected.argmax(-1).tolist())
    assert len(heard) > 3, "it says something"
    facts = json.loads((bundle / layout.PARITY).read_text())["formats"]
    assert list(facts) == ["SpeechBrain", "onnx"] and facts["onnx"]["difference"] <= 1e-3
    assert config.trained["imported"] == "model"


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """A model on a hub of this machine, and its folder."""
    from huggingface_hub import constants

    folder = speechbrain_models.make(tmp_path / "model")
    with hub.Hub() as served:
        files = {path.name: path.read_bytes() for path in folder.iterdir()}
        files |= {"other.ckpt": b"large", "config.json": b"{}"}
        served.repositories["someone/model"] = hub.Repository(files)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE",
                            served.url + "/{repo_id}/resolve/{revision}/{filename}")
        yield served, folder


def test_a_model_on_the_hub_is_that_of_its_folder(repository, tmp_path, monkeypatch):
    """Of it only what its pretrainer loads is fetched."""
    (served, folder), opened = repository, []
    monkeypatch.setattr(imported.bundle, "export", lambda _, open_model: opened.append(open_model()))
    import_model(ImportRequest("someone/model", tmp_path / "bundle", trust_code=True))
    asked = {line.split()[1].rpartition("/")[2] for line in served.seen if line.startswith("GET")}
    assert {"hyperparams.yaml", "model.ckpt", "tokenizer.ckpt"} <= asked and "other.ckpt" not in asked
    assert opened[0].facts["imported"] == "someone/model"
    ours, theirs = (published_sources.find(name, ChosenWeights(), Metric("WER")) for name in ("someone/model", folder))
    assert ours.piece_model() == theirs.piece_model() and ours.tensors().keys() == theirs.tensors().keys()
    assert all(torch.equal(value, theirs.tensors()[name]) for name, value in ours.tensors().items())


@pytest.mark.parametrize("local", [False, True])
def test_code_runs_only_if_it_is_trusted(repository, tmp_path, local):
    code = f"\nran: !apply:os.mkdir [{tmp_path / 'ran'}]\n"
    repository[0].repositories["someone/model"].files["hyperparams.yaml"] += code.encode()
    with (repository[1] / "hyperparams.yaml").open("a") as recipe:
        recipe.write(code)
    name = str(repository[1]) if local else "someone/model"
    error = refusal(tmp_path, name, trust_code=False)
    assert error.code == "untrusted-code" and error.file.endswith("hyperparams.yaml")
    assert not (tmp_path / "ran").exists()


def test_a_repository_that_lacks_a_file_of_its_pretrainer(repository, tmp_path):
    del repository[0].repositories["someone/model"].files["model.ckpt"]
    assert "lacks model.ckpt, which its pretrainer loads" in refusal(
        tmp_path, "someone/model").message


def refusal(tmp_path, source, **more):
    with pytest.raises(SbkitError) as caught:
        import_model(ImportRequest(str(source), tmp_path / "bundle", **{"trust_code": True, **more}))
    assert not (tmp_path / "bundle").exists()
    return caught.value


def test_a_checkpoint_with_code_in_it_is_refused_and_not_run(tmp_path):
    folder = speechbrain_models.make(tmp_path / "model")
    torch.save({"0.w.weight": torch.zeros(3), "x": published.Evil(tmp_path / "ran")}, folder / "model.ckpt")
    assert "model.ckpt" in refusal(tmp_path, folder).message and not (tmp_path / "ran").exists()


def test_a_tokenizer_that_does_not_fit_its_head(tmp_path):
    folder = speechbrain_models.make(tmp_path / "model")
    (folder / "tokenizer.ckpt").write_bytes(piece_model(["<unk>", "▁", "a", "b"]))
    error = refusal(tmp_path, folder)
    assert (error.code, error.file) == ("tokenizer-does-not-fit", str(folder))
    check_wording(str(error))


@pytest.mark.parametrize("lost, said", [
    ("model.ckpt", "lacks model.ckpt, which its pretrainer loads"),
    ("tokenizer.ckpt", "can't open {} as an EncoderASR: RuntimeError: NOT_FOUND: \"{}/tokenizer.ckpt\"")])
def test_a_folder_that_lacks_a_file(tmp_path, lost, said):
    folder = speechbrain_models.make(tmp_path / "model")
    (folder / lost).unlink()
    message = refusal(tmp_path, folder).message
    assert said.format(folder, folder) in message and "init_from" not in message


def test_a_recipe_that_is_no_recogniser(tmp_path):
    folder = speechbrain_models.make(tmp_path / "model")
    text = (folder / "hyperparams.yaml").read_text()
    (folder / "hyperparams.yaml").write_text(text.replace("decoding_function:", "other:"))
    assert refusal(tmp_path, folder).code == "unsupported-model"
