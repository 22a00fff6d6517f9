"""Other people's CTC models become bundles that say what their own code says."""

import functools
import json
import pickle

import bundles
import encoders
import numpy as np
import onnxruntime
import published
import pytest
import soundfile
import torch
from refusals import refused

import sbkit.infer
from sbkit.cli import main
from sbkit.errors import SbkitError
from sbkit.export import layout
from sbkit.export.imported import ImportRequest, import_model
from sbkit.nn.pretrained.ctc import CTCModel
from sbkit.runs.initial import published as published_sources
from sbkit.score.metric import Metric
from sbkit.score.weights import ChosenWeights

LENGTHS = (16_000, 4_000, 23_457, 9_999)


def said(text):
    """Words, without the marks that a tokenizer of letters writes where its head says them."""
    for mark in ("<s>", "</s>", "<unk>"):
        text = text.replace(mark, "")
    return text.split()


def corpus_of(folder, text_of):
    """A corpus of a test split, with what is said in each recording."""
    folder.mkdir(parents=True)
    lines = ["ID,duration,wav,wrd"]
    for i, samples in enumerate(LENGTHS):
        signal = published.spoken(samples, i)
        soundfile.write(folder / f"{i}.wav", signal, 16_000, subtype="FLOAT")
        lines.append(f"{i},{samples / 16_000},{folder / f'{i}.wav'},{text_of(signal)}")
    (folder / "test.csv").write_text("\n".join(lines) + "\n")
    return folder


class Imported:
    """A kind's model and the bundle that the command made of it.

    Of some kinds in all formats: compared on recordings of something else, since a model of random weights would
    change its mind in 8 bits. Of others, a corpus's words are held against a model of capitals in capitals.
    """

    def __init__(self, home, kind):
        self.folder, self.bundle = published.make(home / kind, kind), home / "bundles" / kind
        self.formats = ["onnx", "int8", "torch"] if kind in WHOLE else ["onnx"]
        corpus = corpus_of(home / "corpora" / kind, lambda signal: "of something else" if kind in WHOLE else " ".join(
            said(published.theirs(self.folder, signal)[1])).lower().replace("'", "") or "x")
        more = [] if kind in WHOLE else ["--formats", "onnx", "--tolerance", "0.002"]
        self.words = ["import", str(self.folder), "--to", str(self.bundle), "--data_folder", str(corpus),
                      "--language", "en", *more]
        assert main(self.words) == 0


WHOLE = ("wav2vec2", "parakeet")


@pytest.fixture(scope="module")
def imported(tmp_path_factory):
    """Each kind's folder and bundle, made when asked for."""
    home = tmp_path_factory.mktemp("imported")
    return functools.cache(lambda kind: Imported(home, kind))


def kinds(*names):
    """All but one are long: nn/pretrained/test_pretrained_encoder.py has each encoder, and WavLM is below."""
    return pytest.mark.parametrize("kind", [
        pytest.param(name, marks=[pytest.mark.long] * (name != "wav2vec2")) for name in names])


@pytest.mark.slow
@kinds(*published.KINDS)
def test_a_bundle_says_of_each_clip_what_transformers_says(imported, kind):
    made = imported(kind)
    folder, bundle = made.folder, made.bundle
    config = layout.Config.read(bundle)
    graph = onnxruntime.InferenceSession(bundle / "model.onnx")
    recogniser = sbkit.infer.load(bundle, model=layout.ONNX, device="cpu")
    tokens = published.PIECES if kind == "parakeet" else published.SPOKEN if kind == "lasr" else published.LETTERS
    blank = tokens.index("<pad>")
    order = [blank, *(place for place in range(len(tokens)) if place != blank)]
    heard = set()
    for seed, samples in enumerate(LENGTHS):
        signal = published.spoken(samples, seed)
        found, (frames,) = graph.run(None, {"signals": signal[None], "lengths": np.array([samples])})
        expected, text = published.theirs(folder, signal, frames)
        assert 0 <= len(expected) - frames <= 1, "a frame of their padding may follow"
        np.testing.assert_allclose(found[0, :frames], expected[:frames][:, order], atol=2e-3)
        assert recogniser.transcribe(signal).text.split() == said(text)
        heard |= set(expected[:frames].argmax(-1).tolist())
    assert len(heard) > 3, "it says something"
    assert config.blank_id == 0 and config.batching and config.trained["imported"] == folder.name
    readme = (bundle / layout.README).read_text()
    assert f"imported from {folder.name}." in readme and str(folder) not in readme
    assert "The first row is transformers's own code." in readme
    facts = json.loads((bundle / layout.PARITY).read_text())["formats"]
    assert list(facts) == ["transformers", *made.formats]
    assert facts["onnx"]["difference"] <= 1e-3 and facts["onnx"]["words_changed"] == 0


@pytest.mark.long
@pytest.mark.slow
def test_words_are_those_of_a_tokenizer_that_writes_small_letters(tmp_path, capsys):
    """And whose blank is its last token, of a family whose layers share the positions of the first."""
    letters = [*published.LETTERS[1:], "<pad>"]
    folder = published.make(tmp_path / "small", "wavlm", letters=letters, do_lower_case=True)
    assert import_model(ImportRequest(str(folder), tmp_path / "bundle", formats=["onnx"], clips=2)) == 0
    assert "layerdrop" not in capsys.readouterr().out, "only training would skip layers"
    lines = (tmp_path / "bundle" / layout.TOKENS).read_text().splitlines()
    assert lines[0] == "<blk> 0" and {"a 5", "▁ 4", "z 30"} <= set(lines)
    model = sbkit.infer.load(tmp_path / "bundle", model=layout.ONNX, device="cpu")
    signal = published.spoken(16_000)
    expected, text = published.theirs(folder, signal)
    [found] = model.engine.run([signal])
    np.testing.assert_allclose(found, np.roll(expected[:len(found)], 1, axis=1), atol=2e-3)
    assert model.transcribe(signal).text.split() == said(text) and text == text.lower() != text.upper()


@pytest.mark.slow
@kinds("wav2vec2", "hubert")
def test_recordings_may_be_what_is_compared_on(imported, kind):
    made = imported(kind)
    facts = json.loads((made.bundle / layout.PARITY).read_text())
    assert facts["clips"]["origin"] == "4 utterances of the test split"
    # Where the corpus has the model's words, what is left is what the corpus's text rules change.
    assert (facts["formats"]["transformers"]["wer"] < 30) == (kind not in WHOLE)
    assert layout.Config.read(made.bundle).language == "en"


@pytest.mark.slow
@kinds(*WHOLE)
def test_the_command_writes_all_formats_and_int8_is_transcribed(imported, capsys, kind):
    made, signal = imported(kind), published.spoken(LENGTHS[0], 0)
    assert set(layout.Config.read(made.bundle).models) == set(made.formats) == {"onnx", "int8", "torch"}
    assert main(made.words) == 2 and "exists" in capsys.readouterr().err
    heard = [sbkit.infer.load(made.bundle, model=name, device="cpu").transcribe(signal).text
             for name in ("onnx", "int8")]
    assert heard[0].split() == said(published.theirs(made.folder, signal)[1]) and all(heard)
    card = (made.bundle / layout.README).read_text()
    assert "## Started from" in card and f"weights of an earlier model: {kind}" in card


# ------------------------------------------------------------ bad input


def refusal(tmp_path, source, code=None, **fields):
    """The error of an import, which leaves nothing.

    code, fields : of the error, if the import itself raises it
    """
    with pytest.raises(SbkitError) if code is None else refused(code, **fields) as caught:
        import_model(ImportRequest(str(source), tmp_path / "bundle"))
    assert not (tmp_path / "bundle").exists() and "\n" not in str(caught.value)
    return caught.value


def test_a_model_without_a_head(tmp_path):
    encoders.make(tmp_path / "bare", "wav2vec2-layer")
    error = refusal(tmp_path, tmp_path / "bare")
    assert "is a model of transformers (wav2vec2) without a CTC head" in error.message
    assert error.hint.endswith(f"--encoder_source {tmp_path / 'bare'}")


@pytest.mark.parametrize("letters, what", [
    (published.LETTERS[:-1], "that has 32 rows, but the tokenizer has none for 1, such as row 31"),
    ([*published.LETTERS, "É"], "that has 32 rows, but the tokenizer has 1 more, such as 'É'"),
])
def test_a_tokenizer_that_does_not_fit_its_head(tmp_path, letters, what):
    folder = published.make(tmp_path / "model")
    published.tokenizer(folder, "wav2vec2", letters)
    error = refusal(tmp_path, folder)
    assert f"the tokenizer of {folder} doesn't fit its head: {what}" in error.message


def test_a_model_without_a_tokenizer(tmp_path):
    folder = published.make(tmp_path / "model")
    for name in ("vocab.json", "tokenizer_config.json"):
        (folder / name).unlink()
    assert f"{folder} has no tokenizer that transformers can open" in refusal(tmp_path, folder).message


@pytest.mark.parametrize("name, values, told", [
    ("tokenizer_config.json", {"tokenizer_class": "RagTokenizer"}, "has tokenizer_class: 'RagTokenizer', which no"),
    ("tokenizer_config.json", {"extra_ids": 10**9}, "has extra_ids: 1000000000, which no model"),
    ("tokenizer_config.json", {"added_tokens_decoder": {str(i): {"content": f"<{i}>"} for i in range(200_000)}},
     "tokenizer_config.json has 200,000 entries for a model of 32 tokens"),
    ("tokenizer_config.json", {"backend": 5}, "has backend: 5, which no model"),
    ("vocab.json", {"A": "x"}, "doesn't fit its head: that has 32 rows, but the tokenizer has none for 1"),
    ("vocab.json", {f"<{i}>": i for i in range(200_000)}, "vocab.json has 200,0"),
    ("preprocessor_config.json", {"n_fft": 2**31}, "has n_fft: 2147483648, which no model"),
    ("preprocessor_config.json", {"feature_extractor_type": "Evil"}, "has feature_extractor_type: 'Evil', which"),
])
def test_a_tokenizer_or_features_that_are_no_models_or_would_take_gigabytes(tmp_path, name, values, told):
    folder = published.make(tmp_path / "model")
    path = folder / name
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))
    assert told in refusal(tmp_path, folder).message


def test_a_config_that_names_a_kernel_of_somebody_is_opened_without_it(tmp_path):
    """Also by transformers' own code, with which the bundle is compared."""
    folder = published.make(tmp_path / "model")
    encoders.change(folder, _attn_implementation="evil/kernel@main", auto_map={"AutoModelForCTC": "evil.Evil"},
                    vocab_size=10**9, quantization_config={"quant_method": "evil"})
    signal = published.spoken(8_000)
    scores, text = CTCModel(str(folder)).own_code(lambda samples: samples // 320)(signal)
    assert scores.shape == (24, len(published.LETTERS)) and text
    encoders.change(folder, "preprocessor_config.json", feature_extractor_type="SeamlessM4TFeatureExtractor")
    with pytest.raises(SbkitError, match=f"transformers itself can't run {folder}: "):
        CTCModel(str(folder)).own_code(lambda samples: samples // 320)(signal)


def test_a_model_at_another_rate(tmp_path):
    folder = published.make(tmp_path / "model")
    path = folder / "preprocessor_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "sampling_rate": 8_000}))
    assert "takes 8,000 samples per second, but these families take 16,000" in refusal(tmp_path, folder).message


def test_the_hub_without_a_network(tmp_path, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    error = refusal(tmp_path, "nobody/has-this")
    assert error.message.startswith("the pretrained source nobody/has-this: no folder has this name, its config.json "
                                    "is not in the hub's cache")


def test_a_pickle_with_code_in_it_is_refused_and_not_run(tmp_path):
    folder = published.make(tmp_path / "model")
    (folder / "model.safetensors").unlink()
    torch.save({"lm_head.weight": torch.zeros(32, 32), "x": published.Evil(tmp_path / "ran")},
               folder / "pytorch_model.bin")
    assert "holds more than tensors, so loading it could run code" in refusal(tmp_path, folder).message
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(published.Evil(tmp_path / "ran")))
    refusal(tmp_path, folder)
    assert not (tmp_path / "ran").exists()


def test_a_recipe_beside_a_model_of_transformers_is_not_opened(tmp_path):
    folder = published.make(tmp_path / "model")
    (folder / "hyperparams.yaml").write_text(f"ran: !apply:os.mkdir [{tmp_path / 'ran'}]\n")
    assert published_sources.find(folder, ChosenWeights(), Metric("WER")).has_tokenizer
    (folder / "vocab.json").unlink()
    with pytest.raises(SbkitError, match=f"{folder} has no tokenizer that transformers can open"):
        import_model(ImportRequest(str(folder), tmp_path / "bundle", trust_code=True))
    assert not (tmp_path / "ran").exists()


def test_a_folder_with_no_model_of_others(tmp_path):
    bundles.make(tmp_path / "ours")
    refusal(tmp_path, tmp_path / "ours", "made-by-sbkit", file=tmp_path / "ours")
    (tmp_path / "empty").mkdir()
    refusal(tmp_path, tmp_path / "empty", "not-a-model", file=tmp_path / "empty")


def test_one_file_of_weights(tmp_path):
    (tmp_path / "model.ckpt").touch()
    refusal(tmp_path, tmp_path / "model.ckpt", "not-a-model", file=tmp_path / "model.ckpt")
