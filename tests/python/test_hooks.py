"""Compressing DDP hooks: ranks stay equal, what is owed is repaid and saved, options do what they say."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from families import join
from hooked import HOOKS, MANY_BUCKETS, SPARSE, digest, make_model, sgd, step_of, wrapped
from hosts import LAYOUTS, obstacle, on_hosts
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import torch_iroh
from torch_iroh import hooks

# ---- equal bits ----


def train_by_each(
    rank: int, world: int, store: str, dtype: str, options: dict[str, Any], ddp: dict[str, Any], steps: int = 4
) -> list[str]:
    join(rank, world, store)
    digests = []
    for hook in HOOKS:
        model = make_model().to(getattr(torch, dtype))
        before = digest(model)
        momentum = {"momentum": 0.9} if options.get("momentum") and hook in SPARSE else {}
        distributed, state = wrapped(model, hook, {**options, "momentum": 0.0, **momentum}, **ddp)
        for number in range(steps):
            step_of(distributed, sgd(model), rank, number)
        assert state.step == steps
        assert digest(model) != before
        digests.append(digest(model))
    dist.destroy_process_group()
    return digests


def settle(results: list[list[str]]) -> None:
    assert all(one == results[0] for one in results), "ranks differ"
    assert len(set(results[0])) == len(HOOKS), "two codecs gave the same"


@pytest.mark.parametrize(
    ("world", "dtype", "options", "ddp"),
    [
        (2, "float32", {}, {}),
        (3, "float32", {"momentum": True, "warmup_steps": 1}, {}),
        (3, "bfloat16", {}, {"gradient_as_bucket_view": True}),
        (2, "float16", {"error_feedback": False}, {"static_graph": True}),
        (2, "float64", {"nonfinite": "raise"}, {"find_unused_parameters": True}),
    ],
)
def test_parameters_stay_equal_on_all_ranks(run, store, world, dtype, options, ddp):
    settle(run(world, train_by_each, world, store, dtype, options, ddp))


def test_parameters_are_equal_after_200_steps(run, store):
    settle(run(3, train_by_each, 3, store, "float32", {}, {}, 200))


needs_hosts = pytest.mark.skipif(bool(obstacle()), reason=obstacle())
# The ranks of a host are a site; measured links would make one of all hosts, which here are one machine.
SHARING = {"TORCH_IROH_SHARED_MEMORY": "auto", "TORCH_IROH_PROBE": "off"}


@needs_hosts
@pytest.mark.parametrize("layout", ["2x2", "2x2 interleaved", "2+1"])
def test_parameters_stay_equal_where_ranks_share_a_host(store, layout):
    with on_hosts(LAYOUTS[layout], SHARING) as ranks:
        settle(ranks.run(train_by_each, ranks.world, store, "float32", {"momentum": True}, {}))


def train_two_models(rank: int, world: int, store: str) -> list[str]:
    join(rank, world, store)
    models = [make_model(), make_model()]
    every = []
    for model, hook in zip(models, ("int8", "topk"), strict=True):
        every.append((wrapped(model, hook, {"group": dist.new_group(backend="iroh")})[0], sgd(model)))
    for number in range(3):
        for distributed, optimizer in every:
            step_of(distributed, optimizer, rank, number)
    dist.destroy_process_group()
    return [digest(model) for model in models]


def test_models_with_a_group_each_go_their_own_ways(run, store):
    first, second = run(2, train_two_models, 2, store)
    assert first == second
    assert first[0] != first[1]


# ---- what is owed ----


class Constant(torch.nn.Module):
    """Parameters whose gradients are constants of rank and parameter, arriving in another order than theirs."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.values = torch.nn.ParameterList([torch.zeros(300 + 50 * place) for place in range(6)])
        generator = torch.Generator().manual_seed(rank)
        self.constants = [torch.randn(value.numel(), generator=generator) ** 3 for value in self.values]

    def forward(self, times: float) -> torch.Tensor:
        total = torch.zeros(())
        for place in (3, 0, 5, 1, 4, 2):
            total = total + times * (self.values[place] * self.constants[place]).sum()
        return total


def owe(rank: int, world: int, store: str, hook: str, steps: int, options: dict[str, Any], quiet: int = 0) -> Any:
    """What was applied, what this rank still owes, its gradient, and DDP's buckets over the steps. The last `quiet`
    steps have no gradient.
    """
    join(rank, world, store)
    model = Constant(rank)
    seen: list[list[tuple[int, ...]]] = []

    def watched(state, bucket):  # DDP compares annotations with types, not with texts
        if bucket.index() == 0:
            seen.append([])
        seen[-1].append(tuple(len(one) for one in bucket.parameters()))
        return getattr(hooks, hook)(state, bucket)

    state = hooks.State(parameters=model.parameters(), **options)
    distributed = DistributedDataParallel(model, bucket_cap_mb=0.003)
    distributed.register_comm_hook(state, watched)
    optimizer = sgd(model, lr=1.0)
    for number in range(steps):
        share = 0.25 if number < steps - quiet else 0.0
        with distributed.no_sync():  # a pass that waits for the next one to send it
            distributed(share).backward()
        distributed(3 * share).backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()
    assert state.step == steps
    owed = state.residuals()
    return (
        [-value.detach() for value in model.values],
        [owed.get(value, torch.zeros(value.numel())) for value in model.values],
        model.constants,
        seen,
    )


def flat(tensors: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensor.double() for tensor in tensors])


@pytest.mark.parametrize(("world", "hook"), [(2, "topk"), (3, "topk_int8"), (2, "int4"), (3, "sign")])
def test_what_was_applied_and_what_is_owed_are_the_gradients_also_when_buckets_are_formed_anew(run, store, world, hook):
    results = run(world, owe, world, store, hook, 5, {})
    nothing_is_lost(results, world, 5)
    buckets = results[0][3]
    assert len(buckets[0]) == 1 and len(buckets[1]) > 2, "DDP did not form its buckets anew: the test is void"


def nothing_is_lost(results: list[Any], world: int, steps: int) -> None:
    wanted = steps * sum(flat(gradients) for _, _, gradients, _ in results)
    applied = world * flat(results[0][0])
    owed = sum(flat(one) for _, one, _, _ in results)
    assert owed.abs().max() > 0.1
    torch.testing.assert_close(applied + owed, wanted, rtol=1e-4, atol=1e-4)


@needs_hosts
@pytest.mark.parametrize(("layout", "hook"), [("2x2", "topk"), ("2x2 interleaved", "int4"), ("2+1", "topk_int8")])
def test_nothing_is_lost_and_all_is_repaid_where_ranks_share_a_host(store, layout, hook):
    """Also what a rank owed for values that another rank of its host sends since the buckets were formed anew."""
    density = {} if hook == "int4" else {"density": 0.1}
    with on_hosts(LAYOUTS[layout], SHARING) as ranks:
        loud = ranks.run(owe, ranks.world, store, hook, 3, density)
        quiet = ranks.run(owe, ranks.world, store + "-quiet", hook, 33, density, 32)
    nothing_is_lost(loud, len(loud), 3)
    owed = sum(flat(owed) for _, owed, _, _ in quiet)
    assert owed.abs().max() < 1e-3, f"{owed.count_nonzero()} of {owed.numel()} values are still owed"


@pytest.mark.parametrize("hook", SPARSE)
def test_error_feedback_repays_what_is_below_the_threshold(run, store, hook):
    steps, options = 60, {"density": 0.05}
    with_feedback = run(2, owe, 2, store, hook, steps, options)
    without = run(2, owe, 2, store + "-without", hook, steps, {**options, "error_feedback": False})
    mean = sum(flat(gradients) for _, _, gradients, _ in with_feedback) / 2
    far = flat(with_feedback[0][0]) / steps - mean
    lost = flat(without[0][0]) / steps - mean
    assert far.norm() < 0.25 * mean.norm(), far.norm() / mean.norm()
    assert lost.norm() > 0.4 * mean.norm(), lost.norm() / mean.norm()


# ---- warm-up ----


def average_exactly(state, bucket):  # DDP compares annotations with types, not with texts
    work: Any = dist.all_reduce(bucket.buffer(), dist.ReduceOp.AVG, group=state, async_op=True)
    return work.get_future().then(lambda done: done.value()[0])


def warm_up(rank: int, world: int, store: str) -> list[str]:
    join(rank, world, store)
    exact = dist.group.WORLD
    compressing = dist.new_group(backend="iroh", pg_options=torch_iroh.Options(compression="int8"))
    digests = []
    for steps in (2, 3):
        model = make_model()
        distributed = DistributedDataParallel(model, bucket_cap_mb=MANY_BUCKETS)
        distributed.register_comm_hook(exact, average_exactly)
        for number in range(steps):
            step_of(distributed, sgd(model), rank, number)
        digests.append(digest(model))
        for hook in ("int4", "topk"):
            model = make_model()
            distributed, _ = wrapped(model, hook, {"warmup_steps": 2, "group": compressing})
            for number in range(steps):
                step_of(distributed, sgd(model), rank, number)
            digests.append(digest(model))
    dist.destroy_process_group()
    return digests


@pytest.mark.parametrize("world", [2, 3])
def test_warm_up_is_exact_and_ends(run, store, world):
    for exact, *warm, exact_after, first_after, second_after in run(world, warm_up, world, store):
        assert warm == [exact, exact]
        assert len({exact_after, first_after, second_after}) == 3


# ---- options ----


@pytest.mark.parametrize(
    "options",
    [
        {"warmup_steps": -1},
        {"momentum": 1.0},
        {"momentum": 0.5, "error_feedback": False},
        {"density": 0.0},
        {"density": 1.5},
        {"block": 100},
        {"block": 8192},
        {"rounding": "up"},
        {"nonfinite": "hide"},
    ],
)
def test_options_out_of_range_are_refused(options):
    with pytest.raises(ValueError, match=next(iter(options)).split("_")[0]):
        hooks.State(**options)


def use_options(rank: int, world: int, store: str, cases: list[tuple[str, dict[str, Any]]]) -> list[str]:
    join(rank, world, store)
    errors = []
    for hook, options in cases:
        model = make_model()
        distributed, _ = wrapped(model, hook, options)
        try:
            step_of(distributed, sgd(model), rank, 0)
            errors.append("")
        except ValueError as error:
            errors.append(str(error))
    dist.destroy_process_group()
    return errors


def test_option_that_a_codec_has_no_use_for_is_refused_when_the_hook_is_called(run, store):
    useless = [("int8", "density", 0.1), ("fp8", "rounding", "nearest"), ("topk", "block", 64)]
    useless += [("sign", "momentum", 0.9), ("bf16_compress", "block", 32), ("topk", "rounding", "stochastic")]
    cases = [(hook, {option: value}) for hook, option, value in useless]
    cases.append(("topk_int4", {"density": 0.1, "block": 64, "rounding": "stochastic", "momentum": 0.5}))
    (errors,) = run(1, use_options, 1, store, cases)
    assert errors.pop() == ""
    for error, (_, option, value) in zip(errors, useless, strict=True):
        assert error.startswith(f"State({option}={value!r})"), error


# ---- beside them ----


def autocast(rank: int, world: int, store: str) -> str:
    join(rank, world, store)
    model = make_model()
    distributed, _ = wrapped(model, "int8", {})
    for number in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            step_of(distributed, sgd(model), rank, number)
    dist.destroy_process_group()
    return digest(model)


def sparse_gradients(rank: int, world: int, store: str) -> tuple[torch.Tensor, torch.Tensor]:
    """An embedding with sparse gradients travels exactly, beside a layer that is compressed."""
    join(rank, world, store)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Embedding(50, 40, sparse=True), torch.nn.Linear(40, 40))
    start = model[0].weight.detach().clone()
    distributed, _ = wrapped(model, "int8", {})
    distributed(torch.tensor([rank, 7])).sum().backward()
    sgd(model, lr=1.0).step()
    moved = start - model[0].weight.detach()
    dist.destroy_process_group()
    return moved, model[1].weight.detach()


def not_a_number(rank: int, world: int, store: str) -> tuple[str, bool]:
    """What a NaN of rank 0 does with nonfinite="raise" (the error) and "keep" (whether it is seen)."""
    join(rank, world, store)
    seen = []
    for nonfinite in ("keep", "raise"):
        model = Constant(rank)
        if rank == 0:
            model.constants[2][5] = float("nan")
        distributed, _ = wrapped(model, "int8", {"nonfinite": nonfinite})
        try:
            distributed(1.0).backward()
            seen.append(str(bool(model.values[2].grad[5].isnan())))  # type: ignore[index]
        except (RuntimeError, ValueError) as error:
            seen.append(str(error))
    return seen[1], seen[0] == "True"


def recover(rank: int, world: int, store: str) -> list[bool]:
    """Whether a step's result is finite, for a step with a NaN and an infinity, and for the one after it."""
    join(rank, world, store)
    seen = []
    for hook, options in (("int8", {}), ("int4", {}), ("topk", {"momentum": 0.9}), ("sign", {}), ("fp8", {})):
        model = Constant(rank)
        good = [one.clone() for one in model.constants]
        model.constants[rank][5] = (float("nan"), float("inf"))[rank]
        distributed, _ = wrapped(model, hook, options)
        for constants in (model.constants, good):
            model.constants = constants
            distributed(1.0).backward()
            seen.append(all(bool(value.grad.isfinite().all()) for value in model.values))
            model.zero_grad()
    dist.destroy_process_group()
    return seen


def power_sgd(rank: int, world: int, store: str) -> str:
    join(rank, world, store)
    model = make_model()
    distributed = DistributedDataParallel(model)  # one bucket
    state = powerSGD_hook.PowerSGDState(dist.group.WORLD, start_powerSGD_iter=2, min_compression_rate=0.5)
    distributed.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    for number in range(5):
        step_of(distributed, sgd(model), rank, number)
    assert 0 < state.total_numel_after_compression < state.total_numel_before_compression
    dist.destroy_process_group()
    return digest(model)


@pytest.mark.parametrize("scenario", [autocast, power_sgd])
def test_ranks_stay_equal_with(run, store, scenario: Callable[..., str]):
    assert len(set(run(3, scenario, 3, store))) == 1


def test_sparse_gradients_are_averaged_exactly(run, store):
    first, second = run(2, sparse_gradients, 2, store)
    assert torch.equal(first[0], second[0]) and torch.equal(first[1], second[1])
    assert first[0][:2].ne(0).all() and first[0][7].ne(0).all() and not first[0][8:].any()
    torch.testing.assert_close(first[0][7], 2 * first[0][0])


def test_what_is_not_finite_is_seen_once(run, store):
    assert run(2, recover, 2, store) == [[False, True] * 5] * 2


def test_nan_is_seen_by_all_or_raised(run, store):
    results = run(2, not_a_number, 2, store)
    assert all(seen for _, seen in results)
    assert "not finite" in results[0][0]
    assert results[1][0]
