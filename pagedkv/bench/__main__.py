"""``python -m bench`` and ``pagedkv bench``: measure, print, and write, compare or draw JSON."""

import argparse
import sys
from contextlib import contextmanager
from pathlib import Path

import pagedkv as pk
from pagedkv.bench import ceilings, decode, kernels, models, peers, plot, report
from pagedkv.bench.measure import QUICK, CheckFailed, Effort

SECTIONS = ("ceilings", "kernels", "decode", "peers", "bits")


def parse(arguments, prog):
    parser = argparse.ArgumentParser(prog=prog, description="Time pagedkv beside this machine's limits and its peers.")
    parser.add_argument("section", nargs="*", default="all", choices=(*SECTIONS, "all"), help="what to run: "
                        f"{', '.join(SECTIONS)}; by default all")  # fmt: skip
    parser.add_argument("--quick", action="store_true", help="small sizes, few repetitions: a smoke test")
    parser.add_argument("--threads", type=int, metavar="N", help="threads; by default those of pagedkv")
    parser.add_argument("--model", action="append", metavar="PATH_OR_NAME", help="model to decode with, and whose "
                        f"shapes the kernels get; {models.DEFAULT_MODEL} by default. Given again: more models to "
                        "decode with")  # fmt: skip
    parser.add_argument("--peers", default=",".join(peers.PEERS), metavar="NAMES", help="which peers take part: any of "
                        f"{', '.join(peers.PEERS)}, joined by commas, or none; by default all that are installed")
    parser.add_argument("--batches", metavar="M,M,...", help="only these M of decode and peers, for example 1,8")
    parser.add_argument("--files", metavar="TYPES", help="only these files of peers and bits, for example F32,Q8_0")
    parser.add_argument("--json", metavar="FILE", help="write the results")
    parser.add_argument("--compare", nargs=2, metavar=("A.json", "B.json"), help="print ratios of two results; "
                        "nothing is measured")
    parser.add_argument("--plot", nargs=2, metavar=("A.json", "PREFIX"), help="draw PREFIX-roofline.png and "
                        "PREFIX-tokens.png from a result (needs matplotlib); nothing is measured")
    options = parser.parse_args(arguments)
    options.section = SECTIONS if "all" in options.section else [s for s in SECTIONS if s in options.section]
    options.peers = [] if options.peers == "none" else options.peers.split(",")
    unknown = [name for name in options.peers if name not in peers.PEERS]
    if unknown:
        parser.error(f"--peers: there is no peer {unknown[0]!r}; known are {', '.join(peers.PEERS)}")
    try:
        options.batches = options.batches and [int(m) for m in options.batches.split(",")]
    except ValueError:
        parser.error(f"--batches takes numbers joined by commas, not {options.batches!r}")
    options.files = options.files and options.files.upper().split(",")
    if options.threads is not None and options.threads < 1:
        parser.error(f"--threads must be at least 1, not {options.threads}")
    if options.json and not Path(options.json).resolve().parent.is_dir():
        parser.error(f"--json: there is no directory for {options.json}")  # now, not after minutes
    return options


class Run:
    """Rows and probes of one run, printed as they come.

    probe_with : Ceilings or None
    batches, files : list or None
        The only M, and types of the peers' files, that are wanted.
    """

    def __init__(self, probe_with, batches=None, files=None):
        self.ceilings = probe_with
        self.batches, self.files = batches, files
        self.rows = []
        self.probes = []
        self.skipped = []
        self.peers = {}
        self.same_bits = []
        self.take_probe()

    def wants(self, m):
        """Whether rows of M = `m` are asked for."""
        return not self.batches or m in self.batches

    def skip(self, what, why):
        """Something that cannot be measured here, by name; said once."""
        if {"what": what, "why": why} not in self.skipped:
            self.skipped.append({"what": what, "why": why})
            report.print_skipped(what, why)

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
    model = options.model[0] if options.model else None
    shapes = models.find_shapes(model)
    skipped = None
    try:
        probe_with = ceilings.Ceilings(info["threads"], effort)
    except ceilings.NoCeilings as error:
        probe_with, skipped = None, str(error)
        print(f"ceilings skipped: {skipped}; rows come without a limit")
    run = Run(probe_with, options.batches, options.files)
    for section in options.section:
        if section == "bits":
            report.print_section(section, columns=False)
            peers.measure_same_bits(model, options.peers, effort, run)
            continue
        report.print_section(section)
        if section == "ceilings":
            ceilings.measure(probe_with, effort, run)
        elif section == "kernels":
            kernels.measure(shapes, effort, run)
        elif section == "decode":
            decode.measure(options.model, effort, run)
        else:
            peers.measure(model, options.peers, effort, run)
    health = decode.health(run.rows) if shapes == models.Shapes() else []
    report.print_health(health)
    return {
        "schema": report.SCHEMA,
        "machine": info,
        "model": model or models.DEFAULT_MODEL,
        "quick": options.quick,
        "sections": list(options.section),
        "ceilings_skipped": skipped,
        "skipped": run.skipped,
        "peers": run.peers,
        "probes": [probe.as_dict() for probe in run.probes],
        "rows": [row.as_dict() for row in run.rows],
        "same_bits": run.same_bits,
        "health": health,
    }


def main(arguments=None, prog="python -m bench"):
    """Run the command; its exit status."""
    options = parse(arguments, prog)
    try:
        if options.compare:
            report.compare(*options.compare)
            return 0
        if options.plot:
            plot.draw(report.read_json(options.plot[0]), options.plot[1])
            return 0
        document = measure(options)
        if options.json:
            report.write_json(options.json, document)
        return 0
    except CheckFailed as error:
        print(f"bench: {error}", file=sys.stderr)
        return 1
    except (pk.ModelNotFound, pk.FormatError, report.NotAResult, plot.NoPicture, OSError) as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
