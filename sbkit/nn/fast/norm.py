"""Layer norm over several dimensions, computed as the equivalent one over a single dimension."""

from __future__ import annotations

from torch import Tensor, is_grad_enabled, nn
from torch.nn import functional


class LayerNorm(nn.LayerNorm):
    """``torch.nn.LayerNorm`` whose gradients of weight and bias are right on a GPU for any number of rows.

    torch's own kernel for them only counts the last normalised dimension. Beyond 65,536 rows of few values it fails or
    writes out of bounds.
    """

    def forward(self, input: Tensor) -> Tensor:  # torch's name
        """[..., *normalized_shape] to the same shape."""
        if not is_grad_enabled():
            return super().forward(input)
        count = len(self.normalized_shape)
        weight = None if self.weight is None else self.weight.flatten()
        bias = None if self.bias is None else self.bias.flatten()
        flat = input.flatten(-count)
        return functional.layer_norm(flat, flat.shape[-1:], weight, bias, self.eps).view(input.shape)


def flatten_norms(module: nn.Module) -> None:
    """Swap the class of each ``torch.nn.LayerNorm`` over several dimensions; parameters and checkpoint keys stay."""
    for layer in module.modules():
        if type(layer) is nn.LayerNorm and len(layer.normalized_shape) > 1:
            layer.__class__ = LayerNorm
