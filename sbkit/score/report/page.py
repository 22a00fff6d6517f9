"""report.html: a single file with a run's training, its errors, and what to fix next."""

from __future__ import annotations

import base64
import dataclasses
import datetime
import hashlib
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

import sbkit
from sbkit.data.remote import NO_REMOTE, Remote
from sbkit.errors import SbkitError
from sbkit.score import chunk_size, estimate
from sbkit.score.latency import LATE
from sbkit.score.markup import Markup, tag, text
from sbkit.score.report import charts, model_card, sections
from sbkit.score.report.cards import AudioEmbedder, card, key
from sbkit.score.report.data import RunData, rate, read
from sbkit.score.report.findings import findings, suspects
from sbkit.score.report.sections import section
from sbkit.score.run_files import EVALUATIONS, REPORT
from sbkit.score.significance import RATES, RunComparison, compare
from sbkit.system.console import atomic_write

_PAGE = Path(__file__).with_name("page.html")
_COMMON = Path(__file__).with_name("common.css")
_SCRIPT = re.compile(r"<script>(.*?)</script>", re.DOTALL)
_TITLES = {"first": "Next", "against": "Compared", "curves": "Training", "results": "Results",
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
    compared = None if other is None else _compared(other, data)
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
        raise SbkitError(f"cannot write {path}: {error.strerror}", hint="choose another place with --out") from error
    if compared is not None:
        log(str(compared))
    return path


def _compared(other: RunData, data: RunData) -> RunComparison:
    if data.results is not None and other.results is not None:
        return compare(other.results.words, data.results.words)
    if data.estimate is not None and other.estimate is not None:
        return estimate.compare(other.estimate, data.estimate)
    missing = data if data.results is None and data.estimate is None else other
    raise SbkitError(f"{missing.folder} has no scored test set to compare", hint="let the run finish first; one that "
                     "finished with an older sbkit is scored again by sbkit evaluate")


def _page(data: RunData, other: RunData | None, compared: RunComparison | None, title: str, count: int,
          clips: AudioEmbedder, ) -> str:
    parts: dict[str, Markup | None] = {}
    results = data.results
    suspected = suspects(results) if results is not None else []
    if other is not None and compared is not None:
        parts["against"] = (compared_recordings if results is None else comparison)(
            data, other, compared, clips, count // 4)
    parts["first"] = sections.findings_list(findings(data, suspected))
    parts["curves"] = sections.training(data, other)
    parts["results"] = sections.tables(data)
    parts["listen"] = sections.players(data, clips)
    parts["live"] = live(data)
    if results is not None:
        parts["where"] = sections.where(results, None if other is None else other.results)
        parts["words"] = sections.confused(results)
        parts["worst"] = sections.worst(results, clips, count, suspected)
        parts["labels"] = sections.labels(results, clips, suspected, count)
    elif data.estimate is not None:
        parts["worst"] = sections.worst_recordings(data, data.estimate, clips, count)
    parts["data"] = sections.data(data)
    parts["making"] = sections.making(data)
    shown = {place: part for place, part in parts.items() if part is not None}
    links = tag("nav", [tag("a", _TITLES[place], href=f"#{place}") for place in shown])
    over = "Test results" if results is not None or data.stats else "No test set has been scored yet"
    head = tag("header", tag("p", over, class_="over"), tag("h1", title), sections.tiles(data))
    made = datetime.datetime.now().astimezone().strftime("%Y-%m-%d %H:%M")
    foot = tag("footer", f"Made by sbkit {sbkit.__version__} on {made}. This page needs no network.")
    return fill_template(title, text(head, links, tag("main", list(shown.values())), foot))


def fill_template(title: str, body: Markup, template_file: Path = _PAGE) -> str:
    """Fill a template. Only the template's own script may run, whatever a transcript contains."""
    template = template_file.read_text(encoding="utf-8")
    found = _SCRIPT.search(template)
    assert found is not None, f"{template_file.name} has a script"
    digest = base64.b64encode(hashlib.sha256(found[1].encode()).digest()).decode()
    policy = ("default-src 'none'; style-src 'unsafe-inline'; media-src data:; img-src data:; "
              f"script-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'")
    values: dict[str, Any] = {"title": text(title), "policy": text(policy), "body": body,
                              "common": _COMMON.read_text(encoding="utf-8")}
    return re.sub(r"<!--\{(\w+)\}-->|\{\{(\w+)\}\}", lambda found: values[found[1] or found[2]], template)


MEASURES = ("the other run", "this run", "difference", "95 % interval", "p")


def comparison(run: RunData, other: RunData, words: RunComparison, clips: AudioEmbedder, count: int) -> Markup:
    """Compare ``run`` with ``other`` on the same test set; ``words`` is their difference."""
    ours, before = run.results, other.results
    assert ours is not None and before is not None, "write_report refuses runs without results"
    characters = compare(before.characters, ours.characters)
    place = {one.id: i for i, one in enumerate(before.utterances)}
    theirs = np.array([place[one.id] for one in ours.utterances])
    change = ours.edits - before.edits[theirs]
    order = np.argsort(change, kind="stable")
    better = [int(i) for i in order if change[i] < 0]
    worse = [int(i) for i in order[::-1] if change[i] > 0]
    same = len(change) - len(better) - len(worse)
    table = _compared_table(words, dataclasses.replace(characters, name="CER"))

    def listed(title: str, indices: list[int]) -> Markup | None:
        cards = [card(ours, clips, i, other=(before.words.hypotheses[theirs[i]], before.alignments[theirs[i]],
                                             "the other run")) for i in indices[:count]]
        return sections.listed(title, cards, len(indices))

    return section(
        "against", str(words).replace("-", "−"), table,
        tag("p", f"Of {len(change)} utterances {len(better)} got better, {len(worse)} worse, "
                 f"and {same} have as many errors as before.", class_="note"),
        key("reference"), listed("Better", better), listed("Worse", worse),
        lead=f"Compared with {other.folder.resolve()}")


def compared_recordings(run: RunData, other: RunData, found: RunComparison, clips: AudioEmbedder,
                        count: int) -> Markup:
    """Compare ``run`` with ``other`` by a metric of recordings instead of words."""
    ours, before = run.estimate, other.estimate
    assert ours is not None and before is not None, "write_report refuses runs without results"
    parts: list[Markup | None] = []
    if ours.values and before.values:
        place = {name: i for i, name in enumerate(before.ids)}
        theirs = np.array([before.values[place[name]] for name in ours.ids])
        change = (np.array(ours.values) - theirs) * (-1 if ours.lower_is_better else 1)
        order = np.argsort(change, kind="stable")

        def listed(title: str, indices: list[int]) -> Markup | None:
            cards = [sections.recording(run.recordings[i], clips, f"{ours.name} {theirs[i]:.4g} to "
                                        f"{ours.values[i]:.4g}") for i in indices[:count]]
            return sections.listed(title, cards, len(indices))

        parts = [listed("Better", [int(i) for i in order[::-1] if change[i] > 0]),
                 listed("Worse", [int(i) for i in order if change[i] < 0])]
    return section("against", str(found).replace("-", "−"), _compared_table(found), parts,
                   lead=f"Compared with {other.folder.resolve()}")


def _compared_table(*columns: RunComparison) -> Markup:
    head = tag("tr", tag("th", ""), [tag("th", each.name) for each in columns])
    rows = [tag("tr", tag("th", name, scope="row"), [tag("td", value) for value in values])  # narrow, for a phone
            for name, *values in zip(MEASURES, *map(_column, columns), strict=True)]
    return tag("table", tag("thead", head), tag("tbody", rows), class_="plain compared")


def _column(found: RunComparison) -> tuple[str, ...]:
    def signed(value: float) -> str:
        return (f"{value:+.2f}" if found.name in RATES else f"{value:+.4g}").replace("-", "−")

    levels = [rate(value) if found.name in RATES else f"{value:.4g}" for value in (found.rate_a, found.rate_b)]
    return (*levels, signed(found.difference), f"{signed(found.low)} to\N{NO-BREAK SPACE}{signed(found.high)}",
            f"{found.p_value:.4f}")


COLUMNS = ("chunk", "WER", "95 % interval", "latency", f"{LATE} % within", "words changed")
MEANING = ("Latency: from the end of a correct word to the end of the chunk after which it no longer changed, without "
           "computing time. Word ends come from the model's alignment of the reference. Words changed: how many of 100 "
           "words were shown and replaced later.")


def live(run: RunData) -> Markup | None:
    """Show what ``sbkit evaluate --chunk`` found; None for other results."""
    found: list[Mapping[str, Any]] = run.scored.get("chunks") or []
    if not found:
        return None
    head = [tag("th", name) for name in COLUMNS]
    lines = [tag("tr", tag("th", _name(each), scope="row"), [tag("td", value) for value in _values(each)])
             for each in found]
    points = [charts.Point(_name(each), each["latency"], each["WER"], each["latency_p95"])
              for each in found if each["latency"] is not None]
    drawn = charts.points("WER by latency", points, "seconds after a word's end",
                          note=f"Dots: the mean. Lines: to where {LATE} % of the words are shown.") if points else None
    first = f"The transcripts and rates elsewhere on this page are those of the first line ({_name(found[0])})."
    return section("live", "Live", sections.table(head, lines), tag("p", MEANING, class_="note"),
                   tag("p", first, class_="note"), drawn and tag("div", drawn, class_="charts"))


def _name(each: Mapping[str, Any]) -> str:
    return chunk_size.to_label(each["chunk"])


def _values(each: Mapping[str, Any]) -> list[str]:
    low, high = each["WER_interval"]
    return [rate(each["WER"]), f"{low:.2f} to\N{NO-BREAK SPACE}{high:.2f}", _seconds(each["latency"]),
            _seconds(each["latency_p95"]), f"{each['changed']:.1f}"]


def _seconds(value: float | None) -> str:
    return "not measured" if value is None else f"{value:.2f}\N{NO-BREAK SPACE}s"
