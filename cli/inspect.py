"""`wicore inspect`: describes an engine or a checkpoint, and verifies its files."""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from wicore_trt.arithmetic import ITEM_BYTES

if TYPE_CHECKING:
    from wicore_trt.backends.tensorrt.plan_io import TensorSpec
    from wicore_trt.engine.directory import EngineDir
    from wicore_trt.model.spec import Gemma3Spec
    from wicore_trt.progress import Progress

_OK, _UNCHECKED = "ok", "not checked"
_UNLISTED = "not listed"
_MANY = 8
_BYTES = ITEM_BYTES | {"int32": 4}


def command(
    path: Annotated[Path, Argument(help="Engine or unified checkpoint directory.")],
    verify: Annotated[
        bool, Option("--verify", help="Check every byte; exit 4 when a file is corrupted or not listed.")
    ] = False,
    json: Annotated[bool, Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show the model, sizes, KV bytes and files of an engine or a checkpoint."""
    from wicore_trt.cli._ui import human_bytes, print_json, print_table, progress
    from wicore_trt.engine.build import is_unified_checkpoint

    is_checkpoint = is_unified_checkpoint(path) and not (path / "engine.json").exists()
    with progress(quiet=json or not verify) as report_progress:
        look = _describe_checkpoint if is_checkpoint else _describe_engine
        report = look(path, verify=verify, progress=report_progress)
    again = report.pop("again")
    if json:
        print_json(report)
    else:
        print_table(report["kind"], ("field", "value"), _format_rows(report["about"]))
        print_table("model", ("field", "value"), _format_rows(report["spec"]))
        columns = ("group", "layers", "bytes/token", "page tokens", "bytes/page")
        print_table("KV cache", columns, [tuple(row.values()) for row in report["kv"]])
        if report.get("compiled"):
            print_plans(report["compiled"])
        files = [(name, human_bytes(size), state) for name, size, state in _group_files(report["files"])]
        print_table("files", ("name", "size", "hash"), files)
    bad = [f"{f['name']} is {f['state']}" for f in report["files"] if f["state"] not in (_OK, _UNCHECKED)]
    if verify and bad:
        from wicore_trt.errors import EngineFormatError

        raise EngineFormatError(f"{report['kind']} {path}: {', '.join(bad)}.", fix=again)


def _group_files(files: list[dict[str, Any]]) -> list[tuple[str, int, str]]:
    """List (name, bytes, state): similar files of one directory share a row, bad ones have their own."""
    rows: dict[str, list[dict[str, Any]]] = {}
    for file in files:
        folder = file["name"].rpartition("/")[0]
        alike = [f for f in files if folder and f["name"].rpartition("/")[0] == folder and f["state"] == file["state"]]
        together = len(alike) > _MANY and file["state"] in (_OK, _UNCHECKED)
        rows[f"{folder}/: {len(alike)} files" if together else file["name"]] = alike if together else [file]
    return [(name, sum(f["bytes"] for f in row), row[0]["state"]) for name, row in rows.items()]


def _describe_engine(path: Path, *, verify: bool, progress: Progress) -> dict[str, Any]:
    from wicore_trt.engine.directory import open_engine, read_intact
    from wicore_trt.progress import count_progress

    engine = open_engine(path, verify=False)
    about = engine.manifest.to_dict()
    spec, entries = about.pop("spec"), about.pop("files")
    about.pop("kind")
    if not about["compiled"]:
        del about["compiled"]
    if engine.manifest.backend == "torch":
        about["cpu_kernels"] = _cpu_kernels(engine)
    if not engine.manifest.dummy_weights:
        about |= _describe_ends(engine)
    plans = plans_report(engine)
    moved = count_progress(progress, "verify", engine.manifest.total_bytes)
    states = dict.fromkeys(entries, _UNCHECKED)
    for name in sorted(entries) if verify else ():
        states[name] = _OK if read_intact(engine, name, moved) else "corrupted"
    files = [{"name": name, **entry, "state": states[name]} for name, entry in sorted(entries.items())]
    for name in engine.find_unlisted():
        files.append({"name": name, "bytes": (path / name).lstat().st_size, "state": _UNLISTED})
    return {
        "kind": "engine", "path": str(path), "about": about, **({"compiled": plans} if plans else {}), "spec": spec,
        "kv": _compute_kv_bytes(engine.manifest.spec, engine.manifest.page_tokens, engine.manifest.kv_dtype),
        "files": files, "again": f"Move files that are not the engine's elsewhere. {engine.rebuild_advice}",
    }  # fmt: skip


def _describe_ends(engine: EngineDir) -> dict[str, str]:
    """Describe tokens that end an answer, with the places that name them, and add a note on chats."""
    from wicore_trt.errors import EngineFormatError
    from wicore_trt.text.model_files import FILES
    from wicore_trt.text.tokenizer import Tokenizer

    try:
        tokenizer = Tokenizer.from_files(engine.read_present(FILES), engine.path)
    except EngineFormatError as error:
        return {"ends": f"unknown: {error.message}"}
    return {"ends": tokenizer.described_ends(), "chat": tokenizer.chat_note or "by the model's own template"}


def _cpu_kernels(engine: EngineDir) -> str:
    """Name the kernels that run the engine on a CPU; `wicore doctor` tells whether the native ones were built here."""
    try:
        from wicore_trt.backends.torch.native_ops import explain_unsupported
    except ModuleNotFoundError as error:
        return f"unknown here, {error.name} is not installed"
    from wicore_trt.checkpoint.safetensors_io import SafetensorsFile
    from wicore_trt.errors import CheckpointError

    try:
        names = SafetensorsFile(engine.rank_files[0]).tensors
    except CheckpointError:
        return "unknown, the weights are damaged"
    reason = explain_unsupported(engine.manifest.spec, engine.manifest.kv_dtype, names)
    return f"torch, not native: {reason}" if reason else "native"


def _describe_checkpoint(path: Path, *, verify: bool, progress: Progress) -> dict[str, Any]:
    from wicore_trt.checkpoint.format import READ_AS, open_checkpoint
    from wicore_trt.errors import CheckpointError
    from wicore_trt.progress import count_progress

    checkpoint = open_checkpoint(path)
    moved = count_progress(progress, "verify", sum(record.bytes for record in checkpoint.files.values()))
    states = dict.fromkeys(checkpoint.files, _UNCHECKED)
    for name, record in sorted(checkpoint.files.items()) if verify else ():
        try:
            part = record.describe_change(path / name)
        except CheckpointError:
            part = name
        moved(record.bytes)
        states[name] = _OK if part is None else "corrupted" if part == name else f"corrupted ({part})"
    read_as, form = checkpoint.config["wicore"].get(READ_AS), checkpoint.weights
    about = {
        "dtype": checkpoint.dtype, "quantization": form.algo,
        **{key: value for key, value in form.describe().items() if key != "algo"},
        "kv_scales": checkpoint.kv_scales, **({READ_AS: read_as} if read_as else {}), "tp_size": checkpoint.tp_size,
    }  # fmt: skip
    files = [{"name": n, "bytes": r.bytes, "state": states[n]} for n, r in sorted(checkpoint.files.items())]
    return {
        "kind": "checkpoint", "path": str(path), "about": about, "spec": checkpoint.spec.to_dict(),
        "kv": _compute_kv_bytes(checkpoint.spec, 32, checkpoint.dtype),
        "files": files, "again": checkpoint.rebuild_command,
    }  # fmt: skip


def _compute_kv_bytes(spec: Gemma3Spec, page_tokens: int, kv_dtype: str) -> list[dict[str, Any]]:
    """Compute KV bytes over all ranks; a sequence holds all its tokens in "global" and one window of them in
    "local"."""
    from wicore_trt.model.spec import GROUPS

    size = ITEM_BYTES[kv_dtype]
    return [
        {
            "group": group, "layers": len(spec.layers_of(group)), "bytes_per_token": spec.page_bytes(group, 1, size),
            "page_tokens": page_tokens, "bytes_per_page": spec.page_bytes(group, page_tokens, size),
        }
        for group in GROUPS
    ]  # fmt: skip


def _format_rows(values: dict[str, Any]) -> list[tuple[str, str]]:
    rows = []
    for name, value in values.items():
        if name == "layer_groups":
            value = " ".join(f"{value.count(g)} {g}" for g in dict.fromkeys(value))
        elif isinstance(value, dict):
            value = ", ".join(f"{k} {v}" for k, v in value.items())
        elif isinstance(value, list):
            value = ", ".join(map(str, value)) or "-"
        rows.append((name, "-" if value is None else str(value)))
    return rows


def plans_report(engine: EngineDir) -> dict[str, Any] | None:
    """Report plans and memory of a compiled engine as plain data, without TensorRT; None without plans. Raises
    EngineFormatError for a bad index."""
    import msgspec

    from wicore_trt.backends.tensorrt.plan_io import INDEX, TensorSpec
    from wicore_trt.errors import EngineFormatError

    if INDEX not in engine.manifest.files:
        return None
    try:
        index = engine.read_json(INDEX)
        decode = msgspec.convert(index["tensors"]["decode"], list[TensorSpec])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        fix = "Build the engine again."
        raise EngineFormatError(f"{engine.path / INDEX} cannot be read: {error}.", fix=fix) from error
    files = engine.manifest.files
    plans = [{"file": name, "bytes": files[name].bytes, **facts} for name, facts in sorted(index["plans"].items())]
    weights = {t.parts: t for t in decode if t.kind == "weight"}  # a tied head once
    others = {kind: sum(_count_bytes(t) for t in decode if t.kind == kind) for kind in ("table", "cache")}
    memory = {
        "weights": sum(map(_count_bytes, weights.values())),
        "rope tables": others["table"],
        "KV of one slot": others["cache"],
        "slots at most": engine.manifest.compiled["max_batch"],
        "activations": max(plan["activation_bytes"] for plan in plans),
    }
    return {"plans": plans, "memory": memory}


def print_plans(report: dict[str, Any]) -> None:
    from wicore_trt.cli._ui import human_bytes, print_table

    rows = []
    for plan in report["plans"]:
        counts = plan["network_layers"], _format_counts(plan["kernels"]), _format_counts(plan["precisions"])
        rows.append((plan["file"], human_bytes(plan["bytes"]), *counts, human_bytes(plan["activation_bytes"])))
    print_table("plans", ("file", "size", "layers", "kernels", "written as", "activations"), rows)
    memory = [(name, str(v) if name == "slots at most" else human_bytes(v)) for name, v in report["memory"].items()]
    print_table("device memory", ("what", "size"), memory)
    for plan in report["plans"]:
        if plan["rearranged_weights"]:
            print(f"{plan['file']} transposes in every step: {', '.join(plan['rearranged_weights'])}")


def _count_bytes(tensor: TensorSpec) -> int:
    return prod(d for d in tensor.shape if isinstance(d, int)) * _BYTES[tensor.dtype]


def _format_counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in sorted(counts.items(), key=lambda item: -item[1])) or "-"
