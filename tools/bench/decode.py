"""Speed of beam search with a language model: sbkit, SpeechBrain and flashlight, alternating in the same run.

    pip install kenlm pygtrie flashlight-text       what the others need; a missing one is left out
    python -m tools.bench.decode --json bench.json
    python -m tools.bench.decode --vocabularies 1000 --utterances 40 --rounds 5

The posteriors are synthetic but like those of a trained model: most frames are a confident blank, and in a token's
frames tokens that sound alike are also likely, so that the language model matters and no search is perfect. All
searches get the same posteriors, the same 3-gram model with a weight of 0.5 and 1.5 for each word, and the same number
of hypotheses (--beam). Other options have their defaults unless the name says otherwise: `tuned` has the weights that
make the fewest errors on as many other utterances, and `pruned` follows the 20 likeliest tokens of each frame in
flashlight, which follows all by default.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import math
import os
import platform
import random
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import sentencepiece
import torch

from sbkit.decode import lm
from sbkit.decode.arpa import read
from sbkit.decode.beam import BeamSearch
from sbkit.decode.fusion import FusionWeights
from sbkit.score.edits import count
from sbkit.system.console import table
from sbkit.system.cores import usable_cores
from sbkit.tasks.recognise.search import LM_WEIGHTS, WORD_SCORES

FRAME = 0.04  # seconds
Pair = tuple[float, float]  # the language model's weight, and the score of each word
UNTUNED = (0.5, 1.5)
#: How far a frame's sound is from its token's, and how confident the model is.
NOISE, SHARPNESS = 0.9, 16.0
SOUNDS = 48  # dimensions in which sounds differ
FEW = 2  # utterances for a contender that takes minutes

Decode = Callable[[], list[str]]


# ---------------------------------------------------------------- the task


class Task(NamedTuple):
    """Utterances to decode, with their references."""

    pieces: list[str]
    log_probs: np.ndarray  # [B, T, V]
    lengths: np.ndarray  # [B]
    references: list[str]
    arpa: Path
    spell: Callable[[str], list[str]]

    @property
    def seconds(self) -> float:
        return float(self.lengths.sum()) * FRAME

    def part(self, which: slice) -> Task:
        """Select some of the utterances."""
        return self._replace(log_probs=self.log_probs[which], lengths=self.lengths[which],
                             references=self.references[which])


def language(words: int, seed: int) -> Iterator[str]:
    """Generate sentences of frequent and rare words, in which each word has some that often follow it."""
    rng = random.Random(seed)
    onsets = ["", *"bcdfghjklmnprstvwz", "st", "tr", "pl", "ch", "sh", "br", "gr"]
    nuclei, codas = ["a", "e", "i", "o", "u", "ea", "ou", "ai"], ["", "", "", *"nrtslmd", "nd", "st", "ng"]

    def syllable() -> str:
        return rng.choice(onsets) + rng.choice(nuclei) + rng.choice(codas)

    lexicon = list(dict.fromkeys("".join(syllable() for _ in range(rng.choice([1, 1, 2, 2, 3]))) for _ in range(words)))
    weights = list(itertools.accumulate(1 / (rank + 3) for rank in range(len(lexicon))))
    favourites = [rng.choices(lexicon, cum_weights=weights, k=12) for _ in lexicon]
    numbers = {word: i for i, word in enumerate(lexicon)}
    while True:
        sentence = rng.choices(lexicon, cum_weights=weights)
        for _ in range(rng.randint(4, 16)):
            sentence.append(rng.choice(favourites[numbers[sentence[-1]]]) if rng.random() < 0.75
                            else rng.choices(lexicon, cum_weights=weights)[0])
        yield " ".join(sentence)


def make_task(size: int, utterances: int, folder: Path, seed: int = 0) -> Task:
    """Make a vocabulary of this size (about 32: characters), its language model, and utterances to decode."""
    sentences = language(8000, seed)
    train = [next(sentences) for _ in range(30_000)]
    references = [next(sentences) for _ in range(utterances)]
    text, arpa = folder / f"{size}.txt", folder / f"{size}.arpa"
    text.write_text("\n".join(train))
    kind = {"model_type": "char"} if size < 100 else {"model_type": "bpe", "vocab_size": size}
    with contextlib.redirect_stderr(None):
        sentencepiece.SentencePieceTrainer.train(
            input=str(text), model_prefix=str(folder / str(size)), minloglevel=2, unk_id=0, bos_id=-1, eos_id=-1,
            character_coverage=1.0, **kind)
    processor = sentencepiece.SentencePieceProcessor(model_file=str(folder / f"{size}.model"))
    lm.build(train, arpa, order=3, prune=[0, 0, 1])
    pieces = [processor.id_to_piece(i) for i in range(processor.vocab_size())]
    rng = np.random.default_rng(seed)
    sounds = rng.normal(size=(len(pieces), SOUNDS)) / math.sqrt(SOUNDS)
    spoken = [posteriors(processor.encode(sentence), sounds, rng) for sentence in references]
    lengths = np.array([len(each) for each in spoken])
    log_probs = np.full((len(spoken), lengths.max(), len(pieces)), -30.0, np.float32)
    for row, each in zip(log_probs, spoken, strict=True):
        row[:len(each)] = each
    return Task(pieces, log_probs, lengths, references, arpa, lambda word: processor.encode(word, out_type=str))


def posteriors(tokens: Sequence[int], sounds: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Draw log-probabilities [T, V] of an utterance that are as peaked as those of CTC."""
    frames = []
    for token in tokens:
        noise = NOISE * rng.lognormal(sigma=0.5)  # some tokens are clear, some are not
        observed = sounds[token] + noise * rng.normal(size=sounds.shape[1]) / math.sqrt(sounds.shape[1])
        for number in range(rng.choice([1, 1, 2])):
            scores = SHARPNESS * (sounds @ observed) + 0.3 * rng.normal(size=len(sounds))
            scores[0] = scores.max() + rng.normal(-4.0 if number == 0 else 0.5, 1.5)
            frames.append(scores)
        longer = len(sounds) > 100  # a piece lasts longer than a character
        for _ in range(rng.integers(1, 6) if longer else rng.integers(0, 2)):
            scores = 2.5 * rng.normal(size=len(sounds))
            scores[0] = scores.max() + rng.choice([4.0, 9.0, 14.0])
            frames.append(scores)
    scores = np.array(frames)
    scores -= scores.max(-1, keepdims=True)
    return scores - np.log(np.exp(scores).sum(-1, keepdims=True))


# ---------------------------------------------------------------- the contenders


def ours(task: Task, beam: int, weights: Pair = UNTUNED, **options: Any) -> Decode:
    lm_weight, word_score = weights
    search = BeamSearch(task.pieces, lm=task.arpa, beam=beam, lm_weight=lm_weight, word_score=word_score,
                        **options).load()
    log_probs, lengths = torch.from_numpy(task.log_probs), torch.from_numpy(task.lengths)
    return lambda: [several[0].text for several in search.decode(log_probs, lengths)]


def speechbrain(task: Task, beam: int, name: str, weights: Pair = UNTUNED) -> Decode:
    from speechbrain.decoders import ctc

    search = getattr(ctc, name)(
        blank_index=0, vocab_list=["", *task.pieces[1:]], kenlm_model_path=str(task.arpa),
        alpha=weights[0], beta=weights[1], beam_size=beam)
    log_probs = torch.from_numpy(task.log_probs)
    shares = torch.from_numpy((task.lengths + 0.5) / task.log_probs.shape[1])
    return lambda: [several[0].text for several in search(log_probs, shares)]


def flashlight(task: Task, beam: int, tokens: int | None) -> Decode:
    from torchaudio.models.decoder import ctc_decoder

    words = [word for word in read(task.arpa).words if word not in ("<unk>", "<s>", "</s>")]
    lexicon = task.arpa.with_suffix(".lexicon")
    lexicon.write_text("".join(f"{word} {' '.join(task.spell(word))}\n" for word in words))
    search = ctc_decoder(
        lexicon=str(lexicon), tokens=task.pieces, lm=str(task.arpa.with_suffix(".bin")), beam_size=beam,
        beam_size_token=tokens, lm_weight=UNTUNED[0] * math.log(10), word_score=UNTUNED[1],
        blank_token=task.pieces[0], sil_token=task.pieces[0], unk_word="<unk>", log_add=True)
    log_probs, lengths = torch.from_numpy(task.log_probs), torch.from_numpy(task.lengths)
    return lambda: [" ".join(several[0].words) for several in search(log_probs, lengths)]


def greedy(task: Task) -> Decode:
    from sbkit.decode.greedy import greedy

    log_probs, lengths = torch.from_numpy(task.log_probs), torch.from_numpy(task.lengths)
    return lambda: ["".join(task.pieces[i] for i in spans.ids.tolist()).replace("▁", " ").strip()
                    for spans in greedy(log_probs, lengths)]


def tune(task: Task, beam: int) -> Pair:
    """Find the weights with the fewest errors."""
    search = BeamSearch(task.pieces, lm=task.arpa, beam=beam)
    events = search.events(torch.from_numpy(task.log_probs), torch.from_numpy(task.lengths))

    def wrong(weights: Pair) -> float:
        found = search.search(events, FusionWeights(*weights))
        return error_rate(task.references, [hypotheses[0].text for hypotheses in found])

    return min(itertools.product(LM_WEIGHTS, WORD_SCORES), key=wrong)


def contenders(task: Task, dev: Task, beam: int, workers: int) -> Iterator[tuple[str, Task, Decode]]:
    """Yield the name of each search, what it is to decode, and how; one whose package is missing is left out."""
    few = task.part(slice(FEW))
    tuned = tune(dev, beam)
    print(f"tuned: lm weight {tuned[0]}, word score {tuned[1]}", file=sys.stderr)
    searches: list[tuple[str, Task, Callable[[], Decode]]] = [
        ("sbkit greedy", task, lambda: greedy(task)),
        ("sbkit", task, lambda: ours(task, beam)),
        ("sbkit, beam 16", task, lambda: ours(task, 16)),
        ("sbkit, token_threshold -12", task, lambda: ours(task, beam, token_threshold=-12.0)),
        (f"sbkit, {workers + 1} processes", task, lambda: ours(task, beam, workers=workers)),
        ("sbkit, tuned", task, lambda: ours(task, beam, tuned)),
        ("SpeechBrain, the same weights", task, lambda: speechbrain(task, beam, "CTCBeamSearcher", tuned)),
        ("SpeechBrain CTCBeamSearcher", task, lambda: speechbrain(task, beam, "CTCBeamSearcher")),
        ("SpeechBrain CTCPrefixBeamSearcher", task, lambda: speechbrain(task, beam, "CTCPrefixBeamSearcher")),
        ("flashlight, pruned", task, lambda: flashlight(task, beam, min(20, len(task.pieces)))),
        (f"flashlight, {FEW} utterances", few, lambda: flashlight(few, beam, None)),
    ]
    for name, part, make in searches:
        try:
            yield name, part, make()
        except (ImportError, RuntimeError) as error:  # the second is torchaudio's
            print(f"{name} is left out: {error}", file=sys.stderr)


# ---------------------------------------------------------------- the race


def race(task: Task, dev: Task, beam: int, rounds: int, workers: int) -> list[dict[str, Any]]:
    """Run all searches alternately; returns a row of results for each."""
    runs = list(contenders(task, dev, beam, workers))
    took: dict[str, list[float]] = {name: [] for name, _, _ in runs}
    wer: dict[str, float] = {}
    for number in range(rounds):
        for name, part, decode in runs:
            if not number and name.startswith("sbkit"):
                decode()  # starts processes, builds tables, allocates memory
            began = time.perf_counter()
            hypotheses = decode()
            took[name].append(time.perf_counter() - began)
            wer[name] = error_rate(part.references, hypotheses)
    return [{"vocabulary": len(task.pieces), "search": name, "WER": wer[name],
             "audio_seconds_per_second": part.seconds / statistics.median(took[name]),
             "spread": spread(took[name])} for name, part, _ in runs]


def spread(times: Sequence[float]) -> float:
    """Compute half the difference of the slowest and the fastest round, in per cent of the median."""
    return 50 * (max(times) - min(times)) / statistics.median(times)


def shown(speed: float) -> str:
    return f"{speed:.0f}" if speed >= 10 else f"{speed:.1f}"


def error_rate(references: Sequence[str], hypotheses: Sequence[str]) -> float:
    words = [each.split() for each in references]
    edits = count(words, [each.split() for each in hypotheses]).edits.sum()
    return 100 * float(edits) / sum(map(len, words))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocabularies", type=int, nargs="+", default=[32, 1000, 5000])
    parser.add_argument("--utterances", type=int, default=64, help="utterances searched at once, as in sbkit evaluate")
    parser.add_argument("--beam", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=max(1, usable_cores() - 1), help="additional processes")
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    rows = []
    for size in args.vocabularies:
        with tempfile.TemporaryDirectory() as folder:
            both = make_task(size, 2 * args.utterances, Path(folder))
            task, dev = both.part(slice(args.utterances)), both.part(slice(args.utterances, None))
            print(f"{len(task.pieces)} pieces, {task.seconds:.0f} s of audio", file=sys.stderr)
            rows += race(task, dev, args.beam, args.rounds, args.workers)
    stock = {row["vocabulary"]: row["audio_seconds_per_second"] for row in rows
             if row["search"] == "SpeechBrain CTCBeamSearcher"}
    for row in rows:
        row["times_SpeechBrain"] = row["audio_seconds_per_second"] / stock.get(row["vocabulary"], math.nan)
    print(table(["vocabulary", "search", "audio-s/s", "+- %", "x SpeechBrain", "WER %"],
                [[row["vocabulary"], row["search"], shown(row["audio_seconds_per_second"]), round(row["spread"]),
                  f"{row['times_SpeechBrain']:.1f}", row["WER"]] for row in rows]))
    if args.json:
        machine = {"python": platform.python_version(), "torch": torch.__version__, "cores": usable_cores(),
                   "machine": platform.machine(), "beam": args.beam, "rounds": args.rounds}
        args.json.write_text(json.dumps({"rows": rows, "with": machine}, indent=1) + "\n")


if __name__ == "__main__":
    main()
