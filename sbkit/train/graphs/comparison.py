"""What a first replay is compared with, and by which tolerance.

Nothing wrong may train a model, and a replay that is wrong looks like any other. So before a graph is replayed in
earnest, it is replayed once on what Python has just computed, from the same state and the same random numbers:

- of a micro-step, its sums (loss, count and extras) and the norm of each gradient, since a wrong loss or a missing part
  of it shows in one of these, and they are few numbers to bring to the host;
- of an update, how each weight has changed, since the norm of a weight hardly changes in one step.

``TOLERANCE`` is far above rounding and far below an error. Kernels that add with atomics round in another order each
time, and bf16 has 8 bits, 0.4 %; on a GPU the two computations are not equal to the bit even where all is right. A
replay that repeats something wrong, such as an old batch, a number of the host or a branch that is not taken, is off by
much more than a percent in at least one of the numbers.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sbkit.train.graphs.repeatable import NotRepeatable

#: What a first replay may differ by from what Python computes, as a share of it.
TOLERANCE = 0.01
#: A tensor's change of less than this share of the whole change is compared with the whole one's, as it is rounding.
SMALL = 1e-3


def check_micro_step(expected: np.ndarray, replayed: np.ndarray, sums: int) -> None:
    """Raise ``NotRepeatable`` if a replay of a micro-step computes something else.

    expected, replayed : [N], by Python and by the replay: the loss, its count, further sums, then norms of gradients
    sums : how many of them are sums

    A number is right if it is within the tolerance of the expected one, or, as a part of the loss or a gradient may be
    nothing but rounding beside others, of the loss or of the norm of all gradients. In fp16 some may be infinite: then
    they have to be so in both.
    """
    finite = np.where(np.isfinite(expected), expected, 0.0)
    whole_loss = max(abs(finite[0]), abs(finite[1]))
    whole_gradient = np.linalg.norm(finite[sums:])
    whole = np.concatenate([np.full(sums, whole_loss), np.full(len(expected) - sums, whole_gradient)])

    far = ~np.isclose(replayed, expected, rtol=TOLERANCE, atol=0, equal_nan=True)
    both_finite = np.isfinite(replayed) & np.isfinite(expected)
    wrong = far & (~both_finite | (abs(replayed - finite) > TOLERANCE * whole))
    if wrong.any():
        first = int(wrong.argmax())
        raise NotRepeatable(f"a replay computes another {'loss' if first < sums else 'gradient'} than the step: "
                            f"{replayed[first]:g}, not {expected[first]:g}")


def check_update(change: np.ndarray, distance: np.ndarray, shapes: Sequence[Sequence[int]]) -> None:
    """Raise ``NotRepeatable`` if a replay of an update changes a weight in another way.

    change : [N], the norm of the change that Python made to each weight
    distance : [N], the norm of the difference between the two
    shapes : of the weights
    """
    allowed = TOLERANCE * np.maximum(change, SMALL * np.linalg.norm(change))
    wrong = np.isfinite(change) & ~(distance <= allowed)  # also where the distance is no number
    if wrong.any():
        first = int(wrong.argmax())
        raise NotRepeatable(f"a replay changes a weight of shape {list(shapes[first])} otherwise than the update: "
                            f"{distance[first]:g} apart, of {change[first]:g}")
