"""Metrics of a server in Prometheus' format.

Turns a snapshot of plain data into families of samples. Names are stable: `wicore_` is ours; `vllm:` names, which
routers and dashboards expect, are given where they mean the same. It must not know the source of the data. Invariant:
an engine that does not answer has no samples, rather than old ones.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from wicore_trt.access.admission import CallCounts
from wicore_trt.core.times import STEP_TOKENS, Histogram, Times
from wicore_trt.metrics.machine import GpuUse, ProcessUse
from wicore_trt.types import EngineStats, ModelInfo, TierStats

STATES = ("starting", "serving", "draining", "broken")
VLLM_REASONS = {"stop": "stop", "length": "length", "cancelled": "abort", "deadline": "abort", "error": "error"}


@dataclass(frozen=True, slots=True)
class MetricsSnapshot:
    """State of the server at one moment. `finished`: sequences by reason; `processes`: by "front" and "engine"."""

    version: str
    state: str
    calls: CallCounts
    open_requests: int = 0
    model: ModelInfo | None = None
    engine: EngineStats | None = None
    times: Times = field(default_factory=Times)
    finished: Mapping[str, int] = field(default_factory=dict)
    processes: Mapping[str, ProcessUse | None] = field(default_factory=dict)
    gpus: Sequence[GpuUse] = ()


def render_metrics(found: Iterable[Metric], accept: str = "") -> tuple[bytes, str]:
    """Return the text of a scrape and its content type, in the form that the scraper accepts."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Once(found))
    encode, content_type = choose_encoder(accept)
    return encode(registry), content_type


def collect_families(snapshot: MetricsSnapshot) -> Iterator[Metric]:
    yield from _describe_server(snapshot)
    model = snapshot.model.model_id if snapshot.engine is not None and snapshot.model is not None else None
    yield from _describe_calls(snapshot)
    for attribute, ours, _, about in HISTOGRAMS:
        yield make_histogram(f"wicore_{ours}", about, getattr(snapshot.times, attribute))
    if model is not None:
        yield from _describe_calls_as_vllm(snapshot, model)
    if snapshot.engine is not None:
        yield from _describe_engine(snapshot.engine)
        yield from _describe_tiers(snapshot.engine.kv.tiers)
        if model is not None:
            yield from _describe_engine_as_vllm(snapshot, snapshot.engine, model)
    yield from _describe_machine(snapshot)


def describe_processes(processes: Mapping[str, tuple[bool, int]]) -> Iterator[Metric]:
    """Describe the supervisor's processes: whether each runs, and how often it was restarted."""
    about = "1 while a process runs; on the port of the operator's calls alone."
    rows = [(name, int(up)) for name, (up, _) in processes.items()]
    yield make_family(GaugeMetricFamily, "wicore_process_up", about, ["process"], rows)
    about = "How often a process ended and was started again; on the port of the operator's calls alone."
    counts = [(name, restarts) for name, (_, restarts) in processes.items()]
    yield make_family(CounterMetricFamily, "wicore_process_restarts", about, ["process"], counts)


class _Once(Collector):
    def __init__(self, found: Iterable[Metric]) -> None:
        self._found = found

    def collect(self) -> Iterable[Metric]:
        return self._found


def make_gauge(name: str, about: str, value: float) -> Metric:
    return GaugeMetricFamily(name, about, value=value)


def make_counter(name: str, about: str, value: float) -> Metric:
    return CounterMetricFamily(name, about, value=value)


def make_family(
    kind: type[Metric], name: str, about: str, labels: Sequence[str], rows: Iterable[Sequence[object]]
) -> Metric:
    """Make a family; each row holds the values of its labels, then the number."""
    made = kind(name, about, labels=list(labels))  # type: ignore[call-arg]
    for *values, number in rows:
        made.add_metric([str(value) for value in values], number)  # type: ignore[attr-defined]
    return made


def make_histogram(name: str, about: str, found: Histogram, labels: Mapping[str, str] | None = None) -> Metric:
    buckets, total = [], 0
    for bound, count in zip((*map(str, found.bounds), "+Inf"), list(found.counts), strict=True):
        total += count
        buckets.append((bound, total))
    made = HistogramMetricFamily(name, about, labels=list(labels or ()))
    made.add_metric(list((labels or {}).values()), buckets, found.total)
    return made


def _describe_server(s: MetricsSnapshot) -> Iterator[Metric]:
    model = s.model
    facts = {"version": s.version, "model": model.model_id if model else "", "backend": model.backend if model else ""}
    facts |= {"kernels": model.kernels if model else "", "dtype": model.dtype if model else ""}
    facts |= {"kv_dtype": model.kv_dtype if model else "", "quantization": (model.quantization or "") if model else ""}
    about = "Version of the server and what it serves; always 1."
    yield make_family(GaugeMetricFamily, "wicore_build_info", about, tuple(facts), [(*facts.values(), 1)])
    about = "1 for the state that the server is in, 0 for the others."
    yield make_family(GaugeMetricFamily, "wicore_state", about, ["state"], [(x, int(x == s.state)) for x in STATES])
    yield make_gauge("wicore_engine_up", "1 when the engine answered this scrape.", int(s.engine is not None))


def _describe_calls(s: MetricsSnapshot) -> Iterator[Metric]:
    yield make_gauge("wicore_requests_open", "Generations in progress, over HTTP and gRPC.", s.open_requests)
    about = "Ended HTTP requests; 499 is a client that left."
    yield make_family(CounterMetricFamily, "wicore_http_requests", about, ["method", "path", "status"],
              [(*key, count) for key, count in sorted(s.calls.http.items())])  # fmt: skip
    about = "Ended gRPC calls of the inference service."
    yield make_family(CounterMetricFamily, "wicore_grpc_calls", about, ["method", "code"],
              [(*key, count) for key, count in sorted(s.calls.grpc.items())])  # fmt: skip
    answers = Counter[tuple[str, str, str]]()
    for (method, path, status), count in s.calls.http.items():
        answers[path, method, f"{status[0]}xx"] += count
    yield make_family(CounterMetricFamily, "http_requests", "As wicore_http_requests, under the name that vLLM has.",
              ["handler", "method", "status"], [(*key, count) for key, count in sorted(answers.items())])  # fmt: skip
    about = "Calls without a valid API key."
    yield make_family(CounterMetricFamily, "wicore_keys_refused", about, ["transport"],
              [(way, s.calls.refused[way]) for way in ("grpc", "http")])  # fmt: skip
    about = "Sequences that ended, as their clients were told."
    yield make_family(CounterMetricFamily, "wicore_requests_finished", about, ["reason"],
              [(reason, s.finished.get(reason, 0)) for reason in VLLM_REASONS])  # fmt: skip


HISTOGRAMS = (
    ("first", "time_to_first_token_seconds", "time_to_first_token_seconds",
     "From a request to a sequence's first output."),
    ("queue", "request_queue_seconds", "request_queue_time_seconds",
     "Of the time to the first token, what a sequence waited until a step computed for it."),
    ("prefill", "request_prefill_seconds", "request_prefill_time_seconds",
     "From the beginning of that step to the first output."),
    ("decode", "request_decode_seconds", "request_decode_time_seconds",
     "From the first output of an ended sequence to its last."),
    ("gap", "inter_token_latency_seconds", "inter_token_latency_seconds", "Between two outputs of one sequence."),
    ("whole", "request_seconds", "e2e_request_latency_seconds", "From a request to the end of each of its sequences."),
    ("prompt", "request_prompt_tokens", "request_prompt_tokens", "Prompt tokens of ended sequences."),
    ("generated", "request_generation_tokens", "request_generation_tokens", "Output tokens of ended sequences."),
    ("longest", "request_max_generation_tokens", "request_max_num_generation_tokens",
     "Output tokens of the longest sequence of an ended request."),
)  # fmt: skip
"""Histograms of `Times` by attribute: our name, vLLM's, and the meaning."""


def _describe_engine(e: EngineStats) -> Iterator[Metric]:
    yield make_gauge("wicore_engine_uptime_seconds", "Since the engine was loaded.", e.uptime_s)
    yield make_gauge("wicore_requests_running", "Sequences in the batch.", e.requests_running)
    yield make_gauge("wicore_requests_waiting", "Sequences that wait for a place in the batch.", e.requests_waiting)
    about = "Prompt tokens of requests that the engine took, once for each sequence."
    yield make_counter("wicore_prompt_tokens", about,
                   e.prompt_tokens)  # fmt: skip
    yield make_counter("wicore_cached_prompt_tokens", "Prompt tokens that came from the KV cache, not computed.",
                   e.cached_prompt_tokens)  # fmt: skip
    yield make_counter("wicore_generated_tokens", "Tokens that the engine generated.", e.generated_tokens)
    yield make_counter("wicore_steps", "Steps of the engine.", e.steps)
    yield make_counter("wicore_step_seconds", "Time spent in steps.", e.step_seconds)
    if (found := _step_tokens(e)) is not None:
        yield make_histogram("wicore_step_tokens", "Tokens that a step computed, of prompts and answers.", found)
    yield make_counter("wicore_preemptions", "Sequences that gave their place back and went on later.", e.preemptions)
    about = "Device pages of a layer group: used by sequences, cached for prefixes, and all that there are."
    pages = [(p.group, state, n) for p in e.pools for state, n in
             (("used", p.used_pages), ("cached", p.cached_pages), ("total", p.total_pages))]  # fmt: skip
    yield make_family(GaugeMetricFamily, "wicore_device_pages", about, ["group", "state"], pages)
    about = "Prompts whose cached pages were loaded, computed anew, or both."
    decisions = sorted(e.kv.decisions.items())
    yield make_family(CounterMetricFamily, "wicore_kv_decisions", about, ["decision"], decisions)
    yield make_counter("wicore_kv_parked", "Preempted sequences whose pages went to host memory.", e.kv.parked)
    yield make_counter("wicore_kv_resumed", "Preempted sequences that went on from there.", e.kv.resumed)


def _step_tokens(e: EngineStats) -> Histogram | None:
    if not e.step_tokens:
        return None
    made = Histogram(STEP_TOKENS)
    *made.counts, made.total = e.step_tokens
    return made


def _describe_tiers(tiers: Sequence[TierStats]) -> Iterator[Metric]:
    def gauge(name: str, about: str, value: str) -> Metric:
        return make_family(
            GaugeMetricFamily, f"wicore_kv_{name}", about, ["tier"], [(t.tier, getattr(t, value)) for t in tiers]
        )

    def counter(name: str, about: str) -> Metric:
        return make_family(
            CounterMetricFamily, f"wicore_kv_{name}", about, ["tier"], [(t.tier, getattr(t, name)) for t in tiers]
        )

    def causes(name: str, about: str) -> Metric:
        rows = [(t.tier, cause, n) for t in tiers for cause, n in sorted(getattr(t, name).items())]
        return make_family(CounterMetricFamily, f"wicore_kv_{name}", about, ["tier", "cause"], rows)

    yield gauge("capacity_bytes", "Bytes that a tier of the KV cache has.", "capacity_bytes")
    yield gauge("used_bytes", "Bytes that hold pages.", "used_bytes")
    yield gauge("pinned_bytes", "Bytes that cannot be given up now: running sequences, sessions.", "pinned_bytes")
    yield gauge("queue_depth", "Transfers under way.", "queue_depth")
    rows = [(t.tier, group, n) for t in tiers for group, n in sorted(t.pages.items())]
    yield make_family(GaugeMetricFamily, "wicore_kv_pages", "Pages that a tier holds.", ["tier", "group"], rows)
    yield counter("hit_tokens", "Prompt tokens that a tier saved; each counts for the nearest one.")
    yield counter("read_bytes", "Bytes that were read towards the device.")
    yield counter("read_seconds", "Time that these reads took.")
    yield counter("write_bytes", "Bytes that were written into the tier.")
    yield counter("write_seconds", "Time that these writes took.")
    yield causes("evictions", "Pages that left a tier.")
    yield causes("failures", "Pages that could not be moved or did not verify.")


def _describe_engine_as_vllm(s: MetricsSnapshot, e: EngineStats, name: str) -> Iterator[Metric]:
    label = {"model_name": name}

    def one(kind: type[Metric], metric: str, about: str, value: float) -> Metric:
        return make_family(kind, f"vllm:{metric}", about, tuple(label), [(name, value)])

    yield one(GaugeMetricFamily, "num_requests_running", "As wicore_requests_running.", e.requests_running)
    yield one(GaugeMetricFamily, "num_requests_waiting", "As wicore_requests_waiting.", e.requests_waiting)
    device = next((t for t in e.kv.tiers if t.tier == "device"), None)
    if device is not None and device.capacity_bytes:
        usage = device.pinned_bytes / device.capacity_bytes
        yield one(GaugeMetricFamily, "kv_cache_usage_perc", "Share of the device's KV memory in use, 0 to 1.", usage)
    whole = next(iter(sorted(e.pools, key=lambda pool: pool.group)), None)  # "global" before "local"
    if whole is not None and s.model is not None and s.model.page_tokens:
        about = "Tokens of a KV page, and pages on the device; 1."
        yield make_family(GaugeMetricFamily, "vllm:cache_config_info", about, [*label, "block_size", "num_gpu_blocks"],
                  [(name, str(s.model.page_tokens), str(whole.total_pages), 1)])  # fmt: skip
    yield one(CounterMetricFamily, "prefix_cache_queries", "As wicore_prompt_tokens.", e.prompt_tokens)
    yield one(CounterMetricFamily, "prefix_cache_hits", "As wicore_cached_prompt_tokens.", e.cached_prompt_tokens)
    yield one(CounterMetricFamily, "prompt_tokens", "As wicore_prompt_tokens.", e.prompt_tokens)
    yield one(CounterMetricFamily, "prompt_tokens_cached", "As wicore_cached_prompt_tokens.", e.cached_prompt_tokens)
    yield one(CounterMetricFamily, "generation_tokens", "As wicore_generated_tokens.", e.generated_tokens)
    if (found := _step_tokens(e)) is not None:
        yield make_histogram("vllm:iteration_tokens_total", "As wicore_step_tokens.", found, label)
    yield one(CounterMetricFamily, "num_preemptions", "As wicore_preemptions.", e.preemptions)


def _describe_calls_as_vllm(s: MetricsSnapshot, name: str) -> Iterator[Metric]:
    label = {"model_name": name}
    ended: dict[str, int] = dict.fromkeys(VLLM_REASONS.values(), 0)
    for reason, theirs in VLLM_REASONS.items():
        ended[theirs] += s.finished.get(reason, 0)
    yield make_family(CounterMetricFamily, "vllm:request_success", "As wicore_requests_finished.",
              [*label, "finished_reason"], [(name, *entry) for entry in ended.items()])  # fmt: skip
    for attribute, ours, theirs, _ in HISTOGRAMS:
        yield make_histogram(f"vllm:{theirs}", f"As wicore_{ours}.", getattr(s.times, attribute), label)


def _describe_machine(s: MetricsSnapshot) -> Iterator[Metric]:
    known = [(name, use) for name, use in s.processes.items() if use is not None]
    about = "CPU time of a process, all threads."
    rows: list[tuple[object, ...]] = [(name, use.cpu_seconds) for name, use in known]
    yield make_family(CounterMetricFamily, "wicore_process_cpu_seconds", about, ["process"], rows)
    rows = [(name, use.resident_bytes) for name, use in known]
    yield make_family(GaugeMetricFamily, "wicore_process_resident_bytes", "Memory of a process.", ["process"], rows)
    rows = [(name, use.open_files) for name, use in known if use.open_files is not None]
    yield make_family(
        GaugeMetricFamily, "wicore_process_open_files", "Files and sockets of a process.", ["process"], rows
    )
    if not s.gpus:
        return

    def gpu(name: str, about: str, value: str) -> Metric:
        found = [(g.index, g.uuid, g.name, getattr(g, value)) for g in s.gpus if getattr(g, value) is not None]
        return make_family(GaugeMetricFamily, f"wicore_gpu_{name}", about, ["gpu", "uuid", "name"], found)

    yield gpu("memory_used_bytes", "Memory of a GPU in use, by all processes.", "used_bytes")
    yield gpu("memory_total_bytes", "Memory of a GPU.", "total_bytes")
    yield gpu("utilization", "Share of the last moment in which a kernel ran, 0 to 1.", "utilization")
    yield gpu("power_watts", "What a GPU draws.", "power_watts")
    yield gpu("temperature_celsius", "How warm a GPU is.", "temperature_celsius")
