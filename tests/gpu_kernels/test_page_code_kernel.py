"""The kernels of coded pages against the CPU's code, byte for byte, in the interpreter and on a GPU."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("triton", reason="pip install -e .[triton]")

import torch
from gpu_kernels.targets import targets
from hostile_pages import PAGES, make_pages
from kernel_checks import Runner
from step_runners import RUNNERS

from benchmarks.gpu.page_code import decode_pages, encode_pages
from wicore_trt.plugins.aot import compile_kernel
from wicore_trt.plugins.code_layout import PageCode, decode_launch, encode_launches
from wicore_trt.plugins.kernels.page_code import page_code_specs

CODES = [PageCode(3, 16, 48), PageCode(2, 32, 256), PageCode(1, 32, 384)]
NAMES = [f"{code.rows}x{code.channels}" for code in CODES]
GAP = 16  # values between two pages of the pool


class Pool:
    """Pages in any order with gaps between them, and the arrays of the launches."""

    def __init__(self, run: Runner, code: PageCode, pages: np.ndarray, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.run, self.code, n, step = run, code, len(pages), code.values + GAP
        self.slots = rng.permutation(n + 2)[:n]
        self.memory = rng.integers(0, 65536, (n + 2, step), dtype=np.uint16)
        self.memory[self.slots, : code.values] = pages
        self.on = run.put(torch.from_numpy(self.memory.view(np.int16)).clone())
        self.coded = run.put(torch.from_numpy(rng.integers(0, 256, (n, code.coded_bytes), dtype=np.uint8)))
        self.arrays = {"memory": self.on, "offsets": run.put(torch.from_numpy(self.slots * step)), "coded": self.coded}

    def encode(self) -> tuple[np.ndarray, np.ndarray]:
        found = self.run.ints([-1] * len(self.slots))
        specs = page_code_specs(self.code)
        constants = specs["page_encode"].constants
        calls = encode_launches(constants, self.code, {**self.arrays, "found": found}, len(self.slots))
        for name, call in zip(("page_tops", "page_starts", "page_encode"), calls, strict=True):
            self.run.launch(specs[name], call)
        return self.coded.cpu().numpy(), found.cpu().numpy()

    def decode(self) -> np.ndarray:
        """The whole memory, whose pages are noise before."""
        spec = page_code_specs(self.code)["page_decode"]
        self.run.launch(spec, decode_launch(spec.constants, self.code, self.arrays, len(self.slots)))
        return self.on.cpu().numpy().view(np.uint16)


@pytest.mark.parametrize("run", RUNNERS)
@pytest.mark.parametrize("code", CODES, ids=NAMES)
def test_kernels_make_the_same_code_and_the_same_pages(run: Runner, code: PageCode) -> None:
    pages = make_pages(code, len(PAGES), seed=1)
    want, escapes = encode_pages(code, pages)
    pool = Pool(run, code, pages, 2)
    coded, found = pool.encode()
    fits = escapes <= code.room
    assert (found == escapes).all() and {*fits} == {True, False}
    assert (coded[fits] == want[fits]).all(), "zeros up to the end, too"
    expected = pool.memory.copy()
    pool.on[torch.from_numpy(pool.slots), : code.values] = 0
    pool.coded.copy_(torch.from_numpy(want))
    expected[pool.slots, : code.values] = decode_pages(code, want)
    assert (pool.decode() == expected).all() and (decode_pages(code, want)[fits] == pages[fits]).all()


@pytest.mark.parametrize("run", RUNNERS)
@pytest.mark.parametrize("code", CODES[:2], ids=NAMES[:2])
def test_damaged_code_is_decoded_within_its_page(run: Runner, code: PageCode) -> None:
    """Noise, whose index points anywhere, gives some page, the CPU's; the interpreter refuses any other access."""
    rng = np.random.default_rng(3)
    pages = np.zeros((6, code.values), np.uint16)
    pool = Pool(run, code, pages, 4)
    noise = rng.integers(0, 256, (6, code.coded_bytes), dtype=np.uint8)
    noise[1::2], _ = encode_pages(code, make_pages(code, 3, seed=5))
    noise[3:, 16 : 16 + 4 * code.tiles] = rng.choice([0, 1, 0x7F, 0x80, 255], (3, 4 * code.tiles))
    pool.coded.copy_(torch.from_numpy(noise))
    expected = pool.memory.copy()
    expected[pool.slots, : code.values] = decode_pages(code, noise)
    assert (pool.decode() == expected).all()


@pytest.mark.parametrize("target", targets())  # `make test-targets`
def test_kernels_compile(target: str) -> None:
    """A few words in shared memory: values that passed through it would have lost the layout that makes this fast."""
    for spec in page_code_specs(PageCode(20, 32, 2048)).values():
        assert compile_kernel(spec, target).shared_bytes <= 128, spec.name
