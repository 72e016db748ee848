"""Turns of kernels in a chain of dependent launches; `plugins.dependent` explains why results do not change.

Knows nothing of what kernels compute. Invariant: behind `take_turn` everything that earlier kernels of the stream wrote
is seen, and none of them runs any more.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def take_turn(DEPENDENT: tl.constexpr):
    """Wait for the kernel in front. Only what no kernel of the chain writes may be read before, nothing written.

    Launched ordinarily (ALONE) a kernel waits for nothing here: the one in front has ended. ORDINARY: nothing at all.
    """
    if DEPENDENT:
        gdc_wait()
        gdc_launch_dependents()
