#!/bin/sh
# Are the system's own packages there? Says in one line what is missing and how to get it; with CI=true it installs it.
#   check-system.sh PYTHON build    what compiling and running torch-iroh needs
#   check-system.sh PYTHON test     and what its tests need
# Every check tries the thing itself, not a package's name, so a compiler or a Python from elsewhere is as good.
set -eu
python=$1
purpose=$2
cxx=${CXX:-c++}

usable_python() { "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; }
python_makes_venvs() { "$python" -c 'import ensurepip, venv' 2>/dev/null; }
python_has_headers() {
  "$python" -c 'import os, sysconfig as s; open(os.path.join(s.get_path("include"), "Python.h"))' 2>/dev/null
}
compiles() { printf '%s\n' "$1" | $cxx -std=c++20 -fsyntax-only -x c++ $2 - 2>/dev/null; }
homebrew() { if [ -d /opt/homebrew/include ]; then echo -isystem /opt/homebrew/include; fi; }

missing() {  # one Debian package name per thing that is not there
  usable_python || echo python3
  python_makes_venvs || echo python3-venv
  python_has_headers || echo python3-dev
  compiles '#include <span>' '' || echo g++
  [ "$purpose" = test ] || return 0
  compiles '#include <doctest/doctest.h>' "$(homebrew)" || echo doctest-dev
  # The laboratory's tests; without Linux and root they are skipped.
  [ "$(uname -s)" = Linux ] && [ "$(id -u)" = 0 ] || return 0
  ip -Version >/dev/null 2>&1 || echo iproute2
  nft --version >/dev/null 2>&1 || echo nftables
}

as_root() { if [ "$(id -u)" = 0 ]; then "$@"; else sudo -n "$@"; fi; }

wanted=$(echo $(missing))
if [ -n "$wanted" ] && [ "${CI:-}" = true ] && command -v apt-get >/dev/null; then
  echo "check-system: installing $wanted"
  as_root apt-get update -q
  as_root env DEBIAN_FRONTEND=noninteractive apt-get install -q -y --no-install-recommends $wanted
  wanted=$(echo $(missing))
fi
[ -z "$wanted" ] && exit 0

if command -v apt-get >/dev/null; then
  remedy="sudo apt-get install -y $wanted"
elif [ "$(uname -s)" = Darwin ]; then
  remedy="xcode-select --install; brew install python doctest"
else
  remedy="install what your distribution calls: $wanted"
fi
echo "check-system: missing for PYTHON=$python, CXX=$cxx (needs Python >= 3.10 and C++20): $wanted. Try: $remedy" >&2
exit 1
