"""Are a GPU's answers the CPU oracle's, whatever the company, and does it serve them? Gemma 3 270M, real weights.

`oracle` makes the oracle's file on a CPU: twenty prompts, 64 greedy tokens each, logits of every dtype. `check` judges
an engine against it (`benchmarks.answers.check`), `serve` runs `wicore serve` on one and asks it over gRPC
(`benchmarks.answers.serve`). Exit code 1 when something does not hold. Needs a GPU for engines of backend triton.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np

from benchmarks.answers.data import Oracle
from benchmarks.common import say


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    oracle = commands.add_parser("oracle", help="make the oracle's file; minutes on a CPU")
    oracle.add_argument("--gguf", type=Path, required=True)
    oracle.add_argument("--out", type=Path, required=True)
    check = commands.add_parser("check", help="judge an engine directory")
    check.add_argument("--engine", type=Path, required=True)
    check.add_argument("--oracle", type=Path, help="file of `oracle`; made first if it is not there")
    check.add_argument("--gguf", type=Path, help="to make the oracle from")
    check.add_argument("--backend", choices=("triton", "torch"), default="triton")
    check.add_argument("--alone", type=int, help="prompts that are run alone; default all")
    check.add_argument("--tokens", type=Path, help="where to leave the greedy tokens, for `serve`")
    serve = commands.add_parser("serve", help="serve an engine and ask it")
    serve.add_argument("--engine", type=Path, required=True)
    serve.add_argument("--oracle", type=Path, required=True, help="for its prompts")
    serve.add_argument("--tokens", type=Path, required=True, help="greedy tokens of the executor alone, from `check`")
    serve.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    args = parser.parse_args(argv)
    if args.command == "oracle":
        _make(args.gguf, args.out)
        return 0
    problems = _check(args) if args.command == "check" else _serve(args)
    for problem in problems:
        say(f"WRONG: {problem}")
    say(f"{args.command} {args.engine.name}: {'ok' if not problems else f'{len(problems)} problems'}")
    return int(bool(problems))


def _make(gguf: Path, out: Path) -> Oracle:
    from benchmarks.answers.oracle import make_oracle

    oracle = make_oracle(gguf, say)
    out.parent.mkdir(parents=True, exist_ok=True)
    oracle.save(out)
    return oracle


def _check(args: argparse.Namespace) -> list[str]:
    from benchmarks.answers.check import check_answers, torch_subject, triton_subject

    if args.oracle and args.oracle.is_file():
        oracle = Oracle.load(args.oracle)
    elif args.gguf and args.oracle:
        oracle = _make(args.gguf, args.oracle)
    else:
        return ["no oracle: give --oracle FILE, and --gguf FILE to make it from"]
    subject = (triton_subject if args.backend == "triton" else torch_subject)(args.engine, oracle)
    say(f"{subject.dtype} engine loaded")
    problems, tokens = check_answers(subject, oracle, say, alone=args.alone)
    if args.tokens:
        np.save(args.tokens, tokens)
    return problems


def _serve(args: argparse.Namespace) -> list[str]:
    from benchmarks.answers.serve import serve_all

    return serve_all(args.engine, Oracle.load(args.oracle), np.load(args.tokens), args.device, say)


if __name__ == "__main__":
    sys.exit(main())
