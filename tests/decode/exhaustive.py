"""Every path through a few frames, added up: what a search without any pruning has to find."""

from __future__ import annotations

import functools
import itertools

import numpy as np

from sbkit.decode import arpa, kneser_ney

PIECES = ["<unk>", "▁a", "b", "▁ab", "▁"]  # "ab" can be spelled in three ways
SPELLED = ["▁a ▁ab ▁a", "▁a b ▁ab", "▁a ▁a", "▁ab ▁a ▁ b b", "▁a ▁ b ▁ab"]
SENTENCES = ["a ab a", "ab ab", "a a", "ab a bb", "a b ab"]


def batch(*utterances):
    """Padded [B, T, ...] with the last frames full of nonsense, and lengths."""
    lengths = np.array([len(each) for each in utterances])
    whole = np.full((len(utterances), lengths.max(), *utterances[0].shape[1:]), -1.0, np.float32)
    for row, each in zip(whole, utterances, strict=True):
        row[: len(each)] = each
    return whole, lengths


@functools.cache
def _paths(frames, labels):
    """All paths [P, T], what each collapses to as a row of a list, and that list."""
    paths = np.array(list(itertools.product(range(labels), repeat=frames)), int)
    rows = {}
    which = [rows.setdefault(tuple(label for label, _ in itertools.groupby(path) if label), len(rows))
             for path in paths.tolist()]
    return paths, np.array(which), list(rows)


def text_of(tokens, pieces):
    """What pieces spell."""
    return " ".join("".join(pieces[i] for i in tokens).replace("▁", " ").split())


def token_sequences(log_probs):
    """The log-probability of every sequence of tokens that frames [T, V] can say."""
    paths, which, sequences = _paths(*log_probs.shape)
    masses = np.exp(log_probs.astype(np.float64)[np.arange(len(log_probs)), paths].sum(1))
    return dict(zip(sequences, np.log(np.bincount(which, weights=masses)), strict=True))


def texts(sequences, pieces):
    """The log-probability of every text, from that of every sequence of tokens."""
    found = {}
    for tokens, score in sequences.items():
        text = text_of(tokens, pieces)
        found[text] = np.logaddexp(found.get(text, -np.inf), score)
    return found


def transducer_sequences(joint, states, most):
    """The log-probability of every sequence of tokens that a transducer's states [T, J] can say, with so many tokens in
    a frame at most: of all paths, summed step by step."""
    @functools.cache
    def scores(frame, last):
        return joint.join(states[frame][None], joint.predict(np.array([last])))[0].astype(np.float64)

    masses = {(): 0.0}
    for frame in range(len(states)):
        left = {}
        for said in range(most + 1):
            after = {}
            for tokens, mass in masses.items():
                last = ((joint.blank,) * joint.context + tokens)[-joint.context:]
                log_probs = scores(frame, last)
                left[tokens] = np.logaddexp(left.get(tokens, -np.inf), mass + log_probs[joint.blank])
                if said < most:
                    after |= {(*tokens, i): mass + each for i, each in enumerate(log_probs) if i != joint.blank}
            masses = after
        masses = left
    return masses


def with_words(texts, model, boosts):
    """The score of each text with a language model over words, weighted by 0.7, with 0.4 for a word, -3 for one that
    the model lacks, and boosts for words and pairs of words."""
    def score(text, acoustic):
        words = text.split()
        strange = sum(word not in model.ids for word in words)
        said = [*words, *map(" ".join, itertools.pairwise(words))]
        boost = sum(each * said.count(phrase) for phrase, each in boosts.items())
        return acoustic + 0.7 * model.sentence(text) + 0.4 * len(words) - 3 * strange + boost

    return {text: score(text, acoustic) for text, acoustic in texts.items()}


def with_pieces(sequences, model, pieces):
    """The score of each text's best spelling with a language model over pieces, weighted as above."""
    best = {}
    for tokens, acoustic in sequences.items():
        text = text_of(tokens, pieces)
        score = acoustic + 0.7 * model.sentence(" ".join(pieces[i] for i in tokens)) + 0.4 * len(text.split())
        best[text] = max(best.get(text, -np.inf), score)
    return best


def language_model(path, sentences):
    """Write a model of order 3."""
    model = kneser_ney.estimate(kneser_ney.read(sentences), 3).model
    arpa.write(model, path)
    return model, path


def random_log_probs(rng, frames, labels, sharpness=2.0):
    """[T, V] log-probabilities, some frames sure and some not."""
    scores = rng.normal(size=(frames, labels)) * sharpness * rng.choice([0.5, 1.0, 6.0], size=(frames, 1))
    scores -= scores.max(-1, keepdims=True)
    return (scores - np.log(np.exp(scores).sum(-1, keepdims=True))).astype(np.float32)
