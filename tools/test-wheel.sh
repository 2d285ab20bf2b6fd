#!/usr/bin/env bash
# test-wheel.sh [SUITE]: installs the wheel of build/wheels in a bare Debian, without libhwy, D3 or a compiler, and runs the tests of the
# NumPy functions and of the command there. SUITE is bookworm (Python 3.11, the default) or trixie (Python 3.13, for the abi3
# wheel). Needs root, debootstrap and a Debian mirror; build/bare-SUITE stays for the next run.
set -euo pipefail
cd "$(dirname "$0")/.."
suite=${1:-bookworm}
root=build/bare-$suite
[ "$(id -u)" -eq 0 ] || { echo "test-wheel.sh: needs root, for chroot; run it with sudo" >&2; exit 1; }
command -v debootstrap > /dev/null || { echo "test-wheel.sh: debootstrap is missing; run apt-get install debootstrap" >&2; exit 1; }

if [ ! -e "$root/.done" ]; then
  echo "== Making a bare Debian $suite in $root"
  rm -rf "$root"
  debootstrap --variant=minbase --include=python3,python3-venv "$suite" "$root" > "build/bare-$suite.log" 2>&1 \
    || { tail "build/bare-$suite.log" >&2; exit 1; }
  touch "$root/.done"
fi
version=$(chroot "$root" python3 -c 'import sys; print("%d.%d" % sys.version_info[:2])')

echo "== Installing the wheel in $root, Python $version"
rm -rf "$root/whet"
mkdir -p "$root/whet/packages"
grep -E '^(numpy|pytest|ml_dtypes|safetensors)==' tests/requirements.txt > "$root/whet/requirements.txt"
build/venv/bin/python -m pip download --quiet --disable-pip-version-check --only-binary :all: --python-version "$version" \
  --dest "$root/whet/packages" -r "$root/whet/requirements.txt"
cp build/wheels/whet-*.whl "$root/whet/packages"
cp -r README.md bench docs examples tests "$root/whet"

# The mounts end with the process that made them. Terminals, which some tests open, need the host's /dev.
unshare --mount bash -euo pipefail -c 'mount -t proc proc "$0/proc"; mount --rbind /dev "$0/dev"; exec chroot "$0" bash -euo pipefail' "$root" <<'INSIDE'
export LC_ALL=C.UTF-8 PYTHONDONTWRITEBYTECODE=1
cd /whet
found=$(find / -xdev \( -name 'libhwy*' -o -name 'd3*.js' -o -name 'cc' -o -name 'g++*' \) -not -path '/proc/*')
[ -z "$found" ] || { echo "not bare: $found" >&2; exit 1; }
python3 -m venv venv
venv/bin/pip install --quiet --no-index --find-links packages --requirement requirements.txt whet
venv/bin/whet info
echo "== The NumPy functions"
venv/bin/python -m pytest -q -p no:cacheprovider tests/python --ignore tests/python/torch --ignore tests/python/jax
echo "== The command"
WHET_BUILD=/whet/venv venv/bin/python -m pytest -q -p no:cacheprovider tests/cli -k "not figures_become_files"  # needs a browser
INSIDE
