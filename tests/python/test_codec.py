"""`torch_iroh.codec`: what each codec may change about a tensor, how many bytes it takes, and what it refuses."""

from __future__ import annotations

import math

import hypothesis.extra.numpy as arrays
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torch_iroh import codec
from torch_iroh._native import core_module

HEADER = 32
LEAST_SCALE = 2.0**-126
MANY = settings(max_examples=150, deadline=None, derandomize=True)

FINITE = st.floats(width=32, allow_nan=False, allow_infinity=False)
GENTLE = st.floats(-(2.0**100), 2.0**100, width=32)


def tensors(elements: st.SearchStrategy[float]) -> st.SearchStrategy[torch.Tensor]:
    found = arrays.arrays(np.float32, st.integers(0, 300), elements=elements)
    return found.map(lambda values: torch.from_numpy(values.copy()))


def round_trip(tensor: torch.Tensor, spec: str, seed: int = 0) -> torch.Tensor:
    return codec.decode(codec.encode(tensor, spec, seed), spec, tensor.numel())


def blocks(tensor: torch.Tensor, size: int) -> list[torch.Tensor]:
    return list(tensor.split(size)) if tensor.numel() else []


def bfloat_up(scale: float) -> float:
    near = torch.tensor(scale, dtype=torch.float32)
    stored = near.to(torch.bfloat16)
    if stored.float() < near:
        stored = (stored.view(torch.int16) + 1).view(torch.bfloat16)
    return float(stored)


def scale_of(block: torch.Tensor, steps: int, wide: bool = False) -> float:
    low, high = min(0.0, float(block.min())), max(0.0, float(block.max()))
    scale = (high - low) / steps
    return max(scale * (1 + 1e-6) if wide else bfloat_up(scale), LEAST_SCALE)


def normal(count: int = 1 << 20) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(1))


# ---- error bounds ----


@pytest.mark.parametrize(("name", "steps"), [("int8", 255), ("int4", 15)])
@pytest.mark.parametrize("block", [16, 128])
@pytest.mark.parametrize("scale", ["bf16", "fp32"])
@MANY
@given(data=st.data())
def test_integers_move_no_value_by_more_than_half_a_scale(name, steps, block, scale, data):
    tensor = data.draw(tensors(GENTLE))
    found = round_trip(tensor, f"{name}:block={block},scale={scale}")
    for before, after in zip(blocks(tensor, block), blocks(found, block), strict=True):
        half = scale_of(before, steps, scale == "fp32") / 2
        assert (before.double() - after.double()).abs().max() <= half * (1 + 1e-4)
        assert (after[before == 0] == 0).all()


@pytest.mark.parametrize(("name", "steps"), [("int8", 254), ("int4", 14)])
@MANY
@given(tensor=tensors(GENTLE), seed=st.integers(0, 2**64 - 1))
def test_stochastic_rounding_moves_no_value_by_more_than_a_scale(name, steps, tensor, seed):
    found = round_trip(tensor, f"{name}:rounding=stochastic", seed)
    for before, after in zip(blocks(tensor, 128), blocks(found, 128), strict=True):
        assert (before.double() - after.double()).abs().max() <= scale_of(before, steps) * (1 + 1e-4)
        assert (after[before == 0] == 0).all()


@pytest.mark.parametrize("name", ["int8:block=64", "int4", "topk-int4:density=1"])
def test_stochastic_rounding_has_no_bias(name):
    tensor, rounds = normal(512), 4000
    spec = f"{name}{',' if ':' in name else ':'}rounding=stochastic"
    total, squares = torch.zeros(512, dtype=torch.float64), torch.zeros(512, dtype=torch.float64)
    for seed in range(rounds):
        error = round_trip(tensor, spec, seed).double() - tensor.double()
        total += error
        squares += error**2
    mean = total / rounds
    deviation = ((squares / rounds - mean**2).clamp(min=0) / rounds).sqrt()
    moved = deviation > 0
    standard = mean[moved] / deviation[moved]
    assert moved.sum() > 400
    assert standard.abs().max() < 5
    assert standard.square().mean() == pytest.approx(1, abs=0.25)  # errors of one seed and the next are independent
    assert abs(float(standard.mean())) < 5 / math.sqrt(int(moved.sum()))


@MANY
@given(tensor=tensors(st.floats(width=32)))
def test_bf16_is_torchs_cast(tensor):
    assert torch.equal(round_trip(tensor, "bf16").nan_to_num(7.0), tensor.bfloat16().float().nan_to_num(7.0))


@pytest.mark.parametrize(
    ("spec", "dtype"), [("fp8", torch.float8_e4m3fn), ("fp8-e5m2", torch.float8_e5m2)], ids=["e4m3", "e5m2"]
)
@MANY
@given(data=st.data())
def test_fp8_is_torchs_cast_of_value_over_scale(spec, dtype, data):
    tensor = data.draw(tensors(st.floats(width=32) if data.draw(st.booleans()) else st.floats(-4, 4, width=32)))
    tensor[tensor.abs() > 1.75 * 2.0**127] = 1.0 if data.draw(st.booleans()) else math.nan
    frame = codec.encode(tensor, spec)
    found, body = codec.decode(frame, spec, tensor.numel()), frame[HEADER:]
    for at in range(0, tensor.numel(), 128):
        block = tensor[at : at + 128]
        scale = torch.frombuffer(bytearray(body[:2]), dtype=torch.bfloat16).float()
        codes = torch.frombuffer(bytearray(body[2 : 2 + block.numel()]), dtype=dtype).float()
        body = body[2 + block.numel() :]
        assert float(torch.frexp(scale)[0]) == 0.5  # a power of two
        wanted = (block / scale).to(dtype).float()
        assert torch.equal(codes.nan_to_num(7.0, 1e9, -1e9), wanted.nan_to_num(7.0, 1e9, -1e9))
        assert torch.equal(found[at : at + 128].nan_to_num(7.0), (wanted * scale).nan_to_num(7.0))
    assert body == b""


@MANY
@given(tensor=tensors(GENTLE))
def test_sign_keeps_each_sign_and_the_mean_magnitude(tensor):
    found = round_trip(tensor, "sign:block=32")
    for before, after in zip(blocks(tensor, 32), blocks(found, 32), strict=True):
        assert torch.equal(torch.signbit(before), torch.signbit(after))
        mean = float(before.double().abs().mean())
        assert mean * (1 - 1e-5) - LEAST_SCALE <= float(after[0].abs()) <= mean * (1 + 2**-7) + LEAST_SCALE


# ---- sparse ----


@MANY
@given(tensor=tensors(FINITE), density=st.floats(1e-3, 1))
def test_topk_keeps_exactly_the_largest(tensor, density):
    count = tensor.numel()
    found = round_trip(tensor, f"topk:density={density!r}")
    kept = min(count, max(1, math.ceil(density * count))) if count else 0
    order = sorted(range(count), key=lambda i: (-abs(float(tensor[i])), i))[:kept]
    wanted = torch.zeros(count)
    wanted[order] = tensor[order]
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("density", [0.0003, 0.01, 0.2])
def test_topk_of_many_values_agrees_with_torch(density):
    tensor = normal()
    kept = math.ceil(density * tensor.numel())
    least = tensor.abs().topk(kept).values[-1]
    found = round_trip(tensor, f"topk:density={density}")
    assert int((found != 0).sum()) == kept
    assert torch.equal(found, torch.where(tensor.abs() >= least, tensor, 0.0))
    rounded = round_trip(tensor, f"topk-int8:density={density}")
    assert not rounded[found == 0].any()


# ---- NaN and infinity ----


@pytest.mark.parametrize("spec", [name for name in codec.names() if name not in ("fp8", "sign")])
def test_nan_and_infinity_come_out_as_themselves(spec):
    tensor = normal(1000)
    tensor[5], tensor[500], tensor[501] = math.nan, math.inf, -math.inf
    found = round_trip(tensor, spec)
    assert found[5].isnan() and found[500] == math.inf and found[501] == -math.inf


def test_nonfinite_raise_names_the_first():
    with pytest.raises(ValueError, match="2 of 9 values are not finite, from index 3 on"):
        codec.encode(torch.tensor([0, 1, 2, math.nan, 4, 5, 6, 7, -math.inf]), "int8:nonfinite=raise")


# ---- bytes ----


@pytest.mark.parametrize(
    ("spec", "ratio", "error"),
    [
        ("bf16", 1.999, 0.0017),
        ("fp8", 3.9, 0.027),
        ("int8", 3.9, 0.0062),
        ("int4", 7.5, 0.103),
        ("sign", 28, 0.61),
        ("topk", 74, 0.958),
        ("topk-int8", 170, 0.958),
        ("topk-int4", 225, 0.958),
    ],
)
def test_a_million_normal_values_take_no_more_bytes_and_lose_no_more_than_said(spec, ratio, error):
    tensor = normal()
    frame = codec.encode(tensor, spec)
    found = codec.decode(frame, spec, tensor.numel())
    assert len(frame) == codec.frame_bytes(spec, tensor.numel())
    assert 4 * tensor.numel() / len(frame) >= ratio
    assert float((found - tensor).norm() / tensor.norm()) <= error


@pytest.mark.parametrize("spec", [*codec.names(), "int8:rounding=stochastic"])
def test_equal_seeds_give_equal_frames_whatever_the_tensors_form(spec):
    tensor = normal(1000).reshape(10, 100)
    frame = codec.encode(tensor, spec, 7)
    assert codec.encode(tensor.flatten(), spec, 7) == frame
    assert codec.encode(tensor.t().contiguous().t(), spec, 7) == frame
    assert codec.encode(tensor.double().requires_grad_(), spec, 7) == frame
    assert (codec.encode(tensor, spec, 8) == frame) == ("stochastic" not in spec)


# ---- refusals ----


def test_unknown_codecs_and_parameters_are_value_errors():
    for spec, said in {
        "int9": "unknown codec 'int9'; known: none, bf16",
        "int8:block=3": "int8: block is a power of two from 16 to 4096, not '3'",
        "bf16:block=64": "bf16 has no parameter 'block'",
    }.items():
        for call in (
            lambda spec=spec: codec.frame_bytes(spec, 3),
            lambda spec=spec: codec.encode(torch.zeros(3), spec),
            lambda spec=spec: codec.decode(b"", spec, 3),
        ):
            with pytest.raises(ValueError, match=said):
                call()
    with pytest.raises(ValueError, match=r"torch\.int64 is not floating"):
        codec.encode(torch.zeros(3, dtype=torch.int64), "int8")


def test_a_frame_that_is_another_or_was_changed_is_refused():
    frame = codec.encode(normal(100), "int8:block=64")
    with pytest.raises(
        RuntimeError, match=r"a frame of int8 \(block 64\) for 100 values, expected int4 \(block 128\) for 100"
    ):
        codec.decode(frame, "int4", 100)
    with pytest.raises(RuntimeError, match="expected int8"):
        codec.decode(frame, "int8:block=64", 1 << 47)
    changed = bytearray(frame)
    changed[60] ^= 1
    with pytest.raises(RuntimeError, match="its checksum is wrong: it was changed on its way"):
        codec.decode(bytes(changed), "int8:block=64", 100)


def test_the_core_takes_contiguous_float32_only():
    core = core_module()
    with pytest.raises(ValueError, match="contiguous"):
        core.codec_encode("int8", np.zeros((4, 4), np.float32).T)
    with pytest.raises(ValueError, match="must be float32"):
        core.codec_encode("int8", np.zeros(4))
    assert core.codec_text("int8:block=128") == "int8"
