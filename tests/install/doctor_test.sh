#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# ddp_doctor as a user runs it, on whatever machine this is: alone, by mpirun, and with something wrong.
#
#   doctor_test.sh DDP_DOCTOR [MPIRUN ... -n]
set -euo pipefail
doctor=$1
shift
# shellcheck source-path=SCRIPTDIR source=../support/in_folder.sh
source "$(dirname "${BASH_SOURCE[0]}")/../support/in_folder.sh"

# run CODE COMMAND...: it ends with CODE, or with 0 or 1 where that depends on the machine (CODE is "any").
run() {
  local code=0 expected=$1
  shift
  "$@" >out 2>err </dev/null || code=$?
  if [[ $expected == any ]]; then
    ((code <= 1)) || fail "$*: exit code $code"
  else
    ((code == expected)) || fail "$*: exit code $code instead of $expected"
  fi
}

run any "$doctor"
grep -q '^ok: Linux' out || fail "no line on the system"
grep -qE '^[0-9]+ errors?, [0-9]+ warnings?$' out || fail "no summary"

run any "$doctor" --no-probe --json --report report.json
grep -q '"ranks": 1' out || fail "no JSON"
grep -q '"build_type"' report.json || fail "the report does not describe the machine"
grep -q '"findings"' report.json || fail "the report has no findings"

if "$doctor" --no-probe --json >/dev/full 2>err; then fail "success, though nothing could be written"; fi
grep -q '^ddp_doctor: cannot write to standard output' err || fail "does not say that nothing could be written"

DDP_SHARED_MEMORY=x run 1 "$doctor" --no-probe
grep -q '^error: .*DDP_SHARED_MEMORY' out || fail "the wrong variable is not named"
for wrong in DDP_TIMEOUT=abc DDP_TIMEOUT=0 DDP_STALL_WARNING=-1 DDP_BACKEND=foo; do
  run 1 env $wrong "$doctor" --no-probe
  grep -q "^error: .*${wrong%=*}" out || fail "$wrong is not found"
done
NCCL_NTHREADS=4 run any "$doctor" --no-probe
grep -q 'remedy: unset NCCL_NTHREADS' out || fail "the doubtful variable is not named"
run 1 "$doctor" --no-probe --report /no/such/folder/report.json
for limit in soon 0 -1 nan; do
  run 2 "$doctor" --limit $limit
  grep -qF "ddp_doctor: --limit $limit is no number of seconds above 0; see --help" err || fail "--limit $limit: no word about it"
done
run 2 "$doctor" --limit
grep -q "ddp_doctor: --limit is no flag, or lacks its value" err || fail "--limit without a value"

if (($#)); then
  run any "$@" 2 "$doctor" --json
  grep -q '"ranks": 2' out || fail "not all ranks are in the report"
  (($(grep -c '"ranks": 2' out) == 1)) || fail "several ranks have printed"
  if (($(nproc) > 1)) && command -v taskset >/dev/null; then
    run any taskset -c "$(taskset -cp $$ | sed 's/.*: \([0-9]*\).*/\1/')" "$@" 2 "$doctor" --no-probe
    grep -q '^warning: 2 ranks may use 1 of this host' out || fail "one processor for two ranks is not noticed"
  fi
fi
