"""Answers of the real 270M in Q4_0 beside an independent dequantization: transformers' of the same GGUF file, float32.

`python -m benchmarks.answers.q4_0` prints perplexities and greedy tokens, and exits 1 where they differ. It makes the
Q4_0 file from the demo's Q4_K_M by the gguf package, unless --gguf names one. Invariant: nothing that judges comes
from the engine; a tie is a gap in the reference's logits below what bfloat16 activations move them.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

from wicore_trt import LLM, SamplingParams
from wicore_trt.bench.perplexity import default_text
from wicore_trt.checkpoint.demo import fetch_model
from wicore_trt.engine.build import build_engine

WINDOW = 512
TIE = 0.1
"""Largest gap of two logits, of about 20, that count as equal: activations in bfloat16 have 8 bits."""
MOST_PERCENT = 0.1
"""Largest difference of perplexities."""


def write_q4_0(source: Path, target: Path) -> Path:
    """Write the GGUF `source` with its linears quantized to Q4_0 by the gguf package; all else stays as it is."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, reader.fields["general.architecture"].contents())
    for key, field in reader.fields.items():
        if not key.startswith(("GGUF.", "general.architecture")):
            outer = field.types[0]
            inner = field.types[-1] if outer == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(key, field.contents(), outer, sub_type=inner)
    kind = gguf.GGMLQuantizationType.Q4_0
    for tensor in reader.tensors:
        data, stored = tensor.data, tensor.tensor_type
        if tensor.name.startswith("blk.") and len(tensor.shape) > 1:
            data, stored = gguf.quants.quantize(gguf.quants.dequantize(data, stored), kind), kind
        writer.add_tensor(tensor.name, np.ascontiguousarray(data), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


def load_reference(path: Path) -> Any:
    """Load the file with transformers in float32. Its embedding's factor is that of bfloat16, as Gemma was trained."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    scale = model.model.embed_tokens.embed_scale
    scale.copy_(scale.to(torch.bfloat16))
    return model.eval()


@dataclass(frozen=True)
class Comparison:
    """Perplexities over `tokens` tokens, and the greedy positions that differ: prompt, position, gap of logits."""

    tokens: int
    engine: float
    reference: float
    positions: int
    differing: list[tuple[int, int, float]]

    @property
    def percent(self) -> float:
        return 100 * (self.engine / self.reference - 1)

    @property
    def equal(self) -> bool:
        return abs(self.percent) <= MOST_PERCENT and all(gap <= TIE for *_, gap in self.differing)


@torch.inference_mode()
def compare_answers(
    llm: LLM, model: Any, tokens: int, prompts: int, new_tokens: int, *, scores: bool = True
) -> Comparison:
    """Compare log-probabilities of a text in windows, if the engine gives `scores` of prompts, and the greedy tokens of
    prompts. The reference is given the engine's tokens, so that each position is judged whatever came before it."""
    ids, bos = llm.tokenizer.encode(default_text(), add_bos=False), llm.tokenizer.bos_id
    assert bos is not None
    windows = [[bos, *ids[at : at + WINDOW - 1]] for at in range(0, tokens, WINDOW - 1)]
    scored = SamplingParams(max_tokens=0, temperature=0.0, prompt_logprobs=0)
    sums, count = [0.0, 0.0], 0
    for (answer,), window in zip(llm.generate(windows, scored) if scores else (), windows, strict=scores):
        targets = torch.tensor(window[1:])
        logits = model(torch.tensor([window])).logits[0, :-1].double()
        rows = logits.gather(1, targets[:, None])[:, 0] - logits.logsumexp(1)
        sums[0] -= sum(entry.logprob for entry in answer.prompt_logprobs[1:])
        sums[1] -= float(rows.sum())
        count += len(targets)
    starts = [[bos, *ids[37 * n : 37 * n + 8 + n]] for n in range(prompts)]
    greedy = SamplingParams(max_tokens=new_tokens, temperature=0.0, ignore_eos=True)
    differing = []
    for number, ((answer,), start) in enumerate(zip(llm.generate(starts, greedy), starts, strict=True)):
        said = list(answer.token_ids)
        kept = torch.arange(len(start) - 1, len(start) + len(said) - 1)
        logits = model(torch.tensor([[*start, *said[:-1]]]), logits_to_keep=kept).logits[0]
        gaps = logits.max(1).values - logits.gather(1, torch.tensor(said)[:, None])[:, 0]
        differing += [(number, int(at), float(gaps[at])) for at in gaps.nonzero().flatten()]
    engine, reference = (math.exp(total / max(1, count)) for total in sums)
    return Comparison(count, engine, reference, prompts * new_tokens, differing)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gguf", type=Path, help="a Q4_0 file of Gemma 3; by default made from the demo's")
    parser.add_argument("--source", type=Path, help="a GGUF file to make it from")
    parser.add_argument("--backend", default="torch")
    parser.add_argument("--target", action="append", default=[], help="of backend triton, such as sm90")
    parser.add_argument("--tokens", type=int, default=8_176)
    parser.add_argument("--prompts", type=int, default=50)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--kernels", default="auto", help="of backend torch: auto, torch or native")
    args = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as scratch:
        path = args.gguf or write_q4_0(args.source or fetch_model("gemma3-270m"), Path(scratch) / "q4_0.gguf")
        engine = build_engine(
            path, Path(scratch) / "engine", dtype="q4_0", backend=args.backend, targets=args.target,
            note=lambda line: print(f"note: {line}"),
        )  # fmt: skip
        model = load_reference(path)
        with LLM(engine.path, executor__kernels=args.kernels) as llm:
            scores = args.backend == "torch"  # engines of other backends give none of prompts
            found = compare_answers(llm, model, args.tokens, args.prompts, args.new_tokens, scores=scores)
            facts = {"kernels": llm.info.kernels, "head": engine.manifest.weights.head or engine.manifest.base_dtype}
    worst = max((gap for *_, gap in found.differing), default=0.0)
    print(json.dumps(facts | {
        "tokens": found.tokens, "perplexity": round(found.engine, 4), "reference": round(found.reference, 4),
        "difference_percent": round(found.percent, 4), "greedy_positions": found.positions,
        "differing": len(found.differing), "largest_gap": round(worst, 4), "equal": found.equal,
    }, indent=2))  # fmt: skip
    return 0 if found.equal else 1


if __name__ == "__main__":
    sys.exit(main())
