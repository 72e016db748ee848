"""What images cost sequences that decode, by a formula of an H100: the targets can be met, and by which rules."""

from __future__ import annotations

import pytest
from schedule.image_load import BF16, FP8, STREAMS, Way, run_images


@pytest.mark.parametrize("even", [True, False])
def test_an_image_takes_one_longer_step_and_slows_no_other_much(even: bool) -> None:
    """Ten images a second keep what arithmetic leaves of decode; no gap is longer than the step that reads an image."""
    found = run_images(FP8, Way(), seconds=3.0, even=even)
    assert found.kept >= 0.72 and found.p99_ratio <= (1.9 if even else 2.2) and found.image_s < 0.2
    images = [step for step in found.steps if any(count > 1 and seq >= STREAMS for seq, count in step)]
    assert len(images) == len({seq for step in images for seq, count in step if count > 1}), "each in one step"


def test_the_encoder_keeps_up_where_steps_are_long() -> None:
    """Beside BF16 steps of 23 ms, of which an encoding waits for the last to end."""
    assert run_images(BF16, Way(), seconds=3.0).left <= 2
