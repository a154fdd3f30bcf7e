"""A relay server for iroh endpoints that cannot reach each other, and an observer that tells them their address.

$ torch-iroh relay --token-file tokens

It speaks the relay protocol of iroh's own clients (version 2), so iroh endpoints of any program can use it. The same in
a program of one's own:

>>> from torch_iroh.relay import RelayOptions, RelayServer
>>> async def serve() -> None:
...     server = RelayServer(RelayOptions(bind=("127.0.0.1:0",), observer=None, tokens=frozenset({"secret"})))
...     await server.start()
...     print(server.relay_url)  # what endpoints are given as their relay
...     await server.close()

Packets are encrypted from endpoint to endpoint: a relay sees who sends how much to whom, and nothing else.
"""

from __future__ import annotations

from torch_iroh.relay._options import RelayOptions
from torch_iroh.relay._server import RelayServer

__all__ = ["RelayOptions", "RelayServer"]
