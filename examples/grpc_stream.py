"""Stream a completion from a running server.

    wicore serve ENGINE
    python examples/grpc_stream.py "The capital of France is" --max-tokens 40

Needs the extra `serve`. The stub is generated from wicore_trt/serve/proto; any gRPC language can use the same file.
From Python `wicore_trt.Client` is the shorter way. A server that is still loading is waited for. Ctrl-C, or a reader
of the output that goes away (`| head`), cancels the call, and the server stops working on it.
"""

from __future__ import annotations

import argparse
import os
import sys

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from wicore_trt.serve.gen.wicore.inference.v1 import inference_pb2 as pb2
from wicore_trt.serve.gen.wicore.inference.v1 import inference_pb2_grpc


def wait_until_serving(channel: grpc.Channel, address: str, seconds: float) -> None:
    """Returns when the server takes requests. Raises grpc.RpcError when it does not within `seconds`."""
    stub, serving = health_pb2_grpc.HealthStub(channel), health_pb2.HealthCheckResponse.SERVING
    try:
        if stub.Check(health_pb2.HealthCheckRequest(), timeout=seconds).status == serving:
            return
    except grpc.RpcError:
        pass  # it may not listen yet
    print(f"waiting for {address} ...", file=sys.stderr)
    for reply in stub.Watch(health_pb2.HealthCheckRequest(), timeout=seconds, wait_for_ready=True):
        if reply.status == serving:
            return


def main() -> int:
    parser = argparse.ArgumentParser(description="Stream a completion from a WiCore-TRT server.")
    parser.add_argument("prompt")
    parser.add_argument("--address", default="127.0.0.1:50051")
    parser.add_argument("--api-key")
    parser.add_argument("--chat", action="store_true", help="send the prompt as a user's turn")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--timeout", type=float, help="deadline in seconds")
    parser.add_argument("--wait", type=float, default=60.0, help="seconds to wait for the server (default: 60)")
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
            wait_until_serving(channel, args.address, args.wait)
            for response in stub.Generate(request, metadata=metadata, timeout=args.timeout):
                finished = response.WhichOneof("event") == "finish"
                print(response.finish.delta.text if finished else response.delta.text, end="", flush=True)
        except grpc.RpcError as error:
            print(f"\n{error.code().name}: {error.details()}", file=sys.stderr)
            return 1
        except KeyboardInterrupt:
            return 130
        except BrokenPipeError:  # the reader went away; what Python still holds must not find that out again
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 1
    usage, timings = response.finish.usage, response.finish.timings
    print(
        f"\n[{usage.completion_tokens} tokens, {usage.cached_tokens} of {usage.prompt_tokens} prompt tokens cached, "
        f"first after {timings.time_to_first_token.ToMilliseconds()} ms, all in {timings.total.ToMilliseconds()} ms]",
        file=sys.stderr,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
