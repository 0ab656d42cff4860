"""What the plots of all benchmarks share: no display, one style, a PNG and an SVG of each."""

from __future__ import annotations

import textwrap
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

from benchmarks.files import whole

matplotlib.use("Agg")
import matplotlib.pyplot as plt

# For print. The same results give the same SVG: its identifiers come from a fixed salt.
plt.rcParams.update({
    "font.size": 9, "axes.titlesize": 9, "legend.fontsize": 8, "axes.spines.top": False,
    "axes.spines.right": False, "legend.frameon": False, "svg.hashsalt": "results",
})  # fmt: skip


def title(text: str, inches: float) -> str:
    """Wrapped to the width of a figure, at a font size of 9."""
    return textwrap.fill(text, int(13 * inches))


def save(figure: Figure, name: Path) -> None:
    """As name.png and name.svg. The same results give the same bytes: no date, no version."""
    for suffix, metadata in ((".png", {"Software": None}), (".svg", {"Date": None})):
        with whole(name.with_name(name.name + suffix)) as unfinished:
            figure.savefig(unfinished, dpi=200, metadata=metadata)
    plt.close(figure)
