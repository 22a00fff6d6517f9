"""Updates of a live session from an engine whose threads run at any time."""

import asyncio
import contextlib
import types

import bundles
import pytest

from sbkit.decode.spans import Word
from sbkit.decode.streaming import StreamResult
from sbkit.export.layout import Config
from sbkit.infer.session import Session
from sbkit.serve.live_recogniser import ChunkRecogniser


class Settles:
    """A search that settles one word at the end."""

    quick = True

    def feed(self, log_probs):
        return []

    def finish(self):
        return StreamResult([Word("hello", 0.1, 0.5, 1.0)], [], True, 0.5)


class EndsAfterTake(Session):
    """A session that ends just after a call found nothing to take yet."""

    def take(self, timeout=None):
        found = super().take(timeout)
        if not found and self._ended and not self._finished:
            self.decode(None)
        return found


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    return Config.read(bundles.make(tmp_path_factory.mktemp("live") / "level", streams=True))


def test_last_words_that_are_settled_between_two_takes_are_in_an_update(config):
    async def lines_of():
        streams = types.SimpleNamespace(open=lambda search, chunk, notify: EndsAfterTake(
            config, 8, {}, search, lambda session: None, notify))
        served = types.SimpleNamespace(decoder=types.SimpleNamespace(stream=Settles), chunk_seconds=20.0,
                                       device_errors=contextlib.nullcontext)
        recogniser = ChunkRecogniser(served, streams, None, 5.0)
        recogniser.finish()
        lines = []
        while (update := await recogniser.next_update()) is not None:
            lines += [[word.text for word in line.words] for line in update.lines if line.complete]
        return lines

    assert asyncio.run(lines_of()) == [["hello"]]
