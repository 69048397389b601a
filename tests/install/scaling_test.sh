#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# scaling_test.sh CMAKE BUILD_FOLDER WORK_FOLDER MPIRUN PLOT_PYTHON: installs ddp-scaling with its trainers, and measures
# something short with what is installed.
set -euo pipefail
cmake=$1 build=$2 work=$3 mpirun=$4 plot_python=$5

rm -rf -- "$work"
"$cmake" --install "$build" --component tools --prefix "$work/prefix" >/dev/null
cd "$work"
grep -q "CC BY 4.0" prefix/share/doc/libddp-tools/NOTICE # the digits' attribution goes where the trainers go
export PYTHONDONTWRITEBYTECODE=1
bash "$plot_python" --required prefix/bin/ddp-scaling --mpirun="$mpirun" --out=result --models=mlp --ranks=1 --scaling=weak \
  --rounds=1 --seconds=0.01 2>messages || {
  status=$?
  cat messages
  exit "$status"
}
[[ -s result/report.html ]]
grep -q '"build_type"' result/scaling.json
grep -q '"status": "ok"' result/scaling.json
rm -rf -- "$work"
