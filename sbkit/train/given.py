"""Names for what a recipe gives to training, of types that only the recipe knows."""

from __future__ import annotations

from typing import Any

MicroBatch = Any  # what its data loader yields; its own hooks name the class
Outputs = Any  # what its compute_forward returns
Objectives = Any  # what its compute_objectives returns, such as a Loss or a scalar tensor
DataSource = Any  # a dataset, a data loader, or another iterable of micro-batches
