"""Imports for the server from which checks are forked, done once for all, without asking the driver for cards.

A process that has asked the driver (SpeechBrain does on import, for the sake of AMD's cards) can't pass on CUDA to the
processes that it forks.
"""

import torch

_is_available = torch.cuda.is_available
torch.cuda.is_available = lambda: torch.version.hip is not None
try:
    import torch._dynamo
    import torch._refs

    import sbkit.data.loader
    import sbkit.recipe.build
    import sbkit.recipe.flops
    import sbkit.score.report
    import sbkit.tasks.ctc  # noqa: F401
finally:
    torch.cuda.is_available = _is_available
