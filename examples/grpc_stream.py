"""Stream a completion from a running server.

    wicore serve ENGINE
    python examples/grpc_stream.py "The capital of France is" --max-tokens 40

Needs `pip install wicore-trt[serve]`. The stub is generated from wicore_trt/serve/proto; any gRPC language can use the
same file. Ctrl-C cancels the call, and the server stops working on it.
"""

from __future__ import annotations

import argparse
import sys

import grpc

from wicore_trt.serve.gen.wicore.inference.v1 import inference_pb2 as pb2
from wicore_trt.serve.gen.wicore.inference.v1 import inference_pb2_grpc


def main() -> int:
    parser = argparse.ArgumentParser(description="Stream a completion from a WiCore-TRT server.")
    parser.add_argument("prompt")
    parser.add_argument("--address", default="127.0.0.1:50051")
    parser.add_argument("--api-key")
    parser.add_argument("--chat", action="store_true", help="send the prompt as a user's turn")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--timeout", type=float, help="deadline in seconds")
    args = parser.parse_args()

    request = pb2.GenerateRequest(sampling=pb2.SamplingParams(max_tokens=args.max_tokens, temperature=args.temperature))
    if args.chat:
        request.chat.messages.add(role="user", content=args.prompt)
    else:
        request.text = args.prompt
    metadata = [("authorization", f"Bearer {args.api_key}")] if args.api_key else []
    with grpc.insecure_channel(args.address) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        try:
            for response in stub.Generate(request, metadata=metadata, timeout=args.timeout):
                finished = response.WhichOneof("event") == "finish"
                print(response.finish.delta.text if finished else response.delta.text, end="", flush=True)
        except grpc.RpcError as error:
            print(f"\n{error.code().name}: {error.details()}", file=sys.stderr)
            return 1
        except KeyboardInterrupt:
            return 130
    usage, timings = response.finish.usage, response.finish.timings
    print(
        f"\n[{usage.completion_tokens} tokens, {usage.cached_tokens} of {usage.prompt_tokens} prompt tokens cached, "
        f"first after {timings.time_to_first_token.ToMilliseconds()} ms, all in {timings.total.ToMilliseconds()} ms]",
        file=sys.stderr,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
