"""Tiny pretrained encoders on disk, each written by transformers itself with random weights."""

import json

import pytest
import torch
import transformers

_TRANSFORMER = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64,
                "layerdrop": 0.1}
# Three convolutions that give the frames of the usual seven.
_WAVES = {**_TRANSFORMER, "conv_dim": (32,) * 3, "conv_kernel": (10, 8, 5), "conv_stride": (10, 8, 4),
          "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 2}
_LAYER = {"feat_extract_norm": "layer", "do_stable_layer_norm": True}
GROUP = {"feat_extract_norm": "group", "do_stable_layer_norm": False}

#: By what they are called in tests: the config's class, the model's and what they are given.
KINDS = {
    "wav2vec2-layer": ("Wav2Vec2Config", "Wav2Vec2Model", {**_WAVES, **_LAYER}),
    "wav2vec2-group": ("Wav2Vec2Config", "Wav2Vec2Model", {**_WAVES, **GROUP}),
    "mms-adapters": ("Wav2Vec2Config", "Wav2Vec2Model", {**_WAVES, **_LAYER, "adapter_attn_dim": 4}),
    "hubert-layer": ("HubertConfig", "HubertModel", {**_WAVES, **_LAYER}),
    "hubert-group": ("HubertConfig", "HubertModel", {**_WAVES, **GROUP}),
    "hubert-batch-norm": ("HubertConfig", "HubertModel", {**_WAVES, **GROUP, "conv_pos_batch_norm": True}),
    "wavlm-layer": ("WavLMConfig", "WavLMModel", {**_WAVES, **_LAYER}),
    "wavlm-group": ("WavLMConfig", "WavLMModel", {**_WAVES, **GROUP}),
    "w2v-bert": ("Wav2Vec2BertConfig", "Wav2Vec2BertModel", {
        **_TRANSFORMER, "left_max_position_embeddings": 12, "right_max_position_embeddings": 5,
        "conv_depthwise_kernel_size": 7}),
    "whisper": ("WhisperConfig", "WhisperModel", {
        "d_model": 32, "encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 64, "decoder_layers": 1,
        "decoder_attention_heads": 2, "decoder_ffn_dim": 32, "vocab_size": 50, "pad_token_id": 0, "bos_token_id": 1,
        "eos_token_id": 2, "decoder_start_token_id": 1, "encoder_layerdrop": 0.1}),
    "parakeet": ("ParakeetEncoderConfig", "ParakeetEncoder", {**_TRANSFORMER, "subsampling_conv_channels": 8}),
    "lasr": ("LasrEncoderConfig", "LasrEncoder", {
        **_TRANSFORMER, "subsampling_conv_channels": 16, "conv_kernel_size": 8}),
}


def make(folder, kind="wav2vec2-layer", head=None, normalizes=None, seed=0, **more):
    """An encoder's folder; ``head``: the class of a model that has it within."""
    config, model, given = KINDS[kind]
    torch.manual_seed(seed)
    given = {**given, **more}
    described = getattr(transformers, config)(**given)
    if head and kind in ("parakeet", "lasr"):  # their heads have a config around the encoder's
        described = getattr(transformers, config.replace("Encoder", "CTC"))(encoder_config=described, **more)
    made = getattr(transformers, head or model)(described).eval()
    with torch.no_grad():
        for name, value in made.named_parameters():  # norms and biases that change nothing would hide what they do
            if value.dim() == 1 or "gru_rel_pos_const" in name:
                value.add_(0.2 * torch.randn_like(value))
            elif "subsampl" in name:  # transformers' own are so small that the features would change nothing
                torch.nn.init.kaiming_normal_(value)
        for name, value in made.named_buffers():
            if "running" in name:
                value.add_(0.3 * torch.rand_like(value))
    made.save_pretrained(folder)
    _extractor(kind, given, normalizes).save_pretrained(folder)
    return folder


def _extractor(kind, given, normalizes):
    if kind == "w2v-bert":
        return transformers.SeamlessM4TFeatureExtractor(padding_value=1)
    if kind == "whisper":
        return transformers.WhisperFeatureExtractor(feature_size=given.get("num_mel_bins", 80))
    if kind in ("parakeet", "lasr"):
        try:
            return getattr(transformers, f"{kind.title()}FeatureExtractor")()
        except ImportError as error:  # librosa, which older releases need
            pytest.skip(str(error).split(".")[0].strip())
    layer = given["feat_extract_norm"] == "layer"
    return transformers.Wav2Vec2FeatureExtractor(
        do_normalize=layer if normalizes is None else normalizes, return_attention_mask=layer)


def theirs(folder, kind, signal):
    """What transformers' model gives for one signal [S] by itself: [T, D]."""
    model = getattr(transformers, KINDS[kind][1]).from_pretrained(folder, attn_implementation="eager").eval()
    with torch.no_grad():
        extractor = transformers.AutoFeatureExtractor.from_pretrained(folder)
        given = extractor(signal.numpy(), sampling_rate=16_000, return_tensors="pt")
        if kind == "whisper":
            model = model.encoder
        # Half a frame is left out of w2v-BERT's, and the last one of Parakeet's.
        more = {"attention_mask": given["attention_mask"]} if kind in ("w2v-bert", "parakeet") else {}
        return model(given[model.main_input_name], **more).last_hidden_state[0]


def change(folder, name="config.json", **values):
    """Change what a folder's config says."""
    path = folder / name
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def start(folder, kind):
    """An encoder's weights as the folder has them, by name."""
    return getattr(transformers, KINDS[kind][1]).from_pretrained(folder).state_dict()
