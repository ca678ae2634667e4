"""A comparison as Markdown.

In: a Comparison. Out: text. It measures and computes nothing beyond ratios of medians.
"""

from collections.abc import Callable, Iterable

from comparison import Comparison, Facts, Spread

_MIB = 1 << 20


def markdown(result: Comparison) -> str:
    """The whole page, without the picture."""
    lines = [
        f"# {result.title}: {', '.join(result.facts)}",
        "",
        f"{result.date}, {result.machine}, {result.conditions}.",
        f"Command: `{result.command}`, commit {result.commit}.",
        "",
        *_decode(result),
        *_prefill(result),
        *_ratios(result),
        *_whole(result),
        *_exports(result),
        *_how(result),
    ]
    return "\n".join(lines) + "\n"


def _decode(result: Comparison) -> list[str]:
    def cells(name: str) -> list[str]:
        fidelity = [*_fidelity(result.facts[name], is_reference=name == result.reference)]
        return fidelity + [_rate(result.decode(name, length)) for length in result.prompts]

    head = ["system", "KL to fp32", "same best token", *(f"after {length}" for length in result.prompts)]
    return ["## Decode, tokens a second", "", *_table(head, _rows(result, cells)), ""]


def _prefill(result: Comparison) -> list[str]:
    def cells(name: str) -> list[str]:
        return [_rate(result.prefill(name, length)) for length in result.prompts]

    head = ["system", *(f"of {length}" for length in result.prompts)]
    return ["## Prefill, tokens a second", "", *_table(head, _rows(result, cells)), ""]


def _ratios(result: Comparison) -> list[str]:
    """Each bundle's medians over each other system's."""
    head = ["", "against"]
    head += [f"{phase} {length}" for phase in ("decode", "prefill") for length in result.prompts]
    head += [f"memory {length}" for length in result.prompts] + ["load"]
    rows = []
    for bundle in result.bundles:
        for peer in (name for name in result.facts if name not in result.bundles):
            ratios = [
                _ratio(phase(bundle, length), phase(peer, length))
                for phase in (result.decode, result.prefill, result.peak_bytes)
                for length in result.prompts
            ]
            rows.append([bundle, peer, *ratios, _ratio(result.load(bundle), result.load(peer))])
    return ["## Ratios (of memory and load time, less is better)", "", *_table(head, rows), ""]


def _whole(result: Comparison) -> list[str]:
    """What a user waits for and pays: fresh processes."""

    def cells(name: str) -> list[str]:
        disk = f"{result.facts[name].disk_bytes / _MIB:.0f}"
        firsts = [f"{result.first_token(name, length).median * 1000:.0f}" for length in result.prompts]
        peaks = [f"{result.peak_bytes(name, length).median / _MIB:.0f}" for length in result.prompts]
        answer = f"{result.answer(name, result.prompts[0]).median:.2f}"
        return [disk, _seconds(result.load(name)), answer, *firsts, *peaks]

    head = ["system", "disk, MiB", "load, s", f"process start to first token of {result.prompts[0]}, s"]
    head += [f"first token of {length}, ms" for length in result.prompts]
    head += [f"peak memory {length}, MiB" for length in result.prompts]
    return ["## Loading, time to the first token, memory", "", *_table(head, _rows(result, cells)), ""]


def _exports(result: Comparison) -> list[str]:
    rows = [
        [name, f"{cost.export_s:.0f}", f"{cost.peak_bytes / _MIB:.0f}", f"{cost.read_s:.2f}"]
        for name, cost in ((name, facts.cost) for name, facts in result.facts.items())
        if cost is not None
    ]
    head = ["bundle", "export, verified, s", "peak memory, MiB", "of which reading the source, s"]
    return ["## Making the bundles", "", *_table(head, rows), ""] if rows else []


def _how(result: Comparison) -> list[str]:
    most = max([run.others for run in result.runs] + [start.others for start in result.starts])
    repeats = len(result.runs) // (len(result.facts) * len(result.prompts))
    lines = [
        "## How",
        "",
        f"Batch 1, greedy, {result.new_tokens} new tokens, random prompts, the same for all. Medians of {repeats} "
        "interleaved rounds, in brackets slowest and fastest; the other systems' processes are stopped while one runs.",
        f"KL divergence (nats) and best token: {result.fidelity_tokens} tokens of English against {result.reference}.",
        "Memory is the most resident memory (VmHWM) of a fresh process that answers one prompt, mapped files included; "
        "load is importing the library and opening the model, files in the page cache, median of "
        f"{len(result.prompts)} starts.",
        f"Other processes took at most {most:.0%} of the CPU in any measurement; {result.redone} measurements in which "
        f"they took more than {result.max_others:.0%} were thrown away and done again."
        if result.clock == "wall"
        else f"The machine was busy: other processes took up to {most:.0%} of the CPU. CPU time leaves out waiting for "
        "a core, not what others evict from the caches.",
        "",
    ]
    for name, facts in result.facts.items():
        versions = ", ".join(f"{what} {version}" for what, version in facts.versions.items())
        lines.append(f"* {name}: `{facts.model}`; {versions}")
    return lines


def _fidelity(facts: Facts, *, is_reference: bool) -> tuple[str, str]:
    if facts.fidelity is None:
        return ("0 (reference)", "100 %") if is_reference else ("-", "-")
    return f"{facts.fidelity.kl:.2g}", f"{facts.fidelity.top1:.1%}".replace("%", " %")


def _rate(rates: Spread) -> str:
    return f"{rates.median:.1f} ({rates.least:.0f}-{rates.most:.0f})"


def _seconds(times: Spread) -> str:
    return f"{times.median:.2f} ({times.least:.2f}-{times.most:.2f})"


def _ratio(mine: Spread, other: Spread) -> str:
    return f"{mine.median / other.median:.2f}"


def _rows(result: Comparison, cells: Callable[[str], list[str]]) -> list[list[str]]:
    return [[name, *cells(name)] for name in result.facts]


def _table(head: Iterable[str], rows: list[list[str]]) -> list[str]:
    head = list(head)
    return [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows)]
