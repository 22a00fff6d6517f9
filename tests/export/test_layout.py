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
from refusals import refused

from sbkit.decode.spans import TokenSpans
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


def refuse_changed(folder, made, changes, code, key):
    """In a short line."""
    values = json.loads(made.to_json()) | changes
    (folder / "config.json").write_text(json.dumps({name: v for name, v in values.items() if v is not ...}))
    with refused(code, file=folder / "config.json", key=key) as error:
        layout.read(folder)
    assert "\n" not in str(error.value) and len(str(error.value)) < 1000


def row(changes):
    """Changes with the code and the key that they are refused by, which are given if they aren't the usual ones."""
    return changes if isinstance(changes, tuple) else (changes, "damaged-bundle", next(iter(changes)))


#: What nothing can run with, or what would fill the memory.
REFUSED = {
    config: [
        ({"format": "another"}, "not-a-bundle", None), ({"version": 2}, "newer-bundle", "version"),
        {"sample_rate": 0}, {"vocabulary": "5"}, {"subsampling": True}, {"chunk_seconds": -1},
        {"longest_seconds": 19}, {"longest_seconds": "30"}, {"blank_id": 5},
        ({"colour": "red"}, "newer-bundle", "colour"), {"hop_samples": ...},
        {"streaming": "yes"}, {"models": {"onnx": "../model.onnx"}}, {"files": {"/etc/x": {}}},
        {"models": {"onnx": ".."}}, {"models": {"onnx": ""}}, {"models": {"onnx": "a\0b"}}, {"vocabulary": 10**9},
        {"chunk_seconds": 1e308}, {"chunk_seconds": float("nan")}, {"word_separator": ""}, {"silent_ids": [[]]},
        {"reliability": [[0.1, 2]]}, {"reliability": []}, {"reliability": [[0, -1]]},
        {"reliability": [[0.3, 0.1], [0.3, 0.2]]}, {"reliability": [[0, 0.5], [1, 0.4]]}, {"silent_ids": [5]},
        ({"hop_samples": 16_000}, "damaged-bundle", "subsampling"), {"language": "\ud800"}, {"sample_rate": 16},
        ({"x" * 10**6: 1}, "newer-bundle", "x" * 100 + "..."),
    ],
    codec: [
        {"codec": "0F" * 32}, {"codec": None}, {"books": []}, {"books": [1000, 0]}, {"books": 1000}, {"stride": 0},
        {"min_frames": 1.5}, {"context": -1}, {"context": True}, {"context": ...},
        {"decoders": {}}, {"decoders": ["decoder.onnx"]}, {"decoders": {"onnx": "../decoder.onnx"}},
        {"min_frames": 10**9}, {"min_samples": 10**7}, {"stride": 10**7}, {"context": 10**9},
    ],
    voice: [
        {"symbols": ["<pad>"]}, {"symbols": "abc"}, {"symbols": ["<pad>", "a", 3]}, {"symbols": ["<pad>", "a", ""]},
        {"symbols": ["<pad>", "a", "b", "a"]}, {"symbols": ["<pad>", "ab"]}, {"symbols": ["<pad>", "\u212b"]},
        {"speakers": []}, {"speakers": ["a", "a"]}, {"speakers": ...}, {"max_symbols": 0},
        {"max_symbols": True}, {"frame_seconds": 0}, {"frame_seconds": True}, {"frame_seconds": float("nan")},
        {"frame_seconds": float("inf")}, {"books": [1000, 0]}, {"books": 1000}, {"models": ["model.onnx"]},
        {"models": None}, {"files": ["model.onnx"]}, {"files": {"model.onnx": 3}},
        {"files": {"model.onnx": {"bytes": "3"}}}, {"trained": []}, {"made_by": "me"}, {"language": 3},
        {"batching": 1}, {"codec": 1}, {"max_symbols": 10**9}, {"sample_rate": 10**400}, {"min_samples": 10**7},
        {"text": ["NFC"]}, ({"text": {"colour": 1}}, "newer-bundle", "text"), {"text": {"case": "title"}},
        {"text": {"replace": {"": "x"}}}, {"text": {"unicode": []}}, {"text": {"case": {}}},
        {"text": {"keep_punctuation": 1}}, {"text": {"replace": {"a": "b" * 101}}},
        {"text": {"replace": dict.fromkeys(map(str, range(1001)), "x")}}, {"spelling": "../xx", "characters": ["a"]},
        {"spelling": 3, "characters": ["a"]}, ({"spelling": "xx", "characters": []}, "damaged-bundle", "characters"),
        ({"spelling": None, "characters": ["a"]}, "damaged-bundle", "characters"),
        ({"spelling": "xx", "characters": ["ab"]}, "damaged-bundle", "symbols"),
    ],
    enhancer: [
        {"hop": 0}, {"delay": -1}, {"state": {}}, {"streams": {}},
        {"state": {"state_0": {"type": "float32", "shape": [1 << 26, 2]}}}, {"hop": 1 << 20},
        ({"wet": 1}, "newer-bundle", "wet"),
    ],
}


@pytest.mark.parametrize("make, changes, code, key", [
    (make, *row(changes)) for make, all_changes in REFUSED.items() for changes in all_changes])
def test_a_configuration_that_cannot_be_is_refused(tmp_path, make, changes, code, key):
    refuse_changed(tmp_path, make(), changes, code, key)


@pytest.mark.parametrize("changes, code, key", [row(changes) for changes in [
    {"chunks": []}, {"chunks": [8, 0]}, {"chunks": 8}, {"left": 0}, {"overlap": -1}, {"before": 1.5}, {"ahead": -1},
    {"ahead": 8}, {"state": {}}, {"state": {"keys": {"type": "object", "shape": [3]}}},
    {"state": {"keys": {"type": "float32", "shape": [3, -1]}}}, {"state": {"keys": [3]}}, {"models": ["stream.onnx"]},
    {"models": {"onnx": "/x/stream.onnx"}}, {"models": {"onnx": 3}}, ({"colour": "red"}, "newer-bundle", "colour"),
    {"after": ...}, {"before": 2**31}, {"before": 10**6}, {"after": 401},
    {"chunks": [8, 2000]}, {"state": {"keys": {"type": "float32", "shape": [2**13, 2**14]}}},
]])
def test_streams_that_nothing_can_run_or_that_would_fill_the_memory_are_refused(tmp_path, changes, code, key):
    values = {name: value for name, value in (STREAMING | changes).items() if value is not ...}
    refuse_changed(tmp_path, config(), {"streaming": values}, code, key)


@pytest.mark.parametrize("asked, there", [(CodecConfig, voices), (Config, voices), (VoiceConfig, bundles)])
def test_a_bundle_of_another_kind_is_refused(tmp_path, asked, there):
    bundle = there.make(tmp_path / "bundle")
    with refused("wrong-bundle-kind", file=bundle):
        asked.read(bundle)


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
    with refused("damaged-bundle", file=tmp_path / "config.json"):
        layout.read(tmp_path)
    with refused("damaged-bundle", file=tmp_path / "config.json"):
        read_tokens(tmp_path / "config.json", 3)


@pytest.mark.parametrize(("text", "code"), [
    pytest.param("", "damaged-bundle", id="empty"), pytest.param("{", "damaged-bundle", id="half"),
    pytest.param("[]", "not-a-bundle", id="list"), pytest.param("null", "not-a-bundle", id="null"),
    pytest.param("\x00", "damaged-bundle", id="zero"),
    pytest.param('{"format":' + "[" * 100_000, "damaged-bundle", id="nested"),
    pytest.param("{" + " " * layout.MAX_BYTES + "}", "damaged-bundle", id="long")])
def test_a_damaged_configuration_or_one_without_end_is_one_plain_error(tmp_path, text, code):
    (tmp_path / "config.json").write_text(text)
    with refused(code, wording=False, file=tmp_path / "config.json"):  # Python's versions describe it differently
        layout.read(tmp_path)


PIECES = st.lists(st.text(st.characters(exclude_categories=("Cc", "Cs", "Zl", "Zp")), min_size=1, max_size=6)
                  .filter(lambda piece: "\n" not in piece), min_size=1, max_size=30)


@pytest.mark.parametrize(("name", "code", "hint"), [
    ("models/gone", "no-such-path", "make one by sbkit export RUN"),
    ("owner/model", "no-such-path", "sbkit import owner/model --to BUNDLE makes one"),
    ("models", "not-a-bundle", "make one by sbkit export RUN"),
    ("run", "not-a-bundle", "its bundle is run/bundle"),
    ("models/a.wav", "not-a-bundle", "comes before its recordings"),
])
def test_a_folder_that_is_no_bundle_is_told_where_one_comes_from(tmp_path, monkeypatch, name, code, hint):
    monkeypatch.chdir(tmp_path)
    for folder in ("models", "run/bundle"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "models" / "a.wav").touch()
    (tmp_path / "run/bundle" / layout.CONFIG).touch()
    with refused(code, file=name) as error:
        layout.read(name)
    assert hint in error.value.hint


def test_a_bundle_without_its_tokens_is_to_be_copied_again(tmp_path):
    with refused("damaged-bundle", file=tmp_path / layout.TOKENS):
        read_tokens(tmp_path / layout.TOKENS, 3)


@given(PIECES)
def test_tokens_are_read_as_they_were_written(tmp_path_factory, pieces):
    path = tmp_path_factory.mktemp("t") / layout.TOKENS
    write_tokens(path, pieces, 0)
    assert read_tokens(path, len(pieces)) == ["<blk>", *pieces[1:]]


@pytest.mark.parametrize(("text", "line"), [
    pytest.param("<blk> 0\na 1\n", None, id="too few"), pytest.param("<blk> 0\na 1\nb x\n", 3, id="no number"),
    pytest.param("<blk> 0\na 1\nb 1\n", None, id="twice"), pytest.param("<blk> 0\na 1\nb 7\n", None, id="beyond"),
    pytest.param("lonely\n", 1, id="no id"), pytest.param("a " + "9" * 5000 + "\n", 1, id="long"),
])
def test_a_table_that_is_not_the_models_is_refused(tmp_path, text, line):
    (tmp_path / layout.TOKENS).write_text(text)
    with refused("damaged-bundle", file=tmp_path / layout.TOKENS, line=line):
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
        with refused("damaged-bundle"):
            vocabulary.check(np.array(wrong))
