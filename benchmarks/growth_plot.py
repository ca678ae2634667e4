"""The growth of decode time as a picture. In: figures by model width. Out: a PNG. Needs matplotlib."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from comparison_plot import STYLES, new_figure

if TYPE_CHECKING:
    from growth import Growth


def write_plot(found: "Mapping[int, Growth]", file: Path) -> None:
    """Left: time a token against context, a line for each width. Right: against width, a line for some contexts."""
    figure = new_figure(11, 4.5)
    left, right = figure.subplots(1, 2)
    for (width, one), (colour, dash, marker) in zip(found.items(), STYLES, strict=False):
        lengths, times = list(one.times), list(one.times.values())
        left.plot(lengths, times, color=colour, linestyle="", marker=marker, label=f"width {width}")
        left.plot(lengths, [one.a + one.b / 1000 * length for length in lengths], color=colour, linestyle=dash)
    left.set_title("by context; lines are a + b * length")
    left.set_xlabel("tokens in the cache")
    shown = list(next(iter(found.values())).times)[::2]
    for length, (colour, dash, marker) in zip(shown, STYLES, strict=False):
        times = [one.times[length] for one in found.values()]
        right.plot(
            list(found), times, color=colour, linestyle=dash, marker=marker, label=f"{length} tokens in the cache"
        )
    right.set_title("by model width")
    right.set_xlabel("width")
    for axes in (left, right):
        axes.set_ylabel("ms a new token")
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(file, dpi=130)
