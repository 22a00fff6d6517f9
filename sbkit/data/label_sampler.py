"""P x K sampling: each step has K different clips of each of P labels, redrawn in each pass."""

from __future__ import annotations

import bisect
from collections.abc import Mapping

import numpy as np

from sbkit.errors import SbkitError


class LabelSampler:
    """Groups of ``clips`` clips with one label, of which each step has ``labels_per_step`` with different labels.

    In a pass over the corpus, each label has as many groups as its clips fill, at most one per step. A pass has as many
    steps as these groups fill.

    labels: ``[N]``, the number of each utterance's label, from 0.
    durations: ``[N]``, seconds.
    clips_per: the name of the column of labels, and the number of clips.
    step_seconds: seconds in a step, padding included.
    least: minimum number of utterances in a step.

    >>> groups = LabelSampler(np.array([0, 0, 1, 1, 2, 2]), np.ones(6), {"speaker": 2}, step_seconds=4)
    >>> groups.labels_per_step, groups.lengths.tolist(), groups.draw(np.random.default_rng(0), 1)[0].shape
    (2, [4], (4,))
    """

    def __init__(self, labels: np.ndarray, durations: np.ndarray, clips_per: Mapping[str, int], step_seconds: float,
                 least: int = 1):
        ((name, self.clips),) = clips_per.items()
        self.labels = labels
        self.sizes = np.bincount(labels)
        possible = self.sizes // self.clips  # groups of each label
        enough = possible > 0
        self.left_out = int(self.sizes[~enough].sum())
        """The number of utterances that are in no step because their label has too few."""
        self.longest = float(durations[enough[labels]].max(initial=0.0))
        fits = int(step_seconds / (self.clips * max(self.longest, 1e-6)) + 1e-6)
        self.labels_per_step = fits
        what = f"step_seconds ({step_seconds:g} s) has room for {fits} values of {name} with {self.clips} clips of " \
               f"{self.longest:g} s each"
        if enough.sum() < 2:
            raise SbkitError("impossible-batching", f"clips_per: a step needs two values of the column {name} with "
                             f"{self.clips} clips or more, and the training set has {int(enough.sum())}",
                             hint="lower the number of clips_per, or check the column", key="clips_per")
        if fits < 2:
            raise SbkitError("impossible-batching", f"clips_per: {what}, but a step needs two or more",
                             hint=f"raise step_seconds to {2 * self.clips * self.longest:g} or more, or crop the clips",
                             key="clips_per")
        if fits > enough.sum():
            raise SbkitError("impossible-batching", f"clips_per: {what}, but only {int(enough.sum())} have that many "
                             "clips", hint=f"lower step_seconds to {int(enough.sum()) * self.clips * self.longest:g}",
                             key="clips_per")
        self.steps = _most_steps(possible, fits)
        self.edges = np.array([self.longest])
        self.lengths = np.full(self.steps, fits * self.clips)
        if fits * self.clips < least:
            raise SbkitError("impossible-batching", f"clips_per: a step has {fits * self.clips} utterances, but "
                             f"min_batch_utterances is {least}",
                             hint="raise step_seconds, or lower min_batch_utterances", key="clips_per")
        self._taken = self.clips * np.minimum(possible, self.steps)
        """How many of each label's utterances a pass puts into groups, ``[labels]``."""

    def draw(self, rng: np.random.Generator, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Draw the utterances of one pass, step by step and group by group, ``[steps * labels_per_step * clips]``, with
        their pass numbers.

        Labels, and the utterances of each, are put into a random order, and each label's first ones into groups. These
        groups are dealt out to steps like cards: a label's groups are neighbours, and at most as many as steps, so no
        step gets two of them. For example three labels with 2, 1 and 3 groups, in steps of two groups:

            groups in random order    C C C A A B      C has 3 groups, which is the number of steps, too
            dealt to steps 0 to 2     0 1 2 0 1 2
            steps                     C A,  C A,  C B

        If there are more groups than cards to deal, a random choice of them is dealt, in the same order.
        """
        label_order = rng.permutation(len(self.sizes))
        members = rng.permutation(len(self.labels))
        place_of_label = np.argsort(label_order)
        members = members[np.argsort(place_of_label[self.labels[members]], kind="stable")]

        sizes = self.sizes[label_order]
        place_in_label = np.arange(len(members)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        is_taken = place_in_label < np.repeat(self._taken[label_order], sizes)
        groups = members[is_taken].reshape(-1, self.clips)

        chosen = np.sort(rng.permutation(len(groups))[: self.labels_per_step * self.steps])
        dealt = groups[chosen].reshape(self.labels_per_step, self.steps, self.clips)
        utterances = dealt.transpose(1, 0, 2).ravel()
        return utterances, np.broadcast_to(number, utterances.size)


def _most_steps(groups: np.ndarray, groups_per_step: int) -> int:
    """Return the largest number of steps that can each have this many groups with different labels.

    A label can be in each step once, so in n steps it has at most n of its groups. What the labels can give grows by
    less and less with n, and what the steps need by the same each time: once it is too much for n, it is for all larger
    numbers, and bisection finds the first of these.

    groups : ``[labels]``, how many groups the clips of each label fill

    >>> _most_steps(np.array([2, 1, 3]), groups_per_step=2)  # 6 groups for 3 steps; for 4 steps there are not 8
    3
    >>> _most_steps(np.array([1, 1, 9]), groups_per_step=2)  # each step needs one of the first two labels' groups
    2
    """
    def is_too_many(steps: int) -> bool:
        return bool(np.minimum(groups, steps).sum() < groups_per_step * steps)

    return bisect.bisect_left(range(1, int(groups.sum()) // groups_per_step + 1), True, key=is_too_many)
