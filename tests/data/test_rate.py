"""A corpus whose format can't feed the devices is named with what it would take."""

import pytest
from sounds import encoded, speechlike

from sbkit.data.manifest import Manifest
from sbkit.data.rate import ReadingRate, measure
from sbkit.data.reader import Reader


def test_the_rate_is_that_of_the_corpus_and_of_one_core(tmp_path):
    wavs = [str(tmp_path / f"{i}.{kind}") for i, kind in enumerate(("wav", "flac"))]
    for wav in wavs:
        with open(wav, "wb") as file:
            file.write(encoded(speechlike(4.0), 16000, wav.rpartition(".")[2]))
    broken = tmp_path / "broken.wav"
    broken.write_bytes(b"")
    found = measure(Reader(Manifest(ids=["a", "b", "c"], durations=[4.0] * 3, wavs=[*wavs, str(broken)],
                                    texts=["", "", ""]), None))
    assert found.kinds == "flac, wav" and found.recordings == 3 and 100 < found.rate < 1e6


@pytest.mark.parametrize("workers, wanted, devices, cores", [
    (2, 15_000, 8, 144), (18, 15_000, 8, None), (1, 841, 1, 2), (1, 840, 1, None), (0, 15_000, 1, None)])
def test_advice_has_figures_for_all_devices(workers, wanted, devices, cores):
    advice = ReadingRate(840.0, "mp3", 16).advice(workers, wanted, devices)
    assert (advice is None) == (cores is None)
    if advice is not None and cores is not None:
        message, hint = advice
        assert f"can read {840 * workers:,} s of this corpus in a second (mp3: 840 each, by 16 recordings)" in message
        assert message.endswith(f"about {wanted:,}") and f"if there are {cores} cores" in hint
        assert f"--num_workers {cores // devices} " in hint and "sbkit shard" in hint


def test_a_corpus_that_could_not_be_read_has_no_advice():
    assert ReadingRate(0.0, "mp3", 3).advice(1, 100.0) is None
