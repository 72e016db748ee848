"""A workload of real text through a real engine, recorded as page touches with attention, and its replay per policy.

Sessions share documents (topics of Python's own documentation), ask follow-ups, and sometimes go back and branch.
It must not know tables or arguments. Invariants: every policy replays the same touches; a page's name stands for its
whole prefix, as in the KV cache.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pydoc_data.topics import topics

from wicore_trt.core.engine import EngineCore
from wicore_trt.kv.policy.by_name import make_policy
from wicore_trt.kv.policy.policy import NEUTRAL_SIGNAL, ChainPolicy
from wicore_trt.kv.study.simulate import BeladyPolicy, find_next_uses
from wicore_trt.runtime.batch import SequenceSlice, StepBatch, StepResult
from wicore_trt.runtime.executor import Executor
from wicore_trt.text.tokenizer import Tokenizer
from wicore_trt.types import GenerateRequest, SamplingParams

QUESTIONS = (
    "What does the text above say about {word}?",
    "Explain {word} in one sentence.",
    "Give an example that uses {word}.",
    "When would one need {word}?",
)
_OPEN_SESSIONS, _NEW_SESSION, _BRANCH, _END = 16, 0.3, 0.2, 0.2
_DOCUMENT_TOKENS = (200, 2400)


@dataclass(slots=True)
class TouchedChain:
    """One finished request. `chain` names its full pages, first page first, of which the first `looked_up` were asked
    for when it came; `signals[interval]` are their attention masses when every interval-th step is measured."""

    looked_up: int
    prompt_tokens: int
    chain: list[int]
    signals: dict[int, list[float] | None]


@dataclass(slots=True)
class _Session:
    turns: list[list[int]]
    """The session's prompts so far with their answers, longest last."""


class QuestionSessions:
    """Prompts as token ids. Tell each answer with `answered` before the session goes on."""

    def __init__(self, tokenizer: Tokenizer, seed: int, max_tokens: int) -> None:
        assert tokenizer.bos_id is not None
        self._encode = tokenizer.encode
        self._rng = random.Random(seed)
        self._max_tokens = max_tokens
        low, high = _DOCUMENT_TOKENS
        texts = {name: tokenizer.encode(topics[name], add_bos=False) for name in sorted(topics)}
        self._documents = [([tokenizer.bos_id, *ids], topics[n]) for n, ids in texts.items() if low <= len(ids) <= high]
        self._rng.shuffle(self._documents)
        self._popularity = [1 / (i + 1) for i in range(len(self._documents))]
        self._sessions: list[_Session] = []

    def round(self, count: int) -> Iterator[tuple[_Session, list[int]]]:
        """`count` prompts of different sessions that arrive together."""
        busy: list[_Session] = []
        while len(busy) < count:
            idle = [s for s in self._sessions if s not in busy]
            if not idle or (len(self._sessions) < _OPEN_SESSIONS and self._rng.random() < _NEW_SESSION):
                document = self._rng.choices(self._documents, self._popularity)[0][0]
                session = _Session([document])
                self._sessions.append(session)
            else:
                session = self._rng.choice(idle)
            busy.append(session)
            if len(session.turns) > 1 and self._rng.random() < _BRANCH:
                del session.turns[self._rng.randrange(1, len(session.turns)) :]
            yield session, [*session.turns[-1], *self._question()]

    def _question(self) -> list[int]:
        word = self._rng.choice(self._rng.choice(self._documents)[1].split())
        question = self._rng.choice(QUESTIONS).format(word=word)
        return self._encode(f"\n\nQuestion: {question}\nAnswer:", add_bos=False)

    def answered(self, session: _Session, token_ids: list[int]) -> None:
        """The prompt with its answer; some sessions end with it."""
        session.turns.append(token_ids)
        if len(token_ids) > self._max_tokens or self._rng.random() < _END:
            self._sessions.remove(session)


@dataclass(slots=True)
class _Measured:
    history: list[int]
    steps: list[tuple[int, list[float]]] = field(default_factory=list)


class MeasuringExecutor:
    """Passes on to an executor, measures every step and keeps what it says, by prompt."""

    def __init__(self, inner: Executor) -> None:
        self._inner = inner
        self.spec, self.kernels, self.layout = inner.spec, inner.kernels, inner.layout
        self.max_batch_tokens, self.slice_tokens = inner.max_batch_tokens, inner.slice_tokens
        self.max_sequences = inner.max_sequences
        self.score_rows, self.graph_sizes = inner.score_rows, inner.graph_sizes
        self.images = inner.images
        self.copier = inner.copier
        self.release, self.close = inner.release, inner.close
        self._steps = 0
        self.found: dict[tuple[int, ...], _Measured] = {}
        self.tokens_of: Callable[[int], list[int]] = lambda seq_id: []
        """All tokens of a sequence."""

    def execute(self, batch: StepBatch) -> StepResult:
        self._steps += 1
        result = self._inner.execute(replace(batch, measure_attention=True))
        for s in batch.slices:
            if s.sample:
                self._keep(s, result.attention[s.seq_id])
        return result

    def _keep(self, s: SequenceSlice, masses: list[float]) -> None:
        tokens = self.tokens_of(s.seq_id)
        measured = self.found.setdefault(tuple(tokens[: s.prompt_len]), _Measured(tokens))
        measured.steps.append((self._steps, masses))


class PageNames:
    """Numbers for pages such that equal numbers mean equal prefixes."""

    def __init__(self, page_tokens: int) -> None:
        self.page_tokens = page_tokens
        self._names: dict[tuple[int, tuple[int, ...]], int] = {}

    def chain(self, token_ids: Sequence[int]) -> list[int]:
        """Names of the full pages of a sequence."""
        size, above, chain = self.page_tokens, -1, []
        for i in range(len(token_ids) // size):
            page = (above, tuple(token_ids[i * size : (i + 1) * size]))
            above = self._names.setdefault(page, len(self._names))
            chain.append(above)
        return chain


def record(
    core: EngineCore,
    workload: QuestionSessions,
    *,
    requests: int,
    together: int,
    output_tokens: int,
    intervals: Sequence[int],
    progress: Callable[[int, int], None],
) -> list[TouchedChain]:
    """Run `requests` requests, `together` at a time, greedily; what each of them touched, in the order of arrival.

    The core's executor must be a MeasuringExecutor, and its KV large enough that no request is preempted.
    """
    executor = core.executor
    assert isinstance(executor, MeasuringExecutor)
    names = PageNames(executor.layout.page_tokens)
    executor.tokens_of = lambda seq_id: next(s.tokens for s in core.scheduler.running if s.seq_id == seq_id)
    params = SamplingParams(max_tokens=output_tokens, temperature=0.0, ignore_eos=True)
    trace: list[TouchedChain] = []
    while len(trace) < requests:
        progress(len(trace), requests)
        arrivals = list(workload.round(together))
        executor.found = {}
        for i, (_, prompt) in enumerate(arrivals):
            core.add(GenerateRequest(f"r{len(trace)}-{i}", tuple(prompt), params))
        while core.has_work:
            core.step()
        for session, prompt in arrivals:
            measured = executor.found[tuple(prompt)]
            trace.append(_touched(names, prompt, measured, intervals))
            workload.answered(session, list(measured.history))
    return trace


def _touched(names: PageNames, prompt: Sequence[int], measured: _Measured, intervals: Sequence[int]) -> TouchedChain:
    chain = names.chain(measured.history[:-1])  # the last token was sampled, never computed
    signals = {n: _mean_masses([m for step, m in measured.steps if step % n == 0], len(chain)) for n in intervals}
    return TouchedChain((len(prompt) - 1) // names.page_tokens, len(prompt), chain, signals)


def _mean_masses(samples: Sequence[Sequence[float]], pages: int) -> list[float] | None:
    """Per page, the mean over the samples that saw it; neutral where none did."""
    if not samples:
        return None
    means = []
    for page in range(pages):
        seen = [s[page] for s in samples if page < len(s)]
        means.append(sum(seen) / len(seen) if seen else NEUTRAL_SIGNAL)
    return means


def replay_policy(
    trace: Sequence[TouchedChain], policy: str, capacity: int, page_tokens: int, interval: int | None = None
) -> float:
    """Token hit rate of a policy (a name of `kv.policies`, or "belady") in one tier of `capacity` pages. With an
    `interval` it is told the attention measured at that interval."""
    made: ChainPolicy
    if policy == "belady":
        made = BeladyPolicy(capacity, find_next_uses([request.chain for request in trace]))
    else:
        made = make_policy(policy, capacity, page_tokens=page_tokens)
    hits = 0
    for request in trace:
        wanted = request.chain[: request.looked_up]
        hits += next((i for i, page in enumerate(wanted) if page not in made), len(wanted))
        made.touch_chain(request.chain, request.signals[interval] if interval is not None else None)
        made.add_pages([page for page in request.chain if page not in made])
        excess = len(made) - capacity
        for page in (made.choose_victims(excess) or []) if excess > 0 else []:
            made.remove_page(page)
    return hits * page_tokens / sum(request.prompt_tokens for request in trace)
