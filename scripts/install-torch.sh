#!/bin/sh
# Puts a torch into a virtual environment that has none, preferring the CPU build: the CUDA one is several GB.
#   install-torch.sh VENV_PYTHON [PIP_ARGUMENTS]     with arguments (`torch==2.14.0`): exactly these, whatever is there
set -eu
python=$1
version=2.13.0
cpu_index=${TORCH_CPU_INDEX:-https://download.pytorch.org/whl/cpu}

if [ -n "${2:-}" ]; then
  exec "$python" -m pip install $2
fi
if "$python" -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("torch") is None)'; then
  exit 0
fi
# macOS has one build, under the plain version. On Linux the plain version is the CUDA build, and +cpu lies in PyTorch's
# own index, unless pip is configured with a place (find-links, a mirror) that has it: that one is asked first, and its
# "no" takes a second.
if [ "$(uname -s)" = Linux ]; then
  "$python" -m pip install "torch==$version+cpu" 2>/dev/null && exit 0
  "$python" -m pip install "torch==$version+cpu" --extra-index-url "$cpu_index" --retries 1 --timeout 20 && exit 0
  echo "install-torch: no CPU build of torch $version to be had; taking the default one, which may be several GB" >&2
fi
exec "$python" -m pip install "torch==$version"
