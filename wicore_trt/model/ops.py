"""Operators that Gemma 3 is written in; each is what one fused kernel does.

A lowering (torch, native CPU kernels, triton, tensorrt) implements `Ops` for one engine and one step. It holds weights,
KV pages and the step's geometry; the model passes its tensors `T` on unread. Invariant (I20), against Gemma 3's FP16
overflow: residual stream and norms are FP32; only operands of products and the KV cache are rounded to the engine's
dtype. Shapes: N tokens of the step, ragged over sequences; H hidden; D head_dim; R sampled rows.
"""

from __future__ import annotations

from typing import Protocol, TypeVar

T = TypeVar("T")


class Ops(Protocol[T]):
    """Operators of a step. `layer` selects weights, rope table, window and KV pages."""

    def embed(self) -> T:
        """[N, H] float32: embedding rows of the step's token ids times embedding_scale, and features where images
        are."""

    def norm(self, residual: T, weight: str) -> T:
        """[N, H]: RMSNorm of the residual with the named weight (stored as 1 + w), rounded to the dtype."""

    def linear(self, x: T, weight: str) -> T:
        """[N, out]: x @ W.T with float32 accumulation; FP8 engines quantize x per token first."""

    def reduce(self, x: T) -> T:
        """[N, H]: sum over ranks of x, a product whose inner dimension ranks share; x itself on one rank."""

    def qk_norm_rope_write(self, qkv: T, layer: int) -> T:
        """Split [N, (heads + 2 kv_heads) D]; RMSNorm q and k per head, rotate both by position, round, write
        k and v to the layer's KV pages; returns q as [N, heads, D]."""

    def attention(self, q: T, layer: int) -> T:
        """[N, heads * D]: softmax attention over the sequence's pages: causal, but that an image's tokens see all of
        it; on local layers a window limits what comes before a token."""

    def add_norm(self, residual: T, x: T, post_weight: str, next_weight: str) -> tuple[T, T]:
        """(residual + RMSNorm(x) * post, RMSNorm(that sum) * next rounded to the dtype)."""

    def geglu(self, gate_up: T) -> T:
        """[N, I]: gelu_tanh(gate_up[:, :I]) * gate_up[:, I:]."""

    def sampled_rows(self, x: T) -> T:
        """[R, H]: the rows whose next token is sampled in this step."""

    def logits(self, x: T) -> T:
        """[R, vocab] float32: the LM head, soft-capped if the spec says so."""
