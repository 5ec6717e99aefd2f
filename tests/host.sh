#!/usr/bin/env bash
# Make a virtual environment with one SGLang release and this checkout installed in it, or reuse it.
#
#   tests/host.sh 0.5.23                  -> $BCG_DSA_CACHE/host-0.5.23
#   tests/host.sh --source-only 0.5.12    -> $BCG_DSA_CACHE/source-0.5.12, the package's files alone
#
# A half-made environment is never reused: a stamp is written last. The checkout is installed in place
# each time, which takes 2 s, because another checkout may have used the environment before.
set -euo pipefail

source_only=
if [ "${1:-}" = --source-only ]; then source_only=1; shift; fi
release=${1:?usage: tests/host.sh [--source-only] RELEASE}
cache=${BCG_DSA_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/sglang-bcg-dsa}
python=${PYTHON:-python3}
root=$(cd "$(dirname "$0")/.." && pwd)
pip="pip --disable-pip-version-check"
extras="pytest>=8 hypothesis>=6.100 mypy>=1.11 ruff>=0.6 build>=1.2 matplotlib>=3.8"

fail() { echo "tests/host.sh: $*" >&2; exit 1; }

"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null ||
    fail "'$python' is not Python 3.11 or later; set PYTHON=/path/to/python3.11"
mkdir -p "$cache" 2>/dev/null || fail "cannot create $cache; set BCG_DSA_CACHE to a folder that can be written"
[ -w "$cache" ] || fail "$cache cannot be written; set BCG_DSA_CACHE to another folder"

need_space() {  # GB
    free=$(df -Pk "$cache" | awk 'NR == 2 {print int($4 / 1048576)}')
    [ "$free" -ge "$1" ] || fail "$cache has $free GB free, SGLang $release needs $1 GB; set BCG_DSA_CACHE to a larger disk"
}

if [ -n "$source_only" ]; then
    target=$cache/source-$release
    [ -e "$target/.complete" ] && exit 0
    need_space 1
    echo "Fetching the files of SGLang $release (a few seconds)"
    rm -rf "$target"
    $python -m $pip install -q --no-deps --target "$target" "sglang==$release" ||
        fail "SGLang $release could not be fetched; see pip's message above"
    touch "$target/.complete"
    exit 0
fi

target=$cache/host-$release
if [ ! -e "$target/.complete" ]; then
    need_space 13
    echo "Installing SGLang $release into $target (11 GB, about 4 minutes)"
    rm -rf "$target"
    "$python" -m venv "$target" || fail "no virtual environment could be made; install Python's venv module"
    # shellcheck disable=SC2086
    "$target/bin/python" -m $pip install -q "sglang==$release" $extras ||
        fail "SGLang $release could not be installed; see pip's message above"
    touch "$target/.complete"
fi
"$target/bin/python" -m $pip install -q --no-deps --no-build-isolation -e "$root" 2>/dev/null ||
    "$target/bin/python" -m $pip install -q -e "$root" ||
    fail "this checkout could not be installed into $target; see pip's message above"
"$target/bin/python" -c 'import pluggy, msgspec, rich, prometheus_client, matplotlib' 2>/dev/null ||
    "$target/bin/python" -m $pip install -q -e "$root[plots]" || fail "this package's requirements could not be installed"
