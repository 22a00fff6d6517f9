"""suspects.html: a page to listen to rows whose labels may be wrong, and to decide on each with the keyboard."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from sbkit.data.manifest import Manifest
from sbkit.data.suspects import DECISIONS, Suspect
from sbkit.score.edits import align
from sbkit.score.label_errors import UNSEEN
from sbkit.score.report.cards import AudioEmbedder, diff
from sbkit.score.report.data import outside
from sbkit.score.report.templates import render
from sbkit.system.console import atomic_write

_SHOWN = 1000


def write(path: Path, suspects: Sequence[Suspect], train: Manifest, folders: Sequence[str],
          megabytes: float = 64.0) -> None:
    """Write the page, with as many recordings inside as ``megabytes`` hold, of those in the corpus' ``folders``."""
    clips = AudioEmbedder(megabytes, lambda wav: None if "://" in wav else outside(wav, folders), train.remote)
    place = {name: at for at, name in enumerate(train.ids)}
    shown = suspects[:_SHOWN]
    sides = [[row.label.split() for row in shown], [row.hypothesis.split() for row in shown]]
    rows = [(row, diff(*words), clips.player(train.row(place[row.ID])))
            for row, *words in zip(shown, *sides, align(*sides), strict=True)]
    page = render("score/report/suspects.html", "suspects.js", title="Suspected labels", rows=rows,
                  corpus=suspects[0].corpus if suspects else "", count=len(suspects), unseen=UNSEEN,
                  decisions=DECISIONS, fields=json.dumps(Suspect._fields),
                  data=json.dumps([row._asdict() for row in suspects], ensure_ascii=False))
    with atomic_write(path) as file:
        file.write(page)
