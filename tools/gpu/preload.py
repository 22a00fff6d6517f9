"""Imports for servers that fork ranks or checks, done once for all, without asking the driver for cards.

A process that has asked the driver (SpeechBrain does on import, for the sake of AMD's cards) can't pass on CUDA to the
processes that it forks.
"""

import torch

_is_available = torch.cuda.is_available
torch.cuda.is_available = lambda: torch.version.hip is not None
try:
    import pandas  # type: ignore[import-untyped]  # noqa: F401
    import torch._dynamo
    import torch._refs

    import sbkit.commands.train
    import sbkit.data.loader
    import sbkit.infer.bundles
    import sbkit.recipe.build
    import sbkit.recipe.flops
    import sbkit.recipe.load
    import sbkit.runs.training
    import sbkit.score.report
    import sbkit.tasks.ctc  # noqa: F401
finally:
    torch.cuda.is_available = _is_available
