"""How layers' weights are drawn before training."""

from __future__ import annotations

from torch import nn

_LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d)


def by_layer(*modules: nn.Module) -> None:
    """Draw linear and convolutional layers anew as torch does, each by the number of inputs that one output has.

    SpeechBrain's transformers draw all of their weights by Xavier's rule, which takes what a depthwise convolution's
    output goes on to for its size too: its weights then begin five times smaller than they should, and a recogniser
    begins to hear later.
    """
    for module in modules:
        for layer in module.modules():
            if isinstance(layer, _LAYERS):
                layer.reset_parameters()
