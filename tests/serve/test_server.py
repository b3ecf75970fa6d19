from __future__ import annotations

import asyncio
import socket

from skote.serve.server import bind


def test_what_is_written_does_not_wait_for_acknowledgements() -> None:
    async def no_delay() -> int:
        accepted: asyncio.Future[int] = asyncio.get_running_loop().create_future()

        def note(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            accepted.set_result(writer.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
            writer.close()

        with bind("127.0.0.1", 0) as listener:
            async with await asyncio.start_server(note, sock=listener):
                _, writer = await asyncio.open_connection("127.0.0.1", listener.getsockname()[1])
                option = await accepted
                writer.close()
                await writer.wait_closed()
        return option

    assert asyncio.run(no_delay()) != 0
