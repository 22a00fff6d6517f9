"""Two speakers of a corpus in LJSpeech's layout, from the recordings to a bundle that speaks as either of them."""

import bundles
import numpy as np
import pytest
import soundfile
from processes import sbkit

from sbkit import infer
from sbkit.cli import main
from sbkit.export.layout import VoiceConfig

pytestmark = pytest.mark.long

RATE = bundles.RATE
FAST = ("--step_seconds 8 --min_steps 0 --max_batch_seconds 16 --precision fp32 --noprogressbar "
        "--no-check").split()
CODEC = ("--n_mels 20 --encoder_layers 1 --fast_layers 1 --size 16 --hidden 24 --slow_layers 1 "
         "--number_of_epochs 1").split() + FAST
VOICE = ["--size", "16", "--hidden", "24", "--frame_size", "16", "--frame_hidden", "24",
         "--decoder", "{size: 16, hidden: 24, slow_layers: 1, fast_layers: 1}", "--head", "{input_size: 16}",
         "--number_of_epochs", "2", *FAST]
FIELDS = ["--corpus.columns", "{text: 2, speaker: 3}"]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Levels that spell letters, which one of the two speaks with a hum in it."""
    home = tmp_path_factory.mktemp("corpus")
    (home / "wavs").mkdir()
    drawn, lines = np.random.default_rng(0), []
    for i in range(40):
        text = " ".join("".join(drawn.choice(list("abcde"), 3)) for _ in range(3))
        signal, who = bundles.say(text), "anna" if i % 2 else "ben"
        hum = 0.2 * np.sin(2 * np.pi * 200 * np.arange(len(signal)) / RATE) * (who == "ben")
        soundfile.write(home / "wavs" / f"c{i}.wav", (signal + hum).astype(np.float32), RATE)
        lines.append(f"c{i}|{text}|{who}")
    (home / "metadata.csv").write_text("\n".join(lines) + "\n")
    return home


@pytest.fixture(scope="module")
def bundle(corpus):
    home = corpus.parent
    recogniser = bundles.make(home / "recogniser")
    ours = ["--data_folder", corpus, *FIELDS]
    sbkit("train", "hparams/codec.yaml", *CODEC, *ours, "--output_folder", home / "codec_run")
    sbkit("export", home / "codec_run", "--to", home / "codec", "--formats", "onnx", "--clips", "2")
    sbkit("train", "hparams/tts.yaml", *VOICE, *ours, "--output_folder", home / "run", "--codec", home / "codec",
          "--recogniser", recogniser, "--speakers.several", "true")
    sbkit("export", home / "run", "--to", home / "voice", "--formats", "onnx", "--clips", "2")
    return home / "voice"


def test_the_bundle_lists_both_and_each_sounds_otherwise(bundle, tmp_path):
    assert VoiceConfig.read(bundle).speakers == ["anna", "ben"]
    said = {}
    for name in ("anna", "ben"):
        assert main(["speak", str(bundle), "abc bad", "--voice", name, "--to", str(tmp_path / f"{name}.wav")]) == 0
        said[name] = soundfile.read(tmp_path / f"{name}.wav")[0]
    assert said["anna"].shape != said["ben"].shape or not np.allclose(said["anna"], said["ben"], atol=1e-3)
    with infer.load(bundle, device="cpu") as voice:
        assert [word.text for word in voice.speak("abc bad").words] == ["abc", "bad"]
        np.testing.assert_allclose(voice.speak("abc bad").samples, said["anna"], atol=1e-3)  # the first


def test_a_voice_that_there_is_not_is_an_error_and_no_file(bundle, tmp_path, capsys):
    assert main(["speak", str(bundle), "abc", "--voice", "carl", "--to", str(tmp_path / "x.wav")]) == 2
    assert "there is no voice 'carl'; use anna, ben" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
