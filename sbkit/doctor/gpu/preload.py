"""What the server that checks are forked from imports once for all of them, without asking the driver for cards.

A process that has asked (SpeechBrain does when it is imported, for the sake of AMD's cards) can hand CUDA on to none of
those that it forks.
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
