"""`wicore serve` of an engine with weights in its files, while nothing of them is in memory, and again when all is.

    python -m benchmarks.gpu.cold_start CONFIG_DIR WORK_DIR [--source-dir /dev/shm/source] [--dtype fp8]

Makes a source of the model in CONFIG_DIR (a `config.json` of transformers; its weights are random numbers, its
tokenizer gives no text), builds an engine of it in WORK_DIR, drops what the system keeps of the engine's files, and
starts a server, three times: `cold`, `cold` and `warm`. Prints one JSON document: seconds of each start, of the build
and of reading the files, bytes, versions. It must not know how an engine is loaded. Invariant: before a cold start at
most COLD_SHARE of the files is in memory, or there is no figure.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import resource
import shutil
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.common import installed, say
from benchmarks.gpu.startup import command, measure_startup
from wicore_trt.engine.build import build_engine
from wicore_trt.engine.options import DummyModel
from wicore_trt.kv.sizing import builtin_spec

SHARD_BYTES = 4 << 30
COLD_SHARE = 0.02
TOKENIZER_FILES = "*token*.json"


def write_source(config_dir: Path, tokenizer: Path, out: Path) -> int:
    """A source of random weights as a hub has it; returns their bytes. Norms are those of a fresh model."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoModelForCausalLM

    out.mkdir(parents=True, exist_ok=True)
    for path in [config_dir / "config.json", *tokenizer.glob(TOKENIZER_FILES)]:
        shutil.copy(path, out / path.name)
    auto: Any = AutoModelForCausalLM
    with torch.device("meta"):
        state = auto.from_config(AutoConfig.from_pretrained(config_dir)).state_dict()
    state.pop("lm_head.weight", None)  # tied
    most = max(value.numel() for value in state.values())
    noise = torch.randn(most, device="cuda" if torch.cuda.is_available() else "cpu").mul_(0.02).bfloat16().cpu()
    index, shard, size, number, total = dict[str, str](), dict[str, Any](), 0, 1, 0

    def flush() -> None:
        nonlocal shard, size, number
        name = f"model-{number:05d}.safetensors"
        save_file(shard, out / name, metadata={"format": "pt"})
        index.update(dict.fromkeys(shard, name))
        shard, size, number = {}, 0, number + 1

    for name, value in state.items():
        norm = value.dim() == 1
        shard[name] = torch.zeros(value.shape).bfloat16() if norm else noise[: value.numel()].view(value.shape).clone()
        size, total = size + shard[name].nbytes, total + shard[name].nbytes
        if size >= SHARD_BYTES:
            flush()
    flush()
    text = json.dumps({"metadata": {"total_size": total}, "weight_map": index})
    (out / "model.safetensors.index.json").write_text(text, encoding="utf-8")
    return total


def files_of(engine: Path) -> list[Path]:
    return sorted(path for path in engine.rglob("*") if path.is_file())


def forget(paths: list[Path]) -> None:
    """Have the system drop what it keeps of files."""
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def kept_share(paths: list[Path]) -> float:
    """The part of the files' pages that is in memory."""
    import ctypes

    libc, kept, pages = ctypes.CDLL(None, use_errno=True), 0, 0
    for path in paths:
        if size := path.stat().st_size:
            with path.open("rb") as file, mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY) as view:
                count = -(-size // mmap.PAGESIZE)
                found, begin = (ctypes.c_ubyte * count)(), ctypes.c_char.from_buffer(view)
                if libc.mincore(ctypes.c_void_p(ctypes.addressof(begin)), ctypes.c_size_t(size), found):
                    raise OSError(ctypes.get_errno(), f"mincore of {path}")
                del begin
            kept, pages = kept + sum(value & 1 for value in bytes(found)), pages + count
    return kept / pages


def start(engine: Path, vocab: int, log: Path, *, cold: bool) -> dict[str, Any]:
    """A start. Raises RuntimeError where the files stay in memory though it is to be cold."""
    paths = files_of(engine)
    if cold:
        forget(paths)
    share = kept_share(paths)
    if cold and share > COLD_SHARE:
        raise RuntimeError(f"{share:.0%} of the engine's files stay in memory")
    record = measure_startup(command(engine), vocab, log, 300.0)
    say(f"{'cold' if cold else 'warm'}: {record}")
    return {"cold": cold, "in_memory_before": round(share, 4), **record}


def read_s(paths: list[Path]) -> float:
    """Seconds to read files that are not in memory, one after the other: what the disk allows one thread."""
    forget(paths)
    begun, buffer = time.perf_counter(), bytearray(64 << 20)
    for path in paths:
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass
    return time.perf_counter() - begun


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path)
    parser.add_argument("work", type=Path)
    parser.add_argument("--source-dir", type=Path, help="where the source goes; default: below WORK_DIR")
    parser.add_argument("--dtype", default="fp8")
    parser.add_argument("--backend", default="triton")
    parser.add_argument("--target", default="sm90")
    args = parser.parse_args()
    document: dict[str, Any] = {"versions": installed(), "dtype": args.dtype, "starts": []}
    source, engine = args.source_dir or args.work / "source", args.work / "engine"
    small = builtin_spec("gemma3-270m")
    build_engine(
        "tokenizer", args.work / "tokenizer", backend="triton", targets=[args.target], dummy=DummyModel("t", small),
        force=True,
    )  # fmt: skip
    begun = time.perf_counter()
    document["source_bytes"] = write_source(args.config, args.work / "tokenizer", source)
    document["source_s"] = time.perf_counter() - begun
    say(f"source of {document['source_bytes'] / 1e9:.1f} GB in {document['source_s']:.1f} s")
    begun, targets = time.perf_counter(), [args.target] if args.backend == "triton" else []
    build_engine(str(source), engine, backend=args.backend, dtype=args.dtype, targets=targets, force=True)
    document["build_s"] = time.perf_counter() - begun
    document["build_peak_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    shutil.rmtree(source)
    document["engine_bytes"] = sum(path.stat().st_size for path in files_of(engine))
    say(f"engine of {document['engine_bytes'] / 1e9:.1f} GB built in {document['build_s']:.1f} s")
    document["read_s"] = read_s(files_of(engine))
    say(f"its files are read in {document['read_s']:.1f} s")
    vocab = json.loads((args.config / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    for number, cold in enumerate((True, True, False)):
        document["starts"].append(start(engine, vocab, args.work / f"serve-{number}.log", cold=cold))
    print(json.dumps(document, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
