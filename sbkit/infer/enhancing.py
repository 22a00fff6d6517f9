"""The command ``sbkit enhance``: removes noise from recordings of any length."""

from __future__ import annotations

import contextlib
import functools
import sys
import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from pathlib import Path

from sbkit.data.audio import AudioError
from sbkit.errors import SbkitError
from sbkit.export import layout
from sbkit.infer.enhancer import EnhancerModel
from sbkit.infer.files import SOME_FAILED, Result, run_files
from sbkit.infer.inputs import FilesRequest, collect, lengths
from sbkit.infer.recordings import Recording
from sbkit.infer.resynthesis import file_names
from sbkit.infer.sound_file import SoundWriter
from sbkit.system import disk
from sbkit.system.console import atomic_write, time_span


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
    paths = [request.to / f"{name}.wav" for name in file_names(recording.id for recording in recordings)]
    if request.to.exists() and not request.to.is_dir():
        raise SbkitError("bad-option", f"--to {request.to} is a file", hint="name a folder for the enhanced recordings",
                         file=request.to, key="--to")
    existing = {path.resolve() for path in paths if path.exists()}
    for recording in recordings:
        if isinstance(recording.audio, str) and Path(recording.audio).resolve() in existing:
            raise SbkitError("output-is-input", f"{recording.audio} would be overwritten by its enhanced copy",
                             hint="choose another folder with --to", file=recording.audio, key="--to")
    waiting = [(recording, path) for recording, path in zip(recordings, paths, strict=True)
               if request.overwrite or not path.exists()]
    if len(waiting) < len(recordings):
        print(f"{len(recordings) - len(waiting)} are already enhanced (--overwrite redoes them)", file=sys.stderr)
    recordings = [recording for recording, _ in waiting]
    lengths_of = lengths(recordings, 1)
    errors: dict[int, AudioError] = {}
    began = time.perf_counter()
    seconds = 0.0
    with EnhancerModel.open(request.bundle, request.model, request.device, request.threads) as model, \
            disk.disk_errors_as_user_error(request.to):
        print(model.running, file=sys.stderr)
        request.to.mkdir(parents=True, exist_ok=True)
        run = functools.partial(_run, model, [path for _, path in waiting])
        for index, samples in run_files(recordings, run, errors, what="enhancing", seconds=lengths_of,
                                        show=bool(waiting)):
            seconds += samples / model.sample_rate
            recording = recordings[index]
            if recording.warning is not None:
                print(f"{recording.name}: {recording.warning}", file=sys.stderr)
    elapsed = time.perf_counter() - began
    factor = f" (real-time factor {elapsed / seconds:.4f})" if seconds else ""
    print(f"{request.to}: {len(waiting) - len(errors)} recordings, {seconds:.1f} s; it took {time_span(elapsed)}"
          f"{factor}")
    return SOME_FAILED if errors else 0


def _run(model: EnhancerModel, paths: Sequence[Path], recordings: Sequence[Recording]
         ) -> Generator[Result, None, None]:
    """Write the enhanced recordings, some seconds at a time; yields the samples of each."""
    rate = model.sample_rate
    for index, (recording, path) in enumerate(zip(recordings, paths, strict=True)):
        samples = 0
        try:
            with atomic_write(path, "wb") as file, contextlib.closing(SoundWriter(file, "wav", rate)) as writer:
                for block in model.blocks(recording.blocks(rate)):
                    writer.add(block)
                    samples += len(block)
                    yield index, samples / rate
                writer.end()
            yield index, samples
        except AudioError as error:
            yield index, error
