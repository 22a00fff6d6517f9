"""What a finished run records so that others can reproduce it, and how another run is compared with it.

``reproduce.json`` holds the recipe, hashes of each row's text and audio and of the weights at the start, the machine
and its versions, the loss of steps 1, 10 and each hundredth, and the final figures. Two runs are equal to the bit only
on one kind of device, with the same versions, threads and number of processes; elsewhere they agree within rounding.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import os
import re
import time
import zlib
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from sbkit.data.audio import AudioError, read_bytes
from sbkit.data.copies import block_hash
from sbkit.data.manifest import SECONDS, Manifest
from sbkit.data.remote import NO_REMOTE
from sbkit.errors import SbkitError, first_line, shown
from sbkit.recipe.arguments import CommandLine
from sbkit.recipe.report import did_you_mean
from sbkit.runs.keys import TaskKeys
from sbkit.score.results import Results
from sbkit.score.run_files import METRICS, RECIPE, REPRODUCE, TESTED
from sbkit.system import processes, untrusted
from sbkit.system.console import atomic_write, progress, stored_json
from sbkit.system.cores import usable_cores
from sbkit.system.environment import training_command
from sbkit.train.checkpoint.adapted import hash_of
from sbkit.train.distributed.sharding import is_sharded

FORMAT = 1
#: Bytes of a row's hash: among a million rows, two collide with a probability of 0.2 %.
_HASH = 6
_MAX_BYTES = 4 << 30
_MAX_PROCESSES = 4096  # processes, and threads of each
_NAMED = 5
_QUICK = 10_000  # recordings, read in seconds
WHOLE = 200_000  # recordings, read in minutes
#: Run options that don't change the training.
SHOW = {"param_file", "test_only", "noprogressbar", "tqdm_colored_bar", "log_config", "device", "local_rank"}
#: Packages whose versions must be the same for equal bits.
_BITS = "torch", "speechbrain", "numpy"
#: What else must be the same, of a line for each start in a run's metrics.
_MACHINE = "devices", "threads", "precision", "max_batch_seconds"
#: Allowed relative difference of losses and figures if bits can't be equal: rounding grows with the steps.
ROUNDING = 0.05


def record(keys: TaskKeys, request: CommandLine, results: Results, log: Sequence[Mapping[str, Any]]) -> None:
    """Write ``reproduce.json`` of a run that has just been tested; ``log``: the lines of its metrics.jsonl."""
    folder = keys.folder
    losses = {str(line["step"]): line["loss"] for line in log if line["kind"] == "loss" and line["loss"] is not None}
    trained = max((i for i, line in enumerate(log) if line["kind"] == "epoch"), default=len(log) - 1)
    what = {"losses": losses, "steps": log[trained].get("step", 0)}
    starts = [line for line in log[:trained + 1] if line["kind"] == "run"]  # later ones tested only
    if not starts or what.items() <= stored_json(folder / REPRODUCE).items():
        return  # the log is gone, or the same training is recorded already, and only the test was repeated
    lines, run = recipe_lines(folder), starts[-1]
    options = request.run_opts
    found = {
        "format": FORMAT, "recipe": lines, "recipe_lines": " ".join(
            f"{zlib.crc32(line.encode()):08x}" for line in lines),
        "options": {name: getattr(options, name) for name in sorted(set(options.overridden_args) - SHOW)},
        "device": torch.device(run["device"]).type, "processes": run["devices"],
        "threads": run.get("threads") or torch.get_num_threads(),  # older lines have none
        "precision": run["precision"], "environment": run["environment"],
        "corpus": {split: hashes(manifest, split) for split, manifest in keys.corpus.load().items()},
        **what, "figures": results.stats, "commands": len({line["command"] for line in starts}),
        "machines": len({(torch.device(line["device"]).type, *map(str, map(line.get, _MACHINE)), *(
            str(line["environment"].get(name)) for name in (*_BITS, "gpu", "cpu"))) for line in starts}),
        "weights": next((line["weights"] for line in starts if line.get("weights")), None),
    }
    with atomic_write(folder / REPRODUCE) as out:
        json.dump(found, out, indent=1, default=str)


def recipe_lines(folder: Path) -> list[str]:
    """The lines of a run's resolved recipe, without its head."""
    return [line for line in (folder / RECIPE).read_text(encoding="utf-8").splitlines() if not line.startswith("#")]


def weights_hash(modules: torch.nn.Module) -> str | None:
    """The hash of a model's tensors; None if they are sharded, or their bytes can't be read."""
    tensors = {name: value for name, value in modules.state_dict().items() if isinstance(value, torch.Tensor)}
    try:
        return None if is_sharded(modules) else hash_of(tensors)
    except RuntimeError:  # of sparse ones
        return None


# ---------------------------------------------------------------- rows


def hashes(manifest: Manifest, split: str) -> dict[str, Any]:
    """Hash each row's text and audio. Recordings behind URLs are not read; of more than ``WHOLE``, only the size and a
    block of each are."""
    signals = [manifest.wavs, *(manifest.meta[name] for name in manifest.meta if f"{name}{SECONDS}" in manifest.meta)]
    texts = (_hash("\0".join((row.id, row.speaker, repr(row.start), row.text)).encode()) for row in manifest)
    found: dict[str, Any] = {"rows": len(manifest), "texts": base64.b64encode(b"".join(texts)).decode(), "audio": None}
    if not any("://" in wav for wavs in signals for wav in wavs):
        paths = sorted({wav for wavs in signals for wav in wavs})
        with ThreadPoolExecutor(usable_cores()) as pool:
            read = pool.map(lambda wav: _audio_hash(wav, len(paths) <= WHOLE), paths)
            bar = progress(read, what=f"hashing the audio of {split}", total=len(paths), show=len(paths) > _QUICK)
            audio = dict(zip(paths, bar, strict=True))
        hashed = (_hash(b"".join(audio[wav] for wav in row)) for row in zip(*signals, strict=True))
        found["audio"] = base64.b64encode(b"".join(hashed)).decode()
    return found


def _audio_hash(wav: str, whole: bool) -> bytes:
    if not whole:
        return _hash("".join(block_hash(wav, NO_REMOTE)).encode())
    try:
        return _hash(read_bytes(wav))
    except AudioError:  # a run counts damaged recordings and goes on
        return b""


def _hash(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=_HASH).digest()


def _unpacked(text: str, rows: int) -> np.ndarray:
    return np.frombuffer(base64.b64decode(text, validate=True), np.uint8).reshape(rows, _HASH)


def compare_corpus(recorded: Mapping[str, Any], manifests: Mapping[str, Manifest]) -> list[str]:
    """Compare prepared manifests with the recorded rows; returns what can't be compared.

    Raises an error with the first rows that differ, in all splits.
    """
    wrong, not_compared = [], []
    for split, was in recorded["corpus"].items():
        if split not in manifests:
            wrong.append(f"{split}: the corpus lacks it")
            continue
        manifest = manifests[split]
        now = hashes(manifest, split)
        if was["audio"] is None or now["audio"] is None:
            not_compared.append(f"the audio of {split}, which is behind URLs")
        if now["rows"] != was["rows"]:
            wrong.append(f"{split}: {now['rows']:,} rows instead of {was['rows']:,}")
        for part in ("texts", "audio"):
            if was[part] is None or now[part] is None:
                continue
            least = min(was["rows"], now["rows"])
            differ = (_unpacked(was[part], was["rows"])[:least] != _unpacked(now[part], now["rows"])[:least]).any(1)
            rows = np.flatnonzero(differ)
            what = "id, speaker or text" if part == "texts" else "audio"
            wrong += [f"{split}, row {row + 1}: the {what} of {manifest.ids[row]} differs" for row in rows[:_NAMED]]
            if len(rows) > _NAMED:
                wrong.append(f"{split}: and the {what} of {len(rows) - _NAMED:,} more rows")
    if wrong:
        raise SbkitError("the corpus is not the one that was recorded:\n  " + "\n  ".join(wrong), exit_code=1,
                         hint="name the same corpus, such as --source /data/cv/en, in the release that was used")
    return not_compared


# ---------------------------------------------------------------- reading, and comparing runs


def read(path: Path) -> dict[str, Any]:
    """Read ``reproduce.json``; refuse one whose recipe was edited since."""
    try:
        found = untrusted.read_json(path, _MAX_BYTES)
        if found["format"] != FORMAT:
            raise SbkitError(f"{path} has format {shown(found['format'])}, and this sbkit reads {FORMAT}")
        lines, sums = [str(line) for line in found["recipe"]], str(found["recipe_lines"]).split()
        losses = {int(step): float(loss) for step, loss in found["losses"].items() if loss is not None}
        "".join(lines).encode()  # a ValueError for what no file holds
        found |= {"recipe": lines, "losses": losses}
        missing = {"options", "device", "precision", "environment", "corpus",
                   "figures"} - set(found)
        for name in ("processes", "threads"):
            if not isinstance(found.get(name), int) or not 1 <= found[name] <= _MAX_PROCESSES:
                missing.add(f"a number of {name} from 1 to {_MAX_PROCESSES}")
        if missing or not losses:
            raise ValueError(f"it lacks {', '.join(sorted(missing)) or 'losses'}")
        for name, kind in (("options", dict), ("environment", dict), ("corpus", dict), ("figures", dict),
                           ("device", str), ("precision", str)):
            if not isinstance(found[name], kind):
                raise ValueError(f"its {name} is {shown(found[name])}")
        for split, rows in found["corpus"].items():
            for part in ("texts", "audio"):
                if rows[part] is not None:
                    _unpacked(rows[part], rows["rows"])
                elif part == "texts":
                    raise ValueError(f"it lacks the texts of {shown(split)}")
    except OSError as error:
        raise SbkitError(f"{path}: {error.strerror or error}", hint=f"a finished run has a {REPRODUCE}") from None
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise SbkitError(f"{path} is not what a run records ({first_line(error)[:200]})",
                         hint=f"a finished run has a {REPRODUCE} in its output_folder") from None
    for number, (line, recorded) in enumerate(zip(lines, sums, strict=False), start=1):
        if f"{zlib.crc32(line.encode()):08x}" != recorded:
            raise SbkitError(f"{path}: line {number} of its recipe was changed since the run: {shown(line.strip())}",
                             hint="train it as a new recipe, or use the file as the run wrote it", exit_code=1)
    if len(lines) != len(sums):
        raise SbkitError(f"{path}: its recipe has {len(lines)} lines instead of {len(sums)}", exit_code=1)
    return found


def path_options(texts: Mapping[str, str], given: Iterable[str]) -> list[str]:
    """Return the options that replace paths of the recorded recipe, in all keys that have them.

    texts : the recorded values by key
    given : ``KEY=PLACE``
    """
    words = []
    for each in given:
        key, _, place = each.partition("=")
        if not place:
            raise SbkitError(f"--set {each}: write KEY=PLACE")
        if key not in texts:
            near = did_you_mean(key, texts)
            raise SbkitError(f"--set: the recorded recipe has no key {key}", hint=near and f"did you mean {near}?")
        was = texts[key]
        if re.fullmatch(r"[-+]?(\.?\d[\d_.]*(e[-+]?\d+)?|\.inf)|true|false|[\[{!].*", was):
            raise SbkitError(f"--set {key}: it is {was}, not a path", exit_code=1,
                             hint="a run is reproduced with its own values; train another one with sbkit train")
        words += [f"--{name}={place}{text[len(was):]}" for name, text in texts.items()
                  if name == key or (was not in ("", "null") and (text == was or text.startswith(f"{was}/")))]
    return words


class TrainingLaunch(NamedTuple):
    """How a run is started: on which kind of device, in how many processes of how many threads."""

    device: str
    processes: int
    threads: int

    @classmethod
    def here(cls, recorded: Mapping[str, Any]) -> TrainingLaunch:
        """As recorded, as far as this machine has the devices."""
        if recorded["device"] == "cpu" or not torch.cuda.is_available():
            return cls("cpu", recorded["processes"], recorded["threads"])
        return cls(recorded["device"], min(recorded["processes"], torch.cuda.device_count()), recorded["threads"])

    def command(self, recorded: Mapping[str, Any], words: Sequence[str]) -> list[str]:
        """The training command with these arguments and the recorded options."""
        options = recorded["options"] | {"precision": recorded["precision"], "device": self.device}
        flags = [word for name, value in options.items() if value not in (None, False)
                 for word in ([f"--{name}"] if value is True else [f"--{name}", str(value)])]
        return training_command([*words[:1], "--no-check", *flags, *words[1:]], self.processes)


def not_to_the_bit(recorded: Mapping[str, Any], environment: Mapping[str, str], launch: TrainingLaunch) -> list[str]:
    """Differences from the recorded run's machine, because of which bits may differ."""
    was, on_cpu = recorded["environment"], launch.device == "cpu"
    names = [*_BITS, *([] if on_cpu else ["gpu"])]
    pairs = [(name, str(was.get(name)), str(environment.get(name))) for name in names]
    if on_cpu:  # threads are compared, not cores
        before, after = (re.sub(r", \d+ cores?$", "", str(each.get("cpu"))) for each in (was, environment))
        pairs.append(("cpu", before, after))
    pairs += [(name, str(recorded[name]), str(now)) for name, now in launch._asdict().items()]
    return [f"{name} {now}, recorded with {before}" for name, before, now in pairs if before != now]


def losses_of(folder: Path) -> tuple[dict[int, float], str | None]:
    """The losses of single steps in a run's metrics so far, and the hash of its initial weights."""
    path = folder / METRICS
    if not path.is_file():
        return {}, None
    lines = path.read_text(encoding="utf-8").rpartition("\n")[0].splitlines()
    parsed = [json.loads(line) for line in lines if '"kind": "loss"' in line or '"weights": "' in line]
    return {line["step"]: math.nan if line["loss"] is None else line["loss"] for line in parsed if "step" in line}, \
        next((line["weights"] for line in parsed if "weights" in line), None)


#: Causes of other figures than the recorded ones.
RESUMED = "the run was resumed with another command, and its earlier values are not recorded"
RESUMED_ELSEWHERE = "the run was resumed on another machine, or with other processes, threads or precision"
OTHER_WEIGHTS = ("--set init_from=PLACE (or encoder_source, or the pretrainer's paths) must name the recorded run's "
                 "weights, and --to another folder; if it had none, the code of the recipe or of sbkit differs")


def require_same(what: str, recorded: float, found: float, exact: bool, cause: str | None = None) -> None:
    """Raise an error unless two figures are the same, to the bit or within rounding.

    cause : of a difference, if known
    """
    same = recorded == found if exact else math.isclose(recorded, found, rel_tol=ROUNDING, abs_tol=1e-3)
    if not same and not (math.isnan(recorded) and math.isnan(found)):
        within = "to the bit" if exact else f"within {100 * ROUNDING:.0f} %"
        if cause is None:
            cause = "corpus, recipe and versions are those recorded, so sbkit's code differs" if exact else \
                "on another device or version, rounding grows with the steps: compare the final figures (--full)"
        raise SbkitError(f"{what} is {found!r}, recorded as {recorded!r}: not the same {within}", exit_code=1,
                         hint=cause)


def train(command: Sequence[str], threads: int, folder: Path, wanted: Mapping[int, float], weights: str | None, *,
          exact: bool, cause: str | None, to_the_end: bool) -> dict[int, float]:
    """Train in separate processes, up to the last wanted step or to the end; compare losses as they are written.

    folder : of the run; its output goes to ``train.log`` next to it
    wanted : losses by their steps
    weights : the hash of the recorded run's initial weights, if known
    """
    finished = (folder / TESTED).is_file()  # a small run finishes before it is stopped after the first steps
    if set(wanted) <= set(losses_of(folder)[0]) and (finished or not to_the_end):
        raise SbkitError(f"{folder} has the {'finished ' if finished else ''}run of an earlier call, so nothing would "
                         "be trained", hint="remove it or choose another --to"
                         + ("" if finished else "; --full continues after the first steps"))
    log = folder.parent / "train.log"
    found: dict[int, float] = {}
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    # A run that isn't at its end when this is left saves a checkpoint, from which --full resumes.
    with log.open("w") as out, progress(what="training", total=max(wanted), unit="step") as bar, \
            processes.child(command, environment, out) as process:
        while True:
            ended = process.poll() is not None
            found, started_from = losses_of(folder)
            other = None not in (started_from, weights) and started_from != weights
            if other and exact and cause is None:
                raise SbkitError("the run starts from other weights than the recorded one", hint=OTHER_WEIGHTS,
                                 exit_code=1)
            for step in sorted(set(wanted) & set(found)):
                require_same(f"the loss of step {step}", wanted[step], found[step], exact,
                             f"it started from other weights: {OTHER_WEIGHTS}" if other else cause)
                bar.update(step - bar.n)
            if ended or (not to_the_end and set(wanted) <= set(found)):
                break
            time.sleep(0.5)
    code = process.returncode
    missing = [step for step in wanted if step not in found]
    if missing or (to_the_end and code):
        where = f" before step {missing[0]}" if missing else ""
        last = "".join(f"\n  {line}" for line in log.read_text(errors="replace").splitlines()[-5:])
        raise SbkitError(f"training ended with code {code}{where}; the end of {log}:{last}", exit_code=1)
    return found
