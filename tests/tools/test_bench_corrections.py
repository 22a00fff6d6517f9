"""The benchmark of what is corrected first: equal minutes, and the doubtful ones of each day."""

from sbkit.decode.spans import Word
from tools.bench.corrections import DAY, SHARE, choose


def test_the_doubtful_of_each_day_are_chosen_for_as_many_minutes_as_random_ones():
    pool = [{"id": i, "duration": 3.0, "text": f"word{i}", "words": [Word(f"word{i}", 0, 1, 0.9 if i % 2 else 0.2)]}
            for i in range(10 * DAY)]
    chosen = {way: choose(pool, way, 1, 120.0) for way in ("worth", "random")}
    assert {sum(row["duration"] for row in rows) for rows in chosen.values()} == {120.0}
    assert not any(row["id"] % 2 for row in chosen["worth"]) and any(row["id"] % 2 for row in chosen["random"])
    assert chosen["worth"] == choose(pool, "worth", 1, 120.0) != choose(pool, "worth", 2, 120.0)
    day = pool[:DAY]
    assert DAY / SHARE <= len(choose(day, "random", 1, 1e9)) <= DAY / SHARE + 1, "a quarter of a day"
