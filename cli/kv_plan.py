"""`wicore kv plan`: sizes the KV tiers for given conversations, as recipe lines to paste."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from wicore_trt.arithmetic import ITEM_BYTES, div_ceil

if TYPE_CHECKING:
    from wicore_trt.kv.sizing import Geometry, SessionSize
    from wicore_trt.model.spec import Gemma3Spec
    from wicore_trt.weight_format import WeightFormat

GIB = 1 << 30


def plan(
    model: Annotated[str, Option(help="Engine, checkpoint, or a name such as gemma3-27b (270m, 1b, 4b, 12b).")],
    context: Annotated[str, Option(help="Tokens of a conversation (32K is 32,768); several with commas.")] = "32K",
    users: Annotated[int, Option(min=1, metavar="N", help="Conversations to keep.")] = 50,
    active: Annotated[
        int | None, Option(min=1, metavar="N", help="Of these, computed at the same time. Default: 8 at most.")
    ] = None,
    reply_tokens: Annotated[int, Option(min=0, metavar="N", help="Length of the latest reply.")] = 128,
    kv_dtype: Annotated[str | None, Option(help="float32, bfloat16, float16 or fp8. Default: the engine's.")] = None,
    compression: Annotated[str, Option(help="kv.compression: none or lossless (BF16 on GPUs).")] = "none",
    page_tokens: Annotated[
        int | None, Option(min=1, metavar="N", help="Tokens per KV page. Default: the engine's, or 32.")
    ] = None,
    max_batch_tokens: Annotated[
        int | None, Option(min=1, metavar="N", help="Tokens of one step. Default: 2048.")
    ] = None,
    device_bytes: Annotated[str | None, Option(help="Device memory for KV pages that there is, e.g. 40GB.")] = None,
    dtype: Annotated[
        str | None,
        Option(help="Weights of a named model: bfloat16, float16, fp8, q4_0. Several with commas, for --gpus."),
    ] = None,
    gpus: Annotated[
        str | None, Option(help="Memory of GPUs, such as 16GB,24GB,80GB: conversations that fit beside weights.")
    ] = None,
    host_bytes: Annotated[str | None, Option(help="Host memory that there is, e.g. 100GB.")] = None,
    disk_bytes: Annotated[str | None, Option(help="Disk space that there is, e.g. 1TB.")] = None,
    disk_rate: Annotated[str | None, Option(help="What the disk reads per second, e.g. 4GB.")] = None,
    prefill_tokens_per_s: Annotated[
        float | None, Option(min=1e-3, metavar="N", help="How fast the engine computes prompts.")
    ] = None,
    json: Annotated[bool, Option("--json", help="Print JSON.")] = False,
) -> None:
    """Size the KV tiers for conversations that share no prefix: bytes of each, and what the tiers hold."""
    from wicore_trt.checkpoint.format import count_weight_bytes
    from wicore_trt.cli._ui import human_bytes, print_json, print_table
    from wicore_trt.config import BATCH_TOKENS
    from wicore_trt.errors import ConfigError
    from wicore_trt.kv.sizing import Geometry, SessionSize

    spec, own_dtype, own_page_tokens, longest, formats = _read_model(model, dtype)
    kv_dtype = kv_dtype or own_dtype
    if kv_dtype not in ITEM_BYTES:
        raise ConfigError(f"--kv-dtype {kv_dtype!r} is not known.", fix=f"Take one of {', '.join(ITEM_BYTES)}.")
    if compression not in ("none", "lossless") or (compression == "lossless" and kv_dtype != "bfloat16"):
        fix = "Take none, or bfloat16 pages."
        raise ConfigError(f"--compression {compression!r} for pages of {kv_dtype}.", fix=fix)
    coded = compression == "lossless"
    geometry = Geometry.from_spec(spec, page_tokens or own_page_tokens, kv_dtype, coded=coded)
    sizes = [
        SessionSize(geometry, _parse_tokens(text, longest, geometry.page_tokens), reply_tokens)
        for text in context.split(",")
    ]
    device, host, disk, rate = (_parse_bytes(text) for text in (device_bytes, host_bytes, disk_bytes, disk_rate))
    batch = max_batch_tokens or BATCH_TOKENS["cuda"]
    rows = [_make_row(size, batch, (device, host, disk), prefill_tokens_per_s, rate) for size in sizes]
    largest = max(sizes, key=lambda size: size.tokens)
    together = min(users, active or 8)
    if device is not None:
        fit = geometry.device_sessions(device, largest.tokens, batch, loads=True)
        if fit < min(users, active or 1):
            problem = f"--device-bytes {device_bytes}: {fit} conversations of {largest.tokens:,} tokens fit at a time."
            raise ConfigError(problem, fix="Take a shorter --context, fewer --active, more memory or --kv-dtype fp8.")
        together = min(together, fit)
    recipe = _make_recipe(largest, users, together, batch, host, disk)
    recipe["kv"] |= {"compression": compression} if coded else {}
    weights = {name: count_weight_bytes(spec, form) for name, form in formats.items()}
    cards = {card.strip(): _parse_bytes(card) or 0 for card in gpus.split(",")} if gpus else {}
    fits: list[dict[str, Any]] = [
        {"weights": name, "weight_bytes": nbytes, **{
            card: _count_sessions(geometry, memory - nbytes, sizes, batch) for card, memory in cards.items()
        }}
        for name, nbytes in weights.items()
    ]  # fmt: skip
    if json:
        names = ("kv_dtype", "page_tokens", "page_bytes", "slot_bytes", "slots_per_page")
        about = {name: getattr(geometry, name) for name in names}
        print_json({"model": model, **about, "weight_bytes": weights, "fits": fits, "sessions": rows, "recipe": recipe})
        return
    _print_rows(f"{model}, {geometry.kv_dtype}, {geometry.page_tokens} tokens per page", rows)
    heads = ["weights", "bytes", *cards]
    cells = [[f["weights"], human_bytes(f["weight_bytes"]), *(f[card] for card in cards)] for f in fits]
    lengths = ", ".join(f"{size.tokens:,}" for size in sizes)
    print_table(f"conversations of {lengths} tokens at a time, by GPU" if cards else "device memory", heads, cells)
    print(f"\n# {recipe.pop('comment')}")
    for section, values in recipe.items():
        print(f"{section}:")
        for name, value in values.items():
            print(f"  {name}: {value}")


def _read_model(model: str, dtype: str | None) -> tuple[Gemma3Spec, str, int, int, dict[str, WeightFormat]]:
    """Read (spec, KV dtype, page size, longest context, formats of weights by name) of an engine, a checkpoint, a
    model's files or a name. The formats of the latter two are what `dtype` lists."""
    from pathlib import Path

    from wicore_trt.checkpoint.format import open_checkpoint
    from wicore_trt.checkpoint.open_source import open_source
    from wicore_trt.engine.build import is_unified_checkpoint
    from wicore_trt.engine.directory import open_engine
    from wicore_trt.errors import ConfigError
    from wicore_trt.kv.sizing import MODELS, builtin_spec
    from wicore_trt.recipe import did_you_mean
    from wicore_trt.weight_format import PLAIN, QUANTIZED

    path = Path(model).expanduser()
    if (path / "engine.json").exists():
        manifest = open_engine(path, verify=False).manifest
        kept = {manifest.dtype: manifest.weights}
        return manifest.spec, manifest.kv_dtype, manifest.page_tokens, manifest.max_context, kept
    if path.exists() and is_unified_checkpoint(path):
        checkpoint = open_checkpoint(path)
        kept = {checkpoint.weights.storage: checkpoint.weights}
        return checkpoint.spec, "bfloat16", 32, checkpoint.spec.max_position_embeddings, kept
    known, names = {**PLAIN, **QUANTIZED}, (dtype or "bfloat16").split(",")
    if wrong := [name for name in names if name not in known]:
        raise ConfigError(f"--dtype {wrong[0]!r} is not known.", fix=f"Take some of {', '.join(known)}.")
    if path.exists():
        spec = open_source(path).spec
    elif model in MODELS:
        spec = builtin_spec(model)
    else:
        fix = did_you_mean(model, MODELS)
        raise ConfigError(f"--model {model}: no such directory, and no model of that name.", fix=fix)
    return spec, "bfloat16", 32, spec.max_position_embeddings, {name: known[name] for name in names}


def _count_sessions(geometry: Geometry, nbytes: int, sizes: list[SessionSize], batch: int) -> str:
    """Count, for each size, the conversations that are computed at a time in `nbytes`, of which steps take a part: "no"
    where none fits. Steps take for a token what the widest results need, and a fixed amount for logits of 64 sequences
    and the libraries: an estimate, which a server replaces by what it measures."""
    spec = geometry.spec
    token = 6 * spec.hidden_size + 8 * (spec.num_heads * spec.head_dim) // 2 + 10 * spec.intermediate_size
    room = nbytes - batch * token - 64 * 8 * spec.vocab_size - GIB
    counts = [geometry.device_sessions(max(room, 0), size.tokens, batch) for size in sizes]
    return " / ".join(f"{count:,}" if count else "no" for count in counts)


def _parse_tokens(text: str, longest: int, least: int) -> int:
    """Parse tokens from "32K" or "32768"."""
    from wicore_trt.errors import ConfigError

    number, factor = (text.strip()[:-1], 1024) if text.strip()[-1:] in ("K", "k") else (text.strip(), 1)
    tokens = int(number) * factor if number.isdecimal() else 0
    if not least <= tokens <= longest:
        raise ConfigError(
            f"--context {text!r} is not a number of tokens from {least} (one page) to {longest} (the model's longest).",
            fix="Write 32K or 32768.",
        )
    return tokens


def _parse_bytes(text: str | None) -> int | None:
    from wicore_trt.config import parse_bytes
    from wicore_trt.errors import ConfigError

    try:
        count = parse_bytes(text)
    except ValueError as error:
        raise ConfigError(f"{error}.") from None
    if count == 0:
        raise ConfigError(f"{text!r} is nothing at all.", fix="Leave the option out.")
    assert count is None or isinstance(count, int)
    return count


def _make_row(
    size: SessionSize, batch: int, room: tuple[int | None, ...], prefill: float | None, rate: int | None
) -> dict[str, Any]:
    """Make the figures of one size; `room` are the bytes of device, host and disk, where known."""
    from wicore_trt.model.spec import GLOBAL, LOCAL

    geometry, (device, host, disk) = size.geometry, room
    row: dict[str, Any] = {
        "context": size.tokens, "global_bytes": size.bytes_of(GLOBAL), "window_bytes": size.bytes_of(LOCAL),
        "session_bytes": size.host_bytes, "tokens_per_gb": int(size.tokens * 1e9 / size.host_bytes),
        "all_layers_bytes": size.all_layers_bytes, "saving": round(size.saving_factor, 2),
    }  # fmt: skip
    if device is not None:
        row["sessions_on_device"] = geometry.device_sessions(device, size.tokens, batch, loads=True)
    if host is not None:
        row["sessions_in_host"] = host // size.host_bytes
    if disk is not None:
        row["sessions_on_disk"] = geometry.disk_slots(disk) // size.slot_count
    if prefill is not None:
        row["recompute_s"] = round(size.tokens / prefill, 3)
        row["break_even_disk_rate"] = int(size.resume_bytes * prefill / size.tokens)
    if rate is not None:
        row["disk_read_s"] = round(size.resume_bytes / rate, 3)
    return row


def _make_recipe(
    size: SessionSize, users: int, active: int, max_batch_tokens: int, host: int | None, disk: int | None
) -> dict[str, Any]:
    """Make settings that keep `users` conversations: `active` on the device and all below it, since pages are copied
    down when they are made. The disk gets what the host cannot hold."""
    geometry, slots = size.geometry, users * size.slot_count
    need = slots * geometry.slot_bytes
    held = users if host is None else min(users, host // size.host_bytes)
    comment = f"{users} conversations of {size.tokens:,} tokens: {active} on the device, {held} in host memory"
    kv: dict[str, Any] = {
        "page_tokens": geometry.page_tokens,
        "device_bytes": _format_bytes(geometry.device_bytes(active, size.tokens, max_batch_tokens, loads=True)),
        "host_bytes": _format_bytes(need if host is None else min(need, host), down=host is not None and host < need),
    }
    limit = geometry.disk_bytes(slots)
    on_disk = users if disk is None else min(users, geometry.disk_slots(disk) // size.slot_count)
    kv["disk_bytes"] = _format_bytes(limit if disk is None else min(limit, disk), down=limit > (disk or limit))
    comment += f", {on_disk} on disk (with kv.disk_path)"
    scheduler = {"max_sequences": active, "max_batch_tokens": max_batch_tokens, "max_context": size.tokens}
    return {"comment": comment, "kv": kv, "scheduler": scheduler}


def _format_bytes(count: int, *, down: bool = False) -> str:
    """Format bytes for a recipe, rounded up (or down) by less than 1 %."""
    unit, name, part = (GIB, "GiB", 100) if count >= GIB else (1 << 20, "MiB", 1)
    parts = count * part // unit if down else div_ceil(count * part, unit)
    return f"{parts / part:.10g}{name}"


def _print_rows(title: str, rows: list[dict[str, Any]]) -> None:
    from wicore_trt.cli._ui import human_bytes, print_table

    heads = {
        "context": "tokens", "global_bytes": "global", "window_bytes": "windows", "session_bytes": "in all",
        "tokens_per_gib": "tokens/GiB", "all_layers_bytes": "all layers", "saving": "saving",
        "sessions_on_device": "on the device", "sessions_in_host": "in host", "sessions_on_disk": "on disk",
        "recompute_s": "recompute s", "break_even_disk_rate": "break-even disk", "disk_read_s": "disk read s",
    }  # fmt: skip
    rows = [{**row, "tokens_per_gib": int(row["context"] * GIB / row["session_bytes"])} for row in rows]
    names = [name for name in heads if name in rows[0]]

    def cell(name: str, value: Any) -> str:
        if name == "break_even_disk_rate":
            return f"{human_bytes(value)}/s"
        if name.endswith("_bytes"):
            return str(human_bytes(value))
        return f"{value:.2f}x" if name == "saving" else f"{value:,}"

    # A column for each context, not a row: twelve figures are wider than a terminal.
    (_, *columns), *table = [[heads[name], *(cell(name, row[name]) for row in rows)] for name in names]
    print_table(title, ["tokens", *columns], table)
