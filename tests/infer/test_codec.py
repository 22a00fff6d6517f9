"""Recordings to codes and back: each as if it were alone and whole, and no id that is in no codebook gets anywhere."""

import dataclasses
import pickle
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import soundfile
import toy_codec as codecs
from refusals import refused

import sbkit.infer
from sbkit.codes import InvalidCode
from sbkit.data.audio import AudioError
from sbkit.infer.codec import BATCH_SECONDS, CodecChunk, CodecModel, batches, chunks


@pytest.fixture(scope="module")
def codec(codec_bundle):
    with sbkit.infer.load(codec_bundle, device="cpu") as loaded:
        assert isinstance(loaded, CodecModel)
        yield loaded


def same(found, wanted):
    return len(found) == len(wanted) and all(map(np.array_equal, found, wanted))


def test_encodes_and_decodes_recordings_of_any_length(codec):
    wanted = [codecs.drawn(frames, frames) for frames in (3, 200, 1, 57)]
    found = codec.encode([codecs.sound(codes) for codes in wanted])
    assert same(found, wanted) and all(codes.dtype == np.int64 for codes in found)
    sounds = codec.decode(found)
    assert same(sounds, [codecs.sound(codes) for codes in wanted]) and sounds[0].dtype == np.float32


@pytest.mark.parametrize("samples, frames", [(1, 1), (319, 1), (320, 1), (321, 2)])
def test_the_last_frame_may_reach_beyond_the_end(codec, samples, frames):
    [codes] = codec.encode([np.zeros(samples, np.float32)])
    assert codes.shape == (frames, 2) and codec.decode([codes])[0].shape == (frames * codecs.STRIDE,)


def test_short_inputs_are_padded_to_the_graphs_minimum(codec, monkeypatch):
    wanted, sizes = codecs.drawn(1), []
    for engine in (codec.engine, codec.sounds):
        monkeypatch.setattr(engine, "config", dataclasses.replace(engine.config, min_samples=1000, min_frames=9))
        monkeypatch.setattr(engine, "compute", lambda *inputs, compute=engine.compute:
                            sizes.append(inputs[0].shape[1]) or compute(*inputs))
    assert same(codec.encode(codec.decode([wanted])), [wanted]) and sizes == [9, 1000]


def test_a_long_recording_is_run_in_chunks(codec, monkeypatch):
    monkeypatch.setattr("sbkit.infer.codec.PIECE_SECONDS", 1.0)
    wanted, shapes = [codecs.drawn(frames) for frames in (333, 50, 51)], []
    for engine in (codec.engine, codec.sounds):
        compute = engine.compute
        monkeypatch.setattr(engine, "compute", lambda *inputs, compute=compute: (
            shapes.append(inputs[0].shape), compute(*inputs))[1])
    sounds = [codecs.sound(codes) for codes in wanted]
    assert same(codec.encode(sounds), wanted) and same(codec.decode(wanted), sounds)
    assert {shape[1] for shape in shapes} == {codecs.RATE, 50}


@pytest.mark.parametrize("context", [0, 1, 16, 400])
@pytest.mark.parametrize("frames", [1, 99, 100, 101, 1234])
def test_chunks_cover_each_frame_once_with_its_context(monkeypatch, frames, context):
    monkeypatch.setattr("sbkit.infer.codec.PIECE_SECONDS", 2.0)
    config = codecs.CodecConfig(sample_rate=16_000, codec=codecs.HASH, books=[2], stride=320, context=context)
    cut = chunks(7, frames, config)
    assert [at for each in cut for at in range(each.first, each.last)] == list(range(frames))
    for each in cut:
        assert each.source == 7 and each.end - each.begin <= 100 + 2 * context
        assert each.begin == max(0, each.first - context) or len(cut) == 1
        assert each.end == min(frames, each.last + context)
    groups = batches(cut, config)
    assert sorted(each for group in groups for each in group) == cut


def test_batches_stay_within_the_limit_of_seconds():
    config = codecs.CodecConfig(sample_rate=16_000, codec=codecs.HASH, books=[2], stride=320, context=0)
    frames = np.random.default_rng(0).integers(1, 1500, 200)
    for group in batches([CodecChunk(i, 0, each, 0, each) for i, each in enumerate(frames.tolist())], config):
        assert len(group) * max(piece.end for piece in group) * 0.02 <= BATCH_SECONDS or len(group) == 1


def test_recordings_too_long_for_unbounded_context_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("sbkit.infer.codec.MAX_SECONDS", 3.0)
    monkeypatch.setattr("sbkit.infer.codec.PIECE_SECONDS", 1.0)
    wanted = codecs.drawn(150)
    with sbkit.infer.load(codecs.make(tmp_path / "c", context=None), device="cpu") as whole:
        assert same(whole.encode([codecs.sound(wanted)]), [wanted])
        with refused("audio-too-long"):
            whole.encode([codecs.sound(wanted), codecs.sound(codecs.drawn(151))])
        with refused("audio-too-long"):
            whole.decode([wanted, codecs.drawn(151)])


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize("id", [-1, 50, 50 + 63, 2**40])
def test_invalid_codes_are_reported_before_a_graph_runs(codec, monkeypatch, id):
    wrong = codecs.drawn(9)
    wrong[7, 0] = id
    monkeypatch.setattr(codec.sounds, "submit", lambda _: pytest.fail("nothing must be computed"))
    with refused("code-out-of-range", kind=InvalidCode) as raised:
        codec.decode([codecs.drawn(5), wrong])
    error = pickle.loads(pickle.dumps(raised.value))
    assert (error.position, error.level, error.id) == ((1, 7), 0, id)


@pytest.mark.parametrize("codes, code", [
    (np.zeros((3, 2), np.float32), "bad-codes"), (np.zeros((3, 1), int), "bad-codes"),
    (np.zeros((1, 3, 2), int), "bad-value"), (3, "bad-codes"),
])
def test_codes_of_a_wrong_shape_are_reported(codec, codes, code):
    with refused(code):
        codec.decode([codes])


def test_arguments_must_be_lists(codec):
    for method in (codec.encode, codec.decode):
        with refused("bad-value"):
            method(np.zeros(400, np.float32))
    with refused("bad-value"):
        codec.encode("clip.wav")
    with refused("bad-samples", kind=AudioError):
        codec.encode([np.full(400, np.nan, np.float32)])


def test_empty_lists_give_empty_lists(codec):
    assert codec.encode([]) == [] == codec.decode([])
    [sound] = codec.decode([np.zeros((0, 2), int)])
    assert sound.shape == (0,)


def test_files_are_resampled_to_the_codecs_rate(codec, tmp_path):
    wanted = codecs.drawn(1).repeat(50, axis=0)
    wanted[:, 1] = wanted[0, 0] * 19 / 49  # a constant level
    soundfile.write(tmp_path / "a.wav", np.repeat(codecs.sound(wanted), 3), 48_000, "FLOAT")
    [codes] = codec.encode([tmp_path / "a.wav"])
    assert abs(len(codes) - 50) <= 1 and np.array_equal(codes[5:45, 0], wanted[5:45, 0])


def test_a_graph_that_outputs_invalid_codes_is_reported(tmp_path):
    with sbkit.infer.load(codecs.make(tmp_path / "c", graph_sizes=(60, 20)), device="cpu") as wrong:
        with refused("code-out-of-range", kind=InvalidCode) as raised:
            wrong.encode([np.zeros(400, np.float32), np.ones(400, np.float32)])
    assert (raised.value.position, raised.value.id) == ((1, 0), 59)


def test_encode_each_returns_codes_or_an_error_for_each_waveform(tmp_path, monkeypatch):
    monkeypatch.setattr("sbkit.infer.codec.MAX_SECONDS", 3.0)
    wanted = codecs.drawn(40)
    with sbkit.infer.load(codecs.make(tmp_path / "c", graph_sizes=(50, 30), context=None), device="cpu") as codec:
        good, loud, long = codecs.sound(np.minimum(wanted, 9)), np.ones(900, np.float32), np.zeros(60_000, np.float32)
        found = codec.encode_each([good, loud, long, good])
        assert same([found[0]], codec.encode([good])) and same([found[0]], [found[3]])
    assert isinstance(found[1], InvalidCode) and (found[1].position, found[1].id) == ((0,), 29)
    assert found[2].message == "it is 4 s long, but this codec takes whole recordings of up to 3 s"


def test_threads_get_their_own_results(codec):
    sounds = [codecs.sound(codecs.drawn(100, seed)) for seed in range(8)]
    with ThreadPoolExecutor(8) as pool:
        found = pool.map(lambda sound: codec.decode(codec.encode([sound]))[0], sounds)
        assert same(list(found), sounds)
