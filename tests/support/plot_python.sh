#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# plot_python.sh [--required] SCRIPT [ARGUMENT...]: runs a Python script with the first python3 that has matplotlib. Without
# one: with any python3, or, given --required, not at all (exit code 77, which skips a test).
set -euo pipefail
required=0
if [[ ${1-} == --required ]]; then
  required=1
  shift
fi
for python in python3 /usr/bin/python3; do
  if command -v "$python" >/dev/null && "$python" -c 'import matplotlib' 2>/dev/null; then
    exec "$python" "$@"
  fi
done
if ((required)) || ! command -v python3 >/dev/null; then
  echo "skipped: no python3 with matplotlib (package python3-matplotlib)"
  exit 77
fi
exec python3 "$@"
