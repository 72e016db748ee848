"""Metrics of a server in Prometheus' format.

Turns a snapshot of plain data into families of samples. Names are stable: `wicore_` is ours; `vllm:` names, which
routers and dashboards expect, are given where they mean the same. It must not know the source of the data. Invariant:
an engine that does not answer has no samples, rather than old ones.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from prometheus_client.core import CounterMetricFamily as COUNTER
from prometheus_client.core import GaugeMetricFamily as GAUGE
from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from wicore_trt.access.admission import CallCounts
from wicore_trt.core.times import STEP_TOKENS, Histogram, Times
from wicore_trt.metrics.machine import GpuUse, ProcessUse
from wicore_trt.types import EngineStats, ModelInfo, TierStats

STATES = ("starting", "serving", "degraded", "draining", "broken")
VLLM_REASONS = {"stop": "stop", "length": "length", "cancelled": "abort", "deadline": "abort", "error": "error"}


@dataclass(frozen=True, slots=True)
class MetricsSnapshot:
    """State of the server at one moment. `engines`: statistics of each replica, None where it does not answer;
    `finished`: sequences by reason; `processes`: by "front" and "engine"."""

    version: str
    state: str
    calls: CallCounts
    open_requests: int = 0
    model: ModelInfo | None = None
    engines: Sequence[EngineStats | None] = ()
    times: Times = field(default_factory=Times)
    finished: Mapping[str, int] = field(default_factory=dict)
    processes: Mapping[str, ProcessUse | None] = field(default_factory=dict)
    gpus: Sequence[GpuUse] = ()


def render_metrics(found: Iterable[Metric], accept: str = "") -> tuple[bytes, str]:
    """Return the text of a scrape and its content type, in the form that the scraper accepts."""
    encode, content_type = choose_encoder(accept)
    return encode(_Once(found)), content_type


def collect_families(s: MetricsSnapshot) -> Iterator[Metric]:
    yield from _describe_server(s)
    yield from _describe_calls(s)
    label = {"model_name": s.model.model_id} if any(s.engines) and s.model is not None else None
    for attribute, ours, theirs, about in HISTOGRAMS:
        found = getattr(s.times, attribute)
        yield make_histogram(f"wicore_{ours}", about, found)
        if label is not None:
            yield make_histogram(f"vllm:{theirs}", f"As wicore_{ours}.", found, label)
    if label is not None:
        yield _describe_ends(s, label)
    yield from _label_replicas([[*_describe_replica(engine, s.model)] for engine in s.engines or [None]])
    yield from _describe_machine(s)


def _describe_replica(e: EngineStats | None, model: ModelInfo | None) -> Iterator[Metric]:
    yield GAUGE("wicore_engine_up", "1 when the engine answered this scrape.", int(e is not None))
    if e is not None:
        yield from _describe_engine(e)
        yield from _describe_tiers(e.kv.tiers)
        if model is not None:
            yield from _describe_as_vllm(e, model)


def _label_replicas(replicas: Sequence[Sequence[Metric]]) -> Iterable[Metric]:
    """Join the families of several replicas, whose samples get a label each; a single one's are as they are."""
    if len(replicas) == 1:
        return replicas[0]
    found: dict[str, Metric] = {}
    for i, families in enumerate(replicas):
        for family in families:
            label = {"engine" if family.name.startswith("vllm:") else "replica": str(i)}
            named = [sample._replace(labels={**sample.labels, **label}) for sample in family.samples]
            family.samples = found[family.name].samples + named if family.name in found else named
            found[family.name] = family
    return found.values()


def describe_processes(processes: Mapping[str, tuple[bool, int]]) -> Iterator[Metric]:
    """Describe the supervisor's processes: whether each runs, and how often it was restarted."""
    about = "1 while a process runs; on the port of the operator's calls alone."
    rows = [(name, int(up)) for name, (up, _) in processes.items()]
    yield make_family(GAUGE, "wicore_process_up", about, ["process"], rows)
    about = "How often a process ended and was started again; on the port of the operator's calls alone."
    counts = [(name, restarts) for name, (_, restarts) in processes.items()]
    yield make_family(COUNTER, "wicore_process_restarts", about, ["process"], counts)


class _Once(Collector):
    def __init__(self, found: Iterable[Metric]) -> None:
        self._found = found

    def collect(self) -> Iterable[Metric]:
        return self._found


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
    names = ("backend", "kernels", "dtype", "kv_dtype", "quantization")
    facts = {"version": s.version, "model": s.model.model_id if s.model is not None else ""}
    facts |= {name: getattr(s.model, name, None) or "" for name in names}
    about = "Version of the server and what it serves; always 1."
    yield make_family(GAUGE, "wicore_build_info", about, tuple(facts), [(*facts.values(), 1)])
    about = "1 for the state that the server is in, 0 for the others."
    yield make_family(GAUGE, "wicore_state", about, ["state"], [(x, int(x == s.state)) for x in STATES])


def _describe_calls(s: MetricsSnapshot) -> Iterator[Metric]:
    yield GAUGE("wicore_requests_open", "Generations in progress, over HTTP and gRPC.", s.open_requests)
    about, rows = "Ended HTTP requests; 499 is a client that left.", sorted(s.calls.http.items())
    labels = ["method", "path", "status"]
    yield make_family(COUNTER, "wicore_http_requests", about, labels, [(*key, count) for key, count in rows])
    about, calls = "Ended gRPC calls of the inference service.", sorted(s.calls.grpc.items())
    yield make_family(COUNTER, "wicore_grpc_calls", about, ["method", "code"], [(*key, count) for key, count in calls])
    answers = Counter[tuple[str, str, str]]()
    for (method, path, status), count in rows:
        answers[path, method, f"{status[0]}xx"] += count
    about, labels = "As wicore_http_requests, under the name that vLLM has.", ["handler", "method", "status"]
    yield make_family(COUNTER, "http_requests", about, labels, [(*key, n) for key, n in sorted(answers.items())])
    about, refused = "Calls without a valid API key.", [(way, s.calls.refused[way]) for way in ("grpc", "http")]
    yield make_family(COUNTER, "wicore_keys_refused", about, ["transport"], refused)
    about, ends = "Sequences that ended, as their clients were told.", [(x, s.finished.get(x, 0)) for x in VLLM_REASONS]
    yield make_family(COUNTER, "wicore_requests_finished", about, ["reason"], ends)


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


ENGINE = (
    (GAUGE, "requests_running", ("num_requests_running",), "Sequences in the batch."),
    (GAUGE, "requests_waiting", ("num_requests_waiting",), "Sequences that wait for a place in the batch."),
    (COUNTER, "prompt_tokens", ("prefix_cache_queries", "prompt_tokens"),
     "Prompt tokens of requests that the engine took, once for each sequence."),
    (COUNTER, "cached_prompt_tokens", ("prefix_cache_hits", "prompt_tokens_cached"),
     "Prompt tokens that came from the KV cache, not computed."),
    (COUNTER, "generated_tokens", ("generation_tokens",), "Tokens that the engine generated."),
    (COUNTER, "steps", (), "Steps of the engine."),
    (COUNTER, "step_seconds", (), "Time spent in steps."),
    (COUNTER, "preemptions", ("num_preemptions",), "Sequences that gave their place back and went on later."),
)  # fmt: skip
"""Figures of `EngineStats`: kind, attribute and our name, vLLM's names, and the meaning."""


def _describe_engine(e: EngineStats) -> Iterator[Metric]:
    yield GAUGE("wicore_engine_uptime_seconds", "Since the engine was loaded.", e.uptime_s)
    for kind, name, _, about in ENGINE:
        yield kind(f"wicore_{name}", about, getattr(e, name))
    if (found := _step_tokens(e)) is not None:
        yield make_histogram("wicore_step_tokens", "Tokens that a step computed, of prompts and answers.", found)
    about = "Device pages of a layer group: used by sequences, cached for prefixes, and all that there are."
    pages = [(p.group, state, n) for p in e.pools for state, n in
             (("used", p.used_pages), ("cached", p.cached_pages), ("total", p.total_pages))]  # fmt: skip
    yield make_family(GAUGE, "wicore_device_pages", about, ["group", "state"], pages)
    about = "Prompts whose cached pages were loaded, computed anew, or both."
    decisions = sorted(e.kv.decisions.items())
    yield make_family(COUNTER, "wicore_kv_decisions", about, ["decision"], decisions)
    yield COUNTER("wicore_kv_parked", "Preempted sequences whose pages went to host memory.", e.kv.parked)
    yield COUNTER("wicore_kv_resumed", "Preempted sequences that went on from there.", e.kv.resumed)


def _step_tokens(e: EngineStats) -> Histogram | None:
    if not e.step_tokens:
        return None
    made = Histogram(STEP_TOKENS)
    *made.counts, made.total = e.step_tokens
    return made


TIER = (
    (GAUGE, "capacity_bytes", "", "Bytes that a tier of the KV cache has."),
    (GAUGE, "used_bytes", "", "Bytes that hold pages."),
    (GAUGE, "raw_bytes", "", "Bytes that these pages take on the device: more, where they are coded."),
    (GAUGE, "pinned_bytes", "", "Bytes that cannot be given up now: running sequences, sessions."),
    (GAUGE, "queue_depth", "", "Transfers under way."),
    (GAUGE, "pages", "group", "Pages that a tier holds."),
    (COUNTER, "hit_tokens", "", "Prompt tokens that a tier saved; each counts for the nearest one."),
    (COUNTER, "read_bytes", "", "Bytes that were read towards the device."),
    (COUNTER, "read_seconds", "", "Time that these reads took."),
    (COUNTER, "write_bytes", "", "Bytes that were written into the tier."),
    (COUNTER, "write_seconds", "", "Time that these writes took."),
    (COUNTER, "evictions", "cause", "Pages that left a tier."),
    (COUNTER, "failures", "cause", "Pages that could not be moved or did not verify."),
)
"""Figures of `TierStats`: kind, attribute and name, the label that divides it or "", and the meaning."""


def _describe_tiers(tiers: Sequence[TierStats]) -> Iterator[Metric]:
    for kind, name, label, about in TIER:
        rows: list[tuple[object, ...]] = []
        for tier in tiers:
            found = getattr(tier, name)
            rows += [(tier.tier, *part) for part in sorted(found.items())] if label else [(tier.tier, found)]
        yield make_family(kind, f"wicore_kv_{name}", about, ["tier", label] if label else ["tier"], rows)


def _describe_ends(s: MetricsSnapshot, label: Mapping[str, str]) -> Metric:
    ended = Counter[str]()
    for reason, other in VLLM_REASONS.items():
        ended[other] += s.finished.get(reason, 0)
    rows = [(*label.values(), *entry) for entry in ended.items()]
    about = "As wicore_requests_finished."
    return make_family(COUNTER, "vllm:request_success", about, [*label, "finished_reason"], rows)


def _describe_as_vllm(e: EngineStats, model: ModelInfo) -> Iterator[Metric]:
    name, labels = model.model_id, ["model_name"]
    for kind, ours, theirs, _ in ENGINE:
        for other in theirs:
            yield make_family(kind, f"vllm:{other}", f"As wicore_{ours}.", labels, [(name, getattr(e, ours))])
    for tier in e.kv.tiers:
        if tier.tier == "device" and tier.capacity_bytes:
            about, usage = "Share of the device's KV memory in use, 0 to 1.", tier.pinned_bytes / tier.capacity_bytes
            yield make_family(GAUGE, "vllm:kv_cache_usage_perc", about, labels, [(name, usage)])
    if e.pools and model.page_tokens:
        whole = min(e.pools, key=lambda pool: pool.group)  # "global" before "local"
        about, sizes = "Tokens of a KV page, and pages on the device; 1.", (model.page_tokens, whole.total_pages)
        labels = [*labels, "block_size", "num_gpu_blocks"]
        yield make_family(GAUGE, "vllm:cache_config_info", about, labels, [(name, *sizes, 1)])
    if (found := _step_tokens(e)) is not None:
        yield make_histogram("vllm:iteration_tokens_total", "As wicore_step_tokens.", found, {"model_name": name})


MACHINE = (
    (COUNTER, "cpu_seconds", "CPU time of a process, all threads."),
    (GAUGE, "resident_bytes", "Memory of a process."),
    (GAUGE, "open_files", "Files and sockets of a process."),
)
"""Figures of `ProcessUse`: kind, attribute and name, and the meaning."""
GPU = {
    "memory_used_bytes": "Memory of a GPU in use, by all processes.",
    "memory_total_bytes": "Memory of a GPU.",
    "utilization": "Share of the last moment in which a kernel ran, 0 to 1.",
    "power_watts": "What a GPU draws.",
    "temperature_celsius": "How warm a GPU is.",
}
"""Figures of `GpuUse`: name and meaning."""


def _describe_machine(s: MetricsSnapshot) -> Iterator[Metric]:
    for kind, name, about in MACHINE:
        known = [(process, getattr(use, name)) for process, use in s.processes.items() if use is not None]
        rows = [(process, value) for process, value in known if value is not None]
        yield make_family(kind, f"wicore_process_{name}", about, ["process"], rows)
    for name, about in GPU.items() if s.gpus else ():
        gpus = [(g.index, g.uuid, g.name, g.figures[name]) for g in s.gpus if name in g.figures]
        yield make_family(GAUGE, f"wicore_gpu_{name}", about, ["gpu", "uuid", "name"], gpus)
