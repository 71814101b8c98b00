"""``python -m bench``: measure, print, and write or compare JSON."""

import argparse
import sys
from contextlib import contextmanager
from pathlib import Path

import pagedkv as pk
from bench import ceilings, decode, kernels, models, report
from bench.measure import QUICK, CheckFailed, Effort

SECTIONS = ("ceilings", "kernels", "decode")


def parse(arguments):
    parser = argparse.ArgumentParser(prog="python -m bench", description="Time pagedkv beside this machine's limits.")
    parser.add_argument("section", nargs="?", default="all", choices=(*SECTIONS, "all"))
    parser.add_argument("--quick", action="store_true", help="small sizes, few repetitions: a smoke test")
    parser.add_argument("--threads", type=int, metavar="N", help="threads; by default those of pagedkv")
    parser.add_argument("--model", metavar="PATH_OR_NAME", help=f"model to decode with, and whose shapes the kernels "
                        f"get; {models.DEFAULT_MODEL} by default")
    parser.add_argument("--json", metavar="FILE", help="write the results")
    parser.add_argument("--compare", nargs=2, metavar=("A.json", "B.json"), help="print ratios of two results; "
                        "nothing is measured")
    options = parser.parse_args(arguments)
    if options.threads is not None and options.threads < 1:
        parser.error(f"--threads must be at least 1, not {options.threads}")
    if options.json and not Path(options.json).resolve().parent.is_dir():
        parser.error(f"--json: there is no directory for {options.json}")  # now, not after minutes
    return options


class Run:
    """Rows and probes of one run, printed as they come."""

    def __init__(self, probe_with):
        self.ceilings = probe_with
        self.rows = []
        self.probes = []
        self.take_probe()

    def take_probe(self):
        if self.ceilings is not None:
            self.probes.append(self.ceilings.probe())
            report.print_probe(len(self.probes) - 1, self.probes[-1])

    @contextmanager
    def group(self):
        """Rows of one minute of the machine's life: the ceilings of before and after are theirs."""
        begun = []
        yield begun.append
        before = len(self.probes) - 1
        if self.ceilings is not None:
            self.probes.append(self.ceilings.probe())
        numbers = range(before, before + 2) if self.probes else ()
        for row in begun:
            row.limit_by([self.probes[i] for i in numbers], numbers)
            report.print_row(row)
        self.rows += begun
        if self.probes:
            report.print_probe(len(self.probes) - 1, self.probes[-1])


def measure(options):
    """Run the sections asked for; the document for JSON."""
    if options.threads is not None:
        pk.set_num_threads(options.threads)
    effort = QUICK if options.quick else Effort()
    info = report.machine()
    report.print_header(info)
    if options.quick:
        print("quick: a smoke test, the figures are worth nothing")
    shapes = models.find_shapes(options.model)
    skipped = None
    try:
        probe_with = ceilings.Ceilings(info["threads"], effort)
    except ceilings.NoCeilings as error:
        probe_with, skipped = None, str(error)
        print(f"ceilings skipped: {skipped}; rows come without a limit")
    run = Run(probe_with)
    sections = SECTIONS if options.section == "all" else (options.section,)
    for section in sections:
        report.print_section(section)
        if section == "ceilings":
            ceilings.run(probe_with, effort, run.group)
        elif section == "kernels":
            kernels.run(shapes, effort, run.group)
        else:
            decode.run(options.model, effort, run.group)
    health = decode.health(run.rows) if shapes == models.Shapes() else []
    report.print_health(health)
    return {
        "schema": report.SCHEMA,
        "machine": info,
        "model": options.model or models.DEFAULT_MODEL,
        "quick": options.quick,
        "sections": list(sections),
        "ceilings_skipped": skipped,
        "probes": [probe.as_dict() for probe in run.probes],
        "rows": [row.as_dict() for row in run.rows],
        "health": health,
    }


def main(arguments=None):
    options = parse(arguments)
    try:
        if options.compare:
            report.compare(*options.compare)
            return 0
        document = measure(options)
        if options.json:
            report.write_json(options.json, document)
        return 0
    except CheckFailed as error:
        print(f"bench: {error}", file=sys.stderr)
        return 1
    except (pk.ModelNotFound, pk.FormatError, report.NotAResult, OSError) as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
