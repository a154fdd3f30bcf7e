"""What a hook of :mod:`torch_iroh.hooks` keeps between steps: what this rank still owes, and its momentum.

Knows codecs by name only; what travels and how is said at :func:`torch_iroh.all_reduce_compressed`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from torch_iroh._compression import all_reduce_compressed
from torch_iroh._groups import iroh_backend

__all__ = ["State"]

_VERSION = 1
_SPARSE = frozenset({"topk", "topk-int8", "topk-int4"})
# Options that not every codec has a use for, and the codecs that do.
_TAKEN_BY = {
    "momentum": _SPARSE,
    "density": _SPARSE,
    "block": frozenset({"int8", "int4", "fp8", "sign", "topk-int8", "topk-int4"}),
    "rounding": frozenset({"int8", "int4", "topk-int8", "topk-int4"}),
}


class _PerParameter:
    """Float32 values beside those of parameters, as one flat tensor for each bucket.

    DDP forms its buckets anew after the first step: what belongs to a parameter moves with it.
    """

    def __init__(self) -> None:
        self._flat: dict[tuple[int, ...], torch.Tensor] = {}  # by the ids of a bucket's parameters
        self.pieces: dict[torch.Tensor, torch.Tensor] = {}  # 1-D: by parameter, views of the flat ones

    def flat(self, parameters: Sequence[torch.Tensor]) -> torch.Tensor:
        """Those of a bucket, changed in place by whoever asks; zeros where there was nothing."""
        key = tuple(map(id, parameters))
        known = self._flat.get(key)
        if known is not None:
            return known
        found = [self.pieces.get(parameter) for parameter in parameters]
        made = torch.cat(
            [
                torch.zeros(parameter.numel()) if piece is None else piece
                for parameter, piece in zip(parameters, found, strict=True)
            ]
        )
        moved = set(key)
        self._flat = {ids: flat for ids, flat in self._flat.items() if moved.isdisjoint(ids)}
        self._flat[key] = made
        start = 0
        for parameter in parameters:
            self.pieces[parameter] = made[start : start + parameter.numel()]
            start += parameter.numel()
        return made

    def replace(self, pieces: Mapping[torch.Tensor, torch.Tensor]) -> None:
        self._flat = {}
        self.pieces = {parameter: piece.clone() for parameter, piece in pieces.items()}


class State:
    """Options of a compressing hook, and what it keeps of this rank. One for each model; equal options on all ranks.

    >>> state = torch_iroh.hooks.State(parameters=model.parameters(), warmup_steps=100)  # doctest: +SKIP
    >>> model.register_comm_hook(state, torch_iroh.hooks.topk_int8)  # doctest: +SKIP

    **Error feedback** (arXiv 1901.09847): what a step leaves out is added to the next step's gradient. It is a float32
    tensor on the CPU beside each bucket, which follows its parameters when DDP forms its buckets anew.

    **Momentum** (Deep Gradient Compression, arXiv 1712.01887, section 3.1) belongs here rather than to the optimizer
    when most of a gradient waits for later steps: ``u = momentum * u + gradient``, and u is what is sent, or owed. Use
    an optimizer without momentum. Where this rank's values are in a step's result, u becomes zero (momentum factor
    masking, section 3.2); where ranks share a site, wherever the result has a value. In warm-up, and where nothing is
    compressed, u stays: that is SGD with momentum.

    **Checkpoints**: each rank saves its own :meth:`state_dict`. A run that goes on from it equals one that was never
    interrupted, bit for bit, where DDP's buckets are the same. With ``find_unused_parameters=True`` they are; else DDP
    forms them anew after its first step, so a resumed run's first step puts other values side by side: nothing is lost,
    but roundings differ. So do those of rounding "stochastic", whose seed counts a process's calls.

    **Another number of ranks**: a rank's residual is what *it* owes to the mean of all ranks' gradients, divided by
    their number. :meth:`merge` gives states for another number, by which the same is owed in all.

    Args:
        group: a group of backend "iroh", that of the model; None: the default group.
        parameters: ``model.parameters()``, in their order; :meth:`state_dict` and :meth:`load_state_dict` need it.
        error_feedback: False: what a step leaves out is lost.
        warmup_steps: so many steps average exactly, those after them are compressed.
        momentum: from 0, without, to below 1; for topk, topk_int8 and topk_int4, with error feedback.
        density: share of the values that topk, topk_int8 and topk_int4 send, above 0 to 1; None: 0.01.
        block: values that share a scale, a power of two from 16 to 4096; None: 128. Not for bf16_compress and topk.
        rounding: "nearest" or "stochastic", of int8 and int4, also of topk's; None: "nearest".
        nonfinite: "keep": NaN and infinities stay visible (docs/compression.md), or "raise": an error.

    Raises:
        ValueError: an option is out of its range; or, when a hook is first called, the codec has no use for it.
    """

    def __init__(
        self,
        *,
        group: dist.ProcessGroup | None = None,
        parameters: Iterable[torch.Tensor] | None = None,
        error_feedback: bool = True,
        warmup_steps: int = 0,
        momentum: float = 0.0,
        density: float | None = None,
        block: int | None = None,
        rounding: str | None = None,
        nonfinite: str = "keep",
    ) -> None:
        if warmup_steps < 0:
            raise ValueError(f"warmup_steps is 0 or more, not {warmup_steps}")
        if not 0 <= momentum < 1:
            raise ValueError(f"momentum is from 0 to below 1, not {momentum:g}")
        if momentum and not error_feedback:
            raise ValueError("momentum needs error_feedback: it is of gradients that wait for later steps")
        if density is not None and not 0 < density <= 1:
            raise ValueError(f"density is above 0 and at most 1, not {density:g}")
        if block is not None and not (16 <= block <= 4096 and block & (block - 1) == 0):
            raise ValueError(f"block is a power of two from 16 to 4096, not {block}")
        if rounding not in (None, "nearest", "stochastic"):
            raise ValueError(f"rounding is 'nearest' or 'stochastic', not {rounding!r}")
        if nonfinite not in ("keep", "raise"):
            raise ValueError(f"nonfinite is 'keep' or 'raise', not {nonfinite!r}")
        self.group = group
        self.error_feedback = error_feedback
        self.warmup_steps = warmup_steps
        self.momentum = momentum
        self.density = density
        self.block = block
        self.rounding = rounding
        self.nonfinite = nonfinite
        self._parameters = None if parameters is None else list(parameters)
        self._codecs: dict[str, str] = {}
        self._step = 0
        self._residuals = _PerParameter()
        self._velocities = _PerParameter()
        self._bucket_of: dict[torch.Tensor, int] = {}

    @property
    def step(self) -> int:
        """How many steps the hook has seen; warm-up counts."""
        return self._step

    def residuals(self) -> dict[torch.Tensor, torch.Tensor]:
        """What this rank owes, by parameter: 1-D float32 views, in the order of the gradient's memory."""
        return dict(self._residuals.pieces)

    # ---- a step ----

    def average(self, bucket: Any, name: str) -> torch.futures.Future[torch.Tensor]:
        """Average a bucket's gradient over the ranks by the codec of that name; what the hooks call.

        Args:
            bucket: a ``dist.GradBucket``: a flat gradient of float16, bfloat16, float32 or float64, on any device; a
                sparse one is averaged exactly.
            name: a codec without parameters: "topk-int8".
        """
        codec = self._codec(name)
        compresses = self._step >= self.warmup_steps
        if bucket.is_last():
            self._step += 1
        gradient = bucket.buffer()
        if gradient.is_sparse:
            return _average_sparse(gradient, self.group)
        parameters = bucket.parameters()
        self._bucket_of.update(dict.fromkeys(parameters, bucket.index()))
        residual = self._residuals.flat(parameters) if compresses and self.error_feedback else None
        if not compresses:
            codec = "none"  # also where the group's own option is a codec

        velocity = before = None
        if self.momentum:
            velocity = self._velocities.flat(parameters)
            velocity.mul_(self.momentum).add_(gradient.to("cpu"))
            gradient.copy_(velocity)
            if residual is not None and iroh_backend(self.group).compresses(gradient, codec):
                before = gradient.to("cpu", torch.float32) + residual  # what is to be sent, as its sender adds it up
        work: Any = all_reduce_compressed(gradient, codec, residual=residual, group=self.group)

        def finish(done: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
            averaged = done.value()[0]
            if velocity is not None:  # what is not finite was seen, and would come again in every later step
                torch.nan_to_num_(velocity, 0.0, 0.0, 0.0)
            if before is not None and velocity is not None:
                velocity.masked_fill_((before != residual) & (averaged.to("cpu") != 0), 0.0)
            return averaged

        averaged: torch.futures.Future[torch.Tensor] = work.get_future().then(finish)
        return averaged

    def _codec(self, name: str) -> str:
        known = self._codecs.get(name)
        if known is not None:
            return known
        given = {"density": self.density, "block": self.block, "rounding": self.rounding}
        for option, codecs in _TAKEN_BY.items():
            value = given.get(option, self.momentum or None)
            if value is not None and name not in codecs:
                raise ValueError(
                    f"State({option}={value!r}): {name} has no use for it. It is for: {', '.join(sorted(codecs))}"
                )
        parts = [f"{option}={value}" for option, value in given.items() if value is not None]
        if self.nonfinite != "keep":
            parts.append(f"nonfinite={self.nonfinite}")
        return self._codecs.setdefault(name, name + (":" + ",".join(parts) if parts else ""))

    # ---- checkpoints ----

    def state_dict(self) -> dict[str, Any]:
        """This rank's step, residuals and momentum: tensors, numbers and strings, that weights_only=True loads.

        Raises:
            ValueError: the state was made without ``parameters``, or a bucket holds one that is not among them.
        """
        parameters = self._known_parameters()
        position = {parameter: place for place, parameter in enumerate(parameters)}
        for parameter, bucket in self._bucket_of.items():
            if parameter not in position:
                raise ValueError(
                    f"bucket {bucket} holds a parameter of shape {list(parameter.shape)} that is not among the "
                    f"{len(parameters)} which State(parameters=) was given"
                )
        return {
            "version": _VERSION,
            "step": self._step,
            "rank": dist.get_rank(self.group),
            "world": dist.get_world_size(self.group),
            "shapes": [list(parameter.shape) for parameter in parameters],
            "buckets": {position[one]: bucket for one, bucket in self._bucket_of.items()},
            "residuals": {position[one]: piece.clone() for one, piece in self._residuals.pieces.items()},
            "velocities": {position[one]: piece.clone() for one, piece in self._velocities.pieces.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what :meth:`state_dict` or :meth:`merge` gave for this rank.

        Raises:
            ValueError: it is of another model (the text names bucket, position and shapes), of another rank or number
                of ranks, or has residuals or momentum that this state's options have no use for; or the state was made
                without ``parameters``. The state is then as before.
        """
        parameters = self._known_parameters()
        if state["version"] != _VERSION:
            raise ValueError(f"the saved state has version {state['version']}; this torch_iroh reads {_VERSION}")
        world, rank = dist.get_world_size(self.group), dist.get_rank(self.group)
        if state["world"] != world:
            raise ValueError(
                f"the saved state is one of {state['world']} ranks, here are {world}. "
                f"Try: torch_iroh.hooks.State.merge(states, {world})"
            )
        if state["rank"] != rank:
            raise ValueError(f"the saved state is what rank {state['rank']} owes; this is rank {rank}")
        self._check_shapes(state, parameters)
        for kind, wanted, option in (
            ("residuals", self.error_feedback, "error_feedback"),
            ("velocities", self.momentum, "momentum"),
        ):
            if state[kind] and not wanted:
                raise ValueError(f"the saved state has {kind}, this one was made without {option}")
        self._step = state["step"]
        self._bucket_of = {}
        self._residuals.replace({parameters[place]: piece for place, piece in state["residuals"].items()})
        self._velocities.replace({parameters[place]: piece for place, piece in state["velocities"].items()})

    @staticmethod
    def merge(states: Sequence[Mapping[str, Any]], world: int) -> list[dict[str, Any]]:
        """States for ``world`` ranks from those of all ranks of a saved run, which may have been more or fewer.

        Rank i's goes to rank i modulo ``world``, so ranks that go leave theirs to one that stays and new ones owe
        nothing. A hook averages, so what a rank owes is its residual divided by the number of ranks: that sum over
        ranks stays. Residuals and momentum are therefore multiplied by new over old number.

        Args:
            states: what :meth:`State.state_dict` gave on each rank, in any order.
            world: the new number of ranks.

        Raises:
            ValueError: not one state of each rank, or of different steps or models.
        """
        if world < 1:
            raise ValueError(f"world is 1 or more, not {world}")
        ordered = sorted(states, key=lambda state: int(state["rank"]))
        if not ordered or [state["rank"] for state in ordered] != list(range(ordered[0]["world"])):
            expected = f"{ordered[0]['world']} ranks" if ordered else "a run"
            found = [state["rank"] for state in ordered]
            raise ValueError(f"merge takes one state of each rank of {expected}, found ranks {found}")
        first = ordered[0]
        for state in ordered:
            for key in ("version", "step", "world", "shapes"):
                if state[key] != first[key]:
                    raise ValueError(f"rank {state['rank']}'s state has {key} {state[key]}, rank 0's has {first[key]}")
        if world == len(ordered):
            return [dict(state) for state in ordered]
        merged = []
        for rank in range(world):
            new: dict[str, Any] = {**first, "rank": rank, "world": world, "residuals": {}, "velocities": {}}
            for kind in ("residuals", "velocities"):
                for state in ordered[rank::world]:
                    for place, piece in state[kind].items():
                        share = piece.double() * (world / len(ordered))
                        new[kind][place] = new[kind].get(place, 0.0) + share
                new[kind] = {place: piece.float() for place, piece in new[kind].items()}
            merged.append(new)
        return merged

    def _known_parameters(self) -> list[torch.Tensor]:
        if self._parameters is None:
            raise ValueError("a state is saved by the order of parameters. Try: State(parameters=model.parameters())")
        return self._parameters

    @staticmethod
    def _check_shapes(state: Mapping[str, Any], parameters: Sequence[torch.Tensor]) -> None:
        shapes = state["shapes"]
        for place in sorted({*state["residuals"], *state["velocities"], *range(len(shapes))}):
            expected = list(parameters[place].shape) if place < len(parameters) else None
            found = list(shapes[place])
            if expected != found:
                bucket = state["buckets"].get(place)
                raise ValueError(
                    f"the saved state is of another model: bucket {'(none)' if bucket is None else bucket}, "
                    f"parameter {place}: expected shape {'none' if expected is None else expected}, found {found}"
                )
        if len(shapes) < len(parameters):
            raise ValueError(
                f"the saved state is of another model: it has {len(shapes)} parameters, here are {len(parameters)}; "
                f"parameter {len(shapes)}: expected shape {list(parameters[len(shapes)].shape)}, found none"
            )


def _average_sparse(gradient: torch.Tensor, group: dist.ProcessGroup | None) -> torch.futures.Future[torch.Tensor]:
    work: Any = dist.all_reduce(gradient.div_(dist.get_world_size(group)), group=group, async_op=True)
    averaged: torch.futures.Future[torch.Tensor] = work.get_future().then(lambda done: done.value()[0])
    return averaged
