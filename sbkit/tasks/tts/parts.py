"""Checks that the parts of a voice fit together, and to the codec's, before a batch is sent through."""

from __future__ import annotations

from sbkit.recipe.build import Built
from sbkit.recipe.source import Findings
from sbkit.tasks.fit import Fit, all_fit
from sbkit.tasks.tts.keys import TTSKeys


def parts_fit(keys: TTSKeys, built: Built, findings: Findings) -> bool:
    """Report each number of a part that another part contradicts; returns whether there is none."""
    text, frames, codec, head = keys.text_encoder, keys.frame_decoder, keys.decoder, keys.head
    states = "the text encoder's states have {} numbers"
    fits = [
        Fit("durations", "input_size", keys.durations.input_size, text.size, states),
        Fit("frame_decoder", "input_size", frames.input_size, text.size, states),
        Fit("code_head", "input_size", keys.code_head.input_size, frames.size, "the frames' states have {} numbers"),
        Fit("decoder", "input_size", codec.input_size, keys.quantiser.size, "the quantiser gives {} numbers a frame"),
        Fit("head", "input_size", head.input_size, codec.size, "the decoder's states have {} numbers"),
    ]
    same = keys.code_head.choices == keys.quantiser.choices
    if not same:
        node = built.nodes["code_head"]
        findings.error("shape-mismatch", node.place_of("quantiser"), node.key_of("quantiser"),
                       "it is another one than the recipe's quantiser, with other codes",
                       "write quantiser: !ref <quantiser> under code_head")
    return all_fit(fits, built, findings) and same
