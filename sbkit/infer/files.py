"""Runs a model on the recordings of a command: shows progress, orders the results, and leaves out those that can't be
read. What the model does with recordings is an argument."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any

from sbkit.data.audio import AudioError
from sbkit.errors import printable
from sbkit.infer.recordings import Recording
from sbkit.system.console import progress, time_span

SOME_FAILED = 1  # exit code if some recordings could not be read
#: Errors or warnings that are printed, if there may be many.
SHOWN = 20

#: A recording's number and its result, or its error if it can't be read; or the seconds of it that are done so far.
Result = tuple[int, Any]


def run_files(recordings: Sequence[Recording], run: Callable[[Sequence[Recording]], Generator[Result, None, None]],
              errors: dict[int, AudioError], *, what: str, seconds: Sequence[float] | None = None,
              order: Sequence[int] | None = None, in_order: bool = False, named: int | None = None,
              show: bool | None = None) -> Generator[Result, None, None]:
    """Yield the number of each recording and its result; those that can't be read are named and left out.

    run : runs the model on recordings, and yields their results as they come
    errors : gets the error of each recording that is left out
    what : what is done, beside the progress bar
    seconds : the recordings' lengths, for the progress bar; None: it counts files
    order : the recordings' numbers in the order in which they are run
    in_order : yield in the order of ``recordings``, for printing
    named : how many errors are printed, at once; None: all
    show : whether there is a progress bar; None: for several recordings
    """
    order = range(len(recordings)) if order is None else order
    show = len(recordings) > 1 if show is None else show
    if seconds is None:
        total = len(recordings)
        unit = "file"
    else:
        total = round(sum(seconds))
        unit = "s"
    waiting: dict[int, Any] = {}  # results that were not yielded yet
    first = 0  # the recording whose result is the next, if ``in_order``
    passed = 0.0  # seconds or files with a result
    with progress(what=what, total=total, unit=unit, show=show) as bar, \
            contextlib.closing(run([recordings[i] for i in order])) as results:
        for position, result in results:
            index = order[position]
            if isinstance(result, float):
                bar.update(min(round(passed + result), total) - bar.n)
                continue
            passed += 1 if seconds is None else seconds[index]
            waiting[index] = result
            while waiting and (not in_order or first in waiting):
                index = first if in_order else next(iter(waiting))
                result = waiting.pop(index)
                first += 1
                if (in_order or isinstance(result, AudioError)) and sys.stderr.isatty():
                    bar.clear()  # otherwise a printed line would begin behind it
                if not isinstance(result, AudioError):
                    yield index, result
                    continue
                errors[index] = result
                if named is None or len(errors) <= named:
                    print(f"left out: {printable(str(result))}", file=sys.stderr)
            bar.update(round(passed) - bar.n)
    if named and len(errors) > named:
        print(f"left out: {len(errors) - named} more", file=sys.stderr)


def summarise(count: int, left_out: int, audio: float, seconds: float, output: Path | None) -> None:
    """Print how many of ``count`` recordings were processed, and how fast."""
    if count:
        factor = f" (real-time factor {seconds / audio:.4f})" if audio else ""
        where = f" -> {output}" if output is not None else ""
        print(f"{count - left_out} of {count} recordings, {audio:.1f} s of audio in {time_span(seconds)}"
              f"{factor}{where}", file=sys.stderr)


def print_first(what: str, lines: Sequence[str]) -> None:
    """Print the first ``SHOWN`` of some lines to stderr, and the number of others."""
    for line in lines[:SHOWN]:
        print(f"{what}: {printable(line)}", file=sys.stderr)
    if len(lines) > SHOWN:
        print(f"{what}: {len(lines) - SHOWN} more", file=sys.stderr)
