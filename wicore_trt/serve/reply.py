"""What a handler answers with: messages, before which the call's id is told.

The id is not told before there is something to tell: its metadata cost the system a write of their own, and a call that
is refused has the id in the metadata of its status. Must not know what is answered.
"""

from __future__ import annotations

import grpc
from google.protobuf.message import Message

from wicore_trt.access.calls import REQUEST_ID_HEADER


class Reply:
    """The answer to one call."""

    def __init__(self, context: grpc.aio.ServicerContext, call_id: str) -> None:
        self._context, self._call_id = context, call_id
        self._begun = False

    def time_remaining(self) -> float | None:
        """Seconds to the call's deadline, None without one."""
        left: float | None = self._context.time_remaining()
        return left

    async def begin(self) -> None:
        """The call was taken, though its first message takes a while; the client hears of it."""
        if not self._begun:
            self._begun = True
            await self._context.send_initial_metadata(((REQUEST_ID_HEADER, self._call_id),))

    async def write(self, message: Message) -> None:
        """Send a message."""
        if not self._begun:
            await self.begin()
        await self._context.write(message)
