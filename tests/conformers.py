"""SpeechBrain's encoder, of so few numbers that a test may train, trace and export it."""

from speechbrain.lobes.models.transformer.TransformerASR import TransformerASR


def conformer(input_size, tgt_vocab, **changes):
    """Without a decoder, as the recipes have it, but for ``changes`` of TransformerASR's arguments."""
    return TransformerASR(tgt_vocab, input_size, **{
        "d_model": 16, "nhead": 2, "num_encoder_layers": 2, "num_decoder_layers": 0, "d_ffn": 24, "dropout": 0.1,
        "encoder_module": "conformer", "kernel_size": 7, "normalize_before": True, "causal": False,
        "attention_type": "RoPEMHA", "csgu_linear_units": 24, **changes})
