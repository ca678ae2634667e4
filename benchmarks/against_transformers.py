"""graphport against transformers eager fp32: the same weights, prompts, threads and machine, interleaved.

    python benchmarks/against_transformers.py BUNDLE MODEL [--threads 2] [--prompts 32,512,2048] [--out FILE.md]

Rates are medians in tokens a second, batch 1, greedy. Also measured, each in a process of its own: time to load the
bundle, peak memory of `graphport generate`, time and peak memory of the export that made the bundle.
"""

import argparse
import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path

NEW_TOKENS = 32
REPEATS = 3


def main() -> None:
    arguments = _arguments()
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[name] = str(arguments.threads)
    lengths = [int(text) for text in arguments.prompts.split(",")]
    lines = [
        f"# graphport {arguments.bundle.name} against transformers eager fp32",
        "",
        f"{datetime.date.today().isoformat()}, {_machine()}, {arguments.threads} threads.",
        f"Command: `python {' '.join(sys.argv)}`, commit {_commit()}.",
        "",
        *_speed(arguments, lengths),
        "",
        *_processes(arguments),
    ]
    text = "\n".join(lines) + "\n"
    print(text)
    if arguments.out is not None:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(text, encoding="utf-8")


def _speed(arguments: argparse.Namespace, lengths: list[int]) -> list[str]:
    import torch
    import transformers
    from transformers import AutoModelForCausalLM

    from graphport.runtime import load
    from graphport.runtime.benchmark import measure_speed

    torch.set_num_threads(arguments.threads)
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    warnings.simplefilter("ignore", FutureWarning)  # transformers 5.24 renames past_key_values
    is_file = arguments.model.is_file()
    model = AutoModelForCausalLM.from_pretrained(
        arguments.model.parent if is_file else arguments.model,
        **({"gguf_file": arguments.model.name} if is_file else {}),
        dtype=torch.float32,
    ).eval()
    lines = [
        "Tokens a second, batch 1; in brackets slowest and fastest of the repeats.",
        "",
        "| prompt | prefill graphport | prefill eager | ratio | decode graphport | decode eager | ratio |",
        "|---|---|---|---|---|---|---|",
    ]
    with load(arguments.bundle, threads=arguments.threads, max_batch=1) as lm:
        measure_speed(lm, prompt_length=32, batch=1, new_tokens=4, repeats=1)  # warm
        _eager_once(model, 32, 4, seed=99)
        for length in lengths:
            print(f"prompts of {length} tokens", file=sys.stderr)
            ours: list[tuple[float, float]] = []
            theirs: list[tuple[float, float]] = []
            for repeat in range(REPEATS):
                row = measure_speed(lm, prompt_length=length, batch=1, new_tokens=NEW_TOKENS, repeats=1, seed=repeat)
                ours.append((row.prefill_tokens_per_s, row.decode_tokens_per_s))
                theirs.append(_eager_once(model, length, NEW_TOKENS, seed=repeat))
            cells = [str(length)]
            for phase in (0, 1):
                mine, other = [pair[phase] for pair in ours], [pair[phase] for pair in theirs]
                ratio = statistics.median(mine) / statistics.median(other)
                cells += [_spread(mine), _spread(other), f"{ratio:.2f}"]
            lines.append(f"| {' | '.join(cells)} |")
    return lines


def _eager_once(model: object, length: int, new_tokens: int, *, seed: int) -> tuple[float, float]:
    import torch

    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(model.config.vocab_size, (1, length), generator=generator)
    with torch.inference_mode():
        begin = time.perf_counter()
        result = model(ids, logits_to_keep=1)  # prefill pays for one row of logits here too
        token = result.logits[:, -1:].argmax(-1)
        first = time.perf_counter()
        for _ in range(new_tokens - 1):
            result = model(token, past_key_values=result.past_key_values)
            token = result.logits[:, -1:].argmax(-1)
        end = time.perf_counter()
    return length / (first - begin), (new_tokens - 1) / (end - first)


def _spread(rates: list[float]) -> str:
    return f"{statistics.median(rates):.1f} ({min(rates):.0f}-{max(rates):.0f})"


def _processes(arguments: argparse.Namespace) -> list[str]:
    print("load, generate and export, each in a process of its own", file=sys.stderr)
    load_times = [float(_run(_LOAD, str(arguments.bundle))) for _ in range(REPEATS)]
    peak = json.loads(_run(_GENERATE, str(arguments.bundle)))
    lines = [
        "| what | figure |",
        "|---|---|",
        f"| `load`, median of {REPEATS} | {statistics.median(load_times):.2f} s |",
        f"| `generate` of 64 tokens: peak resident memory | {peak['peak_mib']:.0f} MiB |",
        f"| of which weights on disk + cache | {peak['weights_mib']:.0f} + {peak['cache_mib']:.0f} MiB |",
    ]
    reads = [float(_run(_READ, str(arguments.model))) for _ in range(REPEATS)]
    lines.append(f"| reading the model into float32 weights, median of {REPEATS} | {statistics.median(reads):.2f} s |")
    if not arguments.no_export:
        with tempfile.TemporaryDirectory(dir=arguments.bundle.parent) as folder:
            seconds, mib = _run(_EXPORT, str(arguments.model), f"{folder}/bundle").split()
        lines.append(f"| export to verified bundle | {float(seconds):.0f} s |")
        lines.append(f"| export: peak resident memory | {float(mib):.0f} MiB |")
    return lines


_LOAD = """
import sys, time
begin = time.perf_counter()
from graphport.runtime import load
lm = load(sys.argv[1])
print(time.perf_counter() - begin)
"""

# VmHWM, not getrusage: ru_maxrss of a child starts at its parent's size
_PEAK = """
def peak_mib():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) / 1024
"""

_GENERATE = (
    _PEAK
    + """
import json, sys
from pathlib import Path
from graphport.runtime import SamplingParams, load
lm = load(sys.argv[1])
lm.generate(["The capital of France is"], SamplingParams(max_new_tokens=64, temperature=0.0, ignore_eos=True))
mib = 1 << 20
print(json.dumps({
    "peak_mib": peak_mib(),
    "weights_mib": (Path(sys.argv[1]) / "model.onnx.data").stat().st_size / mib,
    "cache_mib": lm.cache_bytes / mib,
}))
"""
)

_READ = """
import sys, time
from graphport.model_def.checkpoint import load_checkpoint
begin = time.perf_counter()
load_checkpoint(sys.argv[1])
print(time.perf_counter() - begin)
"""

_EXPORT = (
    _PEAK
    + """
import sys, time
begin = time.perf_counter()
from graphport.export import export
export(sys.argv[1], sys.argv[2])
print(time.perf_counter() - begin, peak_mib())
"""
)


def _run(code: str, *arguments: str) -> str:
    done = subprocess.run([sys.executable, "-c", code, *arguments], check=True, capture_output=True, text=True)
    return done.stdout.strip()


def _commit() -> str:
    command = ["git", "describe", "--always", "--dirty"]
    done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def _machine() -> str:
    model = "unknown processor"
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        text = cpuinfo.read_text(encoding="utf-8")
        model = next((line.split(":")[1].strip() for line in text.splitlines() if "model name" in line), model)
        features = [name for name in ("avx2", "avx512f", "avx512_vnni", "amx_int8") if f" {name}" in text]
        model += f" ({', '.join(features)})"
    return f"{platform.system()} {platform.machine()}, {model}, {os.cpu_count()} cores"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("model", type=Path)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--prompts", default="32,512,2048")
    parser.add_argument("--no-export", action="store_true", help="leave the export out")
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
