"""The two pictures of a result: a roofline, and tokens a second over M. matplotlib draws them."""

import re


class NoPicture(Exception):
    """There is nothing to draw, or nothing to draw with."""


def draw(document, prefix):
    """Write ``PREFIX-roofline.png`` and ``PREFIX-tokens.png`` of a result; a picture without rows is not written.

    Raises
    ------
    NoPicture
        matplotlib is not installed, or the result has rows for neither picture.
    """
    try:
        import matplotlib
    except ImportError:
        raise NoPicture("matplotlib is not installed (pip install 'pagedkv[bench]')") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    if document["quick"]:
        raise NoPicture("a quick run's figures are worth nothing, so they are not drawn")
    drawn = []
    for name, paint in (("roofline", roofline), ("tokens", tokens)):
        figure = paint(document, pyplot)
        if figure is not None:
            figure.savefig(f"{prefix}-{name}.png", dpi=150, bbox_inches="tight")
            pyplot.close(figure)
            drawn.append(f"{prefix}-{name}.png")
    if not drawn:
        raise NoPicture("the result has no rows of matmul, attention or decode")
    print("wrote", " and ".join(drawn))


def subtitle(document):
    machine = document["machine"]
    return (f"{machine['cpu']}, {machine['isa']}, {machine['threads']} threads, {document['model']}, "
            f"pagedkv {machine['pagedkv']} ({machine['commit']})")  # fmt: skip


def rows_of(row):
    """M of a row, from its shape; None where it has none."""
    found = re.match(r"M=(\d+)", row["shape"])
    return int(found.group(1)) if found else None


# Groups of rows in the roofline: what their names begin with, and how they look.
GROUPS = (("matmul", "matmul float32", "o", "tab:blue"), ("codes", "matmul, other weight types", "s", "tab:cyan"),
          ("attention", "attention", "^", "tab:orange"), ("decode", "decode, whole step", "D", "tab:green"),
          ("prefill", "prefill", "*", "tab:red"))  # fmt: skip


def group_of(row):
    name = row["name"]
    if name.startswith("matmul"):
        return "codes" if re.search(r"matmul (q|f16|bf16)\w*$", name) and name != "matmul qkv" else "matmul"
    if name in ("paged_attention", "attention step"):
        return "attention"
    return name.split()[0]


def roofline(document, pyplot):
    """Operations a byte against GFLOP/s, under the two ceilings of the run."""
    rows = [row for row in document["rows"] if row["engine"] == "pagedkv" and row["section"] in ("kernels", "decode")
            and row["nbytes"] and row["operations"] and row["cold"]]  # fmt: skip
    probes = document["probes"]
    if not rows or not probes:
        return None
    read = sorted(probe["read_gb_s"] for probe in probes)
    fma = max(probe["fma_gflop_s"] for probe in probes)
    figure, axes = pyplot.subplots(figsize=(9, 6))
    for group, label, marker, colour in GROUPS:
        mine = [row for row in rows if group_of(row) == group]
        axes.plot([row["operations"] / row["nbytes"] for row in mine], [row["gflop_s"] for row in mine], marker,
                  color=colour, label=label, markersize=6, alpha=0.75, markeredgewidth=0)
    low = min(row["operations"] / row["nbytes"] for row in rows) / 2
    high = max(row["operations"] / row["nbytes"] for row in rows) * 2
    ridge = fma / read[-1]
    axes.plot([low, ridge, high], [low * read[-1], fma, fma], color="black", linewidth=1.2,
              label=f"ceilings: {read[-1]:.0f} GB/s, {fma:.0f} GFLOP/s (best of the run)")
    median = read[len(read) // 2]
    axes.plot([low, fma / median], [low * median, fma], color="black", linewidth=0.8, linestyle="--",
              label=f"read at its median of the run, {median:.0f} GB/s")
    axes.set(xscale="log", yscale="log", xlim=(low, high), xlabel="operations a byte",
             ylabel="GFLOP/s (median of each row)", title="Roofline")
    axes.grid(True, which="major", alpha=0.3)
    axes.legend(loc="lower right", fontsize=9)
    figure.text(0.5, -0.02, subtitle(document), ha="center", fontsize=8)
    return figure


def tokens(document, pyplot):
    """Tokens a second of all sequences together, over M: a panel for each type of weights, a line for each engine."""
    rows = [row for row in document["rows"] if row["tokens_s"] and row["name"].startswith("decode ")
            and re.fullmatch(r"M=\d+ ctx=\d+", row["shape"])]  # fmt: skip
    # With peers where there are any; a model alone has its own section.
    peers = [row for row in rows if row["section"] == "peers"]
    rows = peers or rows
    if not rows:
        return None
    shortest = min((int(row["shape"].split("ctx=")[1]) for row in rows))
    rows = [row for row in rows if row["shape"].endswith(f"ctx={shortest}")]
    kinds = list(dict.fromkeys(row["name"].removeprefix("decode ") for row in rows))
    engines = list(dict.fromkeys(row["engine"] for row in rows))
    figure, panels = pyplot.subplots(1, len(kinds), figsize=(1.5 + 3.6 * len(kinds), 4.2), sharey=True, squeeze=False)
    for axes, kind in zip(panels[0], kinds):
        for i, engine in enumerate(engines):
            mine = sorted((rows_of(row), row) for row in rows
                          if row["engine"] == engine and row["name"] == f"decode {kind}")  # fmt: skip
            if mine:
                note = mine[0][1]["note"]
                axes.plot([m for m, _ in mine], [row["tokens_s"] for _, row in mine], "o-", color=f"C{i}",
                          label=f"{engine}\n({note})" if note else engine, linewidth=1.6, markersize=5)
        axes.set(xscale="log", title=f"{kind} weights", xlabel="M, sequences decoding together")
        ticks = sorted({rows_of(row) for row in rows})
        axes.set_xticks(ticks, [str(m) for m in ticks])
        axes.minorticks_off()
        axes.grid(True, alpha=0.3)
        axes.set_ylim(bottom=0)
        axes.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.16), frameon=False)
    panels[0][0].set_ylabel(f"tokens/s, all sequences together\n(contexts of {shortest} tokens, median)")
    figure.text(0.5, 0.97, subtitle(document), ha="center", fontsize=8)
    return figure
