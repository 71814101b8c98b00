"""The picture of a PoolMap, in the colours of the server's page. matplotlib draws it: ``pip install "pagedkv[plot]"``."""

import io
import math

import numpy as np

# As in server/page.html: hues far apart, in turn for the requests; lightness and chroma for 1, 2, 3 to 4, 5 to 8 and more
# sequences that share a block, on light and on dark ground.
HUES = (255, 55, 150, 320, 200, 25, 100, 290)
LIGHTNESS = {False: (0.82, 0.72, 0.62, 0.53, 0.44), True: (0.42, 0.52, 0.62, 0.72, 0.82)}
CHROMA = (0.085, 0.115, 0.14, 0.15, 0.15)
TONES = {False: {"back": "#ffffff", "ink": "#1b1f26", "soft": "#5a6270", "free": "#edeff2", "cache": "#9aa3b0"},
         True: {"back": "#181c23", "ink": "#e6e9ee", "soft": "#9aa4b2", "free": "#222731", "cache": "#66707e"}}  # fmt: skip
MOST_LISTED = 12  # requests
INCHES = 0.3  # a cell, where there are few


def check_matplotlib():
    """
    Raises
    ------
    ImportError
        matplotlib is not installed; the message says how it is.
    """
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ImportError('a picture of the pool needs matplotlib, which is not installed: pip install "pagedkv[plot]"') from None


def draw_pool(pool_map, dark=False):
    """The picture of a PoolMap, a ``matplotlib.figure.Figure``; see :meth:`PoolMap.figure`."""
    check_matplotlib()
    from matplotlib.figure import Figure

    tones, used = TONES[dark], np.flatnonzero(pool_map.ref_counts)
    n_used = int(used[-1]) + 1 if used.size else 0
    n_columns = 32 if n_used <= 1024 else 64 if n_used <= 4096 else 128
    n_shown = min(pool_map.n_blocks, n_columns * max(1, -(-n_used // n_columns)))
    n_rows = -(-n_shown // n_columns)
    lines = _request_lines(pool_map)
    cell = INCHES * 32 / n_columns
    width, top, bottom = INCHES * 32 + 0.6, 0.75, 0.85 + 0.24 * len(lines)
    height = top + cell * n_rows + bottom
    figure = Figure(figsize=(width, height), facecolor=tones["back"])
    axes = figure.add_axes((0.3 / width, bottom / height, 1 - 0.6 / width, cell * n_rows / height))
    axes.set(xlim=(0, n_columns), ylim=(n_rows, 0))
    axes.axis("off")
    filled = pool_map.n_filled / pool_map.block_size
    looks = [_look(pool_map, block_id, owners, float(filled[block_id]))
             for block_id, owners in enumerate(_owners(pool_map)[:n_shown])]  # fmt: skip
    _draw_cells(axes, [(i % n_columns, i // n_columns) for i in range(n_shown)], looks, 1.0, dark, 65 * cell)

    def write(x, inches, text, size=10, colour="ink", **options):
        """Text at `inches` from the figure's top."""
        figure.text(x / width, 1 - inches / height, text, fontsize=size, color=tones[colour], va="center", **options)

    n_held = int(np.count_nonzero(pool_map.n_owners))
    write(0.3, 0.25, _headline(n_held, pool_map.n_saved), 13, weight="bold")
    rest = pool_map.n_blocks - n_shown
    write(0.3, 0.52, f"Each square is a block of {pool_map.block_size} tokens" + (f"; {rest:,} more are free and not shown"
                     if rest else ""), 9, "soft")  # fmt: skip
    _draw_legend(figure, top + cell * n_rows + 0.2, width, height, dark, write)
    for i, (number, text) in enumerate(lines):
        y = top + cell * n_rows + 0.75 + 0.24 * i
        if number is not None:
            mark = figure.add_axes((0.3 / width, 1 - (y + 0.07) / height, 0.14 / width, 0.14 / height))
            mark.axis("off")
            mark.set_facecolor("none")
            mark.add_patch(_rectangle(0, 0, 1, 1, _colour(_hue(number), 2, dark)))
        write(0.52, y, text, 9)
    return figure


def png(figure):
    """Bytes of a PNG file."""
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=100, facecolor=figure.get_facecolor())
    return file.getvalue()


def _headline(n_held, n_saved):
    if not n_saved:
        return f"{n_held:,} blocks held by sequences, none of them shared"
    return f"{n_held:,} blocks hold what would take {n_held + n_saved:,} without sharing: {n_saved:,} saved"


def _owners(pool_map):
    """The samples that hold each block."""
    owners = [[] for _ in range(pool_map.n_blocks)]
    for sample in pool_map.samples:
        for block_id in sample.block_table.tolist():
            owners[block_id].append(sample)
    return owners


def _request_lines(pool_map):
    """(number or None, text) of a line for each request."""
    requests, n_owners = {}, pool_map.n_owners
    for sample in pool_map.samples:
        requests.setdefault(sample.number, []).append(sample)
    lines = []
    for number, samples in list(requests.items())[:MOST_LISTED]:
        held = np.unique(np.concatenate([sample.block_table for sample in samples]))
        states = ", ".join(f"{n} {state}" for state in ("running", "waiting", "preempted")
                           if (n := sum(sample.state == state for sample in samples)))  # fmt: skip
        n_tokens = sum(sample.n_tokens - sample.n_prompt for sample in samples)
        lines.append((number, f"request {number}: prompt of {samples[0].n_prompt:,} tokens, {states}, {n_tokens:,} tokens so "
                      f"far, {len(held):,} blocks, {np.count_nonzero(n_owners[held] > 1):,} of them shared"))  # fmt: skip
    if len(requests) > MOST_LISTED:
        lines.append((None, f"and {len(requests) - MOST_LISTED} requests more"))
    return lines


def _look(pool_map, block_id, owners, full):
    hues = list(dict.fromkeys(_hue(sample.number) for sample in owners))[:4]
    copied = any(sample.copied is not None and sample.copied[0] == block_id for sample in owners)
    return {"hues": hues, "n": len(owners), "full": full, "cached": bool(pool_map.cached[block_id]), "copied": copied,
            "outside": int(pool_map.ref_counts[block_id]) > len(owners) + int(pool_map.cached[block_id])}  # fmt: skip


def _hue(number):
    return HUES[number % len(HUES)]


def _level(n):
    return min(4, math.ceil(math.log2(n))) if n > 1 else 0


def _draw_cells(axes, places, looks, size, dark, points):
    """Cells with their upper left corners at `places`, `points` of type high."""
    from matplotlib.collections import PatchCollection
    from matplotlib.patches import Polygon

    tones, side, patches, colours = TONES[dark], 0.9 * size, [], []

    def add(patch, colour):
        patches.append(patch)
        colours.append(colour)

    for (x, y), look in zip(places, looks):
        ink = tones["back"] if (_level(look["n"]) >= 2) != dark else "#14171c"
        if not look["n"]:
            add(_rectangle(x, y, side, side), tones["cache" if look["cached"] else "free"])
        for i, hue in enumerate(look["hues"]):
            width, full = side / len(look["hues"]), side * look["full"]
            add(_rectangle(x + i * width, y, width, side), _colour(hue, 0, dark, empty=True))
            add(_rectangle(x + i * width, y + side - full, width, full), _colour(hue, _level(look["n"]), dark))
        if look["copied"]:
            add(Polygon([(x, y), (x + 0.4 * side, y), (x, y + 0.4 * side)]), tones["ink"])
        if look["outside"]:
            add(_rectangle(x + side / 3, y + side / 3, side / 3, side / 3), tones["ink"])
        if look["cached"] and look["n"]:
            add(_rectangle(x + 0.78 * side, y + 0.78 * side, 0.14 * side, 0.14 * side), ink)
        if look["n"] > 1 and points > 4:
            axes.text(x + side / 2, y + side / 2, look["n"], fontsize=0.5 * points, color=ink, ha="center",
                      va="center_baseline", weight="bold")  # fmt: skip
    axes.add_collection(PatchCollection(patches, facecolors=colours, edgecolors="none", linewidths=0))


def _draw_legend(figure, inches, width, height, dark, write):
    hue = HUES[0]
    plain = {"hues": [hue], "n": 1, "full": 1.0, "cached": False, "copied": False, "outside": False}
    entries = [("free", plain | {"hues": [], "n": 0}), ("1 sequence", plain), ("shared by 2", plain | {"n": 2}),
               ("by 4", plain | {"n": 4}), ("by 9 or more", plain | {"n": 9}),
               ("by two requests", plain | {"hues": [hue, HUES[1]], "n": 2}), ("being filled", plain | {"full": 0.4}),
               ("copied to append", plain | {"copied": True, "full": 0.5}),
               ("kept prefix", plain | {"hues": [], "n": 0, "cached": True})]  # fmt: skip
    strip = figure.add_axes((0, 1 - (inches + 0.25) / height, 1, 0.25 / height))
    strip.set(xlim=(0, width), ylim=(0.25, 0))
    strip.axis("off")
    x, places = 0.3, []
    for text, _ in entries:
        places.append((x, 0.02))
        write(x + 0.26, inches + 0.12, text, 8, "soft")
        x += 0.42 + 0.066 * len(text)
    _draw_cells(strip, places, [look for _, look in entries], 0.22, dark, 0.22 * 70)


def _rectangle(x, y, width, height, colour=None):
    from matplotlib.patches import Rectangle

    return Rectangle((x, y), width, height, facecolor=colour, linewidth=0)


def _colour(hue, level, dark, empty=False):
    """OKLCH in sRGB (Ottosson 2020), three numbers in [0, 1]."""
    lightness, chroma = ((0.32, 0.045) if dark else (0.94, 0.03)) if empty else (LIGHTNESS[dark][level], CHROMA[level])
    a, b = chroma * math.cos(math.radians(hue)), chroma * math.sin(math.radians(hue))
    l, m, s = ((lightness + x * a + y * b) ** 3 for x, y in (
        (0.3963377774, 0.2158037573), (-0.1055613458, -0.0638541728), (-0.0894841775, -1.2914855480)))  # fmt: skip
    linear = (4.0767416621 * l - 3.3077115913 * m + 0.2309699292 * s,
              -1.2684380046 * l + 2.6097574011 * m - 0.3413193965 * s,
              -0.0041960863 * l - 0.7034186147 * m + 1.7076147010 * s)  # fmt: skip
    return tuple(min(1.0, max(0.0, 12.92 * v if v <= 0.0031308 else 1.055 * v ** (1 / 2.4) - 0.055)) for v in linear)
