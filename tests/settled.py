"""The last import of a server that forks: what was imported before is kept out of its children's garbage collections.

They would write to the pages that they share with the server, and so copy them. And each run looks for the speed of
the CPU by products of matrices, for a third of a second: here by a single one, a sixth of what a small run takes.
"""

import gc

from sbkit.recipe import speed

speed.MEASURE_SECONDS = 0.0
gc.freeze()
