"""``sbkit check RECIPE.yaml [--key value ...]``: report everything wrong with a recipe, what it costs and what fits in
memory."""

from __future__ import annotations

import argparse
import gc
import sys
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from sbkit.commands.options import price
from sbkit.errors import SbkitError
from sbkit.system import disk
from sbkit.system.environment import check_torch

if TYPE_CHECKING:
    from sbkit.recipe.arguments import CommandLine
    from sbkit.recipe.report import Report, Section
    from sbkit.rehearsal.cards import Card

HELP = (
    "--json prints it for programs, --measure times a few steps.\n"
    "--as 8xH100 rehearses the whole run on fake GPUs;\n"
    "--html FILE writes its report as a page.\n--price 2.5 predicts hours, energy and cost of the whole run, at this "
    "price of a device per hour.\n--no-run imports only speechbrain, torch and sbkit, builds and calls nothing,\n"
    "and lists what it could not check.\n"
    "--ignore CODE leaves out warnings with this code, which stands in brackets after them;\n"
    "several codes are separated by commas."
)
FLAGS = ("json", "measure", "no-run")
OPTIONS = (*FLAGS, "as", "html", "price", "ignore")


def run(argv: list[str]) -> int:
    gc.disable()  # what is imported and built stays until the end, and searching it for cycles is slow
    try:
        return _check(argv)
    finally:
        gc.enable()


def _check(argv: list[str]) -> int:
    check_torch()
    from sbkit.recipe import arguments, ignoring

    options, argv = arguments.command_options(argv, "see sbkit check --help", FLAGS, ("ignore",),
                                              as_=str, html=Path, price=price)
    _refuse_combinations(options)
    options.ignore = ignoring.on_command_line(options.ignore)
    if options.as_ is not None:
        return _rehearse(argv, options)
    return _check_here(argv, options)


def _refuse_combinations(options: argparse.Namespace) -> None:
    if options.price is not None and options.no_run:
        raise SbkitError("conflicting-options", "--price needs the model, which --no-run doesn't build",
                         hint="leave out one of them", key="--price")
    if options.measure and options.no_run:
        raise SbkitError("conflicting-options", "--measure runs steps of the recipe, and --no-run runs nothing",
                         hint="leave out one of them", key="--measure")
    if options.as_ is not None and (options.measure or options.no_run):
        raise SbkitError("conflicting-options", "--as rehearses the whole run, so it can't be used with "
                         f"{'--measure' if options.measure else '--no-run'}", hint="leave out one of them", key="--as")
    if options.as_ is None and options.html is not None:
        raise SbkitError("missing-option", "--html writes the report of a rehearsal, which only --as makes",
                         hint="add --as CARDS, such as --as 8xH100", key="--as")


def _check_here(argv: list[str], options: argparse.Namespace) -> int:
    """Check the recipe for this machine, and print the report."""
    from sbkit.recipe import arguments
    from sbkit.recipe.check import check

    request = arguments.parse(argv, importable=not options.no_run)
    measure = None
    if options.measure:
        from sbkit.train.memory import step_timing

        measure = partial(step_timing.measure, request, planned=options.price is not None)
    pricing = None
    if options.price is not None:
        from sbkit.recipe.price import PriceRequest
        from sbkit.rehearsal.cards import CARDS

        pricing = PriceRequest(options.price, watts={card.name: card.watts for card in CARDS.values()})
    report = check(request.path, request.overrides, run_opts=request.run_opts, run=not options.no_run, measure=measure,
                   pricing=pricing, ignore=options.ignore)
    if options.json:
        print(report.json())
    else:
        _print_report(report)
    return 1 if report.errors else 0


def _print_report(report: Report) -> None:
    """Print the tables on stdout, and what is wrong on stderr."""
    # Tables of a recipe without the overrides that were meant would mislead.
    is_as_meant = {"unknown-override", "no-value"}.isdisjoint(finding.code for finding in report.errors)
    facts = report.facts() if is_as_meant else ""
    problems = report.problems()
    if facts:
        print(facts, flush=True)
    if problems:
        print(("\n" if facts else "") + problems, file=sys.stderr, flush=True)
    print(f"\n{report.verdict()}", file=sys.stderr if report.errors else sys.stdout)


def _rehearse(argv: list[str], options: argparse.Namespace) -> int:
    """Rehearse the whole run on fake GPUs, and print what came of it."""
    from sbkit.recipe import arguments, ignoring
    from sbkit.recipe.load import check_overrides
    from sbkit.recipe.source import Place
    from sbkit.rehearsal.cards import parse_cards
    from sbkit.rehearsal.report import assemble, page, write_html
    from sbkit.rehearsal.run import rehearse

    count, card = parse_cards(options.as_)
    html: Path | None = options.html
    if html is not None:
        disk.check_writable(html, "--html")
    request = arguments.parse([*argv, "--device", "cuda"])
    if not options.json:  # JSON has these errors among its findings
        check_overrides(request.path, request.overrides)
    # The price comes first: that a corpus isn't prepared is said now, not after the rehearsal.
    price_sections, price_notes = ({}, []) if options.price is None else _priced(request, options.price, count, card)
    for note in price_notes:
        print(f"not checked: {note}", file=sys.stderr, flush=True)

    started = time.perf_counter()
    rehearsal = rehearse(argv, count, card)
    report = assemble(str(request.path), rehearsal, count, card, time.perf_counter() - started)
    ignoring.ignore(report, [ignoring.IgnoredCode(code, Place(), "--ignore") for code in options.ignore])
    report.sections |= price_sections
    report.notes += price_notes
    print(report.json() if options.json else page(report))
    if html is not None:
        try:
            write_html(report, html)
        except OSError as error:
            raise disk.unwritable(html, "--html", error) from error
    return 1 if report.errors else 0


def _priced(request: CommandLine, rate: float, count: int, card: Card) -> tuple[dict[str, Section], list[str]]:
    """The table of the price on so many cards, and why there is none."""
    from sbkit.recipe.check import check
    from sbkit.recipe.price import PriceRequest

    pricing = PriceRequest(rate, count, card.name, {card.name: card.watts})
    report = check(request.path, request.overrides, run_opts=request.run_opts, pricing=pricing)
    sections = {name: section for name, section in report.sections.items() if name == "price"}
    return sections, [note for note in report.notes if note.startswith("the price")]
