"""What a voice's export is compared on and by: texts of the test split, spectra, and a recogniser's transcripts."""

from pathlib import Path

import numpy as np
import pytest
import soundfile
import toy_voice
from speechbrain.core import Stage

from sbkit.data.text import AsWritten, TextRules
from sbkit.export import gate, graph, layout, parity_report
from sbkit.export.clips import Clip, ComparisonClips
from sbkit.export.parity import Reference
from sbkit.tasks.tts import TTS
from sbkit.tasks.tts.exported import MAX_DIFFERENCE, ExportedVoice, sound_comparison

RATE = toy_voice.RATE
TEXTS = {f"x{i}": "ab cab c"[: 1 + i % 8].strip() for i in range(9)}


def tone(hertz, seconds=0.5):
    return (0.3 * np.sin(2 * np.pi * hertz * np.arange(int(seconds * RATE)) / RATE)).astype(np.float32)


def comparison(transcribe=None, count=8):
    """Of a voice that plays each text's first id as a tone."""
    clips = ComparisonClips([Clip(np.full(5 + i, 1 + i), f"text {i}", f"{i}") for i in range(count)], "tests", 12)
    return sound_comparison(clips, Reference(lambda ids: tone(200 * int(ids[0]))), RATE, transcribe)


def run(change=lambda sound: sound):
    return lambda texts: [change(tone(200 * int(ids[0]))) for ids in texts]


def test_the_same_sound_is_the_same_and_one_of_another_pitch_is_not():
    made = comparison()
    assert made.add("onnx", run(), 1).difference.size == 0 and gate.failures(made) == []
    made.add("torch", lambda texts: [tone(210 * int(ids[0])) for ids in texts], 1)
    [failure] = gate.failures(made)
    assert str(failure).startswith("torch: spectra differ by")
    assert f"only {MAX_DIFFERENCE:g} dB is allowed" in str(failure)


def test_sound_of_another_length_is_compared_as_far_as_the_longer_goes():
    made = comparison()
    made.add("onnx", run(lambda sound: sound[:-320]), 1)
    made.add("torch", run(lambda sound: sound[: len(sound) // 2]), 1)
    sizes = [result.difference.size for result in made.results]
    assert 0 < sizes[0] < sizes[1] and sizes[1] > MAX_DIFFERENCE


def test_samples_that_are_no_numbers_are_infinitely_far():
    made = comparison()
    made.add("onnx", run(lambda sound: sound * np.nan), 1)
    assert made.results[0].difference.size == np.inf and gate.failures(made)


@pytest.mark.parametrize(("others", "refused"), [(1, False), (2, True)])
def test_a_recogniser_may_hear_other_words_in_one_of_few_clips(others, refused):
    calls = []

    def transcribe(sounds):
        calls.append(len(sounds))
        return ["other" if 8 < len(calls) <= 8 + others else "word"]  # the first eight are of the checkpoint

    made = comparison(transcribe)
    made.add("onnx", run(), 1)
    assert made.results[0].words_changed == others and bool(gate.failures(made)) == refused


def test_times_in_its_report_are_seconds():
    made = comparison()
    facts = parity_report.facts(made)["clips"]
    symbols = sum(5 + i for i in range(8))
    assert facts["seconds"] == pytest.approx(8 * 0.5, abs=0.01)
    assert facts["longest_in_training"] == pytest.approx(12 * 8 * 0.5 / symbols, abs=0.01)
    assert 0 < made.of_reference.rtf < 1


# ---------------------------------------------------------------- texts


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("voice")
    made = toy_voice.brain(folder, Stage.TEST, n_symbols=5, n_speakers=2, speakers={"several": True}, max_symbols=9)
    TTS.prepare(made.keys, {"train": toy_voice.recordings(folder / "wavs", TEXTS, {"x0": "anna", "x1": "ben"})}, {})
    return ExportedVoice.of(made.voice, made.keys, None)


class Corpus:
    def __init__(self, path):
        self.path = path

    def manifest_path(self, split):
        return self.path


def test_texts_are_of_the_test_split_from_the_shortest_to_the_longest_and_beyond(model, tmp_path):
    toy_voice.recordings(tmp_path, {**TEXTS, "other": "ñé"}).write(tmp_path / "test.csv")
    clips = model.clips(Corpus(tmp_path / "test.csv"), 4)
    texts = [clip.text for clip in clips.alone]
    assert texts[0] is None and len(clips.alone[0].signal) == 1, "one symbol"
    assert texts[1:-1] == sorted(texts[1:-1], key=len) and texts[1] == "a" and texts[-2] == "ab cab c"
    assert texts[-1] is None and len(clips.alone[-1].signal) == 9, "longer than any, but no more than it takes"
    assert clips.origin == "4 texts of the run's test split" and "ñé" not in texts
    assert all(0 < len(clip.signal) <= 9 and clip.signal.dtype == np.int64 for clip in clips.alone)


@pytest.mark.parametrize("corpus", [None, Corpus(Path("/nowhere/test.csv"))])
def test_without_the_corpus_texts_are_made_up_of_all_symbols(model, corpus):
    clips = model.clips(corpus, 4)
    assert clips.origin.startswith("made-up texts") and clips.longest == 60
    assert {number for clip in clips.alone for number in clip.signal.tolist()} == {1, 2, 3, 4}
    assert max(len(clip.signal) for clip in clips.alone) <= 9


def test_speakers_differ_and_do_not_depend_on_the_batch(model):
    texts = [np.array(ids) for ids in ([1], [2], [1, 2], [3, 4, 1])]
    together = model._speakers(texts)
    assert set(together) == {0, 1} and [model._speakers([text])[0] for text in texts] == together.tolist()


def test_its_config_says_what_it_is(model):
    config = model.config(None, None)
    assert config.symbols == ["<pad>", " ", "a", "b", "c"] and config.speakers == ["anna", "ben", "voice"]
    assert config.frame_seconds == 0.02 and config.books == [12, 12] and config.max_symbols == 9


@pytest.mark.parametrize("rules, text", [
    (TextRules.for_language("tr", alphabet="abc"), {"case_pairs": {"I": "ı", "İ": "i"}, "case": "lower"}),
    (TextRules(case="keep", replace={"&": "and"}), {"replace": {"&": "and"}, "case": "keep"}), (AsWritten(), None),
])
def test_its_config_has_the_rules_of_its_texts(model, monkeypatch, rules, text):
    monkeypatch.setattr(model.keys.corpus, "text", rules)
    config = model.config(None, None)
    if text is None:
        assert config.text is config.rules is None
    else:
        assert config.text.items() >= text.items() and "alphabet" not in config.text
        assert config.rules("DON’T pin-tip & Iİ") == rules("DON’T pin-tip & Iİ")


@pytest.mark.slow
def test_each_snippet_of_its_readme_says_a_text(model, tmp_path, monkeypatch):
    clips = model.clips(None, 4)
    program = model.trace()
    config = model.config(program, clips)
    config.models = {layout.ONNX: layout.MODELS[layout.ONNX], layout.TORCH: layout.MODELS[layout.TORCH]}
    graph.write_onnx(program, tmp_path / "model.onnx", model.inputs, model.outputs, model.metadata(config))
    graph.write_torch(program, tmp_path / "model.pt2")
    (tmp_path / layout.CONFIG).write_text(config.to_json(), encoding="utf-8")

    page = model.readme("bundle", config, model.comparison(clips, config, tmp_path))
    snippets = [part.split("```")[0] for part in page.split("```python\n")[1:]]
    without_sbkit = [snippet for snippet in snippets if "sbkit" not in snippet]
    assert len(without_sbkit) == 2
    monkeypatch.chdir(tmp_path)
    sounds = []
    for snippet in without_sbkit:
        exec(snippet, {})
        sounds.append(soundfile.read("said.wav")[0])
        Path("said.wav").unlink()
    assert len(sounds[0]) > 0
    np.testing.assert_allclose(*sounds, atol=1e-3)
