"""The page and the JSON: what a reader sees."""

import json

from tools.gpu import report
from tools.gpu.check import FAILED, NOT_SHOWN, OK, SHORT, Check, Expect, Observation, Result
from tools.gpu.report import RunReport

KERNELS = Check("kernels", "kernels against their references", ".nowhere:check", 30, (
    Expect("losses", "CTC losses", "within 1e-4 of torch's"), Expect("gradients", "their gradients", "within 5e-3")))
SPEED = Check("flagship", "a bench", ".nowhere:check", 90, (
    Expect("step", "a step against stock", "at least 2.5 times"),))


def made(log="", **kwargs):
    results = [
        Result(KERNELS, [Observation("losses", "at most 1.8e-07 apart", OK, {"5": 1.8e-07, "40": 2e-08}),
                         Observation("gradients", "RuntimeError: a|b", FAILED)], ["a note"], 12.34, log),
        Result(SPEED, [Observation("step", "1.90 times", SHORT)], [], 80.0),
        Result(Check("pair", "two cards", ".nowhere:check", 5, (Expect("fails", "one fails", "all end", cards=2),)),
               [Observation("fails", "needs 2 cards", NOT_SHOWN)]),
    ]
    return RunReport(**{"at": 1.7e9, "seconds": 492.4, "dry_run": False, "machine": [("cuda:0", "a card")],
                   "results": results, **kwargs})


def test_the_page_begins_with_the_verdict_and_has_a_row_for_each_line(tmp_path):
    log = tmp_path / "kernels.log"
    log.write_text("\n".join(f"line {i}" for i in range(40)))
    page = report.page(made(str(log)))
    assert page.startswith("""# GPU report

**1 of 3 as expected; short: flagship (a step against stock); failed: kernels (their gradients); 1 not shown here.**

`python -m tools.gpu`, 2023-11-14 22:13 UTC, 8 min 12 s.

## Machine

| what | found |
| --- | --- |
| cuda:0 | a card |

## Checks

| check | what | expected | seen | verdict |
| --- | --- | --- | --- | --- |
| kernels | CTC losses | within 1e-4 of torch's | at most 1.8e-07 apart | as expected |
|  | their gradients | within 5e-3 | RuntimeError: a\\|b | **failed** |
| flagship | a step against stock | at least 2.5 times | 1.90 times | **short** |
| pair | one fails | all end | needs 2 cards | not shown here |
""")
    assert """### kernels: kernels against their references

`python -m tools.gpu --only kernels`, 12.3 s, failed.

- a note

| of | figure | value |
| --- | --- | --- |
| CTC losses | 5 | 1.8e-07 |
|  | 40 | 2e-08 |
""" in page
    assert "    line 39" in page and "line 20" not in page


def test_a_dry_run_says_that_it_is_one():
    page = report.page(made(dry_run=True))
    assert page.startswith("# Dry run of the GPU report, on a CPU\n")
    assert "`python -m tools.gpu --dry-run`" in page and "the figures say nothing about a card" in page


def test_the_page_names_the_command_that_made_it():
    assert "\n`python -m tools.gpu --only kernels,pair`, 20" in report.page(made(only=["kernels", "pair"]))


def test_both_files_are_written_beside_each_other_and_say_the_same(tmp_path):
    page, facts = report.write(made(), tmp_path / "deep" / "my.report")
    assert [page.name, facts.name] == ["my.report.md", "my.report.json"]
    told = json.loads(facts.read_text())
    assert told["verdict"] in page.read_text() and told["ok"] is False and told["machine"] == {"cuda:0": "a card"}
    kernels = told["checks"][0]
    assert kernels["command"] == "python -m tools.gpu --only kernels"
    assert kernels["lines"][0] == {"what": "CTC losses", "expected": "within 1e-4 of torch's", "key": "losses",
                                   "seen": "at most 1.8e-07 apart", "verdict": "as expected",
                                   "figures": {"5": 1.8e-07, "40": 2e-08}}
