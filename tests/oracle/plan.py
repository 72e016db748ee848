"""What a life is made of, drawn from its seed: an engine's shape and settings, and what happens to it in which order.

Plain data; nothing runs here. Each happening is complete in itself, so that a life without some of them is a life too.
Invariant: one seed gives one plan.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from math import lcm
from typing import Any

from fault_injection import Fault

from oracle.model import DIGEST, IMAGES, VOCAB, Model, answer, image_tokens, seed_of, whole_images
from oracle.world import Speeds
from wicore_trt.model.spec import GLOBAL, LOCAL
from wicore_trt.types import CacheHints, CachePriority, CacheStore, SamplingParams

PAGE_BYTES = 4096


@dataclass
class Setup:
    """An engine and the world it is in. `spare` are pages beyond the least that a sequence of max_context needs."""

    seed: int
    groups: tuple[str, ...]
    page_tokens: int
    window: int
    entry_bytes: dict[str, int]
    max_batch_tokens: int
    slice_tokens: int
    max_sequences: int
    max_context: int
    spare: dict[str, int]
    ahead: bool
    late: bool
    host_slots: int
    disk_slots: int
    kv: dict[str, Any]
    disk_threads: int
    disk_timeout_s: float
    thresholds: tuple[float, float]
    encrypted: bool
    checkpoint_tokens: int
    speeds: Speeds
    priors: dict[str, float]
    faults: dict[Fault, float]
    queue_limit: int
    shared: bool = False
    checks: bool = False
    """The device computes digests of pages, and bits change on the way to and from it as often as `lies` says."""
    lies: float = 0.0
    engine: str = "oracle"
    image_tokens: int = 0
    """Of each image; 0 where prompts are text. `image_s`: seconds of an encoding; `blind`: how often one fails."""
    image_slots: int = 1
    image_s: float = 0.0
    blind: float = 0.0

    @property
    def model(self) -> Model:
        return Model(f"{self.engine}/oracle", self.window, self.entry_bytes)


@dataclass(frozen=True)
class Happening:
    """`after`: steps before it; -1 waits until nothing is left to do."""

    kind: str
    after: int
    values: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        values = {k: (f"{len(v)} tokens" if k == "prompt" else v) for k, v in self.values.items() if k != "right"}
        return f"after {self.after}: {self.kind} {values}"


def some(rng: random.Random, *chances: tuple[float, Any]) -> Any:
    """One of the values, with these weights."""
    return rng.choices([value for _, value in chances], [weight for weight, _ in chances])[0]


def power(rng: random.Random, low: float, high: float) -> float:
    return 10 ** rng.uniform(low, high)


def draw_setup(seed: int) -> Setup:
    rng = random.Random(f"setup/{seed}")
    groups = some(rng, (0.8, (LOCAL, GLOBAL)), (0.1, (GLOBAL,)), (0.1, (LOCAL,)))
    page_tokens = some(rng, (0.1, 1), (0.2, 2), (0.5, 4), (0.2, 8))
    wide = rng.random() < 0.06  # pages of several slots
    entry_bytes = {
        g: DIGEST * (rng.choice((1, 130 * 4 // page_tokens, 260 * 4 // page_tokens)) if wide else 1) for g in groups
    }
    token = power(rng, -5, -2)
    tiers = rng.random() < 0.92
    disk = tiers and rng.random() < 0.75
    max_batch = rng.choice((4, 6, 8, 12, 16, 24, 48))
    tight = rng.random() < 0.5
    setup = Setup(
        seed=seed,
        groups=groups,
        page_tokens=page_tokens,
        window=max(2, rng.choice((2, 3, 5, 8, 8, 11, 16, 24, 32))),
        entry_bytes=entry_bytes,
        max_batch_tokens=max_batch,
        slice_tokens=rng.choice((1, 4, 8, max_batch, 256)),
        max_sequences=rng.choice((1, 2, 3, 4, 6, 8)),
        max_context=rng.choice((60, 100, 150, 220)),
        spare={g: rng.choice((0, 0, 1, 3)) if tight else rng.choice((4, 12, 40, 120)) for g in groups},
        ahead=rng.random() < 0.35,
        late=rng.random() < 0.6,
        host_slots=(rng.choice((8, 16, 30, 60)) if rng.random() < 0.4 else rng.choice((120, 300, 500))) if tiers else 0,
        disk_slots=rng.choice((12, 40, 120, 400)) if disk else 0,
        kv={
            "policy": some(rng, (0.5, "cost"), (0.25, "lru"), (0.25, "a2cr")),
            "write_policy": some(rng, (0.6, "through"), (0.2, "selective"), (0.2, "back")),
            "prefix_cache": rng.random() < 0.96,
            "tenant_quota": some(rng, (0.7, 1.0), (0.3, rng.uniform(0.2, 0.9))),
            "pin_share": rng.choice((0.1, 0.5, 1.0)),
            "pin_s": power(rng, -1, 3),
            "salt": some(rng, (0.5, None), (0.5, "operator")),
        },
        disk_threads=rng.choice((1, 2, 4)),
        disk_timeout_s=some(rng, (0.7, 60.0), (0.3, power(rng, -2, 1))),
        thresholds=(rng.choice((0.2, 0.5, 0.85)), rng.choice((0.2, 0.5, 0.9))),
        encrypted=rng.random() < 0.15,
        checkpoint_tokens=rng.choice((8, 32, 4096)),
        speeds=draw_speeds(rng, token, page_tokens),
        priors={
            "token": token * some(rng, (0.5, 1.0), (0.5, power(rng, -1.5, 1.5))),
            "link": power(rng, -3, 0.7),
            "disk": power(rng, -2, 1.5),
        },
        faults=draw_faults(rng) if rng.random() < 0.25 else {},
        queue_limit=some(rng, (0.8, 256), (0.2, rng.choice((1, 3, 9)))),
        shared=draw_shared(rng, entry_bytes),
        **draw_checks(rng),
    )
    return with_images(with_code(setup))


def with_code(setup: Setup) -> Setup:
    """Perhaps with large pages that tiers keep coded, with dice of their own."""
    rng = random.Random(f"code/{setup.seed}")
    if rng.random() < 0.7 or not setup.host_slots or not setup.checks or setup.shared:
        return setup
    each = 16384 // setup.page_tokens
    kv = setup.kv | {"compression": "lossless"}
    return replace(setup, kv=kv, entry_bytes={group: each * rng.choice((1, 1, 2)) for group in setup.groups})


def with_images(setup: Setup) -> Setup:
    """Perhaps with images, which a step has room for beside all that decode. With dice of their own, so that lives of
    text stay as they are."""
    rng = random.Random(f"images/{setup.seed}")
    most = setup.max_batch_tokens - setup.max_sequences + 1
    if rng.random() < 0.3 or most < 1:
        return setup
    return replace(
        setup,
        image_tokens=min(rng.choice((1, 3, 5, 9, 16)), most),
        image_slots=rng.choice((1, 1, 2, 3, 8)),
        image_s=16 * setup.speeds.token * power(rng, -2, 1.0),
        blind=some(rng, (0.8, 0.0), (0.2, 0.1)),
    )


def draw_checks(rng: random.Random) -> dict[str, Any]:
    checks = rng.random() < 0.6
    return {"checks": checks, "lies": rng.choice((0.003, 0.03, 0.3, 1.0)) if checks and rng.random() < 0.4 else 0.0}


def draw_shared(rng: random.Random, entry_bytes: dict[str, int]) -> bool:
    """Whether the groups share one memory; then mostly with pages of different sizes."""
    if len(entry_bytes) < 2 or rng.random() < 0.4:
        return False
    if len(set(entry_bytes.values())) == 1:
        for group, factor in zip(
            entry_bytes, rng.choice(((1, 1), (2, 1), (5, 1), (3, 2), (5, 2), (2, 3))), strict=True
        ):
            entry_bytes[group] *= factor
    return lcm(*entry_bytes.values()) <= 8 * max(entry_bytes.values())


def draw_speeds(rng: random.Random, token: float, page_tokens: int) -> Speeds:
    """Pages take 1/1000 to 30 times as long as computing them."""
    page = token * page_tokens
    return Speeds(
        token=token,
        link=page * power(rng, -3, 0.7),
        disk=page * power(rng, -2, 1.5),
        checksum=page * power(rng, -4, 0.5),
        noise=rng.choice((1.0, 1.3, 3.0)),
        spike=some(rng, (0.8, 0.0), (0.2, 0.03)),
    )


def draw_faults(rng: random.Random) -> dict[Fault, float]:
    faults = [fault for fault in Fault if "hang" not in fault.value]
    return {fault: rng.choice((0.01, 0.05, 0.3)) for fault in rng.sample(faults, rng.randint(1, 4))}


class Planner:
    """Draws what happens in a life."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.rng = random.Random(f"life/{setup.seed}")
        self.known: list[list[int]] = [self.tokens(self.rng.randint(1, setup.max_context // 2)) for _ in range(2)]
        self.model = setup.model
        self.count = 0
        self.realms = self.rng.random() < 0.3
        self.hinted = self.rng.random() < 0.4
        self.picky = self.rng.random() < 0.5
        self.busy = self.rng.random() < 0.5
        self.pictures = random.Random(f"pictures/{setup.seed}")

    def tokens(self, count: int) -> list[int]:
        return [self.rng.randrange(2, VOCAB) for _ in range(count)]

    def happenings(self) -> list[Happening]:
        rng, setup = self.rng, self.setup
        wanted = rng.randint(4, 22)
        tiers, disk = setup.host_slots > 0, setup.disk_slots > 0
        kinds = [
            (10.0, "add"),
            (0.7, "abort"),
            (1.5, "idle"),
            (0.8 if tiers else 0.1, "restart"),
            (0.5 if disk else 0.0, "crash"),
            (0.2, "clear"),
            (0.3, "drop"),
            (1.2 if tiers else 0.0, "forget device"),
            (1.0 if disk else 0.0, "forget host"),
            (0.4 if tiers else 0.0, "flip host"),
            (0.6 if disk else 0.0, "flip saving"),
            (0.3 if disk else 0.0, "flip disk"),
            (0.5, "speeds"),
            (0.3 if disk else 0.0, "faults"),
            (0.3 if disk else 0.0, "hang"),
            (0.5, "spoil entry"),
            (0.15, "spoil logits"),
            (0.3, "jump"),
            (0.3, "pass"),
            (0.06 if setup.late else 0.0, "break copier"),
        ]
        found: list[Happening] = []
        while self.count < wanted:
            kind = some(rng, *kinds)
            after = some(rng, (0.35, 0), (0.35, rng.randint(1, 6)), (0.1, rng.randint(6, 40)), (0.2, -1))
            if kind == "add" and self.busy and rng.random() < 0.6:
                after = 0
            found.append(Happening(kind, after, getattr(self, "_" + kind.replace(" ", "_"), dict)()))
        return found

    # --- requests ------------------------------------------------------------------------------------------------

    def _add(self) -> dict[str, Any]:
        rng, setup = self.rng, self.setup
        self.count += 1
        prompt = self._prompt()
        params = self._params(setup.max_context - len(prompt))
        seed = seed_of(params.seed or 0, 0)
        right = answer(self.model, prompt, params, seed, setup.max_context, setup.image_tokens)
        self.known.append([*prompt, *right.tokens])
        if len(self.known) > 10:
            self.known.pop(rng.randrange(len(self.known)))
        values: dict[str, Any] = {"prompt": tuple(prompt), "params": params, "right": right}
        if self.realms:
            values["salt"] = rng.choice(("", "", "a", "b"))
            values["tenant"] = rng.choice(("", "", "x", "y"))
        if self.hinted and rng.random() < 0.5:
            ttl_s = some(rng, (0.5, None), (0.5, power(rng, -2, 1)))
            values["hints"] = rng.choice(
                (
                    CacheHints(rng.choice(("", "s", "t")), rng.choice(tuple(CachePriority)), ttl_s),
                    CacheHints(store=CacheStore.NEVER),
                    CacheHints(ttl_s=ttl_s, store=CacheStore.DEVICE),
                )
            )
        if self.picky:
            values["priority"] = some(rng, (0.8, 0), (0.2, rng.randint(-2, 2)))
            if rng.random() < 0.1:
                values["deadline"] = power(rng, -3, 0)
        return values

    def _prompt(self) -> list[int]:
        """A context from before, whole or cut, and something new."""
        rng, longest = self.rng, self.setup.max_context - 1
        if rng.random() < 0.08:
            return whole_images(
                self._illustrate(self.tokens(rng.randint(1, longest)))[:longest], self.setup.image_tokens
            )
        known = rng.choice(self.known)
        if rng.random() < 0.3:
            known = known[: rng.randrange(1, len(known) + 1)]
        new = self.tokens(some(rng, (0.3, 0), (0.5, rng.randint(1, 6)), (0.2, rng.randint(6, longest // 2))))
        return whole_images([*known, *self._illustrate(new)][:longest], self.setup.image_tokens)

    def _illustrate(self, text: list[int]) -> list[int]:
        """Put images between words."""
        rng, count = self.pictures, self.setup.image_tokens
        for _ in range(rng.choice((0, 1, 1, 2, 4)) if count else 0):
            at = rng.randrange(len(text) + 1)
            if at == len(text) or text[at] < IMAGES or (text[at] - IMAGES) % 100 == 0:
                text = [*text[:at], *image_tokens(rng.randrange(4), count), *text[at:]]
        return text

    def _params(self, room: int) -> SamplingParams:
        rng = self.rng
        most = min(room, some(rng, (0.6, rng.randint(1, 6)), (0.3, rng.randint(1, 20)), (0.1, 60)))
        seeded = rng.random() < 0.3
        return SamplingParams(
            max_tokens=some(rng, (0.97, most), (0.03, None)) if room < 40 else most,
            min_tokens=some(rng, (0.75, 0), (0.25, rng.randint(0, most))),
            temperature=0.8 if seeded else 0.0,
            seed=rng.randrange(1 << 40) if seeded else None,
            n=some(rng, (0.85, 1), (0.15, rng.randint(2, 4))),
            repetition_penalty=some(rng, (0.9, 1.0), (0.1, 1.2)),
            frequency_penalty=some(rng, (0.9, 0.0), (0.1, 0.5)),
            stop_token_ids=tuple(self.tokens(rng.choice((3, 20)))) if rng.random() < 0.3 else (),
            ignore_eos=rng.random() < 0.7,
        )

    def _abort(self) -> dict[str, Any]:
        return {"which": self.rng.random(), "one": self.rng.random() < 0.3}

    # --- the world -----------------------------------------------------------------------------------------------

    def _restart(self) -> dict[str, Any]:
        rng = self.rng
        return {
            "engine": some(rng, (0.93, "oracle"), (0.07, "other")),
            "wall": some(rng, (0.8, 0), (0.2, -(10**12))),
            "spare": some(rng, (0.8, None), (0.2, {g: rng.choice((0, 1, 20)) for g in self.setup.groups})),
            "speeds": self._speeds()["speeds"] if rng.random() < 0.3 else None,
        }

    _crash = _restart

    def _speeds(self) -> dict[str, Any]:
        token = self.setup.speeds.token * power(self.rng, -0.5, 0.5)
        return {"speeds": draw_speeds(self.rng, token, self.setup.page_tokens)}

    def _faults(self) -> dict[str, Any]:
        return {"rates": draw_faults(self.rng) if self.rng.random() < 0.6 else {}}

    def _flip_host(self) -> dict[str, Any]:
        return {"share": self.rng.choice((0.05, 0.3, 1.0)), "seed": self.rng.randrange(1 << 30)}

    _flip_disk = _flip_saving = _flip_host

    def _drop(self) -> dict[str, Any]:
        return {"share": self.rng.choice((0.1, 0.5, 1.0)), "seed": self.rng.randrange(1 << 30)}

    def _hang(self) -> dict[str, Any]:
        return {"count": self.rng.randint(1, 5)}

    def _spoil_entry(self) -> dict[str, Any]:
        return {"group": self.rng.choice(self.setup.groups)}

    def _jump(self) -> dict[str, Any]:
        return {"seconds": power(self.rng, -1, 3)}

    def _pass(self) -> dict[str, Any]:
        return {"seconds": power(self.rng, -3, 1.5)}
