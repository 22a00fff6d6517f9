"""Writes docs/reference/keys.md and commands.md from the code: ``make docs``. A test checks that they are up to date."""

from __future__ import annotations

from collections.abc import Container
from pathlib import Path
from typing import NamedTuple

from sbkit.recipe.keys import Declared, Keys
from sbkit.recipe.names import RUN_OPTIONS
from sbkit.tasks.codec.task import CodecKeys
from sbkit.tasks.ctc.keys import CTCKeys
from sbkit.tasks.enhance.task import EnhancementKeys
from sbkit.tasks.keys import RecogniserKeys, TaskKeys
from sbkit.tasks.recognise.keys import EncoderKeys
from sbkit.tasks.speaker.task import SpeakerKeys
from sbkit.tasks.transducer.keys import TransducerKeys
from sbkit.tasks.tts.keys import TTSKeys
from sbkit.train.keys import ScriptKeys, TrainKeys

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "keys.md"


class Chapter(NamedTuple):
    """A section of the page: the keys that one class declares."""

    title: str
    keys: type[Keys]
    of: str


CHAPTERS = (
    Chapter("Every Brain", TrainKeys, "Every `sbkit.Brain` reads these, also in a script of your own."),
    Chapter("A script of your own", ScriptKeys, "A `sbkit.Brain` that is not a task also reads this one; a task always "
                                                "divides evaluation among ranks."),
    Chapter("Every task", TaskKeys, "A recipe that names a task under `brain`, as `sbkit train` requires, has those "
                                    "above and these."),
    Chapter("Recognisers", RecogniserKeys, "Tasks that recognise words have those above and these."),
    Chapter("Encoders", EncoderKeys, "Recognisers with an encoder have those above and these."),
    Chapter("CTC", CTCKeys, "`brain: !name:sbkit.tasks.ctc.CTC` has those above and these."),
    Chapter("Transducer", TransducerKeys,
            "`brain: !name:sbkit.tasks.transducer.Transducer` has those of recognisers and encoders and these."),
    Chapter("Codec", CodecKeys, "`brain: !name:sbkit.tasks.codec.Codec` has those of every task and these."),
    Chapter("Speakers", SpeakerKeys,
            "`brain: !name:sbkit.tasks.speaker.Verification` has those of every task and these."),
    Chapter("Enhancement", EnhancementKeys,
            "`brain: !name:sbkit.tasks.enhance.Enhancement` has those of every task and these."),
    Chapter("Voice", TTSKeys, "`brain: !name:sbkit.tasks.tts.TTS` has those of every task and these."),
)

_HEAD = """# Keys of a recipe

Made by `make docs` from the declarations in the code; edit those, not this page.

A recipe's keys are read once, when it is loaded. A value out of range is refused, with its line, by `sbkit check` and
before a run begins. A key that is neither listed here nor a run option is the recipe's own: others refer to it
(`!ref <d_model>`), or the task reads it. A key that nothing reads and nothing refers to has no effect, and gets a
warning. On the command line, `--KEY VALUE` sets a key that the recipe has or that is listed here, and
`--KEY.ARGUMENT VALUE` an argument of the object that the recipe builds there.

"Object" is an object that the recipe builds with `!new:`, or a class that it names with `!name:`. The docstring of the
class describes its arguments: `python -m pydoc sbkit.data.corpus.Corpus`. [extend](../how-to/extend.md) has tasks with
their own keys.
"""

_OPTIONS = """
## Run options

These are SpeechBrain's; [its documentation](https://speechbrain.readthedocs.io/en/latest/API/speechbrain.core.html)
describes them. A recipe may have them as keys; the command line takes precedence:
{options}.

sbkit adds `precision: auto` and `eval_precision: auto` (bf16 if the device supports it, otherwise
fp32) and `--no-check` (start without checking the recipe).
"""


def page() -> str:
    """Return the text of the page."""
    parts = [_HEAD]
    for title, keys, of in CHAPTERS:
        own = [declared for declared in keys.declared().values() if declared.by == keys.__name__]
        rows = [["key", "type", "range", "default", "what it is"], ["---"] * 5, *map(_row, own)]
        parts.append(f"\n## {title}\n\n{of}\n\n" + "".join(f"| {' | '.join(row)} |\n" for row in rows))
    parts.append(_OPTIONS.format(options=_wrapped([f"`{name}`" for name in sorted(RUN_OPTIONS)])))
    return "".join(parts)


def _row(key: Declared) -> list[str]:
    kind = " or ".join(dict.fromkeys("object" if part == "Any" else part for part in key.kind.split(" | ")
                                     if part != "None")) + (" or null" if "None" in key.kind.split(" | ") else "")
    return [f"`{key.name}`", kind, _range(key.allowed), "needed" if key.needed else _default(key.default), key.what]


def _range(allowed: Container[object] | None) -> str:
    if allowed is None:
        return ""
    return str(allowed).removeprefix("a whole number").removeprefix("a number").strip(" ,")


def _default(value: object) -> str:
    shown = {None: "null", True: "true", False: "false"}
    return f"{shown[value] if value is None or isinstance(value, bool) else value}"


def _wrapped(words: list[str], width: int = 118) -> str:
    lines = [""]
    for word in words:
        word = word + ("," if word != words[-1] else "")
        if len(lines[-1]) + len(word) + 1 > width:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    return "\n".join(lines)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
