"""Imports for servers that fork ranks or checks, done once for all.

The imported objects are kept out of garbage collection, which would write to the pages that a fork shares with the
server, and so copy them.
"""

import gc

from sbkit.rehearsal import fake_gpu

with fake_gpu.without_driver():
    import pandas  # type: ignore[import-untyped]  # noqa: F401
    import torch._dynamo
    import torch._refs  # noqa: F401

    import sbkit.data.loader
    import sbkit.infer.bundles
    import sbkit.recipe.build
    import sbkit.recipe.flops
    import sbkit.recipe.load
    import sbkit.runs.start
    import sbkit.runs.training
    import sbkit.score.report
    import sbkit.tasks.ctc  # noqa: F401

gc.freeze()
