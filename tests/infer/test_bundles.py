"""A bundle of a recogniser hears what a test makes, at the rate of what made it; anything else is refused."""

import bundles
import numpy as np
import pytest

from sbkit.commands.evaluate import evaluate
from sbkit.errors import SbkitError
from sbkit.infer.bundles import Opened
from sbkit.runs.evaluation import EvaluateRequest

pytest.importorskip("onnxruntime", reason="a bundle's ONNX model needs the extra 'export'")


def test_it_hears_each_signal_in_order_at_the_given_rate(tmp_path):
    heard = Opened().recogniser(str(bundles.make(tmp_path / "bundle")), bundles.RATE)
    assert heard([bundles.say("ab ba"), bundles.say("b")]) == ["ab ba", "b"]


def test_signals_of_another_rate_are_resampled(tmp_path):
    heard = Opened().recogniser(str(bundles.make(tmp_path / "bundle")), 2 * bundles.RATE)
    level = bundles.voiced([bundles.PIECES.index("a")] * 12)
    assert heard([np.repeat(level, 2)]) == ["a"]


def test_what_is_no_bundle_is_refused_before_anything_is_scored(tmp_path):
    with pytest.raises(SbkitError, match="nowhere"):
        Opened().recogniser(str(tmp_path / "nowhere"), 16_000)
    with pytest.raises(SbkitError, match=r"does not exist|is not a run"):
        evaluate(EvaluateRequest(tmp_path / "run", recogniser=str(tmp_path / "nowhere")))
