"""What goes wrong on the link between engine and front, and between supervisor and child, one fault at a time (I13)."""

from __future__ import annotations

import asyncio
import os
import socket
from contextlib import aclosing, suppress
from dataclasses import replace

import pytest
from fakes import FAKE_INFO, FakeTokenizer, Gate, greedy, make_core

from wicore_trt.core.text_engine import TextEngine
from wicore_trt.errors import DeadlineError, EngineDeadError, EngineFormatError, InvalidRequestError, UnavailableError
from wicore_trt.link.channel import Channel
from wicore_trt.link.host import EngineHost
from wicore_trt.link.messages import (
    Abort,
    Add,
    Done,
    Down,
    Outputs,
    Welcome,
    decode_to_engine,
    encode,
    encode_request,
    read_request,
)
from wicore_trt.link.remote import RemoteEngine
from wicore_trt.memory_file import make_file
from wicore_trt.process.child import Control, read_error
from wicore_trt.serve import lifecycle
from wicore_trt.types import ContentSpan, FinishReason, GenerateRequest, SamplingParams, TextRequest, TokenOutput, Usage


def framed(message: object) -> bytes:
    data = encode(message)
    return len(data).to_bytes(4, "little") + data


async def until(condition) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.002)


async def join_remote(remote: RemoteEngine) -> socket.socket:
    """Link a remote engine to a socket, the engine's side, which has said Welcome."""
    ours, theirs = socket.socketpair()
    remote.connect(ours)
    theirs.sendall(framed(Welcome("1/", FAKE_INFO, 1)))
    await until(lambda: remote.dead is None)
    return theirs


async def test_an_add_that_was_not_answered_raises_and_makes_no_output():
    """The engine ends between a request and its answer."""
    outputs: list[TokenOutput] = []
    remote = RemoteEngine()
    await remote.start(outputs.extend)
    theirs = await join_remote(remote)
    theirs.setblocking(False)
    request = GenerateRequest("1/0", (1, 2), SamplingParams(max_tokens=4, n=2))
    adding = asyncio.ensure_future(remote.add(request))
    await asyncio.sleep(0)
    sent = await asyncio.get_running_loop().sock_recv(theirs, 1 << 16)
    assert isinstance(decode_to_engine(sent[4:]), Add)
    theirs.close()
    with pytest.raises(EngineDeadError, match="its process ended"):
        await adding
    assert not outputs and remote.channel is None


async def test_an_engine_that_is_left_loses_neither_its_reason_nor_what_it_has_sent():
    """The supervisor tells of its end while the front was busy."""
    outputs: list[TokenOutput] = []
    remote = RemoteEngine()
    await remote.start(outputs.extend)
    theirs = await join_remote(remote)
    theirs.setblocking(False)
    for name in ("1/0", "1/1"):
        adding = asyncio.ensure_future(remote.add(GenerateRequest(name, (1, 2), SamplingParams(max_tokens=4))))
        await asyncio.sleep(0)
        message = decode_to_engine((await asyncio.get_running_loop().sock_recv(theirs, 1 << 16))[4:])
        theirs.sendall(framed(Done(message.call)))
        await adding
    last = TokenOutput("1/0", 0, (5,), finish_reason=FinishReason.LENGTH, usage=Usage(2, 1))
    theirs.sendall(framed(Outputs([last])) + framed(Down("rank 1 has ended")))
    remote.leave_engine("its process has ended")
    assert [(o.request_key, o.finish_reason) for o in outputs] == [
        ("1/0", FinishReason.LENGTH), ("1/1", FinishReason.ERROR)
    ]  # fmt: skip
    assert remote.dead == "rank 1 has ended" and remote.dead in outputs[1].error
    theirs.close()


async def test_statistics_do_not_wait_for_an_engine_that_hangs(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("wicore_trt.link.remote.STATS_S", 0.01)
    remote = RemoteEngine()
    await remote.start(lambda outputs: None)
    theirs = await join_remote(remote)
    async with asyncio.timeout(60):
        with pytest.raises(UnavailableError, match="statistics"):
            await remote.stats()
    theirs.close()


@pytest.mark.parametrize("taken", [True, False])
async def test_a_request_ends_at_its_time_though_the_engine_hangs(monkeypatch: pytest.MonkeyPatch, taken: bool):
    """`taken`: it hangs after it took the request. It hears that nobody waits when it goes on."""
    monkeypatch.setattr("wicore_trt.core.text_engine.LATE_S", 0.01)
    remote = RemoteEngine()
    engine = TextEngine(remote, FakeTokenizer(), FAKE_INFO)
    await engine.start()
    theirs = await join_remote(remote)
    request = TextRequest("a", SamplingParams(max_tokens=9), prompt_token_ids=(5, 6), timeout_s=0.05)

    async def ask() -> None:
        stream = await engine.submit(request)
        async with aclosing(stream):
            async for _ in stream:
                raise AssertionError

    asked = asyncio.ensure_future(ask())
    await until(lambda: remote._pending)
    if taken:
        theirs.sendall(framed(Done(next(iter(remote._pending)))))
    async with asyncio.timeout(60):
        with pytest.raises(DeadlineError):
            await asked
    assert not engine.live and not remote._pending
    sent, kinds = theirs.recv(1 << 16), list[type]()
    while sent:
        end = 4 + int.from_bytes(sent[:4], "little")
        kinds.append(type(decode_to_engine(sent[4:end])))
        sent = sent[end:]
    assert kinds[0] is Add and {*kinds[1:]} == {Abort}
    theirs.close()


async def test_requests_of_an_engine_that_hangs_end_with_an_error_before_a_server_that_ends_cuts_connections(
    monkeypatch,
):
    monkeypatch.setattr(lifecycle, "CANCEL_S", 0.01)
    engine, told = TextEngine(remote := RemoteEngine(), FakeTokenizer(), FAKE_INFO), list[str]()
    await engine.start()
    theirs = await join_remote(remote)
    theirs.setblocking(False)

    async def ask() -> None:
        async with aclosing(await engine.submit(TextRequest("a", SamplingParams(), prompt_token_ids=(5, 6)))) as stream:
            async for _ in stream:
                raise AssertionError

    class Servers:
        streams_open = 1

        async def set_draining(self) -> None:
            pass

        async def stop_listening(self, grace_s: float) -> None:
            await until(asked.done)
            told.append("listening ends")

    asked = asyncio.ensure_future(ask())
    message = decode_to_engine((await asyncio.get_running_loop().sock_recv(theirs, 1 << 16))[4:])
    assert isinstance(message, Add)
    theirs.sendall(framed(Done(message.call)))
    await until(lambda: engine.live)
    assert await lifecycle.drain_requests(Servers(), engine, 0.01) == 1 and told
    with pytest.raises(EngineDeadError):
        await asked
    theirs.close()


async def test_a_sequence_that_fails_behind_its_stop_string_costs_the_others_nothing():
    """It had ended here, and the engine did not know yet. The request is still told of the engine's end."""
    remote = RemoteEngine()
    engine = TextEngine(remote, FakeTokenizer(), FAKE_INFO)
    await engine.start()
    theirs = await join_remote(remote)
    params = SamplingParams(max_tokens=9, n=2, stop=("A",))
    submitted = asyncio.ensure_future(engine.submit(TextRequest("a", params, prompt_token_ids=(5, 6))))
    await until(lambda: remote._pending)
    theirs.sendall(framed(Done(next(iter(remote._pending)))))
    stream = await submitted
    one = [TokenOutput("1/0", index, (33 + index,), usage=Usage(2, 1)) for index in (0, 1)]  # "A" and "B"
    late = TokenOutput("1/0", 0, (), finish_reason=FinishReason.ERROR, usage=Usage(2, 2), error="not finite")
    more = TokenOutput("1/0", 1, (35,), usage=Usage(2, 2))
    theirs.sendall(framed(Outputs(one)) + framed(Outputs([late, more])))
    await until(lambda: sum(len(part.token_ids) for part in stream._pending.get(1, ())) == 2)
    assert [(await anext(stream)).finish_reason, (await anext(stream)).text] == [FinishReason.STOP, "BC"]
    theirs.close()
    with pytest.raises(EngineDeadError, match="its process ended"):
        await anext(stream)
    assert not engine.live and not remote._live


async def test_a_front_that_leaves_while_outputs_are_on_their_way_ends_no_engine():
    looks = []

    class Leaving(dict):
        """A front leaves as soon as somebody has looked for it, in whatever way."""

        def get(self, prefix, default=None):
            looks.append(prefix)
            return self.pop(prefix, default)

        def __getitem__(self, prefix):
            looks.append(prefix)
            return self.pop(prefix)

        def __contains__(self, prefix):
            return self.get(prefix) is not None

    host = EngineHost(make_core(), FAKE_INFO, max_waiting=4)
    ours, theirs = socket.socketpair()
    host.start()
    try:
        await asyncio.to_thread(host.attach, theirs)
        host.links = Leaving(host.links)
        host._send_outputs([TokenOutput("1/0", 0, (5,), finish_reason=FinishReason.LENGTH)])
        host._send_outputs([TokenOutput("2/0", 0, (5,), finish_reason=FinishReason.LENGTH)])
        host._send_outputs([TokenOutput("1/1", 0, (5,))])  # it has left
        assert looks == ["1/", "2/", "1/"] and not host.links and host.engine.dead is None
    finally:
        await asyncio.to_thread(host.stop, 5)
        ours.close()


async def test_a_request_id_used_again_right_behind_a_front_that_ended_is_a_new_request():
    """The engine runs on. What the former front asked for ends, and the new front's request of the same name does not;
    a front that has a request of that name refuses another by its name."""
    core = make_core()
    gate = Gate(core.executor)
    gate.let(3)
    host = EngineHost(core, FAKE_INFO, max_waiting=8)
    host.start()

    async def start_front() -> TextEngine:
        engine = TextEngine(RemoteEngine(), FakeTokenizer(), FAKE_INFO)
        await engine.start()
        ours, theirs = socket.socketpair()
        engine.engine.connect(ours)
        await asyncio.to_thread(host.attach, theirs)
        await until(lambda: engine.ready)
        return engine

    params = SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True)
    request = TextRequest("same", params, prompt_token_ids=(5, 6, 7), tenant="alice")
    try:
        former = await start_front()
        first = await former.submit(request)
        await anext(aiter(first))
        with pytest.raises(InvalidRequestError, match="Request id 'same' is in use"):
            await former.submit(request)
        await former.engine.stop(1.0)  # its end of the socket closes, as when its process ends
        again = await (await start_front()).submit(request)
        gate.let()
        tokens = [token async for output in again for token in output.token_ids]
        assert tokens == greedy([5, 6, 7], 30, ignore_eos=True)
        with pytest.raises(EngineDeadError):
            assert not [output async for output in first if output.finish_reason is not None]
        await until(lambda: not host.engine.live_ids())
        assert core.stats().requests_finished == {"cancelled": 1, "length": 1} and not core.sequences
    finally:
        gate.let()
        await asyncio.to_thread(host.stop, 5)


async def test_pixels_cross_in_files_of_which_none_stays_open(monkeypatch: pytest.MonkeyPatch):
    """Each request arrives whole, an abort behind it; those that nobody reads are closed with their channel, and a
    front that may open no file refuses the request."""
    files = len(os.listdir("/proc/self/fd"))
    remote = RemoteEngine()
    theirs = await join_remote(remote)

    def seeing(number: int, size: int = 300_000) -> GenerateRequest:
        spans = tuple(ContentSpan(at, at + 2, bytes(32), bytes([number + at]) * (size + at)) for at in (0, 2, 5))
        spans = (spans[0], replace(spans[1], pixels=b""), spans[2])
        return GenerateRequest(f"1/{number}", (7,) * 300_000, SamplingParams(max_tokens=4), content=spans)

    sent = [seeing(number) for number in range(12)]
    adding = [asyncio.ensure_future(remote.add(request)) for request in sent]
    await asyncio.sleep(0)
    remote.abort("1/11")
    heard: list[GenerateRequest | Abort] = []

    def answer(data: memoryview, file: int) -> None:
        message = decode_to_engine(data)
        heard.append(read_request(message, file) if isinstance(message, Add) else message)
        if isinstance(message, Add):
            engine.post(encode(Done(message.call)))

    engine = Channel(theirs, asyncio.get_running_loop(), answer, lambda: None)
    await asyncio.wait_for(asyncio.gather(*adding), 60)
    await until(lambda: len(heard) == 13)
    assert heard[:-1] == sent and isinstance(heard[-1], Abort) and heard[-1].request_key == "1/11"
    theirs = socket.socket(fileno=os.dup(theirs.fileno()))
    engine.close()  # from here on nobody reads
    adding = [asyncio.ensure_future(remote.add(request)) for request in sent]
    await asyncio.sleep(0)
    assert remote.channel is not None and remote.channel.backlog
    monkeypatch.setattr("os.memfd_create", lambda name: os.open("/nowhere", os.O_RDONLY))
    with pytest.raises(UnavailableError, match="cannot be passed on"):
        await remote.add(seeing(20))
    assert not [name for name in remote._live if name == "1/20"]
    remote.channel.close()
    theirs.close()
    for added in await asyncio.gather(*adding, return_exceptions=True):
        assert isinstance(added, EngineDeadError)
    heard.clear()  # requests keep their pixels
    await until(lambda: len(os.listdir("/proc/self/fd")) <= files)


def test_one_image_crosses_without_a_copy():
    """Parts of a file in another order, or not all of it, are copied."""
    whole = make_file(8)
    whole[:] = b"abcdefgh"
    view = memoryview(whole).toreadonly()
    for parts, same in (((view[:4],), False), ((view[4:], view[:4]), False), ((b"abcd",), False), ((view,), True)):
        spans = tuple(ContentSpan(at, at + 1, bytes(32), part) for at, part in enumerate(parts))
        request = GenerateRequest("1/1", (7,) * 4, SamplingParams(max_tokens=4), content=spans)
        data, file = encode_request(1, request)
        assert (os.fstat(file).st_ino == os.fstat(whole.file).st_ino) == same
        message = decode_to_engine(data)
        assert isinstance(message, Add) and read_request(message, file) == request
        os.ftruncate(file, 3)
        with pytest.raises(OSError, match="shorter"):
            read_request(message, file)
        os.close(file)


async def test_a_message_without_its_file_ends_the_channel():
    """This process had too many open; who asked hears that there is no answer."""
    ended: list[bool] = []
    ours, theirs = socket.socketpair()
    Channel(ours, asyncio.get_running_loop(), lambda message, file: None, lambda: ended.append(True))
    theirs.sendall((4 | 1 << 31).to_bytes(4, "little") + b"four")
    await until(lambda: ended)
    theirs.close()


async def test_a_file_that_finds_no_room_ends_the_channel(monkeypatch: pytest.MonkeyPatch):
    """The next message's file must not be taken for it."""
    read: list[bytes] = []
    ended: list[bool] = []
    ours, theirs = socket.socketpair()
    Channel(
        ours,
        asyncio.get_running_loop(),
        lambda message, file: read.append(os.pread(file, 9, 0)),
        lambda: ended.append(True),
    )
    files = [os.memfd_create("pixels") for _ in range(2)]
    for number, file in enumerate(files):
        os.write(file, b"AB"[number : number + 1])
    head = (6 | 1 << 31).to_bytes(4, "little")
    with monkeypatch.context() as patched:
        receive = socket.recv_fds
        patched.setattr("wicore_trt.link.channel.READ_BYTES", 6)
        full = [True]

        def recv_fds(sock, size, most):
            """The first file comes while no descriptor is free."""
            data, got, flags, address = receive(sock, size, 1)
            if full and got:
                full.clear()
                os.close(got[0])
                return data, [], flags | socket.MSG_CTRUNC, address
            return data, got, flags, address

        patched.setattr(socket, "recv_fds", recv_fds)
        for file in files:
            with suppress(OSError):
                socket.send_fds(theirs, [head + b"pixels"], [file])
        await until(lambda: ended or read)
    assert not read and ended
    for file in files:
        os.close(file)
    theirs.close()


async def test_pixels_that_an_engine_does_not_take_are_refused_at_some_time(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("wicore_trt.link.remote.MOST_FILE_BYTES", 4 << 20)
    remote = RemoteEngine()
    theirs = await join_remote(remote)
    before, pixels = len(os.listdir("/proc/self/fd")), bytes(1 << 20)
    request = GenerateRequest("1/0", tuple(range(40_000)), SamplingParams(max_tokens=4),
                              content=(ContentSpan(0, 4, b"d" * 32, pixels),))  # fmt: skip
    adding = []
    for number in range(40):
        adding.append(asyncio.ensure_future(remote.add(replace(request, request_key=f"1/{number}"))))
        await asyncio.sleep(0)
        adding[-1].cancel()
    found = await asyncio.gather(*adding, return_exceptions=True)
    assert any(isinstance(error, UnavailableError) for error in found)
    assert remote.channel.file_bytes <= 6 << 20 and len(os.listdir("/proc/self/fd")) - before <= 8
    await remote.stop(0)
    assert len(os.listdir("/proc/self/fd")) <= before
    theirs.close()


async def test_a_message_that_breaks_its_receiver_ends_the_channel():
    """It is not read a second time, and who waits for an answer hears that there is none."""
    read: list[bytes] = []
    ended: list[bool] = []

    def receive(message: memoryview, file: int) -> None:
        read.append(bytes(message))
        if message == b"bad":
            raise ValueError(message)

    ours, theirs = socket.socketpair()
    Channel(ours, asyncio.get_running_loop(), receive, lambda: ended.append(True))
    for message in (b"good", b"bad", b"late"):
        with suppress(BrokenPipeError):
            theirs.sendall(len(message).to_bytes(4, "little") + message)
    await until(lambda: ended)
    assert read == [b"good", b"bad"] and ended == [True]
    theirs.close()


def test_an_error_of_any_length_is_told():
    ours, theirs = map(Control, socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET))
    theirs.send_error(EngineFormatError("\x01" * 1_000_000, fix="\x02" * 1_000_000))
    message, _ = ours.receive_message()
    assert isinstance(read_error(message), EngineFormatError)
