"""Ranks that are threads of one process, exchanging NumPy arrays by the same collectives, without a network.

>>> import numpy as np
>>> from concurrent.futures import ThreadPoolExecutor
>>> from torch_iroh import InProcessWorld
>>> def work(rank):
...     values = np.full(3, float(rank.rank))
...     rank.all_reduce(values)
...     return values
>>> with InProcessWorld(2) as ranks, ThreadPoolExecutor(2) as pool:
...     print([result.tolist() for result in pool.map(work, ranks)])
[[1.0, 1.0, 1.0], [1.0, 1.0, 1.0]]
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from torch_iroh import _native

Array = NDArray[Any]
_FOREVER = 1e9
_ANYONE = -1


def _dtype_of(array: Array, name: str | None) -> str:
    """The wire dtype of an array; `name` overrides it for types that NumPy lacks (bfloat16 as uint16 bits)."""
    return name or array.dtype.name


def _blocks(arrays: Sequence[Array]) -> list[int]:
    return [array.size for array in arrays]


def _joined(arrays: Sequence[Array]) -> Array:
    return np.concatenate([np.ravel(array) for array in arrays])


class InProcessRank:
    """One rank of an :class:`InProcessWorld`. Each call blocks until this rank's part is done.

    Arrays are C-contiguous and of one of the dtypes bool, (u)int8 to (u)int64, float16, float32, float64, complex64,
    complex128; ``dtype="bfloat16"`` reads uint16 arrays as bfloat16 bits. Reduce ops: sum, avg, product, min, max,
    band, bor, bxor, premul_sum.

    Raises:
        ValueError: an argument has no meaning (unknown dtype or op, array not contiguous).
        TimeoutError: not done after `timeout` seconds; the group is broken then.
        RuntimeError: another rank is gone, or called something else; the group is broken then.
    """

    def __init__(self, native: Any) -> None:
        self._native = native

    @property
    def rank(self) -> int:
        """This rank, from 0."""
        return int(self._native.rank)

    @property
    def world(self) -> int:
        """The number of ranks."""
        return int(self._native.world)

    def _run(
        self,
        name: str,
        send: Array | None,
        receive: Array | None,
        *,
        op: str = "sum",
        factor: float = 1.0,
        root: int = 0,
        blocks: Sequence[int] = (),
        send_blocks: Sequence[int] = (),
        dtype: str | None = None,
        timeout: float = _FOREVER,
    ) -> None:
        array = receive if receive is not None else send
        kind = "uint8" if array is None else _dtype_of(array, dtype)
        self._native.collective(name, kind, op, factor, root, send, receive, list(blocks), list(send_blocks), timeout)

    def all_reduce(
        self,
        array: Array,
        op: str = "sum",
        *,
        factor: float = 1.0,
        dtype: str | None = None,
        timeout: float = _FOREVER,
    ) -> None:
        """Replace `array` on every rank by the reduction of all; `factor` is this rank's scale for premul_sum."""
        self._run("all_reduce", None, array, op=op, factor=factor, dtype=dtype, timeout=timeout)

    def reduce(
        self, array: Array, root: int, op: str = "sum", *, dtype: str | None = None, timeout: float = _FOREVER
    ) -> None:
        """Replace `array` on `root` by the reduction of all ranks' arrays."""
        self._run("reduce", array, array, op=op, root=root, dtype=dtype, timeout=timeout)

    def broadcast(self, array: Array, root: int, *, timeout: float = _FOREVER) -> None:
        """Replace `array` on every rank by `root`'s."""
        self._run("broadcast", None, array, root=root, timeout=timeout)

    def all_gather(self, array: Array, sizes: Sequence[int] | None = None, *, timeout: float = _FOREVER) -> Array:
        """Return all ranks' arrays, flat and in rank order; `sizes` (elements per rank) where they differ."""
        blocks = list(sizes) if sizes is not None else [array.size] * self.world
        out = np.empty(sum(blocks), array.dtype)
        self._run("all_gather", array, out, blocks=blocks, timeout=timeout)
        return out

    def reduce_scatter(
        self, arrays: Sequence[Array], op: str = "sum", *, dtype: str | None = None, timeout: float = _FOREVER
    ) -> Array:
        """Return the reduction over all ranks of their block for this rank; `arrays` has one block per rank."""
        out = np.empty(arrays[self.rank].size, arrays[0].dtype)
        self._run("reduce_scatter", _joined(arrays), out, op=op, blocks=_blocks(arrays), dtype=dtype, timeout=timeout)
        return out

    def gather(self, array: Array, root: int, *, timeout: float = _FOREVER) -> Array | None:
        """Return all ranks' arrays, flat and in rank order, on `root`; None elsewhere."""
        blocks = [array.size] * self.world
        out = np.empty(sum(blocks), array.dtype) if self.rank == root else None
        self._run("gather", array, out, root=root, blocks=blocks, timeout=timeout)
        return out

    def scatter(self, arrays: Sequence[Array] | None, out: Array, root: int, *, timeout: float = _FOREVER) -> None:
        """Fill `out` with this rank's block of `root`'s `arrays` (None elsewhere)."""
        send = _joined(arrays) if arrays is not None else None
        self._run("scatter", send, out, root=root, blocks=[out.size] * self.world, timeout=timeout)

    def all_to_all(
        self, arrays: Sequence[Array], sizes: Sequence[int] | None = None, *, timeout: float = _FOREVER
    ) -> list[Array]:
        """Send ``arrays[r]`` to rank r; return what each rank sent here. `sizes`: elements from each, where uneven."""
        blocks = list(sizes) if sizes is not None else _blocks(arrays)
        out = np.empty(sum(blocks), arrays[0].dtype)
        self._run("all_to_all", _joined(arrays), out, blocks=blocks, send_blocks=_blocks(arrays), timeout=timeout)
        return np.split(out, np.cumsum(blocks)[:-1])

    def barrier(self, *, timeout: float = _FOREVER) -> None:
        """Return when every rank has called it."""
        self._run("barrier", None, None, timeout=timeout)

    def send(self, array: Array, peer: int, tag: int = 0, *, timeout: float = _FOREVER) -> None:
        """Send `array` to `peer`; returns when the array may be reused."""
        self._native.send(array, peer, tag, f"{array.dtype.name}, {array.size} elements", timeout)

    def recv(self, array: Array, peer: int | None = None, tag: int = 0, *, timeout: float = _FOREVER) -> int:
        """Fill `array` with the next message of `peer` (None: of anyone) with `tag`; return the sender's rank."""
        what = f"{array.dtype.name}, {array.size} elements"
        return int(self._native.recv(array, _ANYONE if peer is None else peer, tag, what, timeout))

    def abort(self, why: str) -> None:
        """Break the group: every rank's operations fail with `why`."""
        self._native.abort(why)

    def sever(self, why: str) -> None:
        """Vanish as a killed process would: for tests of what the others do."""
        self._native.sever(why)

    def close(self) -> None:
        """Leave the group."""
        self._native.close()


class InProcessWorld:
    """`world` ranks in this process; iterate over them or index them, and give each its own thread.

    Args:
        world: number of ranks, at least 1.
        chunk_bytes: size of the pieces that pipeline a collective; a multiple of 16.
        algorithm: "auto", "ring", "direct", "ring_bidirectional", "tree", "butterfly" or "bruck". An operation that it
            does not cover runs its nearest kin.
    """

    def __init__(self, world: int, *, chunk_bytes: int = 256 << 10, algorithm: str = "auto") -> None:
        native = _native.core_module().make_in_process_world(world, chunk_bytes, algorithm)
        self._ranks = [InProcessRank(one) for one in native]

    def __len__(self) -> int:
        return len(self._ranks)

    def __getitem__(self, rank: int) -> InProcessRank:
        return self._ranks[rank]

    def __iter__(self) -> Iterator[InProcessRank]:
        return iter(self._ranks)

    def __enter__(self) -> InProcessWorld:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close all ranks."""
        for rank in self._ranks:
            rank.close()
