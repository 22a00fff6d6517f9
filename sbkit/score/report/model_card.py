"""Model cards: the README.md of a run, and the training part of a bundle's README.md, as the Hugging Face Hub reads it.

They contain no paths of the training machine, because they are meant to be published.
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from sbkit.data.provenance import describe
from sbkit.data.splits import SPLITS
from sbkit.errors import SbkitError
from sbkit.score.old_set import OLD, OldSet
from sbkit.score.report import data
from sbkit.score.report.data import RunData
from sbkit.score.run_files import EVALUATIONS, MANIFESTS, REPORT, RESULT
from sbkit.score.significance import interval_in_text
from sbkit.score.weights import BEST_CHECKPOINT, ChosenWeights
from sbkit.system import untrusted
from sbkit.system.console import atomic_write, time_span

logger = logging.getLogger(__name__)

README = "README.md"
_MAX_BYTES = 1 << 20  # of another model's card
_SOURCES = {"encoder_source": "a pretrained encoder", "init_from": "weights of an earlier model"}
_OURS = 'library_name: "sbkit"'  # the first line of a card by sbkit
_FRONT_MATTER = re.compile(r"---\n(.*?\n)---\n", re.DOTALL)


def write(run: RunData) -> None:
    """Write the README.md of a run's folder, unless there is one that sbkit didn't write."""
    path = run.folder / README
    if not path.exists() or path.read_bytes().startswith(f"---\n{_OURS}".encode()):
        with atomic_write(path) as file:
            file.write(of_run(run))


def of_run(run: RunData) -> str:
    """Make the README.md of a run's folder."""
    shown = [f"# {run.key('experiment') or run.folder.resolve().name}",
             "A model trained by sbkit. `hyperparams.yaml` is its recipe, `report.html` has everything on one page, "
             "and `sbkit export` makes a bundle for use elsewhere."]
    known, value = run.old_test or (None, 0.0)
    old_test = "" if known is None else f"{known.describe(value)}."
    return "\n\n".join([_front(run), *shown, *_sections(run, _figures(run), old_test)]) + "\n"


def of_bundle(readme: str, folder: str | Path, pipeline_tag: str | None,
              weights: ChosenWeights = BEST_CHECKPOINT, facts: Mapping[str, Any] = MappingProxyType({})) -> str:
    """Complete a bundle's README with facts from its run's folder, and with figures of the bundle's own weights only.

    pipeline_tag : the Hub's name of its task, if it has one
    weights : those that are exported
    facts : the name of that checkpoint, the number of checkpoints there were, and the result on the old test
    """
    try:
        run = data.read(folder)
    except SbkitError as error:  # in its log or test results: the bundle itself is complete
        logger.warning("The bundle's model card has nothing of its training: %s", error.message)
        return readme
    for each in run.warnings:
        logger.warning("The training of %s ended with a warning: %s; %s says more", folder, each["headline"], REPORT)
    figures, remark = _figures(run), ""
    if figures and weights != run.tested_weights:
        figures, how = _own_figures(run, weights, facts)
        remark = f"The run tested {run.tested_weights.describe()}, and this bundle has {weights.describe()}{how}."
    sections = _sections(run, figures, remark, facts.get("old_test", ""))
    return "\n\n".join([_front(run, pipeline_tag), readme.rstrip(), *sections]) + "\n"


def _own_figures(run: RunData, weights: ChosenWeights, facts: Mapping[str, Any]) -> tuple[str, str]:
    """The table of figures of weights that the run didn't test, empty if unknown, and a remark on their origin."""
    known = OldSet.read(run.folder)
    if weights.share is not None:
        if known is None or weights != run.tested_weights.with_share(known.share):
            return "", f", whose figures{' on the new test' if known else ''} are not recorded"
        return _table(("test", "figure"), [(f"{known.metric} {part}", f"{value:.2f}") for part, value in (
            (OLD, known.old), ("new", known.new))]), ", which it tested too: these are its figures"
    label = weights.label_from(facts)
    for path in sorted(run.folder.glob(f"{EVALUATIONS}/*/{RESULT}")):
        try:
            result = untrusted.read_json(path, _MAX_BYTES)
            if (result["checkpoint"], result["checkpoints"][0]) == (label, facts.get("checkpoint")) and \
                    result["corpus"] is None and result["manifest"].endswith(f"/{MANIFESTS}/test.csv"):  # the run's own
                return _figures(data.read(path.parent)), ", which `sbkit evaluate` tested: these are its figures"
        except (SbkitError, OSError, ValueError, LookupError, TypeError, AttributeError):  # damaged, or old
            logger.warning("The bundle's model card leaves out %s, which can't be read", path)
    command = f"sbkit evaluate RUN{weights.options()}"
    return "", f", whose figures are not recorded: `{command}` measures them, and the next export shows them"


def _front(run: RunData, pipeline_tag: str | None = None) -> str:
    """The front matter, as the Hub reads it: JSON's texts and lists are YAML's."""
    language, started = run.key("language"), _started_from(run)
    licences, on_hub = {licence for _, _, licence in started}, [name for _, name, _ in started if _on_hub(name)]
    values: dict[str, object] = {"tags": ["sbkit", "speechbrain"]}
    if re.fullmatch(r"[a-z]{2,3}", language):
        values["language"] = language
    if len(licences) == 1 and "" not in licences:  # the licence of one may not hold for both
        values["license"] = licences.pop()
    if on_hub:
        values["base_model"] = on_hub
    if pipeline_tag:
        values["pipeline_tag"] = pipeline_tag
    return "\n".join(["---", _OURS, *(f"{name}: {json.dumps(value)}" for name, value in values.items()), "---"])


def _sections(run: RunData, figures: str, *remarks: str) -> list[str]:
    parts = []
    if shown := [*filter(None, (figures, *remarks))]:
        parts += ["## Figures", *shown]
    if run.prepared:
        parts += ["## Trained and tested on", *_corpora(run, run.prepared)]
    if started := _started_from(run):
        parts += ["## Started from", "\n".join(
            f"- {what}: {name if _on_hub(name) else Path(name).name}, "
            + (f"licence: {licence}" if licence else "licence unknown: see its source")
            for what, name, licence in started)]
    start = run.starts[-1] if run.starts else {}
    rows: list[tuple[str, ...]] = [
        (name, f"{start[name]:,}" if isinstance(start[name], int) else str(start[name]))
        for name in ("parameters", "devices", "device", "precision", "max_batch_seconds")
        if start.get(name) is not None]
    seconds = sum(epoch.get("train_seconds") or 0 for epoch in run.epochs)
    if run.epochs:
        epochs = str(run.last_epoch)
        if run.planned_epochs is not None and run.last_epoch < run.planned_epochs:
            epochs += f" of {run.planned_epochs}: the run has not finished"
        rows += [("epochs", epochs), ("steps", f"{run.epochs[-1].get('step', 0):,}"),
                 ("training time", time_span(seconds))]
    versions = start.get("environment") or {}
    rows += [(name, str(versions[name])) for name in ("sbkit", "torch", "speechbrain") if name in versions]
    if rows:
        parts += ["## Training", _table(("what", "value"), rows)]
    return parts


def _corpora(run: RunData, prepared: Mapping[str, Any]) -> list[str]:
    """Describe the corpus; for a mixture, each part and how much of it training used."""
    def audio(part: Mapping[str, Any], split: str) -> str:
        entry = part["splits"].get(split)
        return f"{entry['kept']:,} ({time_span(3600 * entry['hours'])})" if entry else ""

    def speakers(part: Mapping[str, Any], split: str) -> str:
        known = part["splits"].get(split, {}).get("speakers")
        return "" if known is None else f"{known:,}" if known else "unknown"

    rows: list[tuple[str, ...]] = []
    if not run.prepared_parts:
        rows += [(split, audio(prepared, split), speakers(prepared, split)) for split in prepared["splits"]]
        return [_source(prepared), _table(("split", "recordings", "speakers"), rows)]
    whole = sum(hours for hours, _ in run.training_audio.values())
    for name, part in run.prepared_parts.items():
        hours, times = run.training_audio.get(name, (0.0, 0.0))
        rows.append((name, _source(part), part["options"].get("language") or "",
                     *(audio(part, split) for split in SPLITS),
                     speakers(part, "train"),
                     f"{time_span(3600 * hours)}, {times:.1f} times, {100 * hours / whole:.0f} % of the audio"
                     if whole else ""))
    note = [f"{run.replay_note} Its share of every step (replay) is {run.key('replay')}."] if run.replay_note else []
    return [*note, _table(("part", "corpus", "language", *SPLITS, "speakers of train", "audio in training"), rows)]


def _source(prepared: Mapping[str, Any]) -> str:
    """What was read: the corpus's own source, by its name on the hub, and who spoke."""
    where, described = prepared["source"]["where"], describe(prepared)
    described = described[0].upper() + described[1:]
    # Other places are folders of the training machine.
    on_hub = where.startswith("hf://") or _on_hub(where)
    return f"{described} ({where.removeprefix('hf://')})" if on_hub else described


def _figures(run: RunData) -> str:
    """Make the table of test results with their 95 % intervals."""
    rows: list[tuple[str, ...]] = []
    for part, results in run.parts.items():
        for name, rates in (("WER", results.words), ("CER", results.characters)):
            rows.append((f"{name} {part}".rstrip(), f"{rates.rate:.2f} %", interval_in_text(rates, " %")))
    for name, value in run.stats.items():
        bounds = run.shown_interval(name)
        rows.append((name, f"{value:.4g}", "" if bounds is None else "{:.4g} to {:.4g}".format(*bounds)))
    return _table(("test", "figure", "95 % interval"), rows) if rows else ""


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    return "\n".join("| " + " | ".join(row) + " |" for row in (head, ("---",) * len(head), *rows))


def _started_from(run: RunData) -> list[tuple[str, str, str]]:
    """What the run started from: kind, name and, if its card is on this machine, licence of each."""
    found = []
    for key, what in _SOURCES.items():
        if not (name := run.key(key)):
            continue
        card = Path(name).expanduser() / README
        if _on_hub(name):
            from huggingface_hub import try_to_load_from_cache  # its import reads environment variables

            repository, _, revision = name.partition("@")
            cached = try_to_load_from_cache(repository, README, revision=revision or None)
            card = Path(cached) if isinstance(cached, str) else card  # otherwise unknown, or known not to exist
        licence = None
        with contextlib.suppress(OSError, ValueError):  # no card, or not a text
            if front := _FRONT_MATTER.match(untrusted.read_text(card, _MAX_BYTES)):
                licence = re.search(r"^license: *\"?([\w.-]+)\"?", front[1], re.MULTILINE)
        found.append((what, name, licence[1] if licence else ""))
    return found


def _on_hub(name: str) -> bool:
    return re.fullmatch(r"[\w.-]+/[\w.-]+(@[\w./-]+)?", name) is not None and not Path(name).parent.is_dir()

