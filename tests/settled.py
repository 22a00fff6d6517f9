"""The last import of a server that forks tests' processes, each of which is to be as quick as it can.

A run looks for the speed of the CPU by products of matrices, for a third of a second: here by a single one, a sixth of
what a small run takes.
"""

import gc
import os
from multiprocessing import forkserver

from sbkit.recipe import speed

speed.MEASURE_SECONDS = 0.0
gc.set_threshold(50_000, 20, 50)
gc.freeze()

# What is forked asks this server, too, for what it starts in that way: another would import for seconds.
forkserver.ensure_running.__self__.ensure_running = lambda: None

os.environ["PYTHONPATH"] = os.environ.pop("CALLERS_PYTHONPATH", os.environ.get("PYTHONPATH", ""))
