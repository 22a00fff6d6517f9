"""A test in chunks: what a listener would have seen, with chunks of each size, and what an evaluation says of it."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
from batches import noise
from letters import Letters
from processes import results
from refusals import refused
from run_folders import corpus
from streaming_runs import saved

from sbkit.cli import main
from sbkit.data.manifest import Manifest
from sbkit.decode import lm
from sbkit.decode.beam import BeamSearch
from sbkit.decode.spans import Spelling
from sbkit.nn.chunks import Chunks
from sbkit.score import utterances
from sbkit.score.latency import stable_words
from sbkit.tasks.ctc.decoding import CTCDecoding
from sbkit.tasks.recognise.live import LiveTest

PIECES = Letters(["<unk>", "▁", "a", "b", "c"])
SPELLING = Spelling(PIECES, 0.04)
CHUNKS = Chunks(sizes=[2, 4], left_context=[4], validate=None)


def listener(chunk, chunks=CHUNKS, encode=None):
    """Its frames are 40 ms long."""
    model = SimpleNamespace(subsampling=4, hop_samples=160, encode=encode, head=lambda states: states)
    keys = SimpleNamespace(chunks=chunks, sample_rate=16_000, blank_index=0, tokenizer=PIECES)
    return LiveTest(model, keys, CTCDecoding(model, keys), chunk)


def said(path):
    """Scores [1, T, V] whose best path is this, a letter for each frame."""
    best = torch.tensor(["-_abc".index(letter) for letter in path])
    return 9.0 * torch.nn.functional.one_hot(best, len(PIECES))[None].float()


def batch(text, seconds, tokens=None):
    tokens = [PIECES.index(letter) for letter in "▁" + text.replace(" ", "▁")] if tokens is None else tokens
    return noise(round(seconds * 16_000), tokens=[tokens], texts=[text])


def seen(chunk, paths, text, seconds, chunks=CHUNKS, **more):
    """The row of an utterance; a path for each size, and that of the whole."""
    live = listener(chunk, chunks)
    [row] = live.rows([said(path) for path in paths], torch.tensor([len(paths[0])]), batch(text, seconds, **more), None,
                       SPELLING)
    return row


def test_a_word_is_shown_at_the_end_of_its_last_chunk():
    whole = "_a-_b--_cc"  # words end after 2, 5 and 10 frames: 0.08, 0.2 and 0.4 s
    row = seen([80, 160, None], [whole] * 4, "a b c", 0.4)
    assert row.hypothesis == "a b c" and [one.changed for one in row.live] == [0, 0, 0]
    assert row.live[0].latencies == pytest.approx([0.0, 0.04, 0.0], abs=1e-6), "chunks of two frames"
    assert row.live[1].latencies == pytest.approx([0.08, 0.12, 0.0], abs=1e-6), "chunks of four, the last cut short"
    assert row.live[2].latencies == pytest.approx([0.32, 0.2, 0.0], abs=1e-6), "all at the end"


def test_what_is_only_looked_at_is_said_with_the_next_chunk():
    # Each says two frames, 0.08 s before its end.
    ahead = Chunks(sizes=[4], left_context=[4], validate=None, lookahead=2)
    row = seen([160, None], ["_a-_b--_cc"] * 3, "a b c", 0.4, ahead)
    assert row.live[0].text == "a b c"
    assert row.live[0].latencies == pytest.approx([0.08, 0.12, 0.0], abs=1e-6)
    assert row.live[1].latencies == pytest.approx([0.32, 0.2, 0.0], abs=1e-6)


def test_each_size_has_its_own_transcript_and_the_first_is_the_tests():
    row = seen([80, None], ["_a-_c-", "_a-_b-", "_a-_b-"], "a b", 0.24)
    assert row.hypothesis == "a c" and [one.text for one in row.live] == ["a c", "a b"]
    assert [len(one.latencies) for one in row.live] == [1, 2], "right words alone are measured"


def test_the_last_chunk_ends_with_the_recording():
    row = seen([160], ["_a---b", "_a---b"], "ab", 0.23)
    assert row.live[0].latencies == pytest.approx([0.23 - 0.24], abs=1e-6)


@pytest.mark.parametrize("text, tokens", [("a b c a b", None), ("", []), ("a é b", [1, 2, 1, 1, 3])])
def test_a_text_that_cannot_be_aligned_is_scored_without_latency(text, tokens):
    row = seen([80], ["_a-_b-", "_a-_b-"], text, 0.24, tokens=tokens)
    assert row.hypothesis == "a b" and row.live[0].latencies == ()


def test_what_a_search_takes_back_has_changed():
    """What comes later goes on from the second best beginning alone."""
    scores = torch.full((1, 4, len(PIECES)), -20.0)
    for frame, likely in enumerate([{1: 0.0}, {2: -0.6, 3: -0.8}, {0: 0.0}, {4: 0.0}]):
        for token, value in likely.items():
            scores[0, frame, token] = value
    search = BeamSearch(PIECES, lexicon=["a", "bc"])
    [row] = listener([80]).rows([scores, scores], torch.tensor([4]), batch("bc", 0.16), search, SPELLING)
    assert row.hypothesis == "bc"
    assert row.live[0].changed == 1 and len(row.live[0].latencies) == 1


def test_a_search_in_chunks_shows_what_a_stream_does_and_one_of_the_whole_what_it_finds():
    """With a pause in a word, behind which a stream begins another line."""
    torch.manual_seed(0)
    letters = torch.randint(1, 5, (2, 60))
    letters[0, 19:46] = torch.tensor([2, *[0] * 25, 3])
    scores = 3.0 * torch.nn.functional.one_hot(letters, len(PIECES)) + torch.randn(2, 60, len(PIECES))
    scores[0, 20:45, 0] += 9.0
    frames = torch.tensor([60, 31])
    together = noise(*(640 * frames).tolist(), tokens=[[1, 2]] * 2, texts=["a"] * 2)
    search, live = BeamSearch(PIECES, beam=8, hot_words={"ab": 3.0}, nbest=2), listener([160, None])
    rows = list(live.rows([scores] * 3, frames, together, search, SPELLING))
    log_probs = scores.log_softmax(-1)
    for row, one, count, best in zip(rows, log_probs, frames.tolist(), search.decode(log_probs, frames), strict=True):
        stream, texts, settled = search.stream(search.spelling(0.04)), [], []
        for piece in one[:count].split(4):
            results = stream.feed(piece.numpy())
            settled += [word.text for each in results for word in each.settled]
            texts.append(settled + [word.text for word in results[-1].partial])
        texts[-1] = settled + [word.text for word in stream.finish().settled]
        assert row.hypothesis == row.live[0].text == " ".join(texts[-1]) and 0 < row.confidence < 1
        assert row.live[0].changed == stable_words(texts)[1]
        assert row.live[1].text == best[0].text and row.nbest == ()
    assert rows[0].live[0].text != rows[0].live[1].text and rows[1].live[0].text == rows[1].live[1].text


def test_each_size_is_computed_once_with_what_it_was_trained_to_see():
    asked = []

    def encode(feats, frames, config):
        asked.append(config and (config.chunk_size, config.left_context_size))
        return feats + len(asked), frames

    live = listener([160, 80, None], encode=encode)
    found = live.scores(torch.zeros(1), torch.tensor([1]), torch.tensor([-1.0]))
    assert asked == [(2, 2), None] and [float(each) for each in found] == [-1, 1, 2, 2]
    assert live.configs[160].chunk_size == 4 and live.configs[None] is None


def test_a_size_that_the_model_was_not_trained_for_is_refused():
    with refused("untrained-chunk") as told:
        listener([80, 120])
    assert "80, 160 and whole" in str(told.value)
    with refused("no-chunks"):
        listener([80], chunks=None)


# ------------------------------------------------------------ the command


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    def hears_something(brain):
        torch.manual_seed(1)
        with torch.no_grad():
            for parameter in brain.acoustic_model.head.parameters():
                parameter.copy_(torch.randn(parameter.shape))

    home = tmp_path_factory.mktemp("live")
    return saved(home / "run", corpus(home / "data", train=8, dev=3, test=5), hears_something)


def evaluate(run, *words):
    return main(["evaluate", str(run), "--device", "cpu", "--workers", "0", "--precision", "fp32", *map(str, words)])


def result(run, name):
    return json.loads((run / "evaluations" / name / "result.json").read_text())


@pytest.mark.slow
def test_one_table_has_all_sizes_and_so_do_the_files_and_the_page(run, capsys):
    assert evaluate(run, "--chunk", "320,1280,whole") == 0
    table = capsys.readouterr().out
    assert "latency s" in table
    first, *others = (line.split() for line in table.splitlines()[2:5])
    assert first[0] == "best" and first[3] == "320", "what lines share stands once"
    assert [line[0] for line in others] == ["1280", "whole"] and max(map(len, table.splitlines()[:5])) <= 120
    folder = run / "evaluations" / "test-best-chunk320-1280-whole"
    facts = result(run, folder.name)
    assert [each["chunk"] for each in facts["chunks"]] == [320, 1280, "whole"]
    assert facts["WER"] == facts["chunks"][0]["WER"], "the first size is that of the files"
    assert all(f"{each['WER']:.2f}" in table for each in facts["chunks"])
    assert all(each["changed"] == 0 for each in facts["chunks"]), "a greedy transcript only grows"
    page = (folder / "report.html").read_text()
    assert 'id="live"' in page and "1280 ms" in page
    assert evaluate(run) == 0
    plain = result(run, "test-best")
    assert "chunks" not in plain and plain["WER"] == facts["chunks"][2]["WER"]
    assert 'id="live"' not in (run / "evaluations" / "test-best" / "report.html").read_text()


def test_the_transcripts_are_those_of_the_first_size(run, capsys):
    assert evaluate(run, "--chunk", "whole,320") == 0 and evaluate(run, "--name", "plain") == 0
    ours, plain = (utterances.read(run / "evaluations" / name / "utterances.jsonl")
                   for name in ("test-best-chunkwhole-320", "plain-best"))
    assert ours == plain


def score_on_a_rank(run, name):
    return evaluate(run, "--chunk", "320,whole", "--name", name)


@pytest.mark.slow
def test_two_devices_see_the_same_as_one(run):
    assert score_on_a_rank(run, "one") == 0 and results(score_on_a_rank, run, "two") == [0, 0]
    one, two = (result(run, f"{name}-best-chunk320-whole") for name in ("one", "two"))
    assert two["devices"] == 2
    for first, second in zip(one["chunks"], two["chunks"], strict=True):
        assert first == {**second, "latency": pytest.approx(second["latency"]),
                         "latency_p95": pytest.approx(second["latency_p95"])}


def test_a_limit_holds_for_each_size(run, capsys):
    assert evaluate(run, "--chunk", "640,whole", "--max-wer", 1) == 1
    told = capsys.readouterr().err
    assert "(chunk: 640 ms), more than 1" in told and "(chunk: whole)" in told


@pytest.mark.slow
def test_a_search_is_tuned_and_shows_what_it_would_have_found_after_each_chunk(run, tmp_path, capsys):
    lm.build(Manifest.read(run / "manifests" / "train.csv").texts, tmp_path / "words.arpa", order=2)
    search = "--lm", tmp_path / "words.arpa", "--tune-lm", "--beam", 4
    assert evaluate(run, "--chunk", "whole,320", *search) == 0 and evaluate(run, *search) == 0
    ours, plain = result(run, "test-best-words-tuned-chunkwhole-320-beam4"), result(run, "test-best-words-tuned-beam4")
    assert ours["decoder"] == plain["decoder"] and ours["WER"] == ours["chunks"][0]["WER"] == plain["WER"]
    assert ours["chunks"][0]["changed"] == 0, "what is shown once cannot change"


@pytest.mark.parametrize("words, message", [
    (["--chunk", "500"], "the model wasn't trained for chunks of 500 ms; it was trained for 320, 640, 1280"),
    (["--chunk", "soon"], "'soon' is neither milliseconds nor whole"),
    (["--chunk", "320,"], "'' is neither milliseconds nor whole"),
    (["--chunk", "-320"], "is neither milliseconds nor whole"),
    (["--chunk", "320,320"], "names a size twice"),
    (["--chunk", "320,whole", "--beam", "4", "--nbest", "2"], "--nbest lists the transcripts of the first size"),
])
def test_a_wrong_size_is_one_line(run, capsys, words, message):
    assert evaluate(run, *words) == 2
    told = capsys.readouterr().err
    assert message in told and "Traceback" not in told
