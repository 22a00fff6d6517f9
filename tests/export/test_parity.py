"""The gate's judgement: what may differ by how much, and what is a change of words."""

import dataclasses

import numpy as np
import pytest
from refusals import refused

from sbkit.decode.spans import Spelling
from sbkit.export import gate, parity_report
from sbkit.export.clips import Clip, ComparisonClips
from sbkit.export.layout import Config
from sbkit.export.measures import Difference
from sbkit.export.parity import Comparison, ParityResult, Reference, WordRules
from sbkit.export.vocabulary import Vocabulary
from sbkit.tasks.ctc.exported import compared

SYMBOLS = ["<blk>", "▁", "a", "b"]
CONFIG = Config(sample_rate=16_000, hop_samples=160, subsampling=4, vocabulary=4)
SPELLING = Spelling(SYMBOLS, 0.04)


def failures(comparison, *tolerance, **how):
    return [str(failure) for failure in gate.failures(comparison, *tolerance, **how)]


def tokenizer_text(spans):
    return "".join(SYMBOLS[i] for i in spans.ids).replace("▁", " ").strip()


def _comparison(texts, wers, formats):
    clips = [Clip(np.zeros(16, np.float32), None, str(number)) for number, _ in enumerate(texts)]
    words = iter([texts[-1], *texts])  # the last clip runs once more, to warm up
    comparison = Comparison(ComparisonClips(clips, "x", 1.0), Reference(lambda signal: next(words)), 16_000,
                            words=WordRules(text=lambda output: output))
    same = Difference(0.0, "")
    of_reference, *comparison.results = [
        ParityResult(format=name, bytes=1, difference=same, batch_difference=same, wer=wer, wer_of_checkpoint=wer_of)
        for (name, wer_of), wer in zip(formats, wers, strict=True)]
    comparison.of_reference = of_reference
    return comparison


@pytest.mark.parametrize("mine, theirs, passes", [(10.0, 10.9, True), (10.0, 11.2, False), (40.0, 43.9, True),
                                                  (40.0, 44.1, False), (10.0, 5.0, True), (10.0, float("nan"), False)])
def test_eight_bits_are_judged_by_what_they_cost_in_wer(mine, theirs, passes):
    comparison = _comparison(["a"] * 10, [mine, theirs], [("checkpoint", 0.0), ("int8", 2.0)])
    assert (failures(comparison) == []) == passes


def test_without_references_eight_bits_are_judged_by_the_checkpoints_words():
    for changed, passes in ((0.5, True), (3.0, False)):
        comparison = _comparison(["a"], [None, None], [("checkpoint", 0.0), ("int8", changed)])
        assert (failures(comparison) == []) == passes


@pytest.mark.parametrize("changed, passes", [(1, True), (2, True), (3, False)])
def test_a_program_that_gives_words_alone_may_miss_one_in_fifty_clips(changed, passes):
    comparison = _comparison(["a"] * 100, [10.0], [("checkpoint", 0.0)])
    said = iter(["a"] + ["b"] * changed + ["a"] * (100 - changed))  # the first one warms up
    assert comparison.add_words("sherpa", lambda signal: next(said), 7).words_changed == changed
    assert (failures(comparison) == []) == passes


@pytest.mark.parametrize("margin, changed", [(0.5, 1), (1e-4, 0)])
def test_a_program_that_gets_the_same_waveform_may_change_words_in_a_tie_alone(comparison, margin, changed):
    made, said = comparison
    best = said[1].max(-1)
    said[1][0, 0], said[1][0, 1] = best[0], best[0] - margin
    made.add_words("sherpa", lambda signal: "ba" if signal[0] == 1 else "bb a", 7, same_waveform=True)
    assert made.results[-1].words_changed == changed
    assert failures(made) == ["sherpa: 1 of 2 clips have different words (1)"][:changed]


def _scores(ids):
    """Log-probabilities [T, 4] of labels."""
    scores = np.full((len(ids), len(SYMBOLS)), -8.0, dtype=np.float32)
    scores[np.arange(len(ids)), ids] = -0.01
    return scores


@pytest.fixture
def comparison():
    return compared_with("the checkpoint")


def compared_with(title, name="checkpoint"):
    """Clips whose first sample is the number of their scores."""
    said = {1: _scores([1, 2, 0, 3]), 2: _scores([1, 3, 3, 0, 3, 1, 2])}
    alone = [Clip(np.full(16_000 * i, i, np.float32), text, str(i)) for i, text in ((1, "ab"), (2, "bb b"))]
    clips = ComparisonClips(alone, "x", 1.0)
    reference = Reference(lambda signal: said[int(signal[0])], name, title)
    made = compared(clips, Vocabulary(SYMBOLS, CONFIG), reference, SPELLING, tokenizer_text, 16_000)
    return made, said


def test_words_that_rounding_decides_are_no_change(comparison):
    made, expected = comparison[0], np.log(np.array([[0.5, 0.49999, 0.00001]]))
    assert made.measure.is_tied(expected, expected[:, [1, 0, 2]])
    assert not made.measure.is_tied(np.log([[0.6, 0.3, 0.1]]), np.log([[0.3, 0.6, 0.1]]))


def test_what_each_format_did_is_counted(comparison):
    made, said = comparison
    assert made.texts == ["ab", "bb a"] and made.of_reference.wer == pytest.approx(100 / 3)
    same = made.add("onnx", lambda signals: [said[int(each[0])] for each in signals], 7)
    assert (same.difference.size, same.batch_difference.size, same.words_changed, same.bytes) == (0.0, 0.0, 0, 7)
    assert same.wer == made.of_reference.wer and same.wer_of_checkpoint == 0.0
    off = made.add("torch", lambda signals: [said[int(each[0])] + 0.5 * (len(signals) > 1) for each in signals], 7)
    assert (off.difference.size, off.batch_difference.size) == (0.0, 0.5)
    other = made.add("int8", lambda signals: [_scores([1, 3, 0, 0])[: len(said[int(each[0])])] for each in signals], 7)
    assert other.words_changed == 2 and other.wer_of_checkpoint == pytest.approx(100.0)
    words = made.add_words("sherpa", lambda signal: "ab" if signal[0] == 1 else "bb  a", 7)
    assert words.words_changed == 0 and words.difference is None
    off_failure, other_failure = failures(made)
    assert "torch: log-probabilities differ by 0.5" in off_failure and "int8: WER" in other_failure
    assert failures(made, batching=False) == [other_failure], "a model that runs alone is compared alone"
    with refused("parity-failed"):
        gate.refuse_if_any(gate.failures(made), made)
    assert list(parity_report.facts(made)["formats"]) == ["checkpoint", "onnx", "torch", "int8", "sherpa"]
    assert parity_report.facts(made)["clips"]["seconds"] == 3.0
    assert parity_report.changed_clips(made) == "int8: other words in 1, 2\n"
    assert "changed" not in parity_report.facts(made)["formats"]["int8"]


def test_a_refusal_for_rounding_says_which_tolerance_would_do_below_the_table(capsys):
    made, said = compared_with("the imported model", "its authors")
    made.add("onnx", lambda signals: [said[int(each[0])] + 0.01 for each in signals], 7)
    with refused("parity-failed") as error:
        gate.refuse_if_any(gate.failures(made), made)
    assert capsys.readouterr().out == f"compared on {made.clips}:\n{parity_report.table(made)}\n"
    assert parity_report.table(made) not in error.value.message
    assert parity_report.table(made).splitlines()[2].startswith("its authors")
    assert "--tolerance 0.02 " in error.value.hint
    assert failures(made, 0.02) == [] and "where the imported model has" in failures(made)[0]
    made.add("torch", lambda signals: [said[int(each[0])][:, ::-1] for each in signals], 7)
    with refused("parity-failed") as error:
        gate.refuse_if_any(gate.failures(made), made)
    assert error.value.hint is None, "other words are no rounding"


def test_what_further_graphs_do_is_judged_and_shown_too(comparison):
    made, said = comparison
    other = compared(made.clips, Vocabulary(SYMBOLS, CONFIG), Reference(lambda signal: said[int(signal[0])] - 0.5),
                     SPELLING, tokenizer_text, 16_000)
    made.companions["stream"] = {"320 ms": other}
    other.add("onnx", lambda signals: [said[int(each[0])] - 0.5 for each in signals], 9)
    assert failures(made) == []
    assert list(parity_report.facts(made)["stream"]["320 ms"]) == ["checkpoint", "onnx"]
    head, _, first, second, third = parity_report.table(made).splitlines()
    assert first.startswith("checkpoint") and second.startswith("stream, 320 ms, checkpoint")
    where = slice(head.index("max difference"), head.index("clips changed"))
    assert [line[where].strip() for line in (first, second, third)] == ["", "", "0"], "none has one from itself"
    other.add("torch", lambda signals: [said[int(each[0])] - 0.5 * len(signals) for each in signals], 9)
    assert failures(made, batching=False) == [
        "stream, 320 ms, torch: log-probabilities differ by 0.5, but only 0.001 is allowed (1, frame 0 of 4: -9 where "
        "the checkpoint has -8.5, in a batch)"]


def test_the_uneven_batch_holds_the_shortest_and_the_longest():
    clips = ComparisonClips([Clip(np.zeros(size, np.float32), None, "") for size in (5, 900, 70, 30, 400, 2)], "x", 1.0)
    sizes = [len(clip.signal) for clip in clips.uneven]
    assert sizes[0] == 2 and sizes[-1] == 900 and len(set(sizes)) == len(sizes) == 4


class Program:
    """A program that decodes by itself, of the same outputs."""

    def __init__(self, said, words):
        self.said, self.words = said, words

    def __call__(self, signals):
        return [self.said[int(signal[0])] for signal in signals]

    def transcribe(self, signal):
        return self.words[int(signal[0])]


@pytest.fixture
def paused():
    """A clip whose second word has no mark but a pause of 0.72 s before it, and one of a single word."""
    said = {1: _scores([1, 2, *[0] * 18, 3]), 2: _scores([1, 3, 0, 3])}
    alone = [Clip(np.full(16_000 * i, i, np.float32), text, str(i)) for i, text in ((1, "a b"), (2, "bb"))]
    return compared(ComparisonClips(alone, "x", 1.0), Vocabulary(SYMBOLS, CONFIG),
                    Reference(lambda signal: said[int(signal[0])]), SPELLING, tokenizer_text, 16_000), said


def test_words_that_a_program_joins_across_a_pause_are_told_and_no_refusal(paused):
    made, said = paused
    assert made.texts == ["a b", "bb"] and made.of_reference.wer == 0.0
    words = {1: "ab", 2: "bb"}
    speechbrain = made.add("speechbrain", Program(said, words), 7, batches=False)
    sherpa = made.add_words("sherpa", lambda signal: words[int(signal[0])], 7, same_waveform=True)
    for found in (speechbrain, sherpa):
        assert (found.words_changed, found.words_joined) == (0, 1) and found.wer == pytest.approx(200 / 3)
    assert failures(made) == []
    assert parity_report.table(made).count("0 (1 joined)") == 2
    assert "speechbrain in 1 of 2 clips, sherpa in 1 of 2 clips" in parity_report.joined_words(made)
    assert parity_report.facts(made)["formats"]["sherpa"]["words_joined"] == 1


def test_other_words_of_a_program_are_a_change_beside_joined_ones(paused):
    made, said = paused
    other = made.add("speechbrain", Program(said, {1: "ab", 2: "b b"}), 7, batches=False)
    assert (other.words_changed, other.words_joined) == (1, 1) and other.changed == ["2"]
    made.add_words("sherpa", lambda signal: "ba" if signal[0] == 1 else "bb", 7, same_waveform=True)
    assert failures(made) == ["speechbrain: 1 of 2 clips have different words (2)",
                               "sherpa: 1 of 2 clips have different words (1)"]


def test_a_bundle_that_makes_other_words_of_the_same_log_probabilities_is_refused(paused):
    made, said = paused
    slower = dataclasses.replace(CONFIG, subsampling=3)  # for which 18 frames are no pause
    other = compared(made.clips, Vocabulary(SYMBOLS, slower), Reference(lambda signal: said[int(signal[0])]), SPELLING,
                     tokenizer_text, 16_000)
    found = other.add("onnx", lambda signals: [said[int(signal[0])] for signal in signals], 7)
    assert found.difference.size == 0.0 and failures(other) == ["onnx: 1 of 2 clips have different words (1)"]


def test_a_tokenizer_that_writes_other_letters_than_the_bundle_is_refused(paused):
    made, said = paused
    with refused("tokenizer-differs"):
        compared(made.clips, Vocabulary(SYMBOLS, CONFIG), Reference(lambda signal: said[int(signal[0])]), SPELLING,
                 lambda spans: tokenizer_text(spans).upper(), 16_000)
