"""Tiny CTC models as others publish them: a head, a tokenizer and a feature extractor, written by transformers."""

import json

import encoders
import numpy as np
import tokenizers
import torch
import transformers

LETTERS = ["<pad>", "<s>", "</s>", "<unk>", "|", *"ABCDEFGHIJKLMNOPQRSTUVWXYZ'"]
PIECES = ["<unk>", "▁", *"etaonirsh", "▁t", "he", "▁the", "in", "er", "▁a", "<pad>"]  # NeMo's blank is the last
SPOKEN = ["<pad>", "</s>", "<unk>", "▁", *"etaonirsh", "▁the", "ing"]  # LASR's is the first

#: By what they are called in tests: the encoder's kind, the model's class, and more of its config.
KINDS = {
    "wav2vec2": ("wav2vec2-group", "Wav2Vec2ForCTC", {}),
    "mms": ("mms-adapters", "Wav2Vec2ForCTC", {
        "add_adapter": True, "num_adapter_layers": 1, "output_hidden_size": 24}),
    "hubert": ("hubert-batch-norm", "HubertForCTC", {}),
    "wavlm": ("wavlm-layer", "WavLMForCTC", {"num_hidden_layers": 2}),  # the first one's positions are the second's
    "w2v-bert": ("w2v-bert", "Wav2Vec2BertForCTC", {
        "add_adapter": True, "use_intermediate_ffn_before_adapter": True, "num_adapter_layers": 1}),
    "parakeet": ("parakeet", "ParakeetForCTC", {}),
    "lasr": ("lasr", "LasrForCTC", {}),
}


def make(folder, kind="wav2vec2", letters=LETTERS, sharp=40.0, **more):
    """A model's folder; ``sharp``: a factor of its head, which makes one token likely in each frame.

    more : what its tokenizer is given
    """
    encoder, model, config = KINDS[kind]
    folder.mkdir(parents=True, exist_ok=True)
    tokens = tokenizer(folder, kind, letters, **more)
    encoders.make(folder, encoder, head=model, vocab_size=len(tokens), pad_token_id=tokens.index("<pad>"),
                  **{"num_hidden_layers": 1, **config})
    own = getattr(transformers, model).from_pretrained(folder)
    extractor = transformers.AutoFeatureExtractor.from_pretrained(folder)
    with torch.no_grad():
        head = getattr(own, "lm_head", None) or own.ctc_head
        head.weight.mul_(sharp)
        given = extractor(spoken(48_000), sampling_rate=16_000, return_tensors="pt")
        head.bias.sub_(own.eval()(**given).logits[0].mean(0))  # so that frames say different tokens
    (folder / "model.safetensors").unlink()
    own.save_pretrained(folder)
    return folder


def tokenizer(folder, kind, letters=LETTERS, **more):
    """Write a family's tokenizer and return its tokens."""
    if kind == "parakeet":
        return _bpe(folder, PIECES, transformers.ParakeetTokenizer)
    if kind == "lasr":
        made = transformers.LasrTokenizer(vocab=[(piece, -float(i)) for i, piece in enumerate(SPOKEN)], extra_ids=0)
        made.save_pretrained(folder)
        return SPOKEN
    path = folder / "letters.json"
    path.write_text(json.dumps({letter: i for i, letter in enumerate(letters)}))
    transformers.Wav2Vec2CTCTokenizer(str(path), **more).save_pretrained(folder)
    path.unlink()
    return letters


def _bpe(folder, pieces, kind):
    merges = [("▁", "t"), ("h", "e"), ("▁t", "he"), ("i", "n"), ("e", "r"), ("▁", "a")]
    own = tokenizers.Tokenizer(tokenizers.models.BPE({piece: i for i, piece in enumerate(pieces[:-1])}, merges,
                                                     unk_token="<unk>"))
    own.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    own.decoder = tokenizers.decoders.Metaspace()
    made = kind(tokenizer_object=own, unk_token="<unk>", pad_token="<pad>")
    made.save_pretrained(folder)
    return pieces


def spoken(samples, seed=0):
    """Noise of changing loudness and pitch [S]."""
    drawn = np.random.default_rng(seed)
    time = np.arange(samples) / 16_000
    return (0.2 * np.sin(2 * np.pi * (200 + 900 * np.abs(np.sin(3 * time + seed))) * time)
            * (1.1 + np.sin(9 * time)) + 0.02 * drawn.standard_normal(samples)).astype(np.float32)


def theirs(folder, signal, frames=None):
    """What transformers' own processor and model say of a signal [S]: log-probabilities, and the text of ``frames``,
    since one of padding may follow."""
    extractor = transformers.AutoFeatureExtractor.from_pretrained(folder)
    own = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCTC.from_pretrained(folder).eval()
    given = extractor(signal, sampling_rate=16_000, return_tensors="pt")
    if getattr(model.config, "add_adapter", False) and "input_features" in given:  # without the padding of half a frame
        given = {name: value[:, :int(given["attention_mask"].sum())] for name, value in given.items()}
    with torch.no_grad():
        scores = model(**given).logits[0].log_softmax(-1)
    return scores.numpy(), own.decode(scores[:frames].argmax(-1).tolist())


class Evil:
    """What writes a file where it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")
