"""sherpa-onnx runs a transducer's streams as one of NeMo's, and hears the same words."""

import json

import numpy as np
import pytest
import soundfile
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from run_folders import corpus
from streaming_bundles import sherpa_hears_streams
from streaming_runs import RECIPE, brain, prepared, saved

import sbkit.infer
from sbkit.cli import main
from sbkit.errors import SbkitError
from sbkit.export import layout
from sbkit.nn.transducer import TransducerHead
from sbkit.tasks.transducer.sherpa import SherpaJoiner, SherpaPrediction, order

TRANSDUCER = RECIPE.with_name("transducer.yaml")
SIZE = 8


def says_something(brain):
    brain.recognizer.normalize.take(torch.full((80,), -5.0), torch.full((80,), 2.0))
    torch.manual_seed(11)
    for weights in brain.recognizer.head.parameters():
        weights.data.normal_(std=2.0)
    out = brain.keys.transducer.out
    out.weight.data.normal_()
    out.bias.data[0] = 3.0


def head_of(context, blank, vocabulary=5):
    torch.manual_seed(context)
    return TransducerHead(vocabulary, 4, SIZE, context, blank).eval().requires_grad_(False)


@given(context=st.integers(1, 4), blank=st.integers(0, 4), said=st.lists(st.integers(0, 3), max_size=7))
@settings(deadline=None)
def test_the_state_that_sherpa_keeps_is_the_last_tokens(context, blank, said):
    """It begins with the blank, which is the last of its tokens, and with zeros."""
    head, theirs = head_of(context, blank), order(5, blank)
    assert sorted(theirs) == [0, 1, 2, 3, 4] and theirs[4] == blank
    states, ours = torch.zeros(2, 1, 1, max(1, context - 1)), [blank] * context
    for token in [4, *said]:
        found, _, *states = SherpaPrediction(head)(torch.tensor([[token]], dtype=torch.int32),
                                                   torch.tensor([1], dtype=torch.int32), *states)
        ours = [*ours, theirs[token]][-context:]
        torch.testing.assert_close(found, head.predict(torch.tensor([ours])).transpose(1, 2))


@given(blank=st.integers(0, 4), silent=st.sets(st.integers(0, 4), max_size=3))
@settings(deadline=None)
def test_scores_stand_in_sherpas_order_and_what_is_no_text_is_never_said(blank, silent):
    head, (encoded, predicted) = head_of(2, blank), torch.randn(2, 3, SIZE, generator=torch.Generator().manual_seed(1))
    found = SherpaJoiner(head, sorted(silent))(encoded[..., None].clone(), predicted[..., None])
    assert found.shape == (3, 1, 1, 5)
    expected = head.join(encoded, predicted)
    for place, token in enumerate(order(5, blank)):
        if token in silent - {blank}:
            assert (found[:, 0, 0, place] < -1000).all()
        else:
            torch.testing.assert_close(found[:, 0, 0, place], expected[:, token])


def test_one_that_did_not_learn_in_chunks_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("sbkit.tasks.recognise.sherpa_stream.imported", lambda: None)
    made = brain(prepared(tmp_path, corpus(tmp_path / "data", train=4, dev=1, test=1), TRANSDUCER, chunks=None))
    with pytest.raises(SbkitError, match="the recipe has no chunks"):
        made.exported(tmp_path).target(layout.SHERPA)


@pytest.mark.slow
@pytest.mark.skipif(not sherpa_hears_streams(), reason="sherpa-onnx is missing, or computes other features for streams")
def test_sherpa_hears_the_words_of_the_checkpoint_and_the_readme_says_how(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("sbkit.decode.transducer.MOST_IN_A_FRAME", 10)  # which drawn weights say, and speech doesn't
    (tmp_path / "run").mkdir()
    run = saved(tmp_path / "run", corpus(tmp_path / "data", train=6, dev=2, test=3), says_something, TRANSDUCER,
                num_encoder_layers=1, joint_size=12)
    made = tmp_path / "bundle"
    assert main(["export", str(run), "--to", str(made), "--clips", "3", "--formats", "onnx", "--target", "sherpa"]) == 0
    parity = json.loads((made / "parity.json").read_text())["sherpa stream"]
    assert list(parity) == ["640 ms"] and parity["640 ms"]["sherpa"]["words_changed"] == 0
    listed = json.loads((made / layout.CONFIG).read_text())["files"]
    assert {"stream.sherpa.onnx", "decoder.sherpa.onnx", "joiner.sherpa.onnx", "tokens.sherpa.txt"} <= set(listed)
    [code] = [part.split("```")[0] for part in (made / "README.md").read_text().split("```python\n")[1:]
              if "import sherpa_onnx" in part or "sherpa_onnx," in part]
    monkeypatch.chdir(made)
    signal = (np.sin(np.arange(40_007) * 0.1) * 0.2 + 0.02 * np.random.default_rng(0).standard_normal(40_007))
    soundfile.write("clip.wav", signal.astype(np.float32), 16_000, subtype="FLOAT")
    capsys.readouterr()
    exec(code, {})
    heard = "".join(capsys.readouterr().out.split())
    with sbkit.infer.load(made, device="cpu") as model:
        stream = model.stream(chunk=640)
        ours = stream.feed(np.pad(signal, (0, 10_240)).astype(np.float32)) + stream.finish()
    ours = "".join(word.text for each in ours for word in each.settled)
    assert heard and ours.startswith(heard), "which hears whole chunks alone"
