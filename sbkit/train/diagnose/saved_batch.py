"""Conversion of any batch to JSON and tensors and back, to save it in a culprit folder without a pickle."""

from __future__ import annotations

import dataclasses
import importlib
import sys
from collections.abc import Mapping
from typing import Any

import torch

from sbkit.errors import SbkitError

# A saved object names its class; only modules with these prefixes are imported for that.
_KNOWN = ("sbkit.", "speechbrain.")


def pack(batch: object) -> tuple[Any, dict[str, torch.Tensor]]:
    """Return a batch as a tree for JSON, and its tensors on the CPU by the keys in the tree."""
    tensors: dict[str, torch.Tensor] = {}
    return _pack(batch, "batch", tensors), tensors


def unpack(tree: object, tensors: Mapping[str, torch.Tensor], device: torch.device | str = "cpu") -> object:
    """Rebuild a batch, with its tensors on ``device``."""
    if not isinstance(tree, dict):
        return tree
    kind: str = tree["kind"]
    value: Any = tree.get("value")  # of another type for each kind
    if kind == "tensor":
        return tensors[value].to(device)
    if kind == "unknown":
        raise SbkitError(f"the batch has a {value}, which could not be saved, so it can't be run again")
    if kind == "dict":
        return {key: unpack(v, tensors, device) for key, v in value}
    if kind in ("list", "tuple"):
        items = [unpack(v, tensors, device) for v in value]
        return items if kind == "list" else tuple(items)
    cls = _class(tree["class"])
    fields = {key: unpack(v, tensors, device) for key, v in value.items()}
    if kind == "namedtuple":
        return cls(**fields)
    made: object = object.__new__(cls)
    made.__dict__.update(fields)
    return made


def _pack(value: object, path: str, tensors: dict[str, torch.Tensor]) -> object:
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, torch.Tensor) and value.layout == torch.strided and not value.is_complex():
        tensors[path] = value.detach().cpu().contiguous().clone()
        return {"kind": "tensor", "value": path}
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return _object("namedtuple", value, value._asdict(), path, tensors)
    if isinstance(value, (list, tuple)):
        items = [_pack(v, f"{path}.{i}", tensors) for i, v in enumerate(value)]
        return {"kind": "list" if isinstance(value, list) else "tuple", "value": items}
    if isinstance(value, Mapping):
        items = [[key, _pack(v, f"{path}.{key}", tensors)] for key, v in value.items()]
        return {"kind": "dict", "value": items}
    if dataclasses.is_dataclass(value) or type(value).__module__ == "speechbrain.dataio.batch":
        return _object("object", value, vars(value), path, tensors)
    return {"kind": "unknown", "value": f"{type(value).__module__}.{type(value).__qualname__}"}


def _object(
    kind: str, value: object, fields: Mapping[str, Any], path: str, tensors: dict[str, torch.Tensor]
) -> dict[str, Any]:
    packed = {key: _pack(v, f"{path}.{key}", tensors) for key, v in fields.items()}
    return {"kind": kind, "class": f"{type(value).__module__}:{type(value).__qualname__}", "value": packed}


def _class(name: str) -> type:
    module, _, path = name.partition(":")
    if module not in sys.modules and not module.startswith(_KNOWN):
        raise SbkitError(f"the saved batch is a {path} of {module}, which is not loaded",
                         hint="replay it with the script that trained the run")
    found: Any = sys.modules.get(module) or importlib.import_module(module)  # then what is in it
    for part in path.split("."):
        found = getattr(found, part)
    return found
