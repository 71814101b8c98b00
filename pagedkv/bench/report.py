"""What a run prints and writes: the header, the table, JSON, and the comparison of two files."""

import datetime
import json
import os
import platform
import subprocess
from pathlib import Path

import numpy as np

import pagedkv as pk

SCHEMA = 1


class NotAResult(Exception):
    """A file to compare is of another kind."""


COLUMNS = f"{'name':<28} {'shape':<30} {'k':>3} {'median':>9} {'best':>9} {'spread':>6} {'GB/s':>7} {'GFLOP/s':>8} " \
          f"{'limit':>5} {'of it':>6} {'tokens/s':>9}"  # fmt: skip


def cpu_model():
    """The processor's own name for itself, or what Python knows of it."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    if platform.system() == "Darwin":
        name = _output("sysctl", "-n", "machdep.cpu.brand_string")
        if name:
            return name
    return platform.processor() or platform.machine()


def _output(*command):
    """What a command prints, stripped; empty if it fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def commit():
    """The commit of the source tree, ``+`` behind it where files differ from it; ``"unknown"`` outside git."""
    root = Path(__file__).resolve().parents[2]
    # An installed package may lie in some other tree under git.
    name = (root / "setup.py").is_file() and _output("git", "-C", str(root), "rev-parse", "--short=12", "HEAD")
    if not name:
        return "unknown"
    return name + ("+" if _output("git", "-C", str(root), "status", "--porcelain", "--untracked-files=no") else "")


def huge_pages():
    """The system's setting of transparent huge pages, or ``"unknown"``."""
    try:
        setting = Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text()
        return setting.partition("[")[2].partition("]")[0]
    except OSError:
        return "unknown"


def machine():
    """Everything about machine and software that a figure depends on."""
    return {
        "cpu": cpu_model(),
        "n_cpus": os.cpu_count(),
        "isa": pk.isa(),
        "available_isas": pk.available_isas(),
        "threads": pk.get_num_threads(),
        "huge_pages": huge_pages(),
        "commit": commit(),
        "pagedkv": pk.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()}",
        "load_average": list(os.getloadavg()) if hasattr(os, "getloadavg") else None,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def print_header(info):
    print(f"cpu       {info['cpu']}, {info['n_cpus']} CPUs, huge pages: {info['huge_pages']}")
    print(f"pagedkv   {info['pagedkv']}, commit {info['commit']}, isa {info['isa']} "
          f"(of {', '.join(info['available_isas'])}), threads {info['threads']}")
    print(f"software  Python {info['python']}, numpy {info['numpy']}, {info['system']}")
    load = info["load_average"]
    print(f"when      {info['date']}, load average {' '.join(f'{x:.2f}' for x in load) if load else 'unknown'}")
    if load and load[0] > 0.5:
        print("          (other work is running: absolute figures, and fractions too, are worth little)")


def seconds(s):
    """Three figures and a unit."""
    for scale, unit in ((1, "s"), (1e-3, "ms"), (1e-6, "us")):
        if s >= scale:
            return f"{s / scale:.3g} {unit}" if s / scale < 100 else f"{s / scale:.0f} {unit}"
    return f"{s * 1e9:.0f} ns"


def _number(x, form):
    return "-" if x is None else format(x, form)


def label(name, engine):
    """A row's name, with the engine's where that is not pagedkv."""
    return name if engine == "pagedkv" else f"{name}, {engine}"


def print_row(row):
    t = row.timing
    fraction = row.fraction
    print(f"{label(row.name, row.engine):<28} {row.shape:<30} {t.k:>3} {seconds(t.median_s):>9} {seconds(t.best_s):>9} "
          f"{t.spread:>6.1%} {_number(row.gb_s, '.1f'):>7} {_number(row.gflop_s, '.1f'):>8} {row.limit or '-':>5} "
          f"{_number(fraction, '.0%'):>6} {_number(row.tokens_s, '.1f'):>9}", flush=True)


def print_section(name, columns=True):
    print(f"\n{name}" + (f"\n{COLUMNS}" if columns else ""))


def print_probe(number, probe):
    print(f"  ceilings #{number} at {probe.at_s:.0f} s: {probe.read_gb_s:.1f} GB/s (median "
          f"{probe.read_median_gb_s:.1f}), {probe.fma_gflop_s:.1f} GFLOP/s (median "
          f"{probe.fma_median_gflop_s:.1f}), best of {probe.k}", flush=True)


def print_health(found):
    if not found:
        return
    print("\nthe project's targets, scaled from 28 GB/s and 230 GFLOP/s to the ceilings here (information only)")
    for item in found:
        print(f"  M={item['m']:<3} {item['tokens_s']:8.1f} tokens/s, target {item['target_tokens_s']:.1f} "
              f"(limit here: {item['limit']}): {'met' if item['met'] else 'missed'}")


def print_skipped(what, why):
    print(f"  skipped {what}: {why}", flush=True)


def same_bits_words(item):
    """A cell of the table of the same bits."""
    ids = "same ids" if item["same_ids"] else f"ids differ from token {item['parted_at'] + 1}"
    if item["same_bits"] is None:
        return ids
    if item["same_bits"]:
        return "same bits"
    difference = f"differs by {item['max_difference']:.2g}"
    return difference if item["what"].startswith("matmul") else f"{difference}, {ids}"


def print_same_bits(items):
    """One engine's line: the fixed row under each M and thread count, beside the first."""
    words = [f"M={item['m']} threads={item['threads']}: {same_bits_words(item)}" for item in items[1:]]
    print(f"{items[0]['what']}, {items[0]['engine']}" + (f" ({items[0]['note']})" if items[0]["note"] else ""))
    print("".join(f"    {each}\n" for each in words), end="", flush=True)


def write_json(file, document):
    """Write a document whole or not at all: where the disk is full, a file that was there before stays."""
    path, text = Path(file), json.dumps(document, indent=1) + "\n"
    if path.exists() and (path.is_symlink() or not path.is_file()):  # /dev/stdout, for one
        path.write_text(text)
        return
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        unfinished.write_text(text)
        os.replace(unfinished, path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise


def read_json(file):
    """A document that :func:`write_json` wrote."""
    try:
        document = json.loads(Path(file).read_text())
    except ValueError:
        document = None
    if not isinstance(document, dict) or document.get("schema") != SCHEMA:
        raise NotAResult(f"{file} is not a result of this benchmark (schema {SCHEMA})")
    return document


def compare(file_a, file_b):
    """Print the ratio of two runs, row by row. Over 1: the second run is faster."""
    a, b = read_json(file_a), read_json(file_b)
    for key in ("cpu", "isa", "threads", "commit", "pagedkv", "numpy", "huge_pages", "date"):
        old, new = a["machine"].get(key), b["machine"].get(key)
        print(f"{key:<10} {old}" if old == new else f"{key:<10} {old}  ->  {new}")
    for key in ("model", "quick"):
        if a[key] != b[key]:
            print(f"{key:<10} {a[key]}  ->  {b[key]}  (sizes differ)")
    rows_a, rows_b = ({(r["engine"], r["section"], r["name"], r["shape"]): r for r in d["rows"]} for d in (a, b))
    print(f"\n{'name':<28} {'shape':<30} {'A median':>9} {'B median':>9} {'A/B':>6} {'A/B best':>8} "
          f"{'A of it':>7} {'B of it':>7} {'ratio':>6}")
    for key, row_a in rows_a.items():
        row_b = rows_b.get(key)
        if row_b is None:
            continue
        fractions = row_a["fraction"], row_b["fraction"]
        ratio = fractions[1] / fractions[0] if all(fractions) else None
        print(f"{label(key[2], key[0]):<28} {key[3]:<30} {seconds(row_a['median_s']):>9} "
              f"{seconds(row_b['median_s']):>9} {row_a['median_s'] / row_b['median_s']:>6.2f} "
              f"{row_a['best_s'] / row_b['best_s']:>8.2f} {_number(fractions[0], '.0%'):>7} "
              f"{_number(fractions[1], '.0%'):>7} {_number(ratio, '.2f'):>6}")
    for file, some, other in (("A", rows_a, rows_b), ("B", rows_b, rows_a)):
        only = [f"{label(key[2], key[0])} {key[3]}" for key in some if key not in other]
        if only:
            print(f"\nonly in {file}: {'; '.join(only)}")
