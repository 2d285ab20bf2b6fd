#!/usr/bin/env bash
# test-sdist.sh [PYTHON]: installs the sdist of build/wheels as a user would: unpacked in an empty folder, pip install ., into a new
# virtual environment, with pip bringing what it is built with.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${1:-python3}
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

echo "== Installing from the sdist (compiles everything)"
tar xzf build/wheels/whet-*.tar.gz --strip-components 1 -C "$folder" --one-top-level=source
"$python" -m venv "$folder/venv"
(cd "$folder/source" && ../venv/bin/pip install --quiet --disable-pip-version-check .)
cd "$folder"
venv/bin/whet info
venv/bin/python -c "import whet; print(whet.softmax([0.0, 2.0, 1.0], rule='target-entropy:0.2'))"
packages=$(venv/bin/pip list --format freeze | cut -d= -f1 | sort | tr '\n' ' ')
[ "$packages" = "numpy pip setuptools whet " ] || [ "$packages" = "numpy pip whet " ] \
  || { echo "test-sdist.sh: installed more than whet and NumPy: $packages" >&2; exit 1; }
