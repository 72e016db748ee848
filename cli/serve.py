"""`wicore serve`: load an engine and answer gRPC and HTTP until a signal.

Invariant: standard output carries two lines, `ready on ADDRESS` and `HTTP on URL`, when it serves, or what
--print-config prints; the log goes to standard error.
"""

from __future__ import annotations

import logging
import os
import resource
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Argument, Option

from wicore_trt.cli._options import complete_recipes
from wicore_trt.cli._vllm import ServeCommand
from wicore_trt.errors import ConfigError, EngineFormatError, EnvironmentUnfitError, check_extras

logger = logging.getLogger(__name__)

_NETWORK, _LIMITS, _ENGINE, _OUTPUT = (
    partial(Option, rich_help_panel=panel) for panel in ("Network", "Limits", "Engine", "Output")
)
COMMAND_CLASS = ServeCommand
FILES = 128
"""Open files of a process without clients, and some to spare: a front has 30, an engine of eight ranks 90."""


def command(
    engine_or_recipe: Annotated[
        str | None,
        Argument(
            metavar="ENGINE|RECIPE",
            help="Engine directory, or a recipe's name or file.",
            show_default=False,
            autocompletion=complete_recipes,
        ),
    ] = None,
    engine: Annotated[str | None, _ENGINE(help="Engine directory, with a recipe.")] = None,
    name: Annotated[
        str | None,
        _ENGINE("--served-model-name", "--name", help="Names that clients may ask for, comma-separated; one is shown."),
    ] = None,
    device: Annotated[str | None, _ENGINE(show_default="auto", help="auto, cpu or cuda.")] = None,
    threads: Annotated[int | None, _ENGINE(show_default="0", help="CPU threads of one step; 0: all cores.")] = None,
    replicas: Annotated[
        int | None, _ENGINE(show_default="1", help="Engines behind the addresses, each on its own GPUs.")
    ] = None,
    host: Annotated[str | None, _NETWORK(show_default="127.0.0.1", help="Address to listen on, or unix:/path.")] = None,
    grpc_port: Annotated[int | None, _NETWORK(show_default="50051", help="gRPC port; 0 takes a free one.")] = None,
    http_port: Annotated[
        str | None, _NETWORK(show_default="8000", help="HTTP port; 0 takes a free one, none is no HTTP.")
    ] = None,
    port: Annotated[
        int | None, _NETWORK(help="--http-port, as other servers name it; beside --http-port it is --grpc-port.")
    ] = None,
    http_host: Annotated[str | None, _NETWORK(show_default="--host", help="Address to listen on for HTTP.")] = None,
    cors_origins: Annotated[str | None, _NETWORK(help="Origins of web pages that may call, comma-separated.")] = None,
    allowed_hosts: Annotated[
        str | None, _NETWORK(help="Names by which a server without keys may be called, comma-separated.")
    ] = None,
    admin_port: Annotated[
        str | None, _NETWORK(show_default="none", help="Port of the operator's calls; 0 takes a free one.")
    ] = None,
    admin_host: Annotated[
        str | None, _NETWORK(show_default="127.0.0.1", help="Address to listen on for these.")
    ] = None,
    api_key: Annotated[
        str | None, _NETWORK(help="Key that calls must present; better set WICORE_SERVER__API_KEY.")
    ] = None,
    keys_file: Annotated[str | None, _NETWORK(help="File of API keys, a line TENANT:KEY each.")] = None,
    tls_cert: Annotated[str | None, _NETWORK(help="Certificate chain, PEM.")] = None,
    tls_key: Annotated[str | None, _NETWORK(help="Private key, PEM.")] = None,
    tls_client_ca: Annotated[str | None, _NETWORK(help="CA that client certificates must come from, PEM.")] = None,
    insecure: Annotated[
        bool | None, _NETWORK("--insecure/--secure", show_default="false", help="Let others in without keys or TLS.")
    ] = None,
    reflection: Annotated[
        bool | None, _NETWORK("--reflection/--no-reflection", show_default="true", help="gRPC reflection.")
    ] = None,
    grace: Annotated[float | None, _LIMITS(show_default="30", help="Seconds to finish requests after SIGTERM.")] = None,
    max_message_mb: Annotated[int | None, _LIMITS(help="Largest request, MiB.")] = None,
    requests_per_minute: Annotated[int | None, _LIMITS(help="Generations of one tenant.")] = None,
    tokens_per_minute: Annotated[int | None, _LIMITS(help="Tokens of one tenant, prompt and output.")] = None,
    max_sequences: Annotated[
        int | None, _LIMITS(show_default="64", help="Sequences that run at the same time.")
    ] = None,
    max_batch_tokens: Annotated[int | None, _LIMITS(show_default="2048, CPU: 256", help="Tokens of one step.")] = None,
    max_waiting: Annotated[int | None, _LIMITS(show_default="1024", help="Sequences that may wait.")] = None,
    max_context: Annotated[int | None, _LIMITS(help="Longest prompt and output, tokens.")] = None,
    gpu_memory_utilization: Annotated[
        float | None, _LIMITS(show_default="0.9", help="Share of the GPU for weights, work space and KV pages.")
    ] = None,
    kv_bytes: Annotated[str | None, _LIMITS(help="Device memory for KV pages, like 2GiB.")] = None,
    kv_host_bytes: Annotated[
        str | None, _LIMITS(show_default="0", help="Host memory for KV pages that left the device.")
    ] = None,
    kv_disk: Annotated[str | None, _LIMITS(help="Directory for KV pages on disk.")] = None,
    kv_disk_bytes: Annotated[
        str | None, _LIMITS(show_default="16GiB", help="Most bytes that the files there take.")
    ] = None,
    log_level: Annotated[str | None, _OUTPUT(show_default="info", help="debug, info, warning or error.")] = None,
    log_json: Annotated[bool | None, _OUTPUT("--log-json/--log-text", show_default="false", help="JSON lines.")] = None,
    print_config: Annotated[
        bool, _OUTPUT("--print-config", help="Print every setting with its meaning and where its value came from.")
    ] = False,
) -> int:
    """Serve an engine over gRPC and HTTP.

    Settings come from flags, then WICORE_* variables, then the recipe. SIGTERM lets running requests finish.

    There are more settings than flags: wicore serve --print-config explains all; WICORE_KV__POLICY=lru sets kv.policy.
    """
    given = dict(locals())
    from wicore_trt.config import KEYS, Flag, resolve_settings

    if engine_or_recipe is None and not print_config:
        raise typer.BadParameter("Name an engine directory or a recipe.", param_hint="ENGINE|RECIPE")
    recipe, where = None, Path(engine_or_recipe or ".")
    if where.suffix in (".gguf", ".safetensors") and where.is_file():
        from wicore_trt.files import quote_arg

        fix = f"Build one: wicore build {quote_arg(where)} engines/{quote_arg(where.stem)}"
        raise ConfigError(f"{where} is a model; an engine or a recipe is needed.", fix=fix)
    if not where.is_dir() and (where.suffix in (".yaml", ".yml") or where.name == engine_or_recipe):
        recipe = engine_or_recipe  # a bare name or a YAML file, and no engine directory, present or not
    if grpc_port is not None and None not in (port, http_port):
        raise typer.BadParameter("It is given beside --http-port and --grpc-port.", param_hint="--port")
    # --port meant the gRPC port before it became HTTP's, and still does beside --http-port.
    old_port = grpc_port is None and http_port is not None
    named = {key.partition(".")[2]: key for key in KEYS if key.startswith(("executor.", "server.", "scheduler."))}
    overrides = {  # first settings and flags that have one name
        **{named[name]: Flag(f"--{name.replace('_', '-')}", value) for name, value in given.items() if name in named},
        "engine": engine if recipe is not None else engine_or_recipe,
        "model.name": Flag("--served-model-name", name),
        "server.port": Flag("--port", port) if old_port else Flag("--grpc-port", grpc_port),
        "server.http_port": Flag("--port", port) if http_port is None else Flag("--http-port", http_port),
        "server.grace_s": Flag("--grace", grace),
        "kv.device_fraction": Flag("--gpu-memory-utilization", gpu_memory_utilization),
        "kv.device_bytes": Flag("--kv-bytes", kv_bytes),
        "kv.host_bytes": Flag("--kv-host-bytes", kv_host_bytes),
        "kv.disk_path": Flag("--kv-disk", kv_disk),
        "kv.disk_bytes": Flag("--kv-disk-bytes", kv_disk_bytes),
        "log.level": Flag("--log-level", log_level),
        "log.json": Flag("--log-json", log_json),
    }
    loaded = resolve_settings(recipe, overrides)
    if print_config:
        print(loaded.render(meanings=True), end="")
        return 0
    directory = loaded.settings.engine
    if recipe is not None and engine is None and directory is not None and not Path(directory).exists():
        from wicore_trt.files import quote_arg

        fix = f"Build it: wicore build --recipe {quote_arg(recipe)}"
        raise EngineFormatError(f"engine {directory} does not exist.", fix=fix)
    return run_server(loaded, lambda: resolve_settings(recipe, overrides))


def run_server(loaded: Any, reread: Any) -> int:
    """Run the server with these LoadedSettings, which `reread` reads again; returns the exit code."""
    settings = loaded.settings
    check_extras("serve", "torch")
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # a connection is a file
    if resource.RLIM_INFINITY != most < FILES:
        problem = f"Each process of a server needs {FILES} open files, and may have {most} here."
        fix = "Raise the hard limit: ulimit -n 4096, LimitNOFILE= of systemd, or --ulimit nofile=4096 of Docker."
        raise EnvironmentUnfitError(problem, fix=fix)
    from wicore_trt.access import log

    log.configure_logging(json_lines=settings.log.json, level=settings.log.level)
    from wicore_trt.access.admission import Admission
    from wicore_trt.access.listening import check_server
    from wicore_trt.process.replicas import GPUS, find_gpus
    from wicore_trt.process.supervisor import Supervisor

    # What is wrong with keys, certificates or addresses is said before any process starts.
    Admission.from_settings(settings.server)
    check_server(settings.server)
    max_context, each = None, 1
    if settings.engine is not None:
        from wicore_trt.engine.directory import open_engine

        manifest = open_engine(Path(settings.engine), verify=False).manifest
        longest, each = manifest.max_context, manifest.tp_size
        max_context = min(settings.scheduler.max_context or longest, longest)
    if settings.kv.disk_path is not None:
        from wicore_trt.kv.disk.claim import list_unused, share_secret

        home, replicas = Path(settings.kv.disk_path), settings.server.replicas
        if replicas > 1:
            share_secret(home, replicas)
        if unused := " ".join(map(str, list_unused(home, replicas))):
            logger.warning("with server.replicas %d nothing reads or bounds these; remove them: %s", replicas, unused)
    if settings.executor.devices:
        os.environ[GPUS] = ",".join(settings.executor.devices)
    gpus = find_gpus(settings.executor.device, settings.server.replicas, each)

    def announce(address: str, url: str | None) -> None:
        print(f"ready on {address}\nHTTP on {url or 'no port'}", flush=True)

    return Supervisor(loaded, max_context=max_context, gpus=gpus, report_serving=announce, reread=reread).run()
