"""SpeechBrain's objects that hold random numbers which they drew earlier: a checkpoint needs these, too."""

from __future__ import annotations

import gc
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from speechbrain.augment.time_domain import AddNoise, AddReverb

from sbkit.train.rng import DrawnAhead

#: What AddNoise and AddReverb hold once they have opened their lists; without it they open them again.
_READERS = ("data_loader", "noise_data", "rir_data")


class SpeechBrainDrawnAhead(DrawnAhead):
    """The masks of LiGRU, and the order of recordings of AddNoise and AddReverb.

    A LiGRU draws 16,000 masks, and again when it has used them or the batch has another size. They are saved: as bits,
    with how many were used.

    AddNoise and AddReverb draw the order of their recordings when they first need one, and no file holds where they are
    in it. So at each checkpoint they draw a new order, which a resumed run draws, too.

    layers : those that may be, or hold, a LiGRU
    device : where masks go
    """

    def __init__(self, layers: Iterable[torch.nn.Module], device: torch.device | str):
        self.device = device
        modules = (module for layer in layers for module in layer.modules())
        self._mask_layers: list[Any] = list(dict.fromkeys(  # LiGRU's, and those of other classes like it
            module for module in modules if hasattr(module, "drop_mask_cnt")))

    def restart(self) -> None:
        """Close the readers of all AddNoise and AddReverb."""
        # A user's object, a partial or a closure may hold one, so all objects of this process are looked through: less
        # than 0.1 s for 250,000. Not by isinstance, which lazy objects answer by importing what they stand for.
        for instance in gc.get_objects():
            if issubclass(type(instance), (AddNoise, AddReverb)):
                for name in _READERS:
                    vars(instance).pop(name, None)

    def state(self) -> dict[str, torch.Tensor]:
        state = {}
        for i, layer in enumerate(self._mask_layers):
            masks = layer.drop_masks.cpu()
            kept_value = masks.max()  # what a mask has where it doesn't drop
            numbers = [layer.drop_mask_cnt, layer.batch_size, kept_value]
            state[f"ahead{i}"] = torch.tensor(numbers, dtype=torch.float64)
            state[f"masks{i}"] = torch.from_numpy(np.packbits(masks.numpy() > 0))
        return state

    def take_from(self, state: dict[str, torch.Tensor]) -> None:
        for i, layer in enumerate(self._mask_layers):
            numbers = state.pop(f"ahead{i}", None)
            bits = state.pop(f"masks{i}", None)
            count = layer.drop_masks.numel()
            if numbers is None or bits is None or len(bits) != (count + 7) // 8:
                continue  # of another model, or from before they were saved
            used, batch_size, kept_value = numbers.tolist()
            masks = torch.from_numpy(np.unpackbits(bits.numpy(), count=count))
            layer.drop_mask_cnt = int(used)
            layer.batch_size = int(batch_size)
            layer.drop_masks = (masks.view(layer.drop_masks.shape) * kept_value).to(self.device)
