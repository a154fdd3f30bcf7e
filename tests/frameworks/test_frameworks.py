"""Real frameworks on tiny local models: one program on gloo, and on iroh by `torch-iroh run` or by a named backend.

Two processes over real iroh on loopback. Losses and parameters equal gloo's, every group is iroh's, no group of gloo
was made. What a user writes for each framework is in docs/frameworks.md.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import pytest
import torch

TORCHRUN, OURS = "torch.distributed.run", "torch_iroh.run"


@dataclass(frozen=True)
class Framework:
    """One framework: what pip installs, how its own option can name iroh, how close to gloo it comes."""

    name: str
    requirements: tuple[str, ...]
    takes_name: bool = False  # the program is also run under torchrun with backend "iroh"
    opens_gloo: bool = False  # ... and the framework then still opens groups of gloo by itself


HUGGING_FACE = ("accelerate~=1.15.0", "transformers~=5.24.0", "peft~=0.21.2", "trl~=1.16.0")
FRAMEWORKS = [
    Framework("accelerate", HUGGING_FACE, takes_name=True),
    Framework("trainer", HUGGING_FACE),
    Framework("trl", HUGGING_FACE),
    Framework("lightning", ("lightning~=2.6.6",), takes_name=True, opens_gloo=True),
    Framework("ignite", ("pytorch-ignite~=0.5.5",)),
    Framework("deepspeed", ("deepspeed~=0.19.8",)),
]


@pytest.mark.timeout(1500)  # pip may have to install first
@pytest.mark.parametrize("framework", FRAMEWORKS, ids=lambda framework: framework.name)
def test_training_over_iroh_equals_training_over_gloo(environment, launch, framework):
    python = environment(*framework.requirements)
    program = f"with_{framework.name}.py"
    expected, _ = launch(python, program, TORCHRUN)
    assert all(one["backend"] == "gloo" and one["gloo_groups"] for one in expected)
    same(expected[0], expected[1])  # it is data-parallel training, also on gloo

    mapped, log = launch(python, program, OURS)
    for one, reference in zip(mapped, expected, strict=True):
        assert one["backend"] == "iroh"
        assert one["gloo_groups"] == []
        carried(one)
        same(one, reference)
    lines = re.findall("torch-iroh run: .*", log)
    assert lines
    assert len(lines) == len(set(lines))

    if framework.takes_name:
        named, _ = launch(python, program, TORCHRUN, "iroh")
        for one, reference in zip(named, expected, strict=True):
            assert one["backend"] == "iroh"
            assert bool(one["gloo_groups"]) == framework.opens_gloo
            carried(one)
            same(one, reference)


def carried(answers: dict) -> None:
    """Gradients went over the default group: its bytes are more than one exchange of the parameters."""
    assert answers["processes"] == 2
    assert answers["bytes_sent"] > sum(one.numel() * one.element_size() for one in answers["parameters"])


def same(answers: dict, reference: dict) -> None:
    torch.testing.assert_close(answers["losses"], reference["losses"], rtol=0, atol=1e-6)
    torch.testing.assert_close(answers["parameters"], reference["parameters"], rtol=0, atol=1e-6)
