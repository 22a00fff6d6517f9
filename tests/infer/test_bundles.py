"""Bundles as tasks use them: a recogniser transcribes and aligns audio of another rate, a codec encodes."""

import bundles
import numpy as np
import pytest
import toy_codec
from refusals import refused

from sbkit.commands.evaluate import evaluate
from sbkit.export import layout
from sbkit.infer.bundles import BundleLoader
from sbkit.runs.evaluation_request import EvaluateRequest

pytest.importorskip("onnxruntime", reason="a bundle's ONNX model needs the extra 'export'")


def test_it_transcribes_each_signal_in_order_at_the_given_rate(tmp_path):
    heard = BundleLoader().text_transcriber(str(bundles.make(tmp_path / "bundle")), bundles.RATE)
    assert heard([bundles.say("ab ba"), bundles.say("b")]) == ["ab ba", "b"]


def test_signals_of_another_rate_are_resampled(tmp_path):
    heard = BundleLoader().text_transcriber(str(bundles.make(tmp_path / "bundle")), 2 * bundles.RATE)
    level = bundles.voiced([bundles.PIECES.index("a")] * 12)
    assert heard([np.repeat(level, 2)]) == ["a"]


def test_a_transducer_transcribes_but_does_not_align(tmp_path):
    bundle = str(bundles.make_transducer(tmp_path / "bundle"))
    assert BundleLoader().text_transcriber(bundle, bundles.RATE)([bundles.say("ab ba")]) == ["ab ba"]
    with refused("wrong-bundle-kind"):
        BundleLoader().aligner(bundle)


def test_what_is_no_bundle_is_refused_before_anything_is_scored(tmp_path):
    with refused("no-such-path"):
        BundleLoader().text_transcriber(str(tmp_path / "nowhere"), 16_000)
    with refused("no-such-path"):
        evaluate(EvaluateRequest(tmp_path / "run", recogniser=str(tmp_path / "nowhere")))


def test_a_codec_is_opened_and_anything_else_is_refused(tmp_path):
    codec = BundleLoader().codec(str(toy_codec.make(tmp_path / "codec")))
    codes = toy_codec.drawn(30)
    assert codec.books == toy_codec.BOOKS and codec.sample_rate == toy_codec.RATE
    assert np.array_equal(codec.encode([toy_codec.sound(codes)])[0], codes)
    codec.close()
    recogniser = str(bundles.make(tmp_path / "recogniser"))
    with refused("wrong-bundle-kind") as error:
        BundleLoader().codec(recogniser)
    assert "hparams/codec.yaml" in error.value.hint
    for open_it in (lambda folder: BundleLoader().text_transcriber(folder, 16_000), BundleLoader().aligner):
        with refused("wrong-bundle-kind"):
            open_it(str(tmp_path / "codec"))


# ---------------------------------------------------------------- when what is known was heard


@pytest.fixture(scope="module")
def aligner(tmp_path_factory):
    aligner = BundleLoader().aligner(str(bundles.make(tmp_path_factory.mktemp("aligner") / "bundle")))
    yield aligner
    aligner.close()


def test_it_aligns_each_piece(aligner):
    [found] = aligner.align([bundles.say("ab c")], bundles.RATE, ["ab c"])
    frame = bundles.FRAME / bundles.RATE
    assert found.pieces == ["▁", "a", "b", "▁", "c"] and found.separator == "▁"
    # Each is held for two frames, and a blank is between.
    assert found.starts == pytest.approx([3 * i * frame for i in range(5)])
    assert found.ends == pytest.approx([(3 * i + 2) * frame for i in range(5)])


def test_signals_of_another_rate_have_the_same_times(aligner):
    level = bundles.voiced([bundles.PIECES.index("▁")] * 8 + [0] * 6 + [bundles.PIECES.index("a")] * 8)
    [own] = aligner.align([level], bundles.RATE, ["a"])
    [other] = aligner.align([np.repeat(level, 2)], 2 * bundles.RATE, ["a"])
    frame = bundles.FRAME / bundles.RATE
    assert other.pieces == own.pieces
    assert other.starts == pytest.approx(own.starts, abs=frame) and other.ends == pytest.approx(own.ends, abs=frame)


def test_a_text_that_cannot_be_aligned_is_reported_and_the_others_are_not_affected(aligner):
    signals = [bundles.say("ab"), bundles.say("a"), bundles.say("b"), bundles.say("ab")]
    good, letters, long, again = aligner.align(signals, bundles.RATE, ["ab", "ñ", "b" * 40, "ab"])
    assert letters == "the recogniser has no tokens for 'ñ'; use one that was trained on the same alphabet"
    assert "can't be aligned" in long
    assert good.pieces == again.pieces and np.array_equal(good.starts, again.starts)


def test_its_fingerprint_is_of_what_aligns_and_of_nothing_that_differs_from_export_to_export(aligner, tmp_path):
    same = BundleLoader().aligner(str(bundles.make(tmp_path / "same", streams=True)))
    assert same.fingerprint == aligner.fingerprint
    other = bundles.make(tmp_path / "other")
    (other / "tokens.txt").write_text((other / "tokens.txt").read_text() + "\n")
    files = layout.Config.read(other).files | {"tokens.txt": layout.fingerprint(other / "tokens.txt")}
    bundles.change(other, files=files)
    assert BundleLoader().aligner(str(other)).fingerprint != aligner.fingerprint


def test_an_output_that_is_no_number_is_no_alignment(aligner, monkeypatch):
    wrong = np.full((9, len(bundles.PIECES)), np.nan, np.float32)
    monkeypatch.setattr(aligner._model.engine, "run", lambda signals: [wrong])
    assert aligner.align([bundles.say("a")], bundles.RATE, ["a"]) == ["the recogniser's output is not a number"]
