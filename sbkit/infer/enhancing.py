"""The command ``sbkit enhance``: removes noise from recordings of any length."""

from __future__ import annotations

import contextlib
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from sbkit.data.audio import AudioError
from sbkit.errors import SbkitError
from sbkit.export import layout
from sbkit.infer.enhancer import EnhancerModel
from sbkit.infer.inputs import FilesRequest, collect, lengths
from sbkit.infer.resynthesis import file_names
from sbkit.infer.sound_file import SoundWriter
from sbkit.infer.transcription import SOME_FAILED
from sbkit.system import disk
from sbkit.system.console import atomic_write, progress, time_span


@dataclass(frozen=True)
class EnhanceRequest(FilesRequest):
    """What to enhance, and the output folder.

    to : the output folder
    overwrite : redo recordings whose output exists
    """

    to: Path
    overwrite: bool = False


def enhance(request: EnhanceRequest) -> int:
    """Enhance and return the exit code: 1 if some recordings could not be read."""
    layout.EnhancerConfig.read(request.bundle)
    recordings = collect(request.files, schemes=request.schemes)
    paths = [request.to / f"{name}.wav" for name in file_names(each.id for each in recordings)]
    if request.to.exists() and not request.to.is_dir():
        raise SbkitError(f"{request.to} is a file", hint="--to must be a folder for the enhanced recordings")
    existing = {path.resolve() for path in paths if path.exists()}
    for recording in recordings:
        if isinstance(recording.audio, str) and Path(recording.audio).resolve() in existing:
            raise SbkitError(f"{recording.audio} would be overwritten by its enhanced copy",
                             hint="choose another folder with --to")
    waiting = [(recording, path) for recording, path in zip(recordings, paths, strict=True)
               if request.overwrite or not path.exists()]
    if len(waiting) < len(recordings):
        print(f"{len(recordings) - len(waiting)} are already enhanced (--overwrite redoes them)", file=sys.stderr)
    expected = lengths([recording for recording, _ in waiting], 1)
    errors: list[AudioError] = []
    began, seconds = time.perf_counter(), 0.0
    with EnhancerModel.open(request.bundle, request.model, request.device, request.threads) as model, \
            disk.disk_errors_as_user_error(request.to):
        print(model.running, file=sys.stderr)
        request.to.mkdir(parents=True, exist_ok=True)
        with progress(what="enhancing", total=round(sum(expected)), unit="s", show=bool(waiting)) as bar:
            for recording, path in waiting:
                rate = model.sample_rate
                try:
                    with atomic_write(path, "wb") as file, \
                            contextlib.closing(SoundWriter(file, "wav", rate)) as writer:
                        for samples in model.blocks(recording.blocks(rate)):
                            writer.add(samples)
                            seconds += len(samples) / rate
                            bar.update(min(round(seconds), bar.total) - bar.n)
                        writer.end()
                except AudioError as error:
                    errors.append(error)
                    continue
                if recording.warning:
                    print(f"{recording.name}: {recording.warning}", file=sys.stderr)
    for each in errors:
        print(f"left out: {each}", file=sys.stderr)
    elapsed = time.perf_counter() - began
    factor = f" (real-time factor {elapsed / seconds:.4f})" if seconds else ""
    print(f"{request.to}: {len(waiting) - len(errors)} recordings, {seconds:.1f} s; it took {time_span(elapsed)}"
          f"{factor}")
    return SOME_FAILED if errors else 0
