"""The clips that an export is compared on say how many they are, and what."""

import numpy as np

from sbkit.export.clips import Clip, ComparisonClips, choose_clips


def test_the_clips_of_a_comparison_are_counted_with_those_that_are_made():
    clips = choose_clips(None, 16_000, 5)
    assert str(clips) == (f"{len(clips.alone)} clips (noise, because there is no test audio, and the first 50 ms of "
                          "the shortest and one longer than any in training)")
    assert len(clips.alone[0].signal) == 800 and len(clips.alone[-1].signal) > len(clips.alone[-2].signal)


def test_clips_of_one_origin_are_counted():
    assert str(ComparisonClips([Clip(np.zeros(3), None, "a")], "5 texts", 1.0)) == "1 clip (5 texts)"
