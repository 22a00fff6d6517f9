"""Tiny folders for SpeechBrain's EncoderASR, as its recipes publish them, with random weights."""

import torch
from hyperpyyaml import load_hyperpyyaml
from speechbrain.dataio.encoder import CTCTextEncoder

from sbkit.data.piece_model import piece_model

RECIPE = """
sample_rate: 16000
compute_features: !new:speechbrain.lobes.features.Fbank
    sample_rate: !ref <sample_rate>
    n_mels: 40
normalize: !new:speechbrain.processing.features.InputNormalization
    norm_type: sentence
CNN: !new:speechbrain.lobes.models.convolution.ConvolutionFrontEnd
    input_shape: [8, 10, 40]
    num_blocks: 2
    num_layers_per_block: 1
    out_channels: [8, 8]
    kernel_sizes: [3, 3]
    strides: [2, 2]
    residuals: [false, false]
Transformer: !new:speechbrain.lobes.models.transformer.TransformerASR.TransformerASR
    input_size: 80
    tgt_vocab: {size}
    d_model: 16
    nhead: 2
    num_encoder_layers: 1
    num_decoder_layers: 0
    d_ffn: 32
    dropout: 0.1
    encoder_module: conformer
    attention_type: RelPosMHAXL
    normalize_before: true
    causal: false
wrapped: !new:speechbrain.lobes.models.transformer.TransformerASR.EncoderWrapper
    transformer: !ref <Transformer>
ctc_lin: !new:speechbrain.nnet.linear.Linear
    input_size: 16
    n_neurons: {size}
log_softmax: !new:speechbrain.nnet.activations.Softmax
    apply_log: true
model: !new:torch.nn.ModuleList
    - [!ref <CNN>, !ref <Transformer>, !ref <ctc_lin>]
encoder: !new:speechbrain.nnet.containers.LengthsCapableSequential
    compute_features: !ref <compute_features>
    normalize: !ref <normalize>
    CNN: !ref <CNN>
    wrapped: !ref <wrapped>
    ctc_lin: !ref <ctc_lin>
    log_softmax: !ref <log_softmax>
"""
#: The same around an encoder of transformers, which SpeechBrain's wrapper makes from a folder.
PRETRAINED = """
sample_rate: 16000
wav2vec2: !new:speechbrain.integrations.huggingface.{wrapper}
    source: {source}
    output_norm: true
    freeze: true
    save_path: {source}
enc: !new:speechbrain.nnet.containers.Sequential
    input_shape: [null, null, 32]
    linear1: !name:speechbrain.nnet.linear.Linear
        n_neurons: 24
        bias: true
    bn1: !name:speechbrain.nnet.normalization.BatchNorm1d
    activation: !new:torch.nn.LeakyReLU
    drop: !new:torch.nn.Dropout
        p: 0.15
ctc_lin: !new:speechbrain.nnet.linear.Linear
    input_size: 24
    n_neurons: {size}
log_softmax: !new:speechbrain.nnet.activations.Softmax
    apply_log: true
model: !new:torch.nn.ModuleList
    - [!ref <enc>, !ref <ctc_lin>]
encoder: !new:speechbrain.nnet.containers.LengthsCapableSequential
    wav2vec2: !ref <wav2vec2>
    enc: !ref <enc>
    ctc_lin: !ref <ctc_lin>
    log_softmax: !ref <log_softmax>
"""
#: What both end with.
END = """
tokenizer: !new:{tokenizer}
decoding_function: !name:speechbrain.decoders.ctc_greedy_decode
    blank_id: {blank}
modules:
    encoder: !ref <encoder>
pretrainer: !new:speechbrain.utils.parameter_transfer.Pretrainer
    loadables:
        model: !ref <model>
        tokenizer: !ref <tokenizer>
"""
LETTERS = [*"etaonirsh", " "]


def make(folder, labels=False, sharp=40.0, pretrained=None, wrapper="wav2vec2.Wav2Vec2"):
    """A folder; ``labels``: with a CTCTextEncoder, whose blank is the last, instead of a SentencePiece model;
    ``pretrained``: the folder of an encoder of transformers, and ``wrapper`` SpeechBrain's class around it."""
    folder.mkdir(parents=True)
    if labels:
        encoder = CTCTextEncoder()
        encoder.update_from_iterable([*LETTERS, "<bos>"], sequence_input=False)
        encoder.bos_label = "<bos>"
        encoder.add_blank()
        encoder.save(folder / "tokenizer.ckpt")
        size, blank, kind = len(LETTERS) + 2, len(LETTERS) + 1, "speechbrain.dataio.encoder.CTCTextEncoder"
    else:
        pieces = ["<unk>", *(letter.replace(" ", "▁") for letter in LETTERS), "▁the"]
        (folder / "tokenizer.ckpt").write_bytes(piece_model(pieces))
        size, blank, kind = len(pieces), 0, "sentencepiece.SentencePieceProcessor"
    text = (RECIPE if pretrained is None else PRETRAINED) + END
    if pretrained is not None:
        text += "        wav2vec2: !ref <wav2vec2>\n"
    for name, value in (("source", pretrained), ("wrapper", wrapper), ("size", size), ("blank", blank),
                        ("tokenizer", kind)):
        text = text.replace(f"{{{name}}}", str(value))
    (folder / "hyperparams.yaml").write_text(text)
    torch.manual_seed(3)
    built = load_hyperpyyaml(text)
    with torch.no_grad():
        built["ctc_lin"].w.weight.mul_(sharp)
        made = built["encoder"].eval()(torch.randn(1, 32_000) * 0.1, torch.ones(1))
        built["ctc_lin"].w.bias.sub_(made[0].mean(0))
    for name in ("model", "wav2vec2"):
        if name in built:
            torch.save(built[name].state_dict(), folder / f"{name}.ckpt")
    return folder


def theirs(folder, signals, room):
    """What SpeechBrain says of each signal [S]: log-probabilities, and text."""
    from speechbrain.inference.ASR import EncoderASR

    own = EncoderASR.from_hparams(source=str(folder), savedir=str(room), run_opts={"device": "cpu"})
    with torch.no_grad():
        for signal in map(torch.from_numpy, signals):
            (text,), _ = own.transcribe_batch(signal[None], torch.ones(1))
            yield own.encode_batch(signal[None], torch.ones(1))[0].numpy(), text
