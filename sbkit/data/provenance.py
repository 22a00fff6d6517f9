"""What a prepared corpus consists of: its source, and whether people or a synthesiser spoke."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow.compute as pc

from sbkit.data.manifest import Column, Manifest
from sbkit.system.console import stored_json

#: Beside the folder of clips that a synthesiser spoke: the arguments that it was made with, and its name.
RECORD = "demo.json"
CLIPS = "clips"
SYNTHESISER = "synthetic"
#: The share of the audio from which on all of it counts as synthesised; hours are rounded.
_ALL = 0.999


def hours_by_synthesiser(manifest: Manifest) -> dict[str, float]:
    """The hours that each synthesiser spoke, by the records beside the recordings, whatever list names these."""
    in_clips = f"/{CLIPS}/[^/]+$"
    wavs = manifest.wavs.arrow
    folders = pc.if_else(pc.match_substring_regex(wavs, in_clips), pc.replace_substring_regex(wavs, in_clips, ""), "")
    names, numbers = Column(folders).numbered()
    hours: dict[str, float] = {}
    for number, name in enumerate(names):
        synthesiser = stored_json(Path(name) / RECORD).get(SYNTHESISER) if name else None
        if isinstance(synthesiser, str):
            spoken = float(manifest.durations[numbers == number].sum()) / 3600
            hours[synthesiser] = hours.get(synthesiser, 0.0) + spoken
    return hours


def synthesised(report: Mapping[str, Any]) -> str:
    """Which of a prepared corpus's audio synthesisers spoke; empty if none is known to be.

    report : the content of its ``prepare_report.json``
    """
    total = 0.0
    hours = dict[str, float]()
    for split in report["splits"].values():
        total += split["hours"]
        for name, spoken in split.get("synthesised", {}).items():
            hours[name] = hours.get(name, 0.0) + spoken
    source = report["source"]
    if "recorded" not in source:  # prepared by a version that didn't look
        name = stored_json(Path(source["where"]) / RECORD).get(SYNTHESISER)
        hours = {name: total} if isinstance(name, str) else {}
    if not hours:
        return ""
    share = sum(hours.values()) / max(total, 1e-9)
    names = " and ".join(hours)
    if share >= _ALL:
        return f"speech synthesised by {names} (no recordings of people)"
    return f"{100 * share:.3g} % of the audio is speech synthesised by {names}"


def describe(report: Mapping[str, Any]) -> str:
    """The kind of a prepared corpus, and whether people or a synthesiser spoke.

    report : the content of its ``prepare_report.json``
    """
    source = report["source"]
    kind: str = source["kind"]
    artificial = synthesised(report)
    if artificial.startswith("speech"):
        return f"{artificial}, in the layout of {kind}"
    if artificial:
        return f"{kind}: {artificial}"
    if "recorded" not in source:
        return kind
    if source["recorded"]:
        return f"{kind}: recordings of people"
    return f"{kind}: it doesn't say whether people or a synthesiser spoke"
