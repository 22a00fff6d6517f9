"""Spoils valid files in one of many ways each, opens and uses them, and prints what went wrong as JSON.

Run by test_hostile_files.py, in a process of its own, whose memory it limits:

    python tests/hostile_files.py KIND COUNT SEED FOLDER
"""

from __future__ import annotations

import copy
import gzip
import hashlib
import json
import os
import random
import re
import resource
import shutil
import signal
import sys
import tarfile
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path

import bundles
import numpy as np
import sounds
import toy_codec
import voices

import sbkit.infer
from sbkit.codes import Books, Codes, writing
from sbkit.data import audio, measure, mp3, suspects
from sbkit.data.manifest import Manifest
from sbkit.data.sources import open_source
from sbkit.decode import arpa, kneser_ney
from sbkit.decode.hotwords import phrase_boosts
from sbkit.errors import SbkitError
from sbkit.export.layout import Config
from sbkit.export.vocabulary import Vocabulary
from sbkit.infer.decoding import decoder

SECONDS, ASLEEP, BYTES, LONGER = 5.0, 60.0, 1 << 30, 200 << 20
VALUES = [0, -1, 1, 2, 7, 255, 2**31 - 1, 2**31, 2**63, 10**400, 0.5, 1e-300, 1e308, float("nan"), float("inf"),
          -float("inf"), "", " ", ".", "..", "../x", "/dev/zero", "a\0b", "\n", "a" * 5000, "\ud800", "é", "\u212b",
          "model.onnx", "NaN", [], [[]], {}, [None], [0], [2**40] * 3, ["a", "a"], {"a": {}}, {"": 1}, None, True,
          False, "٣", ["x" * 50] * 500, list(range(20_000)), {str(i): i for i in range(2000)}]
BYTES_LIKE = [b"\0", b"\xff", b"\xff" * 8, bytes(8), b"\x7f" + b"\xff" * 7, b"\0\0\xc0\x7f", b"\0\0\x80\x7f", b"\n",
              b",", b'"', b"\t", b" ", b"\r", b"\\", b"[", b"{", b"9" * 30, b"nan", b"inf", b"-", b"\xed\xa0\x80",
              b"\xef\xbb\xbf", b"[" * 20_000, b'{"a":' * 20_000, b"9" * 5000, b" " * 50_000, b"," * 50_000,
              b"\n" * 5000]


# ---------------------------------------------------------------- mutations


def of_json(rng: random.Random, text: bytes) -> bytes:
    """Change values, keys and lengths somewhere in a JSON text."""
    tree = [json.loads(text)]
    for _ in range(rng.choice((1, 1, 1, 2, 5))):
        places = list(_places(tree))
        parent, key = rng.choice(places)
        value = parent[key]
        kind = rng.randrange(6)
        if kind == 0 and isinstance(parent, dict):
            del parent[key]
        elif kind == 1 and isinstance(parent, dict):
            parent[rng.choice((*parent, "new", "", "..", "a\0"))] = parent.pop(key)
        elif kind == 2 and isinstance(value, (int, float)) and not isinstance(value, bool):
            parent[key] = value * rng.choice((-1, 2, 10, 1000, 10**6, 10**9)) + rng.choice((0, 1, -1))
        elif kind == 3 and isinstance(value, (list, str)) and value:
            times = max(2, 10**6 // len(json.dumps(value)))  # what has the memory of this process is not the reader
            parent[key] = rng.choice((value * 2, value[1:], value[::-1], value * times, value[:1]))
        elif kind == 4:
            other, its = rng.choice(places)
            parent[key] = json.loads(json.dumps(other[its])) if its in other or isinstance(its, int) else None
        else:
            parent[key] = copy.deepcopy(rng.choice(VALUES))
    return json.dumps(tree[0] if tree else None).encode()


def _places(tree):
    items = tree.items() if isinstance(tree, dict) else enumerate(tree)
    for key, value in list(items):
        yield tree, key
        if isinstance(value, (dict, list)):
            yield from _places(value)


def of_bytes(rng: random.Random, data: bytes) -> bytes:
    """Change, cut, double or insert bytes."""
    data = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 4, 20))):
        at, end = sorted((rng.randrange(len(data) + 1), rng.randrange(len(data) + 1)))
        kind = rng.randrange(12)
        if kind == 0:
            del data[at:]
        elif kind == 1:
            del data[at:min(end, at + rng.choice((1, 8, 100)))]
        elif kind == 2:
            data[at:at] = data[at:min(end, at + 2000)]
        elif kind in (3, 4, 9) and at < len(data):
            data[at] = rng.randrange(256)
        elif kind in (5, 10, 11) and at < len(data):
            data[at] ^= 1 << rng.randrange(8)
        elif kind == 6:
            word = rng.choice(BYTES_LIKE)
            data[at:at + len(word)] = word
        elif kind == 7:
            data[at:at] = rng.choice(BYTES_LIKE)
        elif kind == 8:  # in the header, where sizes are
            for _ in range(rng.randint(1, 8)):
                if data:
                    data[rng.randrange(min(130, len(data)))] = rng.choice((0, 1, 2, 127, 128, 255, rng.randrange(256)))
    return bytes(data)


def spoil(rng: random.Random, path: Path) -> None:
    """Spoil a file of a kind that its name says."""
    kind = rng.randrange(40)
    data = path.read_bytes()
    if kind < 5:
        path.unlink()
        if kind == 0:
            os.mkfifo(path)
        elif kind == 1:
            path.symlink_to("/dev/zero")
        elif kind == 2:
            path.mkdir()
        elif kind == 3:
            path.write_bytes(b"")
    elif kind == 39:
        os.truncate(path, len(data) + (LONGER if ".tar" not in path.name else 0))  # takes no room on the disk
    elif path.suffix == ".json" and kind < 34:
        path.write_bytes(of_json(rng, data))
    elif path.suffix == ".gz":
        packed = gzip.compress(of_bytes(rng, gzip.decompress(data)), 1)
        path.write_bytes(of_bytes(rng, packed) if kind > 35 else packed)
    else:
        path.write_bytes(of_bytes(rng, data))


# ---------------------------------------------------------------- kinds: what is made, and how it is used


def recogniser(folder: Path, make: Callable[..., Path] = bundles.make) -> Callable[[], None]:
    make(folder, streams=True)

    def use() -> None:
        with sbkit.infer.load(folder, device="cpu", threads=1) as model:
            model.transcribe([bundles.say("ab c"), bundles.say("d")])
            stream = model.stream()
            for heard in (*stream.feed(bundles.say("ab")), *stream.finish()):
                stream.text(heard.settled)

    return use


def voice(folder: Path) -> Callable[[], None]:
    voices.make(folder)

    def use() -> None:
        with sbkit.infer.load(folder, device="cpu", threads=1) as model:
            model.speak("ab c")

    return use


def codec(folder: Path) -> Callable[[], None]:
    toy_codec.make(folder)

    def use() -> None:
        with sbkit.infer.load(folder, device="cpu", threads=1) as model:
            model.decode(model.encode([toy_codec.sound(toy_codec.drawn(30))]))

    return use


TEXTS = ["ab c d", "c ab", "d d ab", "e ab c", "ab c d e f", "f e d"] * 3


def language_model(folder: Path, name: str) -> Callable[[], None]:
    folder.mkdir()
    corpus = kneser_ney.read(TEXTS, 1)
    model, _, _ = kneser_ney.estimate(corpus, 3, ())
    path = folder / name
    arpa.write(model, path)
    bundle = bundles.make(folder.with_name(f"bundle of {folder.name}"))
    vocabulary = Vocabulary.read(bundle, Config.read(bundle))
    rng = np.random.default_rng(0)
    scores = -rng.exponential(3, (30, len(bundles.PIECES))).astype(np.float32)

    def use() -> None:
        found = arpa.read(path)
        found.quality(TEXTS[:6])
        search = decoder(vocabulary, {"lm": str(path), "beam": 4, "hot_words": phrase_boosts(["ab"])})
        search.tokens([[search.keep(scores)]])

    return use


ROWS = [{"ID": f"u{i}", "duration": 1.5, "wav": f"$data_root/a{i}.wav", "spk_id": "s", "wrd": f'he said "{i}", twice'}
        for i in range(20)]


def manifest(folder: Path) -> Callable[[], None]:
    folder.mkdir()
    Manifest(ids=[row["ID"] for row in ROWS], durations=[1.5] * 20, wavs=[row["wav"] for row in ROWS],
             texts=[row["wrd"] for row in ROWS], meta={"accent": ["x"] * 20}).write(folder / "train.csv")

    def use() -> None:
        try:
            list(Manifest.read(folder / "train.csv"))
        finally:
            _rows(folder, "train")

    return use


def spaced(folder: Path) -> Callable[[], None]:
    folder.mkdir()
    lines = (", ".join(map(str, row.values())).replace('"', "") for row in ROWS)
    (folder / "train.csv").write_text("\n".join(["ID, duration, wav, spk_id, wrd", *lines]) + "\n")
    return lambda: _rows(folder, "train")


def json_lines(folder: Path) -> Callable[[], None]:
    folder.mkdir()
    rows = [{"audio_filepath": row["wav"], "duration": 1.5, "offset": 0.5, "text": row["wrd"]} for row in ROWS]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "dev.json").write_text(json.dumps({row["ID"]: row for row in ROWS}, indent=1))

    def use() -> None:
        try:
            _rows(folder, "train")
        finally:
            _rows(folder, "dev")

    return use


def _rows(folder: Path, split: str) -> None:
    file = next((folder / name for name in (f"{split}.csv", f"{split}.jsonl") if (folder / name).exists()),
                folder / f"{split}.json")
    open_source({split: file}, cache=folder.with_name("cache"), show_progress=False).read(split, False)


def codes(folder: Path) -> Callable[[], None]:
    books = Books((1000, 64), 50.0, 16000, "ab" * 32)
    with writing(folder, books, shard_frames=40) as out:
        for i in range(6):
            out.add(f"u{i}", np.full((3 + 5 * i, 2), i), "text", "anna")

    def use() -> None:
        found = Codes(folder, books)
        found.check()
        list(found)

    return use


def tables(folder: Path) -> Callable[[], None]:
    """Tables of other kinds, and the list of ``clean``, into which people write."""
    import corpora

    corpora.common_voice(folder / "cv", train=["he said", "no, \"twice\""] * 8)
    shutil.rmtree(folder / "cv" / "en" / "clips")  # which are read elsewhere
    (folder / "cv" / "en" / "clips").mkdir()
    (folder / "lj" / "wavs").mkdir(parents=True)
    (folder / "lj" / "metadata.csv").write_text("".join(f"a{i}|He said {i}.|he said {i}\n" for i in range(90)))
    suspects.write(folder / "suspects.csv", [
        suspects.Suspect(row["ID"], "drop", "why", 1.5, 0.5, row["wrd"], "=1", "", row["wav"], "c") for row in ROWS])

    def use() -> None:
        every(partial(source, folder / "cv"), partial(source, folder / "lj"), listed)

    def listed() -> None:
        found = suspects.Exclusions.read(folder / "suspects.csv")
        found.mask([row["ID"] for row in ROWS], [row["wrd"] for row in ROWS], "c")

    def source(path: Path) -> None:
        found = open_source(path, cache=folder.with_name("cache"), show_progress=False)
        every(*(partial(found.read, name, False) for name in found.names()))

    return use


def every(*uses: Callable[[], object]) -> None:
    """Call all; raise the last error that tells a user what is wrong, or at once any other."""
    last = None
    for use in uses:
        try:
            use()
        except SbkitError as error:
            last = error
    if last is not None:
        raise last


def recordings(folder: Path) -> Callable[[], None]:
    """As a corpus's are measured and read."""
    folder.mkdir()
    for kind in sounds.FORMATS:
        (folder / f"a.{kind}").write_bytes(sounds.encoded(sounds.speechlike(0.5), 16_000, kind))
    data = (folder / "a.mp3").read_bytes()
    first = mp3.inspect(lambda count, offset: data[offset:offset + count]).first
    untagged = data[first + mp3.frame_at(data, first).size:]  # its length is counted
    (folder / "untagged.mp3").write_bytes(b"ID3\4\0\0\0\0\1\0" + bytes(128) + untagged)

    def use() -> None:
        def read(path: Path) -> None:
            measure.measure_one(str(path))
            audio.read_audio(str(path))

        every(*(partial(read, path) for path in sorted(folder.iterdir())))

    return use


def archive(folder: Path) -> Callable[[], None]:
    """A release of Common Voice, packed and not."""
    import corpora

    home = corpora.common_voice(folder / "cv", train=["he said"] * 4)
    for name in ("a.tar.gz", "b.tar"):
        with tarfile.open(folder / name, "w:gz" if name.endswith("gz") else "w") as tar:
            tar.add(home, "cv-1/en")
    shutil.rmtree(folder / "cv")

    def use() -> None:
        cache = folder.with_name("cache")
        shutil.rmtree(cache, ignore_errors=True)

        def read(name: str) -> None:
            found = open_source(folder / name, cache=cache, show_progress=False)
            every(*(partial(found.read, split, False) for split in found.names()))

        every(partial(read, "a.tar.gz"), partial(read, "b.tar"))

    return use


def initial(folder: Path) -> Callable[[], None]:
    """Files and a checkpoint that ``init_from`` names."""
    import torch
    from kill_points import Run
    from safetensors.torch import save_file

    from sbkit.runs.initial.published import find
    from sbkit.score.metric import Metric
    from sbkit.score.weights import ChosenWeights

    Run(folder).save(1, "first")
    state = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8)).state_dict()
    save_file(state, folder / "a.safetensors", {"parts": json.dumps({"0": "encoder"})})
    torch.save(state, folder / "a.ckpt")
    torch.save(state, folder / "b.pt", _use_new_zipfile_serialization=False)

    def use() -> None:
        (saved,) = folder.glob("CKPT+*")
        every(*(lambda name=name: find(folder / name, ChosenWeights(), Metric("WER", False)).tensors()
                for name in ("a.safetensors", "a.ckpt", "b.pt", saved.name, f"{saved.name}/model.ckpt")))

    return use


def imported(folder: Path) -> Callable[[], None]:
    """A model of transformers that ``import`` and ``init_from`` take: its tokens, its layers, its tensors."""
    import published

    from sbkit.nn.pretrained.encoder import Encoder
    from sbkit.runs.initial.published import PublishedSource

    published.make(folder)

    def use() -> None:
        model = PublishedSource.of(str(folder))
        model.piece_model()
        model.tensors()
        encoder = Encoder(str(folder))
        encoder.load()
        encoder.frames(16_000)

    return use


KINDS = {each.__name__: each for each in (recogniser, voice, codec, manifest, spaced, json_lines, codes, tables,
                                          recordings, archive, initial, imported)} | {
    "transducer": partial(recogniser, make=bundles.make_transducer),
    "arpa_text": partial(language_model, name="lm.arpa"), "arpa_packed": partial(language_model, name="lm.arpa.gz")}


# ---------------------------------------------------------------- a run


class TooLong(BaseException):
    """Raised by the alarm."""


def ring(*_: object) -> None:
    raise TooLong


def main(kind: str, *more: str) -> None:
    """Spoil it ``COUNT SEED FOLDER``."""
    count, seed, folder = int(more[0]), int(more[1]), Path(more[2])
    whole, work, before = folder / "whole", folder / "work", peak()
    make = KINDS[kind]
    make(whole)
    use = make(work)
    use()
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + BYTES, size + BYTES))
    signal.signal(signal.SIGPROF, ring)  # after seconds of work, which other programs' work doesn't use up
    signal.signal(signal.SIGALRM, ring)
    found, refused, slowest = [], 0, 0.0
    for number in range(count):
        rng = random.Random(seed + number)
        shutil.rmtree(work)
        shutil.copytree(whole, work)
        targets = sorted(path for path in work.rglob("*") if path.is_file())
        target = rng.choice([*targets, *[each for each in targets if each.name == "config.json"] * len(targets)])
        spoil(rng, target)
        if (work / "manifest.json").exists() and target.suffix == ".safetensors" and target.is_file() \
                and rng.random() < 0.8:
            values = json.loads((work / "manifest.json").read_text())
            for shard in values["shards"]:
                data = (work / shard["file"]).read_bytes()
                shard |= {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
            (work / "manifest.json").write_text(json.dumps(values))
        if target.name != "config.json" and (work / "config.json").exists() and rng.random() < 0.8:
            values = json.loads((work / "config.json").read_text())  # whoever spoils it says nothing of its size
            (work / "config.json").write_text(json.dumps(values | {"files": {}}))
        for sums in work.glob("CKPT+*/*.sums.json"):  # as do those who make up a checkpoint
            if target != sums and target.parent == sums.parent and rng.random() < 0.8:
                sums.unlink(missing_ok=True)
        fault = {"seed": seed + number, "file": target.name}
        print(fault, file=sys.stderr, flush=True)  # which ended the process, if one does
        began = time.process_time()
        signal.setitimer(signal.ITIMER_PROF, SECONDS)
        signal.setitimer(signal.ITIMER_REAL, ASLEEP)
        try:
            use()
        except SbkitError as error:
            refused += 1
            if "\n" in str(error) or len(str(error)) > 2000:
                found.append(fault | {"what": f"told in no line: {str(error)[:300]!r}"})
        except (Exception, TooLong) as error:
            where = "".join(traceback.format_tb(error.__traceback__)[-4:])
            found.append(fault | {"what": f"{type(error).__name__}: {str(error)[:300]}", "where": where})
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
            signal.setitimer(signal.ITIMER_REAL, 0)
        slowest = max(slowest, time.process_time() - began)
    print(json.dumps({"kind": kind, "count": count, "refused": refused, "slowest": round(slowest, 2),
                      "megabytes": peak() - before, "found": found}))


def peak() -> int:
    """The most memory that this program has had, in MB; ``getrusage`` counts its parent's, too."""
    status = Path("/proc/self/status")
    if not status.exists():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 20  # bytes, on macOS
    return int(re.findall(r"VmHWM:\s+(\d+) kB", status.read_text())[0]) // 1024


if __name__ == "__main__":
    main(*sys.argv[1:])
