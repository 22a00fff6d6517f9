"""What a live session has to tell, taken from an engine whose threads run as they like."""

import asyncio
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


class EndsBehindTheBack(Session):
    """A session whose end is heard just after somebody found that there is nothing to take yet."""

    def take(self, timeout=None):
        found = super().take(timeout)
        if not found and self._ended and not self._finished:
            self.decode(None)
        return found


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    return Config.read(bundles.make(tmp_path_factory.mktemp("hearing") / "level", streams=True))


def test_last_words_that_are_settled_between_two_looks_are_told(config):
    async def told():
        streams = types.SimpleNamespace(open=lambda search, chunk, tell: EndsBehindTheBack(
            config, 8, {}, search, lambda session: None, tell))
        served = types.SimpleNamespace(decoder=types.SimpleNamespace(stream=Settles), chunk_seconds=20.0)
        hearing = ChunkRecogniser(served, streams, None, 5.0)
        hearing.finish()
        lines = []
        while (news := await hearing.next_update()) is not None:
            lines += [[word.text for word in line.words] for line in news.lines if line.complete]
        return lines

    assert asyncio.run(told()) == [["hello"]]
