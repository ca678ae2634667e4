"""The command `prepare`, which packs a bundle for the processor it will run on; `export` does so where it pays.

In: arguments. Out: the folder on stdout, what it holds on stderr. It computes nothing itself.
"""

from pathlib import Path

from graphport import cli_tables
from graphport.cli_options import BundlePath, Debug


def prepare(bundle: BundlePath, *, _debug: Debug = False) -> None:
    """Pack BUNDLE for this machine's processor, into BUNDLE/prepared: faster to open, and to run from a GGUF file."""
    print(pack(bundle))


def pack(bundle: Path) -> Path:
    """Pack `bundle` and say what came of it; returns the folder. Raises what `graphport.runtime.prepare` does."""
    from graphport.runtime import prepare as run_prepare

    with cli_tables.progress_lines() as progress:
        progress("packing for this processor")
        made = run_prepare(bundle)
    minima = f", minima of {made.num_minima} matrices inside the kernels" if made.num_minima else ""
    cli_tables.print_line(
        f"packed for this processor: {made.disk_bytes / 1e6:.0f} MB{minima}; KL divergence to the bundle's own graph "
        f"{made.divergence:.2g}"
    )
    return made.folder


def pack_after_export(bundle: Path) -> None:
    """Pack a bundle that was just exported; where that cannot be done here, say so: its own graph runs anyway."""
    try:
        pack(bundle)
    except (ValueError, RuntimeError, OSError) as error:
        cli_tables.print_notes((f"not packed for this processor, the bundle runs as exported: {error}",))
