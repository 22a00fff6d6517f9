"""suspects.html: a page to listen to rows whose labels may be wrong, and to decide on each with the keyboard."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from sbkit.data.manifest import Manifest
from sbkit.data.suspects import DECISIONS, Suspect
from sbkit.score.edits import align
from sbkit.score.label_errors import UNSEEN
from sbkit.score.markup import tag, text
from sbkit.score.report.cards import AudioEmbedder, diff, key
from sbkit.score.report.data import outside
from sbkit.score.report.page import fill_template
from sbkit.system.console import atomic_write

_TEMPLATE = Path(__file__).with_name("suspects.html")
_SHOWN = 1000
_KEYS = "j: next · k: previous · space: play · x: drop · o: keep · f: fix, enter · s: save"


def write(path: Path, suspects: Sequence[Suspect], train: Manifest, folders: Sequence[str],
          megabytes: float = 64.0) -> None:
    """Write the page, with as many recordings inside as ``megabytes`` hold, of those in the corpus' ``folders``."""
    clips = AudioEmbedder(megabytes, lambda wav: None if "://" in wav else outside(wav, folders), train.remote)
    place = {name: at for at, name in enumerate(train.ids)}
    shown = suspects[:_SHOWN]
    sides = [[row.label.split() for row in shown], [row.hypothesis.split() for row in shown]]
    cards = []
    for row, *words, alignment in zip(shown, *sides, align(*sides), strict=True):
        facts = f"{row.reason} · score {row.score:.1f} · correct labels expected up to here: {row.expected_right:.0%}"
        choices = [tag("button", decision, type="button", data_decision=decision) for decision in DECISIONS]
        fix = tag("input", value=row.hypothesis, hidden=True, aria_label="the right text")
        cards.append(tag(
            "article", diff(words[0], words[1], alignment), clips.player(train.row(place[row.ID])),
            tag("p", facts, class_="facts"), tag("p", choices, fix, class_="choices"), tag("span", row.ID, class_="id"),
            class_="utterance", tabindex=-1))
    more = f" The page shows the first {_SHOWN:,}; the list has all." if len(suspects) > _SHOWN else ""
    corpus = suspects[0].corpus if suspects else ""
    head = tag("header", tag("p", corpus, class_="over"), tag("h1", f"{len(suspects):,} labels to listen to"),
               tag("p", "Your decisions stay in this browser until you save the list. Then set corpus.exclude to "
                   f"that file.{more}", class_="lead"), tag("p", UNSEEN, class_="lead"), key("label"),
               tag("nav", tag("span", _KEYS), tag("button", "Save suspects.csv", type="button", id="save"),
                   tag("output", "")))
    rows = json.dumps([row._asdict() for row in suspects], ensure_ascii=False)
    body = text(head, tag("main", cards, data_rows=rows, data_fields=json.dumps(Suspect._fields), class_="cards"))
    with atomic_write(path) as file:
        file.write(fill_template("Suspected labels", body, _TEMPLATE))
