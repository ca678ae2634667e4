"""Speed on one CUDA device of a random Llama of 1.2 B parameters: graphport, transformers eager and torch.compile.

    python benchmarks/gpu.py [--out FILE.md] [--work FOLDER] [--contexts 128,2048,8192]

Float16, greedy, interleaved rounds, medians. Limits are measured in the same run: bytes copied on the device, and the
rate of a float16 matrix product. `--device cpu --size tiny` runs the same code on a small model where there is no GPU.
"""

import argparse
import datetime
import importlib.metadata
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from gpu_systems import NEW_TOKENS, SIZES, Rates, Size, System, open_graphport, open_systems, transformer_config, wait

from graphport.model_def.transformer import parameter_shapes

ROUNDS = 3
PREFILL_LENGTH = 4096
BATCH = 32
BATCH_CONTEXT = 128


def main() -> None:
    arguments = _arguments()
    size, device = SIZES[arguments.size], torch.device(arguments.device)
    contexts = [int(text) for text in arguments.contexts.split(",")]
    longest = max(*contexts, PREFILL_LENGTH, BATCH_CONTEXT) + NEW_TOKENS
    bandwidth, flops = copy_bandwidth(device), product_rate(device, size.block)
    folder = arguments.work
    with open_graphport(size, arguments.device, folder=folder, max_batch=BATCH, longest=longest) as lm:
        systems = open_systems(lm, size, device, longest=longest)
        lines = _header(size, bandwidth, flops)
        lines += _decode_table(systems, contexts, limit=bandwidth / _weight_bytes(size, device))
        lines += _prefill_table(systems, size, flops)
        lines.append(_batch_line(systems["graphport"]))
    text = "\n".join(lines) + "\n"
    print(text)
    if arguments.out is not None:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(text, encoding="utf-8")


def copy_bandwidth(device: torch.device, num_bytes: int = 1 << 30) -> float:
    """Bytes read and written a second by a copy on the device."""
    source = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * num_bytes / _seconds(lambda: target.copy_(source), device)


def product_rate(device: torch.device, side: int) -> float:
    """Floating-point operations a second of a square matrix product, float16 on CUDA and float32 elsewhere."""
    dtype = torch.float16 if device.type == "cuda" else torch.float32
    left, right = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
    return 2 * side**3 / _seconds(lambda: left @ right, device)


def _seconds(work: Callable[[], object], device: torch.device, repeats: int = 10) -> float:
    for _ in range(3):
        work()
    times = []
    for _ in range(repeats):
        wait(device)
        begin = time.perf_counter()
        work()
        wait(device)
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def _measure(systems: dict[str, System], length: int, batch: int) -> dict[str, Rates]:
    """Medians over interleaved rounds, after one round that is thrown away (it compiles and captures)."""
    rounds: dict[str, list[Rates]] = {name: [] for name in systems}
    for index in range(ROUNDS + 1):
        for name, system in systems.items():
            print(f"{name}: {batch} x {length} tokens, round {index}", file=sys.stderr)
            rates = system(length, batch)
            if index:
                rounds[name].append(rates)
    return {
        name: Rates(
            prefill=statistics.median(rates.prefill for rates in found),
            decode=statistics.median(rates.decode for rates in found),
        )
        for name, found in rounds.items()
    }


def _decode_table(systems: dict[str, System], contexts: list[int], *, limit: float) -> list[str]:
    """`limit`: steps a second that reading every weight once allows, at the bytes a second that a copy moves."""
    others = [name for name in systems if name != "graphport"]
    lines = [
        f"Decode, batch 1, tokens a second; weights over bandwidth allow {limit:.0f}.",
        "",
        f"| context | graphport | of the limit | {' | '.join(f'{name} | ratio' for name in others)} |",
        f"|{'---|' * (3 + 2 * len(others))}",
    ]
    for context in contexts:
        rates = _measure(systems, context, 1)
        ours = rates["graphport"].decode
        cells = [f"{rates[name].decode:.1f} | {ours / rates[name].decode:.2f}" for name in others]
        lines.append(f"| {context} | {ours:.1f} | {ours / limit:.0%} | {' | '.join(cells)} |")
    return [*lines, ""]


def _prefill_table(systems: dict[str, System], size: Size, flops: float) -> list[str]:
    work = _prefill_flops(size, PREFILL_LENGTH)
    return [
        f"Prefill of {PREFILL_LENGTH} tokens, tokens a second, and its share of the measured matrix product rate.",
        "",
        "| system | tokens/s | share |",
        "|---|---|---|",
        *[
            f"| {name} | {rates.prefill:.0f} | {rates.prefill / PREFILL_LENGTH * work / flops:.0%} |"
            for name, rates in _measure(systems, PREFILL_LENGTH, 1).items()
        ],
        "",
    ]


def _prefill_flops(size: Size, length: int) -> float:
    """Operations of the matrix products and of causal attention; the head runs on one row."""
    heads = size.heads * size.head_dim
    layer = size.hidden * (2 * heads + 2 * size.kv_heads * size.head_dim) + 3 * size.hidden * size.width
    attention = 2 * heads * length / 2  # half of the scores are masked
    return 2 * length * size.layers * (layer + attention)


def _batch_line(graphport: System) -> str:
    one, many = (_measure({"graphport": graphport}, BATCH_CONTEXT, batch)["graphport"].decode for batch in (1, BATCH))
    return f"Batch {BATCH} at {BATCH_CONTEXT} tokens: {many:.0f} tokens/s, {many / one:.1f} times batch 1 ({one:.0f})."


def _weight_bytes(size: Size, device: torch.device) -> float:
    """Bytes of all weights; a tied table is read once a step, by the head."""
    shapes = parameter_shapes(transformer_config(size, 1)).values()
    return sum(torch.Size(shape).numel() for shape in shapes) * (2 if device.type == "cuda" else 4)


def _header(size: Size, bandwidth: float, flops: float) -> list[str]:
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "no CUDA device"
    packages = ("torch", "transformers", "onnxruntime-gpu")
    versions = ", ".join(f"{package} {importlib.metadata.version(package)}" for package in packages)
    return [
        f"# {size.layers} layers of {size.hidden} on {name}",
        "",
        f"{datetime.date.today().isoformat()}, {versions}. Command: `python {' '.join(sys.argv)}`.",
        f"A copy moves {bandwidth / 1e9:.0f} GB/s (bytes read and written), a matrix product runs at "
        f"{flops / 1e12:.2f} TFLOP/s.",
        "",
    ]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--size", choices=tuple(SIZES), default="1b")
    parser.add_argument("--contexts", default="128,2048,8192")
    parser.add_argument("--work", type=Path, default=Path("build"), help="folder of the exported bundle")
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
