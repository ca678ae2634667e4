"""A comparison as a picture: decode and prefill by context.

In: a Comparison. Out: a PNG. Systems differ by marker, dash and grey level as well as by colour. Only the files of
plots need matplotlib.
"""

from pathlib import Path
from typing import TYPE_CHECKING

from comparison import Comparison

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Colour (dark to light, so that greys differ too), dash, marker.
STYLES = (
    ("#000000", "-", "o"),
    ("#8c1d40", "-", "s"),
    ("#1f5fa8", "--", "^"),
    ("#c46a00", "-.", "D"),
    ("#4f9d69", ":", "v"),
    ("#9a9a9a", "--", "x"),
)


def new_figure(width: float, height: float) -> "Figure":
    """An empty figure, in inches. Raises ImportError, naming the command that installs it, without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("a plot needs matplotlib; install it with: pip install 'graphport[bench]'") from error
    return Figure(figsize=(width, height), layout="constrained")


def write_plot(result: Comparison, file: Path) -> None:
    """Tokens a second against the prompt's length: medians, and bars from the slowest to the fastest run."""
    figure = new_figure(11, 5)
    left, right = figure.subplots(1, 2)
    for axes, phase, title in ((left, result.decode, "decode"), (right, result.prefill, "prefill")):
        for index, name in enumerate(result.facts):
            colour, dash, marker = STYLES[index % len(STYLES)]
            spreads = [phase(name, length) for length in result.prompts]
            middle = [one.median for one in spreads]
            bars = [
                [one.median - one.least for one in spreads],
                [one.most - one.median for one in spreads],
            ]
            axes.errorbar(
                result.prompts,
                middle,
                bars,
                color=colour,
                linestyle=dash,
                marker=marker,
                capsize=3,
                label=_label(result, name),
            )
        _finish(axes, f"{title}, batch 1, {result.conditions}", result.prompts)
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False)
    figure.suptitle(f"{result.title}, {result.date}")
    figure.savefig(file, dpi=130)


def _label(result: Comparison, name: str) -> str:
    fidelity = result.facts[name].fidelity
    return f"{name} (the reference)" if fidelity is None else f"{name} (KL {fidelity.kl:.2g})"


def _finish(axes: "Axes", title: str, lengths: list[int]) -> None:
    axes.set_title(title)
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [str(length) for length in lengths])
    axes.set_xlabel("tokens of the prompt")
    axes.set_ylabel("tokens a second")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
