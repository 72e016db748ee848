"""The one settings tree, and the source of each value.

A value comes from a flag, else from an environment variable (`WICORE_KV__DEVICE_BYTES`), else from the recipe, else
from the default below. It must not know what the settings do. Invariant: every key that a user wrote is either a
setting or an error that names the file and line, the variable or the flag.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from textwrap import wrap
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_origin

from pydantic import BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass as settings

from wicore_trt.errors import ConfigError
from wicore_trt.recipe import did_you_mean, read_recipe, resolve_recipe

ENV_PREFIX = "WICORE_"
ENV_OTHER = frozenset({"WICORE_DEBUG"})  # read by the command line itself; not settings
_WIDTH = 80  # columns of a printed meaning
_OF_A_SERVICE = re.compile(r"\w+_(SERVICE_(HOST|PORT)|PORT_\d+_(TCP|UDP|SCTP))\w*=.*|\w+_PORT=(tcp|udp|sctp)://.*")
"""Variables that Kubernetes gives every pod beside a Service named wicore or wicore-something."""
SECRETS = frozenset({"server.api_key", "kv.salt"})

_UNITS = {"": 1, "B": 1, **{f"{p}{s}": b**e for e, p in enumerate("KMGT", 1) for s, b in (("B", 1000), ("iB", 1024))}}


def parse_bytes(value: object) -> object:
    """Parse "2GiB", "512 MB" or a plain number; values that are no text pass. Raises ValueError for other text."""
    if not isinstance(value, str):
        return value
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", value)
    if not match or match[2] not in _UNITS:
        raise ValueError(f"{value!r} is not a size; write it like 2GiB, 512MiB or 1000000")
    return int(float(match[1]) * _UNITS[match[2]])


def _comma_list(value: object) -> object:
    return tuple(part.strip() for part in value.split(",") if part.strip()) if isinstance(value, str) else value


def _none(value: object) -> object:
    return None if isinstance(value, str) and value.strip().lower() == "none" else value


ByteSize = Annotated[int, BeforeValidator(parse_bytes), Field(gt=0)]
ByteSizeOrNone = Annotated[int, BeforeValidator(parse_bytes), Field(ge=0)]
Seconds = Annotated[Annotated[float, Field(gt=0)] | None, BeforeValidator(_none)]
Share = Annotated[float, Field(gt=0, le=1)]
Positive = Annotated[int, Field(gt=0)]
Names = Annotated[tuple[str, ...], BeforeValidator(_comma_list)]
PortOrNone = Annotated[Annotated[int, Field(ge=0, le=65535)] | None, BeforeValidator(_none)]
BATCH_TOKENS = {"cuda": 2048, "cpu": 256}
"""Tokens of a step by device. A GPU computes no faster with more, and what comes meanwhile waits for the step's end."""
_STRICT = ConfigDict(extra="forbid", use_attribute_docstrings=True)


@settings(config=_STRICT, frozen=True)
class ModelSettings:
    name: Names = ()
    """Names that clients may ask for, comma-separated; the first is shown. Default: the engine's model id."""


@settings(config=_STRICT, frozen=True)
class ExecutorSettings:
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the engine runs; auto takes a GPU that PyTorch can use, else the CPU."""
    kernels: Literal["auto", "native", "torch"] = "auto"
    """CPU operators: native (C++ kernels), torch, or auto: native when the library was built."""
    threads: Annotated[int, Field(ge=0)] = 0
    """CPU threads of one step; 0 takes all cores that the process may use."""
    batch_invariant: bool = False
    """Backend triton: one kernel for every size of a step, so that a sequence's tokens do not depend on its company;
    prefill is then several times slower."""
    devices: Names = ()
    """GPUs to use, comma-separated, as CUDA_VISIBLE_DEVICES names them; an engine of n ranks takes n. Default: the
    first ones."""
    peer_access: bool = True
    """Let GPUs of several ranks write to each other's memory where they can; else they exchange through the host."""
    compare_ranks: bool = False
    """For tests of several ranks: compare rows behind the last layer, and the tokens that GPUs choose, and end an
    engine whose ranks differ."""

    def __post_init__(self) -> None:
        if len(set(self.devices)) < len(self.devices):
            raise ValueError(f"devices names one GPU twice: {','.join(self.devices)}")


@settings(config=_STRICT, frozen=True)
class KVSettings:
    page_tokens: Positive | None = None
    """Tokens per KV page. Default: the engine's page size."""
    device_bytes: ByteSize | None = None
    """Memory for KV pages on the device, as bytes or text like 2GiB. Default: 1GiB; backend triton takes what the model
    leaves of the GPU, up to device_fraction."""
    device_fraction: Share = 0.9
    """Share of the GPU's memory that weights, work space and KV pages together take where device_bytes is not set."""
    prefix_cache: bool = True
    """Keep the pages of finished requests and reuse them for prompts that begin alike. A host tier needs it."""
    policy: Literal["cost", "lru", "a2cr"] = "cost"
    """Which pages leave a full tier first; `wicore kv simulate` compares the policies on a trace."""
    write_policy: Literal["through", "selective", "back"] = "through"
    """When pages are copied to the next tier: when made, when used a second time, or when the tier fills up."""
    compression: Literal["auto", "none", "lossless"] = "auto"
    """Keep pages in host memory and on disk coded, in three quarters of their bytes, and lose no bit: bfloat16 pages of
    engines of backend triton, on GPUs. Engines that cannot keep them raw, or with lossless do not start."""
    host_bytes: ByteSizeOrNone = 0
    """Host memory for KV pages that left the device; 0 is no host tier. Needs prefix_cache."""
    disk_path: str | None = None
    """Directory for KV pages on disk, for one server alone; needs a host tier. Default: no disk tier."""
    disk_bytes: ByteSize = 16 << 30
    """Most bytes that the files under disk_path take."""
    disk_free_bytes: ByteSizeOrNone = 1 << 30
    """Free space that the disk tier leaves on its file system."""
    disk_key_file: str | None = None
    """File with a 32-byte key: pages on disk are then encrypted (AES-256-GCM), with a key of its own per tenant."""
    salt: Annotated[str, Field(min_length=1)] | None = None
    """Secret that keys the names of all pages and the tags of tenants: give some 32 random characters. Servers with one
    salt name pages alike, others never match. Default: a random one, kept in disk_path where there is a disk tier."""
    tenant_quota: Share = 1.0
    """Share of the host and of the disk tier that one tenant may fill, whatever its cache salts are. Requests without a
    tenant of their own (server without API keys) count by their cache salt."""
    pin_share: Share = 0.5
    """Share of a tier that pinned sessions may fill."""
    pin_s: Annotated[float, Field(gt=0)] = 600.0
    """Seconds after its last request for which a pinned session is kept, unless the request says otherwise."""

    def __post_init__(self) -> None:
        if self.host_bytes and not self.prefix_cache:
            raise ValueError("host_bytes needs prefix_cache: without it nothing is kept; set host_bytes to 0")
        if self.disk_path is not None and not self.host_bytes:
            raise ValueError("disk_path needs host_bytes (--kv-host-bytes): pages pass through host memory")


@settings(config=_STRICT, frozen=True)
class SchedulerSettings:
    max_batch_tokens: Positive | None = None
    """Most tokens of one step, which it has where nobody decodes; beside running requests target_itl_ms bounds it.
    Default: 2048 on a GPU, 256 on a CPU; where images are read, at least an image beside max_sequences."""
    target_itl_ms: Seconds = None
    """Longest time of a step while requests decode. Steps are measured: prompts get only as many tokens as keep
    it, but some in any case; where it is set, requests also get only as many places. Default: 50 ms, or 1.6 times a
    step without prompts if that is more; none for `LLM.generate` and `LLM.chat`, whose tokens nobody waits for one by
    one."""
    target_ttft_ms: Seconds = None
    """Refuse a request, with the time to retry, whose first token is not expected within three quarters of this, or
    within twice what its prompt takes if that is more; it ends if it then waits longer. Default: max_queue_s alone."""
    max_queue_s: Seconds = 60.0
    """Refuse a request, with the time to retry, that would wait longer for its first step; it ends if it then does.
    none is no limit. Proxies give up after 60 s."""
    timeout_s: Seconds = 3600.0
    """Time limit of a request that names none; none is no limit."""
    max_sequences: Positive = 64
    """Sequences that run at the same time."""
    max_waiting: Positive = 1024
    """Sequences that may wait for their first step (n of a request count n); a request beyond that is refused with
    RESOURCE_EXHAUSTED. A tenant may have as many waiting as there is room left."""
    max_context: Positive | None = None
    """Longest sequence in tokens, prompt and output. Default: the engine's limit."""
    max_images: Positive = 16
    """Most images of one request, crops included."""


@settings(config=_STRICT, frozen=True)
class ServerSettings:
    host: str = "127.0.0.1"
    """Address to listen on. 0.0.0.0 listens on every interface, and needs api_key or keys_file, and TLS."""
    port: Annotated[int, Field(ge=0, le=65535)] = 50051
    """gRPC port; 0 takes a free one and prints it."""
    http_port: PortOrNone = 8000
    """HTTP port; 0 takes a free one and prints it, none is no HTTP."""
    http_host: str | None = None
    """Address to listen on for HTTP. Default: host; where that is unix:/path, unix:/path.http."""
    cors_origins: Names = ()
    """Origins of web pages that may call this server from a browser, such as https://chat.example.org; * is any.
    Default: none but its own."""
    allowed_hosts: Names = ()
    """Names by which browsers and others may call a server that this machine alone reaches and that has no keys, beside
    localhost and addresses; * is any. A page of another site could otherwise reach it under a name of its own."""
    admin_port: PortOrNone = None
    """Port of the operator's calls: /reload, /drain, /config, /metrics, /health; 0 takes a free one. Default: none."""
    admin_host: str = "127.0.0.1"
    """Address to listen on for the operator's calls."""
    requests_per_minute: Positive | None = None
    """Generation requests that one tenant may send in a minute, over HTTP and gRPC together. Default: no limit."""
    tokens_per_minute: Positive | None = None
    """Tokens, prompt and output, that one tenant may take in a minute. A request reserves what it may take at most and
    gives back what it did not use. Default: no limit."""
    grace_s: Annotated[float, Field(ge=0)] = 30.0
    """Seconds that running requests get to finish after SIGTERM."""
    replicas: Positive = 1
    """Engines that serve behind the addresses. Each has GPUs of its own, or its part of the CPU, and its part of
    kv.host_bytes and kv.disk_bytes. A request goes to the one that holds its prefix unless that is loaded."""
    watchdog_s: Seconds = 300.0
    """An engine that has work and ends no step for so long is ended, with the stacks of its threads in the log, and
    started again. Longer than any step takes: with its first ones kernels may be compiled. none is no watchdog."""
    api_key: Annotated[str, Field(min_length=1)] | None = None
    """The operator's key. Set it by WICORE_SERVER__API_KEY, so that it is in no file and no ps. Without this and
    keys_file everybody who reaches the server may use it, as one trusted user."""
    keys_file: str | None = None
    """File with a line TENANT:KEY for each API key, or TENANT:KEY:operator, readable by its owner alone. Tenants share
    neither cached work nor request ids, and see the counts and KV events of their own requests; operators see all."""
    tls_cert: str | None = None
    """Server certificate chain, a PEM file."""
    tls_key: str | None = None
    """Private key of the certificate, a PEM file."""
    tls_client_ca: str | None = None
    """CA that client certificates must be signed by, a PEM file; clients without one are refused."""
    insecure: bool = False
    """Listen where other machines reach the server also without keys or TLS, such as behind a proxy that has both."""
    reflection: bool = True
    """Serve gRPC reflection, so that grpcurl lists the methods."""
    max_message_mb: Positive | None = None
    """Largest request message in MiB, unpacked. Default: 4 MiB, or 128 bytes for each token of the context; 32 MiB for
    engines that read images."""
    image_hosts: Names = ()
    """Hosts from which images are fetched by their URLs, such as images.example.org or *.example.org, with a port where
    it is not the scheme's own; * is any. Addresses that are not public are never asked. Default: none."""

    def __post_init__(self) -> None:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("tls_cert and tls_key go together")
        if self.tls_client_ca is not None and self.tls_cert is None:
            raise ValueError("tls_client_ca needs tls_cert and tls_key")


@settings(config=_STRICT, frozen=True)
class LogSettings:
    level: Literal["debug", "info", "warning", "error"] = "info"
    """Least severe message that is logged."""
    json: bool = False
    """Log a JSON object per line, in place of text."""


@settings(config=_STRICT, frozen=True)
class BuildSettings:
    source: str | None = None
    """Hub id, directory or GGUF file that `wicore build RECIPE` builds from."""
    dtype: Literal["auto", "float32", "bfloat16", "float16", "fp8", "q4_0"] = "auto"
    """Dtype of the weights."""
    kv_dtype: Literal["auto", "float32", "bfloat16", "float16", "fp8"] = "auto"
    """Dtype of the KV cache; auto is that of the activations. fp8 runs on the torch operators, on a GPU on
    compiled kernels too."""
    backend: str = "torch"
    """How the engine computes."""
    targets: Names = ()
    """GPU architectures to compile for, such as sm89; backend torch takes none."""
    max_batch: Positive = 8
    """Sequences of a decode step in compiled engines."""
    max_chunk: Positive = 512
    """Tokens of a prefill step in compiled engines."""
    tp_size: Positive = 1
    """Number of GPUs that the weights are split over."""


@settings(config=_STRICT, frozen=True)
class Settings:
    """Tree of all settings, validated."""

    engine: str | None = None
    """Engine directory to load."""
    model: ModelSettings = field(default_factory=ModelSettings)
    executor: ExecutorSettings = field(default_factory=ExecutorSettings)
    kv: KVSettings = field(default_factory=KVSettings)
    scheduler: SchedulerSettings = field(default_factory=SchedulerSettings)
    server: ServerSettings = field(default_factory=ServerSettings)
    log: LogSettings = field(default_factory=LogSettings)
    build: BuildSettings = field(default_factory=BuildSettings)


_TREE = TypeAdapter(Settings)


def value_of(settings: Settings, key: str) -> Any:
    found: Any = settings
    for part in key.split("."):
        found = getattr(found, part)
    return found


@dataclass(frozen=True, slots=True)
class LoadedSettings:
    """Settings with the origin of every value that is not a default, by dotted key ("kv.device_bytes")."""

    settings: Settings
    sources: Mapping[str, str]

    def rows(self) -> list[tuple[str, Any, str]]:
        """List (key, value, source) of every setting in the tree's order; secrets are masked."""
        found = []
        for key in KEYS:
            value = value_of(self.settings, key)
            masked = "***" if key in SECRETS and value is not None else value
            found.append((key, masked, self.sources.get(key, "default")))
        return found

    def render(self, *, meanings: bool = False) -> str:
        """Render the settings as a recipe with their sources as comments; `meanings` adds descriptions."""
        lines, section = list[str](), ""
        for key, value, source in self.rows():
            head, _, leaf = key.rpartition(".")
            if head != section:
                lines.append(f"{head}:")
                section = head
            text, indent = json.dumps(list(value) if isinstance(value, tuple) else value), "  " if head else ""
            if meanings:
                tree: Any = getattr(Settings(), head) if head else Settings()
                about = type(tree).__pydantic_fields__[leaf]
                choices = get_args(about.annotation) if get_origin(about.annotation) is Literal else ()
                meaning = (about.description or "") + (f" One of {', '.join(choices)}." if choices else "")
                lines += wrap(meaning, _WIDTH, initial_indent=f"{indent}# ", subsequent_indent=f"{indent}# ")
            lines.append(f"{indent}{leaf}: {text}  # {source}")
        return "\n".join(lines) + "\n"


def _leaf_keys(tree: type, prefix: str = "") -> Iterator[str]:
    for entry in fields(tree):
        section = entry.default_factory
        if isinstance(section, type) and is_dataclass(section):
            yield from _leaf_keys(section, f"{prefix}{entry.name}.")
        else:
            yield prefix + entry.name


KEYS = tuple(_leaf_keys(Settings))
"""Dotted keys of all settings, in the tree's order."""


class Flag(NamedTuple):
    """Value of the command line (None: not given), and the name of its option for errors."""

    name: str
    value: Any


def load_settings(recipe: str | Path | None = None, overrides: Mapping[str, Any] | None = None) -> Settings:
    """Load settings from flags, environment, recipe and defaults; see `resolve_settings`."""
    return resolve_settings(recipe, overrides).settings


def resolve_settings(
    recipe: str | Path | None = None,
    overrides: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] | None = None,
) -> LoadedSettings:
    """Resolve settings and their sources. Precedence: flag > environment > recipe > default. `recipe` is a packaged
    recipe's name or a path. `overrides` maps keys, dotted ({"kv.page_tokens": 16}) or nested, to values or Flags; None
    means not given. Raises ConfigError naming where the bad value was written."""
    values: dict[str, tuple[Any, str]] = {}
    if recipe is not None:
        values |= read_recipe(resolve_recipe(recipe), KEYS)
    values |= _from_environment(os.environ if environ is None else environ)
    values |= _from_flags(overrides or {})
    nested: dict[str, Any] = {}
    for key, (value, _) in values.items():
        section, _, leaf = key.rpartition(".")
        (nested.setdefault(section, {}) if section else nested)[leaf] = value
    sources = {key: where for key, (_, where) in values.items()}
    try:
        return LoadedSettings(_TREE.validate_python(nested), sources)
    except ValidationError as error:
        raise _as_config_error(error, sources) from error


def settings_to_json(settings: Settings) -> str:
    """Serialize settings for another process of this server; the text contains secrets."""
    return _TREE.dump_json(settings).decode()


def settings_from_json(text: str) -> Settings:
    return _TREE.validate_json(text)


def _from_environment(environ: Mapping[str, str]) -> dict[str, tuple[Any, str]]:
    names = {ENV_PREFIX + key.replace(".", "__").upper(): key for key in KEYS}
    found: dict[str, tuple[Any, str]] = {}
    for name in sorted(n for n in environ if n.startswith(ENV_PREFIX) and n not in ENV_OTHER):
        if name in names:
            found[names[name]] = (environ[name], f"env {name}")
        elif not _OF_A_SERVICE.fullmatch(f"{name}={environ[name]}"):
            raise ConfigError(f"environment variable {name} is not a setting.", fix=did_you_mean(name, names))
    return found


def _from_flags(overrides: Mapping[str, Any], prefix: str = "") -> dict[str, tuple[Any, str]]:
    found: dict[str, tuple[Any, str]] = {}
    for name, value in overrides.items():
        key = prefix + name
        if isinstance(value, Mapping):
            found |= _from_flags(value, f"{key}.")
            continue
        where, value = (value.name, value.value) if isinstance(value, Flag) else ("argument", value)
        if value is not None:
            if key not in KEYS:
                raise ConfigError(f"{key} is not a setting.", fix=did_you_mean(key, KEYS))
            found[key] = (value, where)
    return found


def _as_config_error(error: ValidationError, sources: Mapping[str, str]) -> ConfigError:
    parts = []
    for detail in error.errors(include_url=False, include_context=False, include_input=False):
        key = ".".join(str(part) for part in detail["loc"] if isinstance(part, str) and not part.isdigit())
        words = re.findall(r"\w+", detail["msg"])  # an error about several fields is the section's and names them
        fields = (w for k, w in sources.items() if k.startswith(f"{key}.") and k.rpartition(".")[2] in words)
        written = sources.get(key) or next(fields, "default")
        name = written if written.startswith("--") else f"{written}: {key}"
        parts.append(f"{name}: {detail['msg'].removeprefix('Value error, ')}")
    return ConfigError("; ".join(parts) + ".")
