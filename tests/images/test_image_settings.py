"""Settings of images reach the front: its largest message, the most images, and the hosts."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from wicore_trt.config import load_settings
from wicore_trt.core.prompts import ImageLimits
from wicore_trt.serve.front import FrontProcess


@pytest.mark.parametrize(("reads", "asked", "megabytes"), [(True, None, 32), (False, None, None), (True, 2, 2)])
def test_engines_that_read_images_take_larger_messages(reads: bool, asked: int | None, megabytes: int | None) -> None:
    given = {"server.max_message_mb": asked, "server.image_hosts": "a.org, *.b.org", "scheduler.max_images": 3}
    front = FrontProcess(None, load_settings(None, given), None, SimpleNamespace(reads_images=reads))
    assert front._settings.max_message_mb == megabytes
    assert front._image_limits == ImageLimits(3, ("a.org", "*.b.org"))
