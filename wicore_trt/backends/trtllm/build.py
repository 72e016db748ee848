"""Backend `tensorrt-llm`: builds engines with the command `trtllm-build`; never run with the library itself.

Exports a checkpoint in the command's layout, runs it, and compares the engine's configuration with the request, because
the command changes arguments silently. Must not know how engines run. Invariant: `trtllm/` in the engine directory
appears only with an engine for every rank, made by our model class, with our numbers.

Flags: tensorrt_llm/commands/build.py of 1.2. One worker: the command cannot send a class from a file to others.
"""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wicore_trt.backends.trtllm import model as trtllm_model
from wicore_trt.backends.trtllm.checkpoint import PATTERN_KEY, export_checkpoint
from wicore_trt.backends.trtllm.installed import ENGINE_DIR, find_trtllm_build, require_tensorrt_llm
from wicore_trt.checkpoint.format import Checkpoint
from wicore_trt.engine.options import Backend, BuildOptions
from wicore_trt.errors import ConfigError, EnvironmentUnfitError
from wicore_trt.files import UntrustedFiles

if TYPE_CHECKING:
    from wicore_trt.engine.directory import EngineDir
    from wicore_trt.progress import Progress
    from wicore_trt.runtime.executor import RequestExecutor
    from wicore_trt.runtime.options import ExecutorOptions

BLOCK_TOKENS = (8, 16, 32, 64, 128)
"""Tokens per block that its attention kernels know."""
_LAST_LINES = 20
_SCRATCH = "trtllm-checkpoint"
_log = logging.getLogger(__name__)


class TensorRTLLMBackend(Backend):
    """Backend whose part of the engine directory is `trtllm/`."""

    has = frozenset({"kv_fraction"})

    def targets(self, options: BuildOptions) -> list[str]:
        """List the architecture that `trtllm-build` compiles for: always this machine's GPU, as ["sm90"].
        Raises ConfigError when another was asked for, EnvironmentUnfitError without TensorRT-LLM 1.2 or a GPU."""
        require_tensorrt_llm()
        find_trtllm_build()
        import torch

        if not torch.cuda.is_available():
            problem = "trtllm-build compiles for the GPU that it runs on, and there is none here."
            fix = "Build on the machine that will serve, or use --backend tensorrt, which compiles without a GPU."
            raise EnvironmentUnfitError(problem, fix=fix)
        here = "sm{}{}".format(*torch.cuda.get_device_capability())
        if options.targets not in ((), (here,)):
            what = f"Backend tensorrt-llm compiles for the GPU of this machine, {here}"
            raise ConfigError(f"{what}, not for {', '.join(options.targets)}.", fix="Leave --target out.")
        return [here]

    def check(self, checkpoint: Checkpoint, options: BuildOptions) -> None:
        if options.kv_dtype not in ("auto", checkpoint.dtype, "fp8"):
            allowed, fix = f"the dtype of the model, {checkpoint.dtype}, or fp8", "Leave --kv-dtype out."
            raise ConfigError(f"TensorRT-LLM's KV cache has {allowed}; not {options.kv_dtype}.", fix=fix)
        if options.page_tokens not in BLOCK_TOKENS:
            sizes, fix = ", ".join(map(str, BLOCK_TOKENS)), "Choose --page-tokens among these."
            raise ConfigError(f"TensorRT-LLM has blocks of {sizes} tokens, not {options.page_tokens}.", fix=fix)

    def compile(
        self, checkpoint: Checkpoint, directory: Path, options: BuildOptions, progress: Progress
    ) -> dict[str, Any]:
        """Build the engine of `checkpoint` into `directory`/trtllm; returns its facts for the manifest. Needs as much
        free disk as the checkpoint meanwhile. Raises ConfigError for options that TensorRT-LLM lacks, CheckpointError
        for a model that it cannot express, EnvironmentUnfitError when it is missing or fails."""
        installed, command = require_tensorrt_llm(), find_trtllm_build()
        self.check(checkpoint, options)
        scratch, output = directory / _SCRATCH, directory / ENGINE_DIR
        arguments = build_arguments(checkpoint, options)
        paths = {"--checkpoint_dir": scratch, "--output_dir": output, "--output_timing_cache": scratch / "timing.cache"}
        paths["--model_cls_file"] = Path(trtllm_model.__file__)
        scratch.mkdir()
        try:
            config = export_checkpoint(checkpoint, scratch, kv_fp8=options.kv_dtype == "fp8", progress=progress)
            progress("compile", 0, 1)
            flags = [part for name, value in (paths | arguments).items() for part in (name, str(value))]
            _run_build([command, *flags], cwd=scratch)
            _check_engine(output, checkpoint, arguments, config)
            progress("compile", 1, 1)
        except BaseException:
            shutil.rmtree(output, ignore_errors=True)
            raise
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
        return {"flavour": "tensorrt-llm", "tensorrt_llm": installed, "directory": ENGINE_DIR, "arguments": arguments}

    def open_fit(self, engine: EngineDir, settings: ExecutorOptions) -> RequestExecutor:
        from wicore_trt.backends.trtllm.executor import TrtllmExecutor

        return TrtllmExecutor(engine, settings)


def build_arguments(checkpoint: Checkpoint, options: BuildOptions) -> dict[str, str | int]:
    """Choose the flags of `trtllm-build`, paths apart. max_seq_len is explicit, because the command would take
    max_position_embeddings times the rope factor; so is max_input_len, whose default is 1,024. A step may prefill
    max_chunk tokens while max_batch sequences decode. FP8 goes without the GEMM plugin, as TensorRT-LLM's Gemma guide
    says."""
    context = options.max_context or checkpoint.spec.max_position_embeddings
    return {
        "--model_cls_name": trtllm_model.MODEL_CLASS, "--max_batch_size": options.max_batch,
        "--max_input_len": context, "--max_seq_len": context,
        "--max_num_tokens": options.max_chunk + options.max_batch, "--max_beam_width": 1,
        "--kv_cache_type": "paged", "--tokens_per_block": options.page_tokens,
        "--remove_input_padding": "enable", "--context_fmha": "enable", "--use_paged_context_fmha": "enable",
        "--gpt_attention_plugin": "auto", **({} if checkpoint.weights.fp8 else {"--gemm_plugin": "auto"}),
        "--workers": 1, "--log_level": "info",
    }  # fmt: skip


def _run_build(command: list[str], cwd: Path) -> None:
    """Run the build, its output to the log line by line. Raises EnvironmentUnfitError with the last lines."""
    _log.info("running %s", " ".join(command))
    last: deque[str] = deque(maxlen=_LAST_LINES)
    repaired = False
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(
        command, cwd=cwd, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, errors="replace",
    ) as process:  # fmt: skip
        assert process.stdout is not None
        try:
            for line in process.stdout:
                _log.info("trtllm-build: %s", line.rstrip())
                last.append(line.rstrip())
                repaired |= trtllm_model.MARKER in line
        except BaseException:
            process.kill()
            raise
    if process.returncode:
        problem = f"trtllm-build failed with exit code {process.returncode}. Its last lines:\n" + "\n".join(last) + "\n"
        fix = "When memory ran out, lower --max-context; the log has all of its output."
        raise EnvironmentUnfitError(problem, fix=fix)
    if not repaired:
        problem = "trtllm-build did not use our Gemma 3 class, and its own has wrong rope on local layers."
        raise EnvironmentUnfitError(problem, fix="Install an unchanged TensorRT-LLM 1.2, or use --backend tensorrt.")


def _check_engine(
    output: Path, checkpoint: Checkpoint, arguments: dict[str, str | int], config: dict[str, Any]
) -> None:
    """Compare the engine's config.json with what it was to be made of. Raises EnvironmentUnfitError."""
    files = ["config.json", *(f"rank{rank}.engine" for rank in range(checkpoint.tp_size))]
    missing = [name for name in files if not (output / name).is_file() or not (output / name).stat().st_size]
    if missing:
        raise EnvironmentUnfitError(f"trtllm-build ended without error and did not write {', '.join(missing)}.")
    made = UntrustedFiles(output, EnvironmentUnfitError).read_json(output / "config.json")
    model, build = made.get("pretrained_config", {}), made.get("build_config", {})
    wanted = {key: config[key] for key in ("architecture", "dtype", "rotary_scaling", "runtime_defaults", PATTERN_KEY)}
    wrong = [f"{k} {model.get(k)!r}, not {value!r}" for k, value in wanted.items() if not _is_same(model, k, value)]
    kept = build | {"tokens_per_block": build.get("plugin_config", {}).get("tokens_per_block")}
    names = ("max_batch_size", "max_input_len", "max_seq_len", "max_num_tokens", "max_beam_width", "tokens_per_block")
    asked = {name: arguments[f"--{name}"] for name in names}
    wrong += [f"{name} {kept.get(name)!r}, not {value}" for name, value in asked.items() if kept.get(name) != value]
    if wrong:
        problem = f"trtllm-build made another engine than it was told to: {'; '.join(wrong)}."
        raise EnvironmentUnfitError(problem, fix="Choose options that it keeps (its log says why it changed them).")


def _is_same(model: dict[str, Any], key: str, value: Any) -> bool:
    """Compare, allowing keys of null that `runtime_defaults` may have gained."""
    have = model.get(key)
    if isinstance(value, dict) and isinstance(have, dict):
        return all(have.get(k) == v for k, v in value.items()) and all(have[k] is None for k in have.keys() - value)
    return bool(have == value)
