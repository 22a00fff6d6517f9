"""report.html: a single file with a run's training, its errors, and what to fix next."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from pathlib import Path

import sbkit
from sbkit.data.remote import NO_REMOTE, Remote
from sbkit.errors import SbkitError
from sbkit.score import estimate
from sbkit.score.report import model_card, sections
from sbkit.score.report.cards import AudioEmbedder
from sbkit.score.report.data import RunData, read
from sbkit.score.report.findings import findings, suspects
from sbkit.score.report.templates import render
from sbkit.score.run_files import EVALUATIONS, REPORT
from sbkit.score.significance import RunComparison, compare
from sbkit.system.console import atomic_write

_TITLES = {"against": "Compared", "first": "Next", "curves": "Training", "results": "Results",
           "listen": "Listen", "live": "Live", "where": "Where", "words": "Words", "worst": "Worst", "labels": "Labels",
           "data": "Data", "making": "Reproduce"}


def write_report(run: str | Path, *, against: str | Path | None = None, out: str | Path | None = None,
                 title: str | None = None, utterances: int = 24, audio_megabytes: float = 8.0,
                 remote: Remote = NO_REMOTE, log: Callable[[str], object] = lambda verdict: None) -> Path:
    """Write the page of a run from the files in its folder, and its README.md beside its own; returns its path.

    run : the output folder of a run, finished or not, or of an evaluation
    against : another run on the same test set, to compare with
    out : path of the page, by default ``RUN/report.html``, or ``RUN/report-against-OTHER.html`` for a comparison
    title : heading of the page, by default the run's folder
    utterances : how many of the worst and of suspected labels to show (a quarter of that for better and worse)
    audio_megabytes : megabytes that recordings may add to the page
    remote : which URLs of recordings may be opened
    log : called with the verdict of a comparison
    """
    data = read(run)
    other = None if against is None else read(against)
    compared = None
    if other is not None:
        if data.results is not None and other.results is not None:
            compared = compare(other.results.words, data.results.words)
        elif data.estimate is not None and other.estimate is not None:
            compared = estimate.compare(other.estimate, data.estimate)
        else:
            missing = data if data.results is None and data.estimate is None else other
            raise SbkitError("no-results", f"{missing.folder} has no test scores to compare",
                             hint="let the run finish first; a run of an older sbkit needs sbkit evaluate to score it "
                                  "again", file=missing.folder)
    name = REPORT  # a comparison goes next to the run's own
    if other is not None:
        name = f"report-against-{other.name.lstrip('/').replace('/', '-')}.html"
    path = data.folder / name if out is None else Path(out)
    clips = AudioEmbedder(audio_megabytes, data.why_foreign, remote)
    page = _page(data, other, compared, title or data.name, utterances, clips)
    try:
        with atomic_write(path) as file:
            file.write(page)
        if other is None and out is None and data.folder == data.run and data.folder.parent.name != EVALUATIONS:
            model_card.write(data)
    except OSError as error:
        raise SbkitError("not-writable", f"cannot write {path}: {error.strerror}",
                         hint="choose another place with --to", file=path) from error
    if compared is not None:
        log(str(compared))
    return path


def _page(data: RunData, other: RunData | None, compared: RunComparison | None, title: str, count: int,
          clips: AudioEmbedder) -> str:
    results = data.results
    suspected = suspects(results) if results is not None else []
    # In the order of the page: recordings are embedded where they are first shown, until there is no room for more.
    shown: dict[str, object] = {}
    if other is not None and compared is not None:
        shown["against"] = sections.against(data, other, compared, clips, count // 4)
    shown |= {"first": findings(data, suspected), "curves": sections.training(data, other),
              "results": sections.tables(data), "listen": sections.players(data, clips), "live": sections.live(data)}
    if results is not None:
        shown |= {"where": sections.where(results, None if other is None else other.results),
                  "words": sections.confused(results), "worst": sections.worst(results, clips, count, suspected),
                  "labels": sections.labels(results, clips, suspected, count)}
    elif data.estimate is not None:
        shown["worst"] = sections.worst_recordings(data, data.estimate, clips, count)
    shown |= {"data": sections.data(data), "making": sections.making(data)}
    return render(
        "score/report/run.html", "page.js", title=title, tiles=sections.tiles(data), titles=_TITLES,
        over="Test results" if results is not None or data.stats else "No test result is recorded",
        shown=dict.fromkeys(_TITLES) | {place: part or None for place, part in shown.items()},
        version=sbkit.__version__, made=datetime.datetime.now().astimezone().strftime("%Y-%m-%d %H:%M"))
