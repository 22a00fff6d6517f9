"""Small corpora for the tests, made on the spot."""

from __future__ import annotations

import tarfile
from pathlib import Path

from sounds import encoded, speechlike

from sbkit.data.corpus import Corpus
from sbkit.data.manifest import Manifest

NEW_COLUMNS = ("client_id", "path", "sentence_id", "sentence", "sentence_domain", "up_votes", "down_votes",
               "age", "gender", "accents", "variant", "locale", "segment")
OLD_COLUMNS = ("client_id", "path", "sentence", "up_votes", "down_votes", "age", "gender", "accent")
SECONDS = 1.0


def clip(seconds: float = SECONDS, seed: int = 0) -> bytes:
    return encoded(speechlike(seconds, 16000, seed), 16000, "mp3")


def common_voice(folder: Path, language: str = "en", *, columns: tuple[str, ...] = NEW_COLUMNS,
                 durations: str | None = "duration[ms]", end: str = "\n", bom: bool = False,
                 **splits: list[str]) -> Path:
    """A release with a clip for each sentence; returns the language folder."""
    home = folder / language
    (home / "clips").mkdir(parents=True)
    sound, listed = clip(), []
    for split, sentences in splits.items():
        lines = ["\t".join(columns)]
        for i, sentence in enumerate(sentences):
            name = f"common_voice_{language}_{split}{i}.mp3"
            (home / "clips" / name).write_bytes(sound)
            listed.append(name)
            values = {"client_id": f"speaker{i % 3}", "path": name, "sentence": sentence, "age": "twenties",
                      "gender": "female_feminine", "accents": "Scottish", "accent": "scotland",
                      "locale": language}
            lines.append("\t".join(values.get(column, "") for column in columns))
        text = end.join(lines) + end
        (home / f"{split}.tsv").write_bytes(text.encode("utf-8-sig" if bom else "utf-8"))
    if durations:
        lines = [f"clip\t{durations}", *(f"{name}\t{round(SECONDS * 1000)}" for name in listed)]
        (home / "clip_durations.tsv").write_text("\n".join(lines) + "\n")
    return home


def prepared(source: object, folder: Path, **options: object) -> tuple[Corpus, dict[str, Manifest]]:
    """A corpus with these options, and its manifests."""
    corpus = Corpus(source, folder=folder, **options)
    return corpus, corpus.prepare(show_progress=False)


def archive(folder: Path, into: Path) -> Path:
    """A folder's content as a .tar.gz."""
    with tarfile.open(into, "w:gz") as tar:
        tar.add(folder, arcname=folder.name)
    return into


def recording(path: Path, seconds: float = SECONDS, seed: int = 0, rate: int = 16_000) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(encoded(speechlike(seconds, rate, seed), rate))


def voicebank(folder: Path, seconds: float = SECONDS, rate: int = 48_000) -> Path:
    """VoiceBank-DEMAND's folders, with two pairs of each of four speakers: two in train, one in dev and in test."""
    for speaker, where in (("p225", "trainset_28spk"), ("p226", "trainset_28spk"), ("p227", "trainset_28spk"),
                           ("p232", "testset")):
        for i in (1, 2):
            for number, kind in enumerate(("clean", "noisy")):
                recording(folder / f"{kind}_{where}_wav" / f"{speaker}_{i:03}.wav", seconds, 2 * i + number, rate)
    return folder
