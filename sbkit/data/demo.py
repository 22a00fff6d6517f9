"""The embedded demo corpus: synthesised speech in the layout of a Common Voice release.

    OUT/<language>/clips/common_voice_<language>_<number>.mp3
    OUT/<language>/{train,dev,test,validated,invalidated,other}.tsv
    OUT/<language>/clip_durations.tsv

With it, a model can be trained within minutes without any data. Its error rates say nothing about real speech, but its
splits are proper ones: voices and sentences of dev and test don't occur in training.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import itertools
import json
import multiprocessing
import os
import random
import re
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
import soxr
import yaml

from sbkit.data import demo_voice, provenance
from sbkit.errors import SbkitError
from sbkit.system import disk, helper_process
from sbkit.system.console import progress, stored_json
from sbkit.system.cores import usable_cores

COLUMNS = (
    "client_id", "path", "sentence_id", "sentence", "sentence_domain", "up_votes", "down_votes", "age",
    "gender", "accents", "variant", "locale", "segment",
)

# Common Voice has 32 or 48 kHz. Here it is 16 kHz, the default of models: that halves the decoding and saves the
# resampling in each epoch, which matters on two cores, and espeak voices have nothing useful above 8 kHz.
SAMPLE_RATE = 16_000
FORMAT = 1  # increase it when the same seed gives other clips

# Dialects share the sentences of their language. Accents have the names that speakers in Common Voice use.
DIALECTS = {
    "en": {
        "en": "England English", "en-us": "United States English", "en-gb-scotland": "Scottish English",
        "en-gb-x-rp": "England English", "en-029": "West Indies and Bermuda English",
        "en-us-nyc": "United States English", "en-gb-x-gbclan": "England English",
        "en-gb-x-gbcwmd": "England English",
    },
    "es": {"es": "España", "es-419": "América central"},
    "fr": {"fr": "Français de France", "fr-be": "Français de Belgique", "fr-ch": "Français de Suisse"},
    "pt": {"pt": "Português de Portugal", "pt-br": "Português do Brasil"},
}
# Common Voice's language codes for which espeak-ng has other names.
ESPEAK_NAMES = {"zh": "cmn", "zh-cn": "cmn", "zh-tw": "cmn", "zh-hk": "yue", "no": "nb", "nn-no": "nb"}

# Timbres. The two groups are disjoint, so the voices of dev and test are unseen in training.
TRAIN_VARIANTS = ("", "+f1", "+m1", "+f2", "+m2", "+f4", "+m3", "+m5", "+m7", "+m8")
HELD_OUT_VARIANTS = ("+f3", "+m4", "+f5", "+m6")
VOICES = {"train": 20, "dev": 4, "test": 4}
AGES = ("teens", "twenties", "thirties", "fourties", "fifties", "sixties")  # Common Voice's spelling

SHARES = {"train": 0.82, "dev": 0.08, "test": 0.10}  # of the clips, and of all possible sentences
MIN_CLIPS = 8  # of a split, however short the corpus
EXTRAS = {"invalidated": 0.01, "other": 0.01}  # of the clips, in addition: lists of a release besides the splits
SHORTEST_SECONDS = 1.5
RETRIES = 1000  # draws for a new sentence; needed only for number lists of languages with few number words


# ---------------------------------------------------------------- sentences

#: A table of slots: ``expand`` picks one alternative of a slot and fills the slots named in it. Each grammar yields
#: more than 100,000 sentences over 90 to 150 words: too many to memorise, so a model has to recognise words.
Grammar = Mapping[str, Sequence[str]]


#: By espeak-ng's name of the language.
GRAMMARS: dict[str, Grammar] = {
    name: {slot: tuple(map(str.strip, text.split("|"))) for slot, text in slots.items()}
    for name, slots in yaml.safe_load(Path(__file__).with_name("demo_sentences.yaml").read_text("utf-8")).items()}


def expand(grammar: Grammar, rng: random.Random, slot: str = "sentence") -> str:
    """A random sentence of the grammar, with a capital letter, and ``an`` before vowels in English."""
    text = _fill(grammar, rng, slot)
    if grammar is GRAMMARS["en"]:
        text = re.sub(r"\ba (?=[aeiou])", "an ", text)
    first = next((i for i, char in enumerate(text) if char.isalnum()), 0)
    return text[:first] + text[first].upper() + text[first + 1:]


def _fill(grammar: Grammar, rng: random.Random, slot: str) -> str:
    return re.sub(r"\{(\w+)\}", lambda match: _fill(grammar, rng, match.group(1)), rng.choice(grammar[slot]))


# ---------------------------------------------------------------- the corpus


@dataclass(frozen=True)
class Speaker:
    id: str
    voice: str
    words_per_minute: int
    pitch: int
    age: str
    gender: str
    accent: str
    steady: bool = False
    """Whether all clips have the same level, rate and pitch, as in a studio."""


@dataclass(frozen=True)
class DemoClip:
    """A clip to synthesise; its random variations of the speaker's properties are drawn from ``seed``."""

    number: int
    split: str
    speaker: Speaker
    spoken: str
    written: str
    seed: int


def make_demo_corpus(out: str | os.PathLike[str], hours: float = 1.0, language: str = "en", seed: int = 1234,
                     workers: int | None = None, show_progress: bool = True, voices: Sequence[str] = ()) -> Path:
    """Synthesise the corpus and return its folder, ``out/<language>``, to be used as ``data_folder``.

    The same arguments give the same bytes, with any number of workers. A folder that was made with these arguments is
    reused; any other folder is left alone.

    out : folder in which the language's folder is made; it appears there completely or not at all.
    hours : approximate amount of speech in all splits together.
    language : an espeak-ng language or Common Voice's code for it. For ten languages there are sentences (see
        ``demo_sentences.yaml``); in all others the texts are lists of numbers, written in digits.
    voices : voices of espeak-ng, such as ``en-us+f2``, for all splits, with the same level, rate and pitch in all
        clips: a corpus to train a TTS voice on. By default there are many, and different ones in each split
    """
    if not 0 < hours <= 1000:
        raise SbkitError("bad-value", f"hours must lie between 0 and 1000, not {hours}", key="hours", value=hours)
    if workers is not None and workers < 1:
        raise SbkitError("bad-value", f"workers must be at least 1, not {workers}", key="workers", value=workers)
    spoken = espeak_name(language)
    folder = Path(out) / language
    made_with = {"format": FORMAT, "hours": float(hours), "language": language, "seed": seed,
                 **({"voices": list(voices)} if voices else {})}
    if _finished(folder, made_with):
        return folder

    with _temporary_folder(folder) as temporary, _pool(workers, language) as run:
        base = next((name for name, dialects in DIALECTS.items() if spoken in dialects), spoken)
        grammar = GRAMMARS.get(base)
        if not grammar:  # lists of numbers, of those below 100 that have distinct pronunciations
            (sounds,) = run(demo_voice.pronounce, [([str(number) for number in range(100)], spoken)])
            sayable = [number for number, sound in enumerate(sounds) if sound and sounds.count(sound) == 1]
            if len(sayable) < 20:
                raise SbkitError("unknown-language", f"espeak-ng has no number words for '{spoken}', so there is "
                                 "nothing to synthesise",
                                 hint=f"languages with sentences: {' '.join(sorted(GRAMMARS))}", value=language)
            # espeak-ng reads digits as number words of the language, and the transcript keeps the digits, so no
            # knowledge of its script is needed.
            grammar = {"sentence": tuple(", ".join(["{n}"] * count) + "." for count in (3, 4, 5)),
                       "n": tuple(map(str, sayable))}
        if voices:  # the same speakers in each split, with espeak-ng's names
            steady = [Speaker(voice, voice, words_per_minute=165, pitch=50, age="", gender="", accent="", steady=True)
                      for voice in voices]
            speakers = dict.fromkeys(VOICES, steady)
        else:
            speakers = draw_voices(spoken, seed)
        # A few clips are synthesised to estimate how many these hours are.
        texts = [(i, speaker, expand(grammar, random.Random(f"{seed} sample {i} {speaker.id}")))
                 for i in range(3) for speaker in speakers["train"]]
        sample = [DemoClip(0, "train", speaker, text, text, i) for i, speaker, text in texts]
        seconds = sum(len(samples) for samples in run(speak_clip, ((clip,) for clip in sample))) / SAMPLE_RATE
        count = max(3 * MIN_CLIPS, round(hours * 3600 / (seconds / len(sample))))
        clips = plan_clips(count, grammar, speakers, seed)
        (temporary / provenance.CLIPS).mkdir()
        jobs = ((clip, temporary / provenance.CLIPS / _file_name(clip, language)) for clip in clips)
        milliseconds = list(progress(
            run(_record, jobs), what=f"synthesising {hours:g} h of {language}", total=len(clips), unit="clip",
            show=show_progress,
        ))
        write_tables(temporary, clips, milliseconds, language)
        record = {**made_with, provenance.SYNTHESISER: "espeak-ng"}
        (temporary / provenance.RECORD).write_text(json.dumps(record, indent=1) + "\n")
        disk.sync_file_system(temporary)
        try:
            os.rename(temporary, folder)
        except OSError:
            if not _finished(folder, made_with):  # another process has created the same meanwhile
                raise
        disk.sync_folder(folder.parent)
    return folder


def espeak_name(language: str) -> str:
    """Return espeak-ng's name of a language; an error if it doesn't support it."""
    names = demo_voice.languages()
    code = language.lower().replace("_", "-")
    for name in (code, ESPEAK_NAMES.get(code), code.split("-")[0]):
        if name in names:
            return name
    raise SbkitError("unknown-language", f"espeak-ng, which synthesises the demo corpus, has no language '{language}'",
                     hint=f"the corpus has sentences in {' '.join(sorted(GRAMMARS))} and numbers in every other "
                          "language of espeak-ng, such as fi nl pl pt tr uk vi", value=language)


def _finished(folder: Path, made_with: dict[str, Any]) -> bool:
    """Whether the folder exists and was made with these arguments; an error if it contains something else."""
    if not folder.exists():
        return False
    record = stored_json(folder / provenance.RECORD)
    if any(record.get(key) != value for key, value in {"voices": None, **made_with}.items()):
        raise SbkitError("output-exists", f"{folder} already exists and is not this demo corpus "
                         f"({', '.join(f'{key} {value}' for key, value in made_with.items())})",
                         hint="choose another folder or remove it first", file=folder)
    return True


@contextlib.contextmanager
def _temporary_folder(folder: Path) -> Iterator[Path]:
    """A temporary folder beside ``folder``, which is deleted at the end unless it was renamed."""
    temporary = None
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}."))
        temporary.chmod(0o755)
        with disk.disk_errors_as_user_error(folder):
            yield temporary
    except OSError as error:
        raise SbkitError("not-writable", f"cannot write the demo corpus to {folder}: {error.strerror or error}",
                         file=folder) from error
    finally:
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)


Run = Callable[[Callable[..., Any], Iterable[tuple[Any, ...]]], Iterator[Any]]


@contextlib.contextmanager
def _pool(workers: int | None, language: str) -> Iterator[Run]:
    """Start worker processes, as a process can load espeak-ng only once; yields ``run(function, argument tuples)``.

    Results come in order. The processes are spawned, not forked, because the caller may have threads or use CUDA.
    """
    with helper_process.without_working_directory():
        pool = ProcessPoolExecutor(workers or usable_cores(), mp_context=multiprocessing.get_context("spawn"),
                                   initializer=signal.signal, initargs=(signal.SIGINT, signal.SIG_IGN))

    def run(function: Callable[..., Any], jobs: Iterable[tuple[Any, ...]]) -> Iterator[Any]:
        with helper_process.without_working_directory():
            return pool.map(function, *zip(*jobs, strict=True), chunksize=8)

    try:
        yield run
    except BrokenProcessPool as error:
        raise SbkitError("worker-died", f"a process that synthesised '{language}' with espeak-ng died",
                         hint="espeak-ng may be broken for this language, or memory ran out") from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def draw_voices(espeak_name: str, seed: int) -> dict[str, list[Speaker]]:
    """The speakers of each split, with random rates and pitches."""
    accents = DIALECTS.get(espeak_name, {espeak_name: ""})
    dialects = itertools.cycle(accents)
    speakers: dict[str, list[Speaker]] = {split: [] for split in VOICES}
    for split, count in VOICES.items():
        variants = TRAIN_VARIANTS if split == "train" else HELD_OUT_VARIANTS
        for i in range(count):
            rng = random.Random(f"{seed} {split} voice {i}")
            dialect = next(dialects)
            variant = variants[i % len(variants)]
            # Of two speakers with the same timbre, one has a low and one a high voice.
            low, high = (50, 68) if i // len(variants) % 2 else (32, 50)
            speakers[split].append(Speaker(
                id=hashlib.sha512(f"sbkit {seed} {espeak_name} {split} {i}".encode()).hexdigest(),
                voice=dialect + variant, words_per_minute=rng.randint(145, 190), pitch=rng.randint(low, high),
                age=rng.choice(AGES), gender="female_feminine" if "f" in variant else "male_masculine",
                accent=accents[dialect],
            ))
    return speakers


def plan_clips(count: int, grammar: Grammar, voices: dict[str, list[Speaker]], seed: int) -> list[DemoClip]:
    """Plan the speaker and sentence of all clips. A sentence's hash decides its split, so none occurs in two splits."""
    sizes = {split: max(MIN_CLIPS, round(count * SHARES[split])) for split in ("dev", "test")}
    sizes = {"train": count - sum(sizes.values()), **sizes}
    sizes.update({name: max(2, round(count * share)) for name, share in EXTRAS.items()})
    rng = random.Random(f"{seed} sentences")
    used: set[str] = set()
    clips: list[DemoClip] = []
    for split, size in sizes.items():
        belongs = split if split in SHARES else "train"
        for i in range(size):
            text = _new_sentence(grammar, rng, belongs, used)
            wrong = _new_sentence(grammar, rng, belongs, used) if split == "invalidated" else text
            speaker = voices[belongs][i % len(voices[belongs])]
            clips.append(DemoClip(40_000_000 + len(clips), split, speaker, text, wrong, rng.getrandbits(31)))
    return clips


def _new_sentence(grammar: Grammar, rng: random.Random, split: str, used: set[str]) -> str:
    for _ in range(RETRIES):
        text = expand(grammar, rng)
        place = int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") / 2**32
        belongs = "train"
        for name, share in SHARES.items():
            if place < share:
                belongs = name
                break
            place -= share
        if belongs == split:
            if text not in used:
                used.add(text)
                return text
            seen = text
    return seen  # the grammar has no new sentence; a repetition within the split does no harm


def speak_clip(clip: DemoClip) -> np.ndarray:
    """The clip as float32 [S] at SAMPLE_RATE: speech at a random level, with a moment of silence on both sides."""
    speaker = clip.speaker
    rng = np.random.default_rng(clip.seed)
    varies = 0 if speaker.steady else 1
    speech, rate = demo_voice.speak(
        clip.spoken, speaker.voice, seed=clip.seed,
        words_per_minute=speaker.words_per_minute + varies * int(rng.integers(-8, 9)),
        pitch=speaker.pitch + varies * int(rng.integers(-5, 6)), pitch_range=50 + varies * int(rng.integers(-10, 11)),
    )
    loud = np.flatnonzero(np.abs(speech) > 0.005)
    speech = soxr.resample(speech[loud[0]:loud[-1] + 1], rate, SAMPLE_RATE)
    before, after = (int(SAMPLE_RATE * seconds) for seconds in rng.uniform(0.1, 0.35, size=2))
    level = rng.uniform(-9, -1)
    peak = 10 ** ((-5 if speaker.steady else level) / 20)
    after = max(after, int(SAMPLE_RATE * SHORTEST_SECONDS) - before - len(speech))
    samples = np.pad(speech * (peak / np.abs(speech).max()), (before, after))
    # Real recordings have no digital silence, so noise 60 dB below the loudest clip is added.
    return (samples + 10 ** (-60 / 20) * rng.standard_normal(len(samples))).astype(np.float32)


def _record(clip: DemoClip, path: Path) -> int:
    """Write the clip as MP3 and return its duration in milliseconds."""
    samples = speak_clip(clip)
    encoded = io.BytesIO()
    soundfile.write(encoded, samples, SAMPLE_RATE, format="MP3")
    path.write_bytes(encoded.getvalue())  # with Python, because libsndfile reports a full disk as "System error"
    return round(len(samples) * 1000 / SAMPLE_RATE)


def _file_name(clip: DemoClip, language: str) -> str:
    return f"common_voice_{language}_{clip.number}.mp3"


def write_tables(folder: Path, clips: Sequence[DemoClip], milliseconds: Sequence[int], language: str) -> None:
    votes = {"invalidated": (0, 2), "other": (1, 0)}
    rows: dict[str, list[str]] = {name: [] for name in (*SHARES, "validated", *EXTRAS)}
    for clip in clips:
        up, down, speaker = *votes.get(clip.split, (2, 0)), clip.speaker
        row = "\t".join(map(str, (
            speaker.id, _file_name(clip, language), hashlib.sha256(clip.written.encode()).hexdigest(),
            clip.written, "", up, down, speaker.age, speaker.gender, speaker.accent, "", language, "",
        )))
        rows[clip.split].append(row)
        if clip.split in SHARES:
            rows["validated"].append(row)
    tables = {name: ["\t".join(COLUMNS), *lines] for name, lines in rows.items()}
    tables["clip_durations"] = ["clip\tduration[ms]", *(
        f"{_file_name(clip, language)}\t{ms}" for clip, ms in zip(clips, milliseconds, strict=True))]
    for name, lines in tables.items():
        (folder / f"{name}.tsv").write_text("\n".join(lines) + "\n", encoding="utf-8", newline="\n")
