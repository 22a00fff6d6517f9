"""What the check says of SpeechBrain's own recipes: no traceback and nothing false. Needs a snapshot of them:

    SBKIT_SPEECHBRAIN_RECIPES=speechbrain/recipes python -m pytest tests/recipe/test_speechbrain_recipes.py
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from written import write

from sbkit.recipe.check import check

ROWS = [line.split(" | ") for line in Path(__file__).with_name("speechbrain_recipes.txt").read_text().splitlines()
        if not line.startswith("#")]
SNAPSHOT = os.environ.get("SBKIT_SPEECHBRAIN_RECIPES")


def test_the_table_has_each_recipe_once_with_a_verdict():
    assert len({path for path, _ in ROWS}) == len(ROWS) > 60
    assert sum(verdict == "clean" for _, verdict in ROWS) > 15 and all(verdict for _, verdict in ROWS)


#: What was once told wrongly of a recipe of theirs, in few lines.
MENDED = {
    "a rescorer moves the language model that the pretrainer loads": """\
lm_model: !new:speechbrain.lobes.models.RNNLM.RNNLM {output_neurons: 8, embedding_dim: 4, rnn_neurons: 4}
rnnlm: !new:speechbrain.decoders.scorer.RNNLMRescorer
    language_model: !ref <lm_model>
    tokenizer: !new:sentencepiece.SentencePieceProcessor
rescorer: !new:speechbrain.decoders.scorer.RescorerBuilder {rescorers: [!ref <rnnlm>], weights: {rnnlm: 0.5}}
pretrainer: !new:speechbrain.utils.parameter_transfer.Pretrainer
    loadables: {lm: !ref <lm_model>}
layer: !new:torch.nn.Linear [3, 5]
modules: {layer: !ref <layer>}
""",
    "a language model that rescores, which its script moves in tests": """\
lm: !new:speechbrain.lobes.models.transformer.TransformerLM.TransformerLM
    {vocab: 8, d_model: 8, nhead: 2, num_encoder_layers: 1, d_ffn: 8, max_length: 16}
transformerlm: !new:speechbrain.decoders.scorer.TransformerLMRescorer
    {language_model: !ref <lm>, tokenizer: null, temperature: 1.0}
pretrainer: !new:speechbrain.utils.parameter_transfer.Pretrainer
    loadables: {lm: !ref <lm>}
output: !new:torch.nn.Linear [3, 5]
modules: {output: !ref <output>}
checkpointer: !new:speechbrain.utils.checkpoints.Checkpointer
    checkpoints_dir: save
    recoverables: {output: !ref <output>}
""",
    "a pretrainer of another name, and a weight that spectral_norm computes": """\
embedding: !new:torch.nn.Linear [3, 5]
pretrained: !new:speechbrain.utils.parameter_transfer.Pretrainer
    loadables: {embedding: !ref <embedding>}
discriminator: !new:speechbrain.lobes.models.MetricGAN.MetricDiscriminator
modules: {embedding: !ref <embedding>, discriminator: !ref <discriminator>}
checkpointer: !new:speechbrain.utils.checkpoints.Checkpointer
    checkpoints_dir: save
    recoverables: {discriminator: !ref <discriminator>}
""",
    "a model of several outputs copies the layers that it is given": """\
intra: !new:speechbrain.lobes.models.dual_path.SBTransformerBlock
    {num_layers: 1, d_model: 8, nhead: 2, d_ffn: 8, use_positional_encoding: true}
inter: !new:speechbrain.lobes.models.dual_path.SBTransformerBlock
    {num_layers: 1, d_model: 8, nhead: 2, d_ffn: 8, use_positional_encoding: true}
encoder: !new:speechbrain.lobes.models.dual_path.Encoder {kernel_size: 4, out_channels: 8}
masknet: !new:speechbrain.lobes.models.dual_path.Dual_Path_Model
    {in_channels: 8, out_channels: 8, intra_model: !ref <intra>, inter_model: !ref <inter>, num_layers: 2, K: 10}
decoder: !new:speechbrain.lobes.models.dual_path.Decoder {in_channels: 8, out_channels: 1, kernel_size: 4, stride: 2}
modules: {encoder: !ref <encoder>, masknet: !ref <masknet>, decoder: !ref <decoder>}
""",
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", MENDED)
def test_a_finding_that_was_false_is_gone(kind, tmp_path):
    assert [str(each) for each in check(write(tmp_path, MENDED[kind])).findings] == []


@pytest.fixture(scope="module")
def encoders(tmp_path_factory):
    """Folders of pretrained encoders' sizes with two layers of random weights, by what their names on the hub have."""
    transformers = pytest.importorskip("transformers")
    large = {"hidden_size": 1024, "num_attention_heads": 16, "intermediate_size": 4096, "do_stable_layer_norm": True,
             "feat_extract_norm": "layer", "conv_bias": True}
    kinds = {"whisper": ("Whisper", {"d_model": 512, "encoder_attention_heads": 8, "decoder_attention_heads": 8}),
             "wavlm": ("WavLM", large), "wav2vec2-base": ("Wav2Vec2", {}), "wav2vec2": ("Wav2Vec2", large)}
    folders = {}
    for name, (kind, sizes) in kinds.items():
        folders[name] = tmp_path_factory.mktemp(name)
        config = getattr(transformers, f"{kind}Config")(**{"num_hidden_layers": 2, **sizes})
        getattr(transformers, f"{kind}Model")(config).save_pretrained(folders[name])
        prefix = kind if kind == "Whisper" else "Wav2Vec2"
        getattr(transformers, f"{prefix}FeatureExtractor")().save_pretrained(folders[name])
    return folders


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.skipif(SNAPSHOT is None, reason="SBKIT_SPEECHBRAIN_RECIPES names no snapshot of SpeechBrain's recipes")
@pytest.mark.parametrize(("path", "verdict"), ROWS, ids=[path for path, _ in ROWS])
def test_a_recipe_of_speechbrain_is_clean_or_told_right(path, verdict, encoders, tmp_path):
    recipe = Path(SNAPSHOT).resolve() / path
    text = recipe.read_text()
    given = dict.fromkeys(re.findall(r"^(\w+): *!PLACEHOLDER", text, re.M), "/nowhere/x")
    for key, hub in re.findall(r"^(w\w+_(?:hub|url)): *\"?([\w/-]+)", text, re.M):
        given[key] = next(folder for name, folder in encoders.items() if name in hub)
    words = ["-m", "sbkit", "check", str(recipe), "--json", *(f"--{key}={value}" for key, value in given.items())]
    done = subprocess.run([sys.executable, *words], cwd=tmp_path, env={**os.environ, "HF_HUB_OFFLINE": "1"},
                          capture_output=True, text=True)
    report = json.loads(done.stdout)
    found = [each for each in [*report["errors"], *report["warnings"]] if "can't be built here" not in each["message"]]
    expected = [] if verdict in ("clean", "not fetched") else verdict.split("; ")
    assert len(found) == len(expected), found
    assert all(f"{each['key']}: {each['message']}".startswith(said) for each, said in zip(found, expected, strict=True))
