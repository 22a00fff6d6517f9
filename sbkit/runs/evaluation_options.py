"""What an evaluation asks of a task: a search, chunks, a recogniser. A task that has none refuses the option by its
name.

A task has the first two in an object, its ``transcriber``, and is built with the recogniser (see
``sbkit.tasks.task.Task``).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from sbkit.data.manifest import Manifest
from sbkit.errors import SbkitError
from sbkit.recipe.load import Recipe, Transcribe
from sbkit.runs.evaluation_request import EvaluateRequest
from sbkit.runs.keys import Bundles

Task = Any  # an object of sbkit.tasks.task.Task, which this package can't import
#: Fields of a request that describe a search.
_SEARCH_OPTIONS = ("lm", "tune_lm", "lm_weight", "word_score", "beam", "hot_words", "nbest", "joint", "ctc_weight")


def use_options(task: Task, request: EvaluateRequest) -> None:
    """Have the tests of a task do what the options of ``sbkit evaluate`` ask for, except its recogniser."""
    use_search(task, request)
    if request.behaviour and not task.writes_words:
        raise SbkitError("option-not-for-task",
                         f"--behaviour tests recognisers, and {type(task).__name__} is none",
                         hint="leave it out", key="behaviour")
    if request.chunk:
        use_chunks(task, request.chunk)


def use_search(task: Task, request: EvaluateRequest) -> None:
    """Search in tests as an evaluation asks, by default as the recipe says."""
    if task.transcriber is not None:
        task.transcriber.use_search(request)
        return
    for option in _SEARCH_OPTIONS:
        if getattr(request, option):
            raise SbkitError("option-not-for-task",
                             f"{type(task).__name__} has no search, so it can't use --{option.replace('_', '-')}",
                             hint="leave it out", key=option)


def use_chunks(task: Task, chunk: Sequence[int | None]) -> None:
    """Run tests as on live streams, in chunks of each of these sizes; the transcripts of the first are written.

    chunk : milliseconds; None is the whole utterance
    """
    if task.transcriber is None:
        raise SbkitError("option-not-for-task",
                         f"{type(task).__name__} doesn't recognise in chunks, so it can't use --chunk",
                         hint="leave it out", key="chunk")
    task.transcriber.use_chunks(chunk)


def open_recogniser(recipe: Recipe, bundles: Bundles, requested: str | None = None) -> Transcribe | None:
    """Open the recogniser that transcribes the speech of a recipe's tests, with which its Brain is then built.

    bundles : opens its bundle
    requested : the bundle that an evaluation names; None: that of the recipe

    Returns None if neither names one.
    """
    bundle = requested or vars(recipe.keys).get("recogniser")
    if bundle is None:
        return None
    if not recipe.task.generates_speech:
        raise SbkitError("option-not-for-task",
                         f"{recipe.task.__name__} generates no speech, so it can't use --recogniser",
                         hint="leave it out", key="recogniser")
    transcribe: Transcribe = bundles.text_transcriber(bundle, recipe.keys.sample_rate)
    return transcribe


def tune_search(task: Task, dev: Manifest, evaluate: Callable[[Manifest], object]) -> dict[str, Any]:
    """Tune the search's weights on a dev split; returns facts for result.json.

    evaluate : runs the model over a manifest, which fills ``task.rows``
    """
    assert task.transcriber is not None, "use_search refuses --tune-lm without one"

    def evaluated_rows(manifest: Manifest) -> list[Any]:
        evaluate(manifest)
        return task.rows

    return task.transcriber.tune(dev, evaluated_rows)


@contextlib.contextmanager
def searching(task: Task) -> Iterator[None]:
    """Context for a pass over a test set, at whose end a search may run over the whole set."""
    if task.transcriber is None:
        yield
        return
    with task.transcriber.searching_at_the_end() as finish:
        yield
    task.rows = finish(task.rows)


def search_facts(task: Task) -> dict[str, Any]:
    """Describe the search for result.json."""
    return {} if task.transcriber is None else task.transcriber.search_facts()
