#!/usr/bin/env bash
# wheel.sh [PYTHON [SETTING...]]: builds a wheel for this interpreter (abi3 from 3.12 on) and the sdist, into build/wheels. PYTHON, by
# default that of build/venv, has to have what tools/wheel-requirements.txt lists; settings are those of the build, as `-C key=value`. auditwheel copies libhwy into the wheel and tags it with the
# oldest glibc it runs on.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${1:-build/venv/bin/python}
settings=("${@:2}")
mkdir -p build/wheels
plain=$(mktemp -d build/wheel.XXXXXX)
trap 'rm -rf "$plain"' EXIT

# whet.jax is for every JAX from 0.6 on, so it is built with the headers of that version.
jaxlib=build/jaxlib-0.6.2
[ -d $jaxlib ] || "$python" -m pip install --quiet --disable-pip-version-check --no-deps --only-binary :all: \
  --python-version 3.12 --target $jaxlib jaxlib==0.6.2

# Without isolation, so that the paths of its tools stay and a second build compiles only what changed.
"$python" -m build --no-isolation --wheel "${settings[@]}" -C cmake.define.WHET_JAXLIB="$PWD/$jaxlib/jaxlib" --outdir "$plain" . \
  > "$plain/log" 2>&1 || { cat "$plain/log" >&2; exit 1; }
wheel=$(basename "$plain"/*.whl)
rm -f "build/wheels/${wheel%-linux_*}"-*.whl build/wheels/*.tar.gz
PATH="$(cd "$(dirname "$python")" && pwd):$PATH" "$python" -m auditwheel repair --wheel-dir build/wheels "$plain/$wheel" > "$plain/log" 2>&1 \
  || { cat "$plain/log" >&2; exit 1; }
"$python" -m build --no-isolation --sdist --outdir build/wheels . > "$plain/log" 2>&1 || { cat "$plain/log" >&2; exit 1; }
ls build/wheels/"${wheel%-linux_*}"-*.whl build/wheels/*.tar.gz
