"""Whether a recipe's quantiser, decoder and head are those of the codec that it names."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from safetensors import SafetensorError, safe_open

from sbkit.errors import first_line
from sbkit.export import layout
from sbkit.nn.codec.coder import definition
from sbkit.recipe.keys import Problem
from sbkit.tasks.tts.keys import CODEC_PARTS, TTSKeys

#: What a part has that matters in the codec's own training only.
_FREE = {"noise"}
_HINT = "write it as in the codec's recipe"


def differing(keys: TTSKeys) -> Iterator[Problem]:
    """Yield which parts are others than the codec's: by their numbers, or by the names and shapes of their weights."""
    assert keys.codec is not None, "one that is absent is told before"
    path = Path(keys.codec, layout.WEIGHTS)
    if not path.is_file():
        return  # init_from tells that, since it takes the weights from there
    try:
        with safe_open(path, framework="numpy") as file:
            defined = json.loads((file.metadata() or {}).get("definition", "null"))
            shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError, ValueError, RecursionError) as error:
        yield Problem("codec", f"{path} cannot be read: {first_line(error)}", "is it a codec's bundle? export it again")
        return
    if not isinstance(defined, dict):
        yield Problem("codec", f"{path} does not say what its parts are", "is it a codec's bundle? export it again")
        return
    for name in CODEC_PARTS:
        part = getattr(keys, name)
        if part is None:
            continue
        mine, theirs = json.loads(json.dumps(definition(part))), defined.get(name)
        if not isinstance(theirs, dict):
            theirs = {}
        numbers = [f"{key} {mine.get(key)} instead of {theirs.get(key)}" for key in sorted(mine.keys() | theirs.keys())
                   if mine.get(key) != theirs.get(key) and key not in _FREE]
        own = {f"{name}.{key}": tuple(value.shape) for key, value in part.state_dict().items()}
        if numbers:
            yield Problem(name, f"it is not the codec's: {', '.join(numbers)}", _HINT)
        elif own != (there := {key: shape for key, shape in shapes.items() if key.startswith(f"{name}.")}):
            first = sorted(own.items() ^ there.items())[0][0]
            yield Problem(name, f"it is not the codec's: {first} is in one of them alone, or has another shape", _HINT)
