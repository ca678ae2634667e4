"""graphport, llama.cpp, onnxruntime-genai and transformers eager: the same weights, prompts, threads and machine.

    python benchmarks/compare.py MODEL.gguf BUNDLE... [--peers llama.cpp,genai] [--out FILE.md]

Every system is a process of its own, in an environment of its own that is made when it is not there. Writes FILE.md,
FILE.png and FILE.json: decode and prefill, KL divergence to fp32, peak memory, load time, time to the first token.
transformers eager is always run: it is the reference. `--peers none` leaves the others out. How it measures stands in
docs/benchmarks.md.
"""

import argparse
import datetime
import shlex
import sys
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from comparison import Comparison, ExportCost, Facts, Fidelity
from comparison_plot import new_figure, write_plot
from comparison_report import markdown
from machine import commit, describe_machine
from options import add_shared_options, clock, count, lengths
from peer_environments import environment, genai_model
from peer_process import PeerError, System
from rounds import Plan, Quiet, ask_once, measure_rounds, measure_starts, opening, write_logits

from graphport.export.parity import compare
from graphport.model_def.parity_text import PARITY_TEXT
from graphport.runtime.bundle_files import open_bundle
from graphport.runtime.tokenizer import Tokenizer

REFERENCE = "transformers eager fp32"
FIDELITY_TOKENS = 400


def main() -> int:
    arguments = _arguments()
    try:
        if arguments.out is not None:
            new_figure(1, 1)  # fails now, not after the measurement
        result = _compare(arguments)
    except (PeerError, ValueError, OSError, ImportError) as error:
        print(f"compare: error: {error}", file=sys.stderr)
        return 1
    text = markdown(result)
    print(text, end="")
    if arguments.out is not None:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.with_suffix(".json").write_text(result.to_json(), encoding="utf-8")
        write_plot(result, arguments.out.with_suffix(".png"))
        picture = f"\n![decode and prefill by context]({arguments.out.with_suffix('.png').name})\n"
        arguments.out.write_text(text + picture, encoding="utf-8")
    return 0


def _compare(arguments: argparse.Namespace) -> Comparison:
    systems = {system.name: system for system in _systems(arguments)}
    context = max(arguments.prompts) + arguments.new_tokens
    opened = {name: _open(system, threads=arguments.threads, context=context) for name, system in systems.items()}
    sizes = {name: reply["vocab_size"] for name, reply in opened.items()}
    if len(set(sizes.values())) > 1:
        raise ValueError(f"the models differ in vocabulary, so they are not the same model: {sizes}")
    english = _english(arguments.bundles)
    fidelities = _fidelities(systems, english, threads=arguments.threads)
    plan = Plan(
        systems=systems,
        prompts=arguments.prompts,
        new_tokens=arguments.new_tokens,
        rounds=arguments.rounds,
        threads=arguments.threads,
        vocab_size=sizes[REFERENCE],
        clock=arguments.clock,
    )
    quiet = Quiet(max_others=arguments.max_others, patience_s=arguments.patience)
    costs = {} if arguments.no_export else _export_costs(systems, arguments, quiet)
    starts, runs = measure_starts(plan, quiet), measure_rounds(plan, quiet)
    facts = {
        name: Facts(
            versions=opened[name]["versions"],
            model=system.model.name,
            disk_bytes=_size(system.model),
            fidelity=fidelities.get(name),
            cost=costs.get(name),
        )
        for name, system in systems.items()
    }
    return Comparison(
        title=arguments.source.name,
        date=datetime.date.today().isoformat(),
        machine=describe_machine(),
        commit=commit(),
        command=f"python {shlex.join(sys.argv)}",
        threads=arguments.threads,
        clock=plan.clock,
        new_tokens=arguments.new_tokens,
        fidelity_tokens=len(english),
        max_others=arguments.max_others,
        redone=quiet.redone,
        reference=REFERENCE,
        bundles=tuple(_bundle_name(bundle) for bundle in arguments.bundles),
        facts=facts,
        runs=tuple(runs),
        starts=tuple(starts),
    )


def _open(system: System, *, threads: int, context: int) -> dict[str, Any]:
    """What a system says of itself: `vocab_size`, `versions`. Its files are in the page cache from now on."""
    reply, _ = ask_once(system, opening(system, threads=threads, context=context), threads=threads)
    return reply


def _systems(arguments: argparse.Namespace) -> list[System]:
    here, place = Path(sys.executable), arguments.environments
    systems = [
        System(name=_bundle_name(bundle), python=here, script="peer_graphport.py", model=bundle)
        for bundle in arguments.bundles
    ]
    if "llama.cpp" in arguments.peers:
        python = environment("llama_cpp", place)
        default = System(name="llama.cpp", python=python, script="peer_llama_cpp.py", model=arguments.source)
        off = replace(default, name="llama.cpp, flash attention off", options={"flash_attention": "off"})
        systems += [default, off]
    if "genai" in arguments.peers:
        python = environment("genai", place)
        model = genai_model(arguments.source, python, place)
        systems.append(System(name="onnxruntime-genai int4", python=python, script="peer_genai.py", model=model))
    return [*systems, System(name=REFERENCE, python=here, script="peer_transformers.py", model=arguments.source)]


def _bundle_name(bundle: Path) -> str:
    return f"graphport {bundle.name}"


def _english(bundles: list[Path]) -> list[int]:
    """Tokens of the parity text, as many as every bundle holds."""
    longest = min(open_bundle(bundle).manifest.max_length for bundle in bundles)
    return Tokenizer.load(bundles[0]).encode(PARITY_TEXT)[: min(FIDELITY_TOKENS, longest - 1)]


def _fidelities(systems: dict[str, System], ids: list[int], *, threads: int) -> dict[str, Fidelity]:
    """How close each system but the reference comes to it on the same tokens."""
    with tempfile.TemporaryDirectory() as folder:
        reference = Path(folder) / "reference.npy"
        write_logits(systems[REFERENCE], ids, reference, threads=threads)
        found = {}
        for name, system in systems.items():
            if name != REFERENCE:
                file = Path(folder) / "candidate.npy"
                write_logits(system, ids, file, threads=threads)
                difference = compare(np.load(reference, mmap_mode="r"), np.load(file, mmap_mode="r"))
                found[name] = Fidelity(kl=difference.kl, top1=difference.top1)
    return found


def _export_costs(systems: dict[str, System], arguments: argparse.Namespace, quiet: Quiet) -> dict[str, ExportCost]:
    """Each bundle made once more from the source, at its precision."""
    costs = {}
    for bundle in arguments.bundles:
        name = _bundle_name(bundle)
        print(f"export: {name}", file=sys.stderr)
        precision = open_bundle(bundle).manifest.precision
        request = {"command": "export", "source": str(arguments.source), "precision": precision}
        with tempfile.TemporaryDirectory(dir=bundle.resolve().parent) as folder:
            export = quiet.measured(
                partial(ask_once, systems[name], request | {"folder": folder}, threads=arguments.threads)
            )
        costs[name] = ExportCost(export_s=export["export_s"], peak_bytes=export["peak_bytes"], read_s=export["read_s"])
    return costs


def _size(model: Path) -> int:
    files = [model] if model.is_file() else [path for path in model.rglob("*") if path.is_file()]
    return sum(path.stat().st_size for path in files)


PEERS = ("llama.cpp", "genai")


def _peers(text: str) -> tuple[str, ...]:
    names = () if text == "none" else tuple(text.split(","))
    unknown = [name for name in names if name not in PEERS]
    if unknown:
        raise argparse.ArgumentTypeError(f"unknown peer {unknown[0]!r}; known are {', '.join(PEERS)}, or none")
    return names


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "source", type=Path, help="the .gguf file, or Hugging Face folder, that the bundles were made from"
    )
    parser.add_argument("bundles", type=Path, nargs="+", metavar="bundle")
    parser.add_argument("--peers", type=_peers, default=PEERS, metavar="NAME,...", help="llama.cpp, genai, or none")
    parser.add_argument("--environments", type=Path, default=Path("build/peers"), help="where the peers are installed")
    parser.add_argument("--prompts", type=lengths, default=(32, 512, 2048), metavar="N,...")
    parser.add_argument("--new-tokens", type=count, default=64)
    parser.add_argument("--no-export", action="store_true", help="do not time exporting the bundles")
    add_shared_options(parser, rounds=5)
    arguments = parser.parse_args()
    arguments.clock = clock(parser, arguments)
    _check(parser, arguments)
    return arguments


def _check(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    if not arguments.source.exists():
        parser.error(
            f"{arguments.source} is no .gguf file or folder; for a hub id, give the folder that `hf download` fetched"
        )
    if "llama.cpp" in arguments.peers and arguments.source.suffix != ".gguf":
        parser.error(f"llama.cpp reads .gguf files, got {arguments.source}; leave it out with --peers genai")
    names = [bundle.name for bundle in arguments.bundles]
    if len(set(names)) < len(names):
        parser.error(f"the bundles' folders need different names for the table, got {', '.join(names)}")
    if arguments.new_tokens < 2:
        parser.error("--new-tokens must be at least 2 to time decoding")


if __name__ == "__main__":
    sys.exit(main())
