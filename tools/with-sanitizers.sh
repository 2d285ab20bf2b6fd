#!/usr/bin/env bash
# with-sanitizers.sh BUILD COMMAND...: runs a Python command with the package of a build that has sanitizers. Their
# libraries must be there before the interpreter's own allocations; what the interpreter never frees is no leak of ours.
set -euo pipefail
build=$1
shift
libraries=""
for name in libasan.so libubsan.so libstdc++.so; do libraries+="$(g++ -print-file-name=$name) "; done
exec env LD_PRELOAD="$libraries" ASAN_OPTIONS=detect_leaks=0 PYTHONPATH="$build/python" "$@"
