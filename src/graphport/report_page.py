"""One page about a bundle: what it is, its certificate, its graph before and after the passes, place by place.

In: the bundle's own facts as JSON data, and times of nodes if they were measured. Out: the text of an HTML file that
needs no network, no script and no pointer. It reads no files and measures nothing.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

Json = Mapping[str, Any]

_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; margin: 2em auto; max-width: 75em; padding: 0 1em; color: #1b1f24; }
table { border-collapse: collapse; margin: .6em 0 1.6em; }
th, td { border: 1px solid #ccd3da; padding: .25em .6em; text-align: left; vertical-align: top; }
th { background: #eef1f4; } .number { font-variant-numeric: tabular-nums; }
.op { display: inline-block; border: 1px solid #8a96a3; border-radius: 4px; padding: 0 .4em; margin: .1em; }
.after .op { background: #e3f1e5; } .before .op { background: #f6efe0; }
.failed { color: #a40e26; font-weight: bold; } .ok { color: #116329; } .why { color: #7a4a00; }
svg { border: 1px solid #ccd3da; background: #fff; } figure { margin: 0 0 1.5em; } figcaption { margin: .2em 0; }
"""
_TRIAL_SECONDS = ("best_seconds", "seconds")
_TRIAL_RATIOS = ("ratio", "noise")
_WIDTH, _HEIGHT, _MARGIN = 900, 160, 46


def report_page(
    report: Json, facts: Sequence[tuple[str, str]], account: Json, certificate: Json | None, times: Sequence[Json]
) -> str:
    """The page. `report` is a `Report`'s data, `facts` what the bundle is by name, `account` that of fusions.json,
    `times` records of name, op, provider, microseconds.
    """
    manifest = report["manifest"]
    title = f"graphport bundle {report['path']}"
    parts = [
        f"<h1>{escape(title)}</h1>",
        _table(("", ""), [*facts, *(("advice", line) for line in report["advice"]), *_not_tuned(report)]),
        "<h2>Files</h2>",
        _table(
            ("file", "bytes", "SHA-256"),
            [(name, _number(record["size"]), record["sha256"]) for name, record in manifest["files"].items()],
        ),
        *_tuning_parts(report["tuning"]),
        "<h2>Certificate</h2>",
        *_certificate_parts(certificate, is_decoder=report["manifest"]["kind"] == "decoder"),
        "<h2>Graph, place by place</h2>",
        *_graph_parts(account, times),
    ]
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f"<style>{_STYLE}</style></head><body>\n" + "\n".join(parts) + "\n</body></html>\n"
    )


def _not_tuned(report: Json) -> list[tuple[str, str]]:
    problem = report["tuning_problem"]
    return [] if problem is None else [("not tuned here", problem)]


def _tuning_parts(tuning: Json | None) -> list[str]:
    """What was tried on this machine; nothing where nothing was."""
    if tuning is None:
        return []
    rows = [
        (
            trial["what"],
            *(("" if trial[name] is None else _number(1e3 * trial[name], digits=1)) for name in _TRIAL_SECONDS),
            *(("" if trial[name] is None else f"{trial[name]:.3f}") for name in _TRIAL_RATIOS),
            trial["verdict"],
        )
        for trial in tuning["trials"]
    ]
    heads = ("tried", "before, ms", "with it, ms", "ratio", "noise", "")
    return ["<h2>Tuned on this machine</h2>", f"<p>Timed: {escape(tuning['request'])}.</p>", _table(heads, rows)]


def _certificate_parts(certificate: Json | None, *, is_decoder: bool) -> list[str]:
    if certificate is None:
        return ["<p>None: nothing in this bundle says that it is the original model.</p>"]
    checks = [
        (
            check["name"],
            f"{check['measured']:.3g}",
            f"{check['tolerance']:.3g}",
            _Markup('<span class="ok">ok</span>' if check["passed"] else '<span class="failed">FAILED</span>'),
            check.get("inputs", ""),
            check["detail"],
        )
        for check in certificate["checks"]
    ]
    parts = []
    for heading in ("candidate", "reference"):
        rows = [(name, _words(value)) for name, value in certificate.get(heading, {}).items()]
        parts.append(_table((heading, ""), rows))
    parts.append(_table(("check", "measured", "tolerance", "", "inputs", "detail"), checks))
    conditioning = certificate.get("conditioning")
    parts += [] if conditioning is None else [f"<p>{escape(conditioning['words'])}.</p>"]
    missing = certificate.get("uncovered", ())
    parts += [f"<p>Not covered: {escape('; '.join(missing))}.</p>"] if missing else []
    parts += [_chart(run, series, is_decoder=is_decoder) for run, series in certificate.get("errors", {}).items()]
    for name, series in certificate.get("layers", {}).items():
        parts += _layer_parts(name, series)
    return parts


def _chart(run: str, series: Json, *, is_decoder: bool) -> str:
    """KL by position on a logarithmic scale; the largest difference where that is nothing; of encoders the relative."""
    kind = "relative" if not is_decoder else "kl" if max(series["kl"]) > 1e-7 else "max_abs"
    labels = {"kl": "KL in nats", "max_abs": "largest difference of a logit", "relative": "relative error"}
    place = "position in the text" if is_decoder else "row"
    caption = f"{run}: {labels[kind]} by {place}, logarithmic"
    return _figure(caption, series["positions"], series[kind], name="position")


def _layer_parts(name: str, series: Json) -> list[str]:
    """The relative error of each place, its largest over all steps drawn, and a row a layer with every step."""
    largest = [max(column) for column in zip(*series["relative"], strict=True)]
    caption = f"{name}: largest relative error by place, from the embedding to the logits, logarithmic"
    layers: dict[str, list[int]] = {}
    for index, site in enumerate(series["sites"]):
        layers.setdefault(" ".join(site.split()[:2]) if site.startswith("layer ") else site, []).append(index)
    steps = [f"prompt of {series['prompt']}", *(f"step {step}" for step in range(1, len(series["relative"])))]
    rows = [
        (layer, *(f"{max(values[index] for index in indices):.2g}" for values in series["relative"]))
        for layer, indices in layers.items()
    ]
    return [
        _figure(caption, range(len(largest)), largest, name="place"),
        _table((f"{name}: relative error", *steps), rows),
    ]


def _figure(caption: str, positions: Sequence[int], sizes: Sequence[float], *, name: str) -> str:
    """A dot a value, over its position."""
    values = [min(max(value, 1e-12), 1e12) for value in sizes]
    low, high = min(values), max(values)
    left = min(positions)
    right = max(*positions, left + 1)
    span = max(_log(high) - _log(low), 1e-9)
    points = [
        (
            _MARGIN + (position - left) / (right - left) * (_WIDTH - 2 * _MARGIN),
            _HEIGHT - 24 - (_log(value) - _log(low)) / span * (_HEIGHT - 48),
        )
        for position, value in sorted(zip(positions, values, strict=True))
    ]
    dots = "".join(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2" fill="#1f5fa8"/>' for x, y in points)
    texts = (
        f'<text x="4" y="26" font-size="12">{high:.1e}</text>'
        f'<text x="4" y="{_HEIGHT - 22}" font-size="12">{low:.1e}</text>'
        f'<text x="{_MARGIN}" y="{_HEIGHT - 5}" font-size="12">{escape(name)} {left}</text>'
        f'<text x="{_WIDTH - 110}" y="{_HEIGHT - 5}" font-size="12">{escape(name)} {right}</text>'
    )
    return (
        f"<figure><figcaption>{escape(caption)}</figcaption>"
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" role="img">{dots}{texts}</svg></figure>'
    )


def _graph_parts(account: Json, times: Sequence[Json]) -> list[str]:
    disabled = account.get("disabled", ())
    parts = [f"<p>Switched off by name: {escape(', '.join(disabled))}.</p>"] if disabled else []
    if not account.get("sites"):
        return [*parts, "<p>This bundle was exported before graphport accounted for places; export it again.</p>"]
    spent = {record["name"]: record for record in times}
    known = {name for site in account["sites"] for name in site["nodes"]}
    rows = [_site_row(site, [spent[name] for name in site["nodes"] if name in spent]) for site in account["sites"]]
    others = [record for name, record in spent.items() if name not in known]
    if others:
        words = f"made by ONNX Runtime ({len(others)} nodes)"
        rows.append((words, "", _ops([record["op"] for record in others], "after"), "", "", *_time_cells(others), ""))
    heads = (
        "place",
        "before",
        "after",
        "bytes of weights",
        "MFLOP a token",
        "µs a step",
        "runs on",
        "rules and misses",
    )
    note = "" if times else "<p>Times were not measured; add --times.</p>"
    return [*parts, note, _table(heads, rows)]


def _site_row(site: Json, spent: Sequence[Json]) -> tuple[object, ...]:
    misses = "".join(
        f'<div class="why">{escape(miss["rule"])} left {escape(miss["site"])}: needs that {escape(miss["check"])}, '
        f"found {escape(miss['found'])}</div>"
        for miss in site["missed"]
    )
    return (
        site["place"],
        _ops(site["before"], "before"),
        _ops(site["after"], "after"),
        _number(site["bytes"]),
        _number(site["flops"] / 1e6, digits=2),
        *_time_cells(spent),
        _Markup(escape(", ".join(site["rules"])) + misses),
    )


def _time_cells(spent: Sequence[Json]) -> tuple[object, object]:
    if not spent:
        return "", ""
    providers = sorted({record["provider"].removesuffix("ExecutionProvider") for record in spent})
    return _number(sum(record["microseconds"] for record in spent), digits=1), ", ".join(providers)


def _ops(ops: Iterable[str], kind: str) -> "_Markup":
    boxes = " → ".join(f'<span class="op">{escape(op)}</span>' for op in ops)
    return _Markup(f'<div class="{kind}">{boxes}</div>')


class _Markup(str):
    """Text that is HTML already."""

    __slots__ = ()


def _number(value: float, *, digits: int = 0) -> _Markup:
    return _Markup(f'<span class="number">{value:,.{digits}f}</span>')


def _table(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in heads) if any(heads) else ""
    body = "".join("<tr>" + "".join(f"<td>{_cell(cell)}</td>" for cell in row) + "</tr>\n" for row in rows)
    return f"<table><tr>{head}</tr>\n{body}</table>"


def _cell(value: object) -> str:
    return value if isinstance(value, _Markup) else escape(str(value))


def _words(value: object) -> str:
    return ", ".join(f"{name} {item}" for name, item in value.items()) if isinstance(value, Mapping) else str(value)


def _log(value: float) -> float:
    return math.log10(value)
