"""The package as installed: names, version, entry points, and that importing it costs nothing."""

from __future__ import annotations

import importlib
import importlib.metadata
import subprocess
import sys
from pathlib import Path

import pytest

import torch_iroh


def test_all_is_sorted_and_every_name_in_it_exists():
    assert torch_iroh.__all__ == sorted(torch_iroh.__all__)
    for name in torch_iroh.__all__:
        assert getattr(torch_iroh, name) is not None, name
    assert set(torch_iroh.__all__) <= set(dir(torch_iroh))


def test_all_names_every_public_name():
    public = {name for name in torch_iroh._HOMES if not name.startswith("_")} | {"Options"} | torch_iroh._MODULES
    assert public == set(torch_iroh.__all__)


def test_unknown_name_is_an_attribute_error_naming_it():
    with pytest.raises(AttributeError, match="module 'torch_iroh' has no attribute 'Option'"):
        _ = torch_iroh.Option


def test_version_is_that_of_the_installed_distribution():
    assert torch_iroh.__version__ == importlib.metadata.version("torch-iroh")


@pytest.mark.parametrize("group", ["torch.backends", "torch.distributed.backends"])
def test_entry_point_leads_to_the_registration(group):
    (point,) = importlib.metadata.entry_points(group=group, name="iroh")
    assert point.value == "torch_iroh:_autoload"
    assert point.load() is torch_iroh._autoload


@pytest.mark.parametrize("name", ["torch_iroh.adapters", "torch_iroh.launch"])
def test_folder_outside_the_package_is_importable_inside_it(name):
    module = importlib.import_module(name)
    assert module.__name__ == name
    assert module.__doc__


def test_every_public_thing_has_a_docstring():
    for name in torch_iroh.__all__:
        thing = getattr(torch_iroh, name)
        assert thing.__doc__, name
        for member in vars(thing) if isinstance(thing, type) else ():
            if not member.startswith("_") and callable(getattr(thing, member)):
                assert getattr(thing, member).__doc__, f"{name}.{member}"


def test_types_are_declared():
    assert (Path(torch_iroh.__file__).parent / "py.typed").is_file()


def test_import_loads_neither_torch_nor_numpy_nor_native_code():
    code = (
        "import sys, torch_iroh; "
        "print([n for n in ('torch', 'numpy', 'iroh', 'torch_iroh._C', 'torch_iroh._core') if n in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
