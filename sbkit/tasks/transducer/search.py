"""The search of a transducer that is being trained or tested."""

from __future__ import annotations

import numpy as np
import torch

from sbkit.decode.transducer import Joint
from sbkit.nn.transducer import TransducerHead


class TorchJoint(Joint):
    """Prediction and joint network of a model, for a search."""

    def __init__(self, head: TransducerHead, blank: int):
        self.head, self.context, self.blank = head, head.context, blank
        self._device = head.out.weight.device

    @torch.no_grad()
    def predict(self, tokens: np.ndarray) -> np.ndarray:
        """Map the last tokens [N, context] to states [N, J]."""
        return self.head.predict(torch.from_numpy(tokens).to(self._device))[:, 0].float().cpu().numpy()

    @torch.no_grad()
    def join(self, encoded: np.ndarray, predicted: np.ndarray) -> np.ndarray:
        """Map states [N, J] of both to log-probabilities [N, V]."""
        with torch.autocast(self._device.type, enabled=False):  # as the bundle's graphs compute
            joined = self.head.join(*(torch.from_numpy(each).to(self._device) for each in (encoded, predicted)))
            return joined.float().log_softmax(-1).cpu().numpy()
