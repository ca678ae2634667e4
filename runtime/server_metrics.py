"""What a server does, in numbers for Prometheus.

In: finished requests, times of tokens, the statistics of open models. Out: the text of /metrics. It holds no text of
requests, and its labels are names of models, routes and statuses.
"""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from graphport.runtime.server_models import HostedDecoder, Models

_SHORT = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
_LONG = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)


class ServerMetrics:
    """Counts and times of one server, in a registry of its own."""

    def __init__(self, models: Models) -> None:
        self._registry = CollectorRegistry()
        self._requests = Counter(
            "graphport_requests", "HTTP requests by route and status.", ("route", "status"), registry=self._registry
        )
        self._seconds = Histogram(
            "graphport_request_seconds",
            "Time from a request to the end of its answer.",
            ("route",),
            buckets=_LONG,
            registry=self._registry,
        )
        self._first = Histogram(
            "graphport_time_to_first_token_seconds",
            "Time from a request to its first token.",
            ("model",),
            buckets=_LONG,
            registry=self._registry,
        )
        self._gaps = Histogram(
            "graphport_time_between_tokens_seconds",
            "Time between the steps that bring tokens of one request.",
            ("model",),
            buckets=_SHORT,
            registry=self._registry,
        )
        self._registry.register(_ModelNumbers(models))

    def note_request(self, route: str, status: int, seconds: float) -> None:
        """Count an answered request."""
        self._requests.labels(route, str(status)).inc()
        self._seconds.labels(route).observe(seconds)

    def note_tokens(self, model: str, *, since_begin: float, since_last: float | None) -> None:
        """Note the time of a step's tokens; `since_last` is None for a request's first."""
        if since_last is None:
            self._first.labels(model).observe(since_begin)
        else:
            self._gaps.labels(model).observe(since_last)

    def text(self) -> bytes:
        """All of it, in Prometheus' text format."""
        return generate_latest(self._registry)


class _ModelNumbers(Collector):
    """Reads the statistics of the open models when Prometheus asks."""

    def __init__(self, models: Models) -> None:
        self._models = models

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        gauges = {
            name: GaugeMetricFamily(f"graphport_{name}", text, labels=("model",))
            for name, text in (
                ("places_taken", "Sequences that run or wait, from their request to their end."),
                ("sequences_waiting", "Sequences without a place in the batch."),
                ("batch_size", "Sequences with a place in the batch."),
                ("kv_cache_bytes", "Memory of the KV cache."),
                ("prefix_cache_bytes", "Memory of rows of earlier prompts."),
            )
        }
        counters = {
            name: CounterMetricFamily(f"graphport_{name}", text, labels=("model",))
            for name, text in (
                ("steps", "Runs of the model."),
                ("prompt_tokens", "Prompt tokens that were run; reused ones are not."),
                ("generated_tokens", "Tokens that were generated."),
                ("drafted_tokens", "Tokens that were drafted."),
                ("drafted_tokens_right", "Drafted tokens that were right."),
                ("prefix_cache_lookups", "Prompts looked up in the prefix cache."),
                ("prefix_cache_hits", "Prompts whose beginning was found."),
                ("prefix_cache_reused_tokens", "Prompt tokens that were not run again."),
            )
        }
        for name, model in self._models.by_name.items():
            gauges["places_taken"].add_metric([name], model.places.num_taken)
            if isinstance(model, HostedDecoder):
                _add_decoder(name, model, gauges, counters)
        yield from gauges.values()
        yield from counters.values()


def _add_decoder(
    name: str, model: HostedDecoder, gauges: dict[str, GaugeMetricFamily], counters: dict[str, CounterMetricFamily]
) -> None:
    now = model.lm.statistics
    gauges["sequences_waiting"].add_metric([name], now.num_waiting)
    gauges["batch_size"].add_metric([name], now.num_active)
    gauges["kv_cache_bytes"].add_metric([name], now.cache_bytes)
    counters["steps"].add_metric([name], now.num_steps)
    counters["prompt_tokens"].add_metric([name], now.num_prompt_tokens)
    counters["generated_tokens"].add_metric([name], now.num_generated_tokens)
    counters["drafted_tokens"].add_metric([name], now.num_drafted)
    counters["drafted_tokens_right"].add_metric([name], now.num_drafted_right)
    if now.prefix_cache is not None:
        gauges["prefix_cache_bytes"].add_metric([name], now.prefix_cache.num_bytes)
        counters["prefix_cache_lookups"].add_metric([name], now.prefix_cache.num_prompts)
        counters["prefix_cache_hits"].add_metric([name], now.prefix_cache.num_hits)
        counters["prefix_cache_reused_tokens"].add_metric([name], now.prefix_cache.num_reused_tokens)
