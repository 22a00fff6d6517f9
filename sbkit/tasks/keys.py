"""Keys of every task, and of every recogniser."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sbkit.errors import SbkitError
from sbkit.recipe.keys import Problem, key
from sbkit.runs.keys import TaskKeys
from sbkit.system.schema import SIZE, Enumerated, Number

if TYPE_CHECKING:
    from torch import Tensor

    from sbkit.data.manifest import Manifest
    from sbkit.data.nonspeech import NonSpeech
    from sbkit.data.tokens import Tokenizer

__all__ = ["RecogniserKeys", "TaskKeys"]


@dataclass(kw_only=True)
class RecogniserKeys(TaskKeys):
    """Keys of every recogniser."""

    tokenizer: Tokenizer = key("a sbkit.data.tokens.Tokenizer")
    output_neurons: int = key("the size of the vocabulary; for characters determined by the text", allowed=SIZE)
    init_tokenizer: str = key("new: trained on this corpus, and tokens that both have keep their rows; keep: that of "
                              "init_from", "new", Enumerated(("new", "keep")))
    replay: float | None = key("the share of each step from the corpus that init_from was trained on, such as 0.2; its "
                               "test is scored before and after; null: none", None, Number(0, 0.9, above=True))
    replay_from: str | None = key("a run trained on that corpus, or the corpus itself, if init_from is not a run", None)
    spec_augment: Callable[[Tensor, Tensor], Tensor] | None = key(
        "the augmentation of features [B, T, F] in training, called with frame counts [B] too, such as "
        "sbkit.nn.spec_augment.SpecAugment", None)

    nonspeech: NonSpeech | None = key("a sbkit.data.nonspeech.NonSpeech: silence of all kinds in training, with empty "
                                      "texts; null: none, and rows without a text are left out", None)

    def rows_of_training(self, train: Manifest) -> Manifest:
        return train if self.nonspeech is None else self.nonspeech.added_to(train, self.batching.seed)

    @classmethod
    def read(cls, hparams: Mapping[str, Any]) -> RecogniserKeys:
        """Read the keys, with a mixture as corpus if there is a corpus to replay."""
        from sbkit.data.corpus import Corpus
        from sbkit.runs import replay

        keys = super().read(hparams)
        if keys.replay is not None and keys.init_from is not None and "corpus" in vars(keys):
            with contextlib.suppress(SbkitError):  # clashes reports it
                keys.corpus = replay.with_replay(keys)
        if keys.nonspeech is not None and isinstance(vars(keys).get("corpus"), Corpus):
            keys.corpus.keep_silence()
        return keys

    def clashes_of_the_corpus(self) -> Iterator[Problem]:
        from sbkit.runs import replay

        yield from super().clashes_of_the_corpus()
        yield from replay.problems(self)

    def clashes(self) -> Iterator[Problem]:
        yield from super().clashes()
        there = vars(self)
        if there.get("nonspeech") and getattr(there.get("batching"), "clips_per", None):
            yield Problem("nonspeech", "batching: clips_per draws each step by a label or speaker, and clips of "
                          "silence have none", "leave one of them out")
