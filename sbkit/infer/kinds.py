"""Loads bundles of any kind: the table of the classes that do it, and how to add a kind of your own."""

from __future__ import annotations

from collections.abc import Sequence
from inspect import signature
from pathlib import Path
from typing import Any, TypeVar, overload

from sbkit.errors import SbkitError
from sbkit.export import layout
from sbkit.infer.bundle_engine import LoadedBundle
from sbkit.infer.codec import CodecModel
from sbkit.infer.decoding import DECODERS, MakeDecoder
from sbkit.infer.enhancer import EnhancerModel
from sbkit.infer.formats import AUTO
from sbkit.infer.graph_model import GraphModel
from sbkit.infer.model import Model
from sbkit.infer.pipeline import Options
from sbkit.infer.voice import Voice

L = TypeVar("L", bound=LoadedBundle[Any])

#: The class that loads each kind of bundle. The kinds themselves are in ``sbkit.export.layout.KINDS``, what decodes
#: recognisers in ``sbkit.infer.decoding.DECODERS``, and how a server runs each in ``sbkit.serve.served_kinds.SERVED``.
MODELS: layout.ByKind[type[LoadedBundle[Any]]] = layout.ByKind({
    layout.Config: Model,
    layout.VoiceConfig: Voice,
    layout.CodecConfig: CodecModel,
    layout.EnhancerConfig: EnhancerModel,
    layout.GraphConfig: GraphModel,
})


def add_kind(config: type[layout.Bundle], *, model: type[LoadedBundle[Any]] | None = None,
             decoder: MakeDecoder | None = None) -> None:
    """Add a kind of bundle of your own, so that ``load``, the commands and a server take it.

    config : its configuration, whose ``kind`` is the name in config.json
    model : loads it; None: what loads the kind that the configuration derives from
    decoder : of a recogniser, makes its decoder from a vocabulary and a search's options, if any; None: as above
    """
    layout.add_kind(config)
    if model is not None:
        MODELS[config] = model
    if decoder is not None:
        DECODERS[config] = decoder


@overload
def load(bundle: str | Path, device: str = AUTO, model: str = AUTO, threads: int | None = None,
         compile: str | None = None, options: Options | None = None,
         buckets: Sequence[tuple[int, float]] | None = None, *, expect: type[L]) -> L: ...
@overload
def load(bundle: str | Path, device: str = AUTO, model: str = AUTO, threads: int | None = None,
         compile: str | None = None, options: Options | None = None,
         buckets: Sequence[tuple[int, float]] | None = None, *, expect: None = None) -> LoadedBundle[Any]: ...
def load(bundle: str | Path, device: str = AUTO, model: str = AUTO, threads: int | None = None,
         compile: str | None = None, options: Options | None = None,
         buckets: Sequence[tuple[int, float]] | None = None, *,
         expect: type[LoadedBundle[Any]] | None = None) -> LoadedBundle[Any]:
    """Load a bundle. Its kind decides the class: a recogniser is a ``Model`` with ``transcribe``, a voice a ``Voice``
    with ``speak``, a codec a ``CodecModel`` with ``encode`` and ``decode``, an enhancer an ``EnhancerModel`` with
    ``enhance`` and ``stream``, a model of another task a ``GraphModel`` with ``run``; ``add_kind`` adds kinds of yours.

    >>> model = load("bundle")                            # doctest: +SKIP
    >>> print(model.transcribe("clip.mp3").text)          # doctest: +SKIP
    >>> voice = load("bundle", expect=Voice)              # doctest: +SKIP
    >>> voice.speak("hello").samples                      # doctest: +SKIP

    bundle : the folder that ``sbkit export`` made
    device : ``auto``, ``cpu``, ``cuda`` or ``cuda:N``; an unavailable one is an error, never a silent fallback
    model : ``onnx``, ``int8`` or ``torch``, which can run code; ``auto`` takes the first of the others in the bundle
    threads : CPU threads of one run
    compile : a mode of ``torch.compile``, for ``model="torch"``
    options : how recordings are cut into chunks and batched
    buckets : shapes (utterances, seconds) that the model is compiled for
    expect : the class that your code needs, which editors and type checkers then know; another kind is refused
    """
    config = layout.read(bundle)
    model_class = MODELS.of(config)
    if expect is not None and not issubclass(model_class, expect):
        raise SbkitError("wrong-bundle-kind", f"the bundle {bundle} has {config.what}, which is loaded as "
                         f"{model_class.__name__}, but {expect.__name__} is needed here",
                         hint=config.use.format(bundle), file=bundle)

    arguments = {"compile": compile or None, "options": options, "buckets": buckets}
    requested = {name: value for name, value in arguments.items() if value is not None}
    if not requested.keys() <= signature(model_class.open).parameters.keys():
        raise SbkitError("wrong-bundle-kind", f"the bundle {bundle} has {config.what}, and compile, options and "
                         "buckets are only for recognisers", hint="leave them out", file=bundle)
    if options is not None and not isinstance(options, Options):
        raise SbkitError("bad-value", f"options is a {type(options).__name__}, not sbkit.infer.Options",
                         hint='write, for example, Options(search={"beam": 8})', key="options")
    return model_class.open(bundle, model, device, threads, **requested)
