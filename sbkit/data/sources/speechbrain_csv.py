"""SpeechBrain's CSVs (``ID,duration,wav,spk_id,wrd``), which sbkit's manifests are, too."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow.compute as pc

from sbkit.data.delimited import header, read_delimited
from sbkit.data.manifest import RESERVED, Column, to_seconds
from sbkit.data.sources.base import ALIASES, Rows, find_column, no_column, unique_ids
from sbkit.data.sources.files import FileSource

# Recipes with segments in samples have columns start and stop; a quotient below this isn't a sample rate.
_LOWEST_RATE = 1000


class SpeechBrainCsv(FileSource):
    """CSV files with at least a path and a text; missing durations are measured.

    Other columns are kept as metadata; those with a name that manifests reserve get a prefix, such as ``source_wrd``.
    ``start`` is in seconds; together with ``stop`` it may be in samples. A file that is named may be a ``.tsv``: tabs
    between fields, and no quotation, as in Common Voice.
    """

    kind = "SpeechBrain CSV"
    suffixes = (".csv",)

    def header(self, name: str) -> list[str]:
        tabs = self.files[name].suffix == ".tsv"
        return header(self.files[name], delimiter="\t" if tabs else None, quoted=not tabs)

    def read_file(self, path: Path, show_progress: bool) -> Rows:
        tabs = path.suffix == ".tsv"
        csv = read_delimited(path, delimiter="\t" if tabs else None, quoted=not tabs)
        roles = {role: find_column(role, csv.columns, self.columns)
                 for role in dict.fromkeys(("id", "audio", "text", "speaker", "duration", "start", *self.wanted))}
        for role in self.needed:
            if roles[role] is None:
                raise no_column(path, role, csv.columns, self.columns)
        name_of = {role: name for role, name in roles.items() if name is not None}
        column = {role: csv.columns[name] for role, name in name_of.items()}
        wavs = Column(column["audio"])
        stems = Column(pc.replace_substring_regex(wavs.arrow, r"^.*/|\.[A-Za-z0-9]+$", ""))
        durations = np.full(len(csv), np.nan)
        if "duration" in column:
            durations = to_seconds(path, name_of["duration"], column["duration"], unknown=np.nan)
        starts = np.zeros(len(csv))
        if "start" in column:
            is_blank = pc.equal(pc.utf8_trim_whitespace(column["start"]), "")
            starts = np.where(is_blank, 0.0, to_seconds(path, name_of["start"], column["start"], unknown=np.nan))
            if "stop" in csv.columns:  # a row without a duration may have one
                stops = to_seconds(path, "stop", csv.columns["stop"], unknown=np.nan)
                # Starts and stops may be in samples: the same number of them for every second.
                with np.errstate(divide="ignore", invalid="ignore"):
                    rates = (stops - starts) / durations
                rates = rates[np.isfinite(rates)]
                rate = round(float(np.median(rates))) if len(rates) else 0
                if rate > _LOWEST_RATE:
                    starts = starts / rate
                    stops = stops / rate
                durations = np.where(np.isnan(durations), stops - starts, durations)
        used = {*name_of.values(), "stop"}
        meta = {f"source_{name}" if name in RESERVED else name: Column(values)
                for name, values in csv.columns.items() if name not in used}
        meta.update({role: Column(column[role]) for role in self.wanted if role not in ALIASES})
        return Rows(
            str(path), column["id"] if "id" in column else unique_ids(stems), self.locate(wavs, path),
            column.get("text"), column.get("speaker"), durations, starts, self.with_paths(meta, path),
            malformed=[(f"{path.name} line {line}", what) for line, what in csv.malformed])
