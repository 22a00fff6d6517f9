"""config.json and tokens.txt: what is written is read again, and what is wrong is told."""

import dataclasses
import json
import time

import bundles
import numpy as np
import pytest
import voices
from hypothesis import given
from hypothesis import strategies as st

from sbkit.decode.spans import TokenSpans
from sbkit.errors import SbkitError
from sbkit.export import layout
from sbkit.export.layout import CodecConfig, Config, EnhancerConfig, Streaming, VoiceConfig
from sbkit.export.vocabulary import Vocabulary, read_tokens, write_tokens


def config(**changes):
    return Config(**({"sample_rate": 16_000, "hop_samples": 160, "subsampling": 4, "vocabulary": 5} | changes))


def codec(**changes):
    return CodecConfig(**({"sample_rate": 16_000, "codec": "0f" * 32, "books": [1000, 1000], "stride": 320,
                           "context": 16, "models": {"onnx": "model.onnx"}, "decoders": {"onnx": "decoder.onnx"}}
                          | changes))


def voice(**changes):
    return VoiceConfig(**({"sample_rate": 24_000, "symbols": ["<pad>", " ", "a", "é"], "speakers": ["anna"],
                           "max_symbols": 200, "frame_seconds": 0.02} | changes))


def enhancer(**changes):
    return EnhancerConfig(**({"sample_rate": 16_000, "outputs": ["enhanced"], "hop": 16, "delay": 48,
                              "state": {"state_0": {"type": "float32", "shape": [8, 2]}},
                              "models": {"onnx": "model.onnx"}, "streams": {"onnx": "stream.onnx"}} | changes))


STREAMING = {"chunks": [8, 16], "left": 64, "overlap": 240, "before": 120, "after": 200,
             "state": {"keys": {"type": "float32", "shape": [6, 64, 144]}, "seen": {"type": "int64", "shape": []}},
             "models": {"onnx": "stream.onnx"}}


@pytest.mark.parametrize("mine", [
    config(language="fr", models={"onnx": "model.onnx"}, files={"model.onnx": {"bytes": 3}}, silent_ids=[1, 2]),
    config(streaming=Streaming(**STREAMING)), codec(), enhancer(),
    codec(context=None, min_frames=2, min_samples=321, batching=False),
    voice(language="fr", codec="0" * 64, books=[1000, 1000], models={"onnx": "model.onnx"})])
def test_a_configuration_is_read_as_it_was_written(tmp_path, mine):
    (tmp_path / "config.json").write_text(mine.to_json())
    assert type(mine).read(tmp_path) == layout.read(tmp_path) == mine


def test_an_older_sbkit_reads_what_has_no_streams():
    assert not {"streaming", "longest_seconds"} & json.loads(config().to_json()).keys()
    assert config().frame_seconds == 0.04 and config(streaming=Streaming(**STREAMING)).window(8) == 8 * 640 + 240


def refused(folder, made, changes, expected):
    """In a short line."""
    values = json.loads(made.to_json()) | changes
    (folder / "config.json").write_text(json.dumps({name: v for name, v in values.items() if v is not ...}))
    with pytest.raises(SbkitError, match=expected) as error:
        layout.read(folder)
    assert "\n" not in str(error.value) and len(str(error.value)) < 1000


#: What nothing can run with, or what would fill the memory.
REFUSED = {
    config: [
        ({"format": "another"}, "does not describe an sbkit bundle"),
        ({"version": 2}, "has version 2, but this sbkit reads version 1"),
        ({"sample_rate": 0}, "sample_rate is 0"), ({"vocabulary": "5"}, "vocabulary is '5'"),
        ({"subsampling": True}, "subsampling is True"), ({"chunk_seconds": -1}, "chunk_seconds is -1"),
        ({"longest_seconds": 19}, "longest_seconds is 19, but must be at least chunk_seconds, which is 20"),
        ({"longest_seconds": "30"}, "longest_seconds is '30'"),
        ({"blank_id": 5}, "blank_id is 5"), ({"colour": "red"}, "unknown keys: colour"),
        ({"hop_samples": ...}, "lacks keys"), ({"streaming": "yes"}, "streaming is 'yes', but must be an object"),
        ({"models": {"onnx": "../model.onnx"}}, "name of a file in the bundle's folder"),
        ({"files": {"/etc/x": {}}}, "keys are each the name of a file in the bundle's folder"),
        ({"models": {"onnx": ".."}}, "name of a file"), ({"models": {"onnx": ""}}, "name of a file"),
        ({"models": {"onnx": "a\0b"}}, "name of a file"), ({"vocabulary": 10**9}, "vocabulary is 1000000000"),
        ({"chunk_seconds": 1e308}, r"chunk_seconds is 1e\+308, but must be a number above 0, up to 600"),
        ({"chunk_seconds": float("nan")}, "chunk_seconds is nan"), ({"word_separator": ""}, "word_separator is ''"),
        ({"silent_ids": [[]]}, r"silent_ids is \[\[\]\]"),
        ({"reliability": [[0.1, 2]]}, r"reliability is \[\[0.1, 2\]\]"), ({"reliability": []}, "a list of 1 to"),
        ({"reliability": [[0, -1]]}, "each a number from 0 to 1"),
        ({"reliability": [[0.3, 0.1], [0.3, 0.2]]}, "growing confidences"),
        ({"reliability": [[0, 0.5], [1, 0.4]]}, "shares that don't fall"),
        ({"silent_ids": [5]}, r"silent_ids is \[5\], but .* from 0 to 4"),
        ({"hop_samples": 16_000}, "a frame has .* 64,000 samples, but must have 16,000 at most"),
        ({"language": "\ud800"}, "language is"), ({"sample_rate": 16}, "sample_rate is 16, but must be .* from 1,000"),
        ({"x" * 10**6: 1}, "unknown keys: xxx"),
    ],
    codec: [
        ({"codec": "0F" * 32}, "codec is .* must be a sha256"), ({"codec": None}, "codec is .* must be a sha256"),
        ({"books": []}, "books is .* must be a list of 1 to"),
        ({"books": [1000, 0]}, "books is .* must be a list of 1 to 256, each a whole number from 1"),
        ({"books": 1000}, "books is 1000"), ({"stride": 0}, "stride is 0"), ({"min_frames": 1.5}, "min_frames is 1.5"),
        ({"context": -1}, "context is -1, but must be a whole number from 0 to"),
        ({"context": True}, "context is True"),
        ({"context": ...}, "lacks keys"), ({"decoders": {}}, "decoders must give a file for each of onnx"),
        ({"decoders": ["decoder.onnx"]}, "decoders is .* must be an object"),
        ({"decoders": {"onnx": "../decoder.onnx"}}, "name of a file in the bundle's folder"),
        ({"min_frames": 10**9}, "min_frames is 1000000000, but must be a whole number from 1 to 3,000"),
        ({"min_samples": 10**7}, "min_samples is 10000000, but must be a whole number from 1 to 960,000"),
        ({"stride": 10**7}, "stride is 10000000, but must be a whole number from 1 to 16,000"),
        ({"context": 10**9}, "context is 1000000000, but must be a whole number from 0 to 3,000, or null"),
    ],
    voice: [
        ({"symbols": ["<pad>"]}, "must be a list of 2 to 1,000,000, each a text"),
        ({"symbols": "abc"}, "symbols is .* must be a list"),
        ({"symbols": ["<pad>", "a", 3]}, "symbols is .* must be a list"),
        ({"symbols": ["<pad>", "a", ""]}, "symbols is .* must be a list"),
        ({"symbols": ["<pad>", "a", "b", "a"]}, "symbols has 'a' twice"),
        ({"symbols": ["<pad>", "ab"]}, "symbol 'ab' is not one character"),
        ({"symbols": ["<pad>", "\u212b"]}, r"symbol '.u212b' is not one character in Unicode's form NFC"),
        ({"speakers": []}, "speakers is .*, but must be a list of 1 to"),
        ({"speakers": ["a", "a"]}, "speakers has 'a' twice"),
        ({"speakers": ...}, "lacks keys"), ({"max_symbols": 0}, "max_symbols is 0"),
        ({"max_symbols": True}, "max_symbols is True"), ({"frame_seconds": 0}, "frame_seconds is 0"),
        ({"frame_seconds": True}, "frame_seconds is True"), ({"frame_seconds": float("nan")}, "frame_seconds is nan"),
        ({"frame_seconds": float("inf")}, "frame_seconds is inf"), ({"books": [1000, 0]}, "books is .* must be a list"),
        ({"books": 1000}, "books is .* must be a list"),
        ({"models": ["model.onnx"]}, "models is .* must be an object"),
        ({"models": None}, "models is .* must be an object"),
        ({"files": ["model.onnx"]}, "files is .* must be an object"),
        ({"files": {"model.onnx": 3}}, "files is .* must be an"),
        ({"files": {"model.onnx": {"bytes": "3"}}}, "files is .* must be an"),
        ({"trained": []}, "trained is .* must be an object"),
        ({"made_by": "me"}, "made_by is .* must be an object"),
        ({"language": 3}, "language is 3, but must be a text in UTF-8 of 0 to 100 characters, or null"),
        ({"batching": 1}, "batching is 1, but must be true or false"),
        ({"codec": 1}, "codec is 1, but must be a sha256 in hexadecimal, or null"),
        ({"max_symbols": 10**9}, "max_symbols is 1000000000, but must be a whole number from 1 to 50,000"),
        ({"sample_rate": 10**400}, "sample_rate is 1000.*, but must be a whole number from 1,000 to 768,000"),
        ({"min_samples": 10**7}, "min_samples is 10000000, but must be a whole number from 1 to 1,440,000"),
        ({"text": ["NFC"]}, "text is .*, but must be an object, or null"),
        ({"text": {"colour": 1}}, "text must have options of TextRules"),
        ({"text": {"case": "title"}}, "case is 'title'"), ({"text": {"replace": {"": "x"}}}, "replace is"),
        ({"text": {"unicode": []}}, "unicode is"), ({"text": {"case": {}}}, "case is"),
        ({"text": {"keep_punctuation": 1}}, "keep_punctuation is 1"),
        ({"text": {"replace": {"a": "b" * 101}}}, "text has more than"),
        ({"text": {"replace": dict.fromkeys(map(str, range(1001)), "x")}}, "text has more than"),
        ({"spelling": "../xx", "characters": ["a"]}, "spelling is '../xx', but must be a voice of espeak-ng"),
        ({"spelling": 3, "characters": ["a"]}, "spelling is 3"),
        ({"spelling": "xx", "characters": []}, "must be characters if there is a spelling"),
        ({"spelling": None, "characters": ["a"]}, "and none otherwise"),
        ({"spelling": "xx", "characters": ["ab"]}, "not one character"),
    ],
    enhancer: [
        ({"hop": 0}, "hop is 0"), ({"delay": -1}, "delay is -1"), ({"state": {}}, "state is"),
        ({"streams": {}}, "streams must give a file for each of onnx"),
        ({"state": {"state_0": {"type": "float32", "shape": [1 << 26, 2]}}}, "more than"),
        ({"hop": 1 << 20}, "hop is"), ({"wet": 1}, "unknown keys: wet"),
    ],
}


@pytest.mark.parametrize("make, changes, expected", [(make, *row) for make, rows in REFUSED.items() for row in rows])
def test_a_configuration_that_cannot_be_is_refused(tmp_path, make, changes, expected):
    refused(tmp_path, make(), changes, expected)


@pytest.mark.parametrize("changes, expected", [
    ({"chunks": []}, "streaming: chunks is"), ({"chunks": [8, 0]}, "streaming: chunks is"),
    ({"chunks": 8}, "streaming: chunks is 8"), ({"left": 0}, "left is 0, but must be a whole number from 1 to"),
    ({"overlap": -1}, "streaming: overlap is -1, but must be a whole number from 0 to"),
    ({"before": 1.5}, "streaming: before is 1.5"),
    ({"ahead": -1}, "streaming: ahead is -1"), ({"ahead": 8}, "streaming: ahead is 8, but must be below the smallest"),
    ({"state": {}}, "streaming: state is .* must be an object"),
    ({"state": {"keys": {"type": "object", "shape": [3]}}}, "streaming: state is .* must be an object"),
    ({"state": {"keys": {"type": "float32", "shape": [3, -1]}}}, "streaming: state is .* must be an object"),
    ({"state": {"keys": [3]}}, "streaming: state is .* must be an object"),
    ({"models": ["stream.onnx"]}, "streaming: models is"),
    ({"models": {"onnx": "/x/stream.onnx"}}, "name of a file in the"),
    ({"models": {"onnx": 3}}, "name of a file in the"),
    ({"colour": "red"}, "streaming has unknown keys: colour; was it written by a newer sbkit?"),
    ({"after": ...}, "streaming lacks keys"),
    ({"before": 2**31}, "streaming: before is 2147483648, but must be a whole number from 0 to"),
    ({"before": 10**6}, "streaming: before is 1000000, but must be a whole number from 0 to 960,000"),
    ({"after": 401}, "streaming: after is 401, but must be a whole number from 0 to 400"),
    ({"chunks": [8, 2000]}, "window of the largest of chunks is 1280240, but must be a whole number from 0 to 960,000"),
    ({"state": {"keys": {"type": "float32", "shape": [2**13, 2**14]}}}, "state has more than 67,108,864 numbers"),
])
def test_streams_that_nothing_can_run_or_that_would_fill_the_memory_are_refused(tmp_path, changes, expected):
    values = {name: value for name, value in (STREAMING | changes).items() if value is not ...}
    refused(tmp_path, config(), {"streaming": values}, expected)


@pytest.mark.parametrize("asked, there, expected", [
    (CodecConfig, voices, "has a voice, but a codec is needed here"),
    (Config, voices, "has a voice, but a speech recogniser is needed here"),
    (VoiceConfig, bundles, "has a speech recogniser, but a voice is needed here")])
def test_a_bundle_of_another_kind_is_told_from_it(tmp_path, asked, there, expected):
    with pytest.raises(SbkitError, match=expected):
        asked.read(there.make(tmp_path / "bundle"))


@pytest.mark.parametrize("kind", [*layout.KINDS.values(), Streaming], ids=lambda kind: kind.__name__)
def test_the_schema_says_of_each_value_what_it_may_be(kind):
    left = {each.name for each in dataclasses.fields(kind) if "allowed" not in each.metadata}
    assert left == ({"streaming"} if issubclass(kind, Config) else set()), "which has a schema of its own"


def test_two_hundred_thousand_speakers_are_read_in_a_second(tmp_path):
    (tmp_path / "config.json").write_text(voice(speakers=[f"s{i}" for i in range(200_000)]).to_json())
    began = time.perf_counter()
    assert len(layout.read(tmp_path).speakers) == 200_000
    assert time.perf_counter() - began < 5  # it took a minute: each was counted among all


def test_a_configuration_that_is_no_regular_file_is_refused_at_once(tmp_path):
    (tmp_path / "config.json").symlink_to("/dev/zero")
    with pytest.raises(SbkitError, match=r"config\.json cannot be read: it is not a regular file"):
        layout.read(tmp_path)
    with pytest.raises(SbkitError, match="cannot be read: it is not a regular file"):
        read_tokens(tmp_path / "config.json", 3)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "\x00", '{"format":' + "[" * 100_000,
                                  "{" + " " * layout.MAX_BYTES + "}"])
def test_a_damaged_configuration_or_one_without_end_is_one_plain_error(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(SbkitError, match=r"config\.json (cannot be read|does not describe)"):
        layout.read(tmp_path)


PIECES = st.lists(st.text(st.characters(exclude_categories=("Cc", "Cs", "Zl", "Zp")), min_size=1, max_size=6)
                  .filter(lambda piece: "\n" not in piece), min_size=1, max_size=30)


@pytest.mark.parametrize(("name", "problem", "hint"), [
    ("models/gone", "does not exist", "make one by sbkit export RUN"),
    ("owner/model", "does not exist", "sbkit import owner/model --to BUNDLE makes one"),
    ("models", "is not a bundle", "make one by sbkit export RUN"),
    ("run", "is not a bundle", "its bundle is run/bundle"),
    ("models/a.wav", "is a file", "comes before its recordings"),
])
def test_a_folder_that_is_no_bundle_is_told_where_one_comes_from(tmp_path, monkeypatch, name, problem, hint):
    monkeypatch.chdir(tmp_path)
    for folder in ("models", "run/bundle"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "models" / "a.wav").touch()
    (tmp_path / "run/bundle" / layout.CONFIG).touch()
    with pytest.raises(SbkitError, match=problem) as told:
        layout.read(name)
    assert hint in told.value.hint


def test_a_bundle_without_its_tokens_is_to_be_copied_again(tmp_path):
    with pytest.raises(SbkitError, match=r"tokens\.txt is missing; copy the bundle again"):
        read_tokens(tmp_path / layout.TOKENS, 3)


@given(PIECES)
def test_tokens_are_read_as_they_were_written(tmp_path_factory, pieces):
    path = tmp_path_factory.mktemp("t") / layout.TOKENS
    write_tokens(path, pieces, 0)
    assert read_tokens(path, len(pieces)) == ["<blk>", *pieces[1:]]


@pytest.mark.parametrize("text, expected", [
    ("<blk> 0\na 1\n", "has 2 tokens, but the model has 3 outputs"), ("<blk> 0\na 1\nb x\n", "tokens.txt:3"),
    ("<blk> 0\na 1\nb 1\n", "has 2 tokens"), ("<blk> 0\na 1\nb 7\n", "the model has 3 outputs"),
    ("lonely\n", "tokens.txt:1"), ("a " + "9" * 5000 + "\n", "tokens.txt:1"),
])
def test_a_table_that_is_not_the_models_is_refused(tmp_path, text, expected):
    (tmp_path / layout.TOKENS).write_text(text)
    with pytest.raises(SbkitError, match=expected):
        read_tokens(tmp_path / layout.TOKENS, 3)


def spans(ids):
    ids = np.array(ids)
    return TokenSpans(ids, np.arange(len(ids)), np.arange(len(ids)) + 1, np.ones(len(ids)))


def test_words_and_text_of_scripts_with_and_without_spaces():
    spaced = Vocabulary(["<blk>", "<s>", "▁go", "▁", "es"], config(silent_ids=[1]))
    words = spaced.spelling.words(spans([1, 2, 4, 3, 4]), start=1.0)
    assert [(word.text, word.start) for word in words] == [("goes", 1.04), ("es", 1.16)]
    assert spaced.text(words) == "goes es"
    bare = Vocabulary(["<blk>", "▁東", "京", "▁", "都"], config(word_separator=None))
    words = bare.spelling.words(spans([1, 2, 4]))
    assert [word.text for word in words] == ["東", "京", "都"] and bare.text(words) == "東京都"


def test_ids_beyond_the_table_are_refused_and_never_looked_up():
    vocabulary = Vocabulary(["<blk>", "a", "b"], config(vocabulary=3))
    vocabulary.check(np.array([0, 2, 1]))
    vocabulary.check(np.array([], dtype=int))
    for wrong in ([0, 3], [-1, 2], [4159]):
        with pytest.raises(SbkitError, match=r"the model gave the token ids .*, but the bundle has 3 tokens"):
            vocabulary.check(np.array(wrong))
