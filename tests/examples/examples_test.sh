#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# examples_test.sh PROGRAM 'LINES' [LAUNCHER...]: runs an example, and compares its sorted output with the lines expected,
# which are separated by " | ". PROGRAM may have arguments, PORT among them; "A & B" runs two of them at a time. NEEDS_GPUS
# in the environment: skipped where there are fewer GPUs.
set -euo pipefail
# shellcheck source=tests/support/free_port.sh
. "$(dirname "$0")/../support/free_port.sh"
program=${1//PORT/$port} expected=$2
shift 2
gpus=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU' || true)
if ((gpus < ${NEEDS_GPUS:-0})); then
  echo "skipped: needs $NEEDS_GPUS GPUs, there are $gpus"
  exit 77
fi
output=$(mktemp)
trap 'rm -f "$output"' EXIT
pids=()
IFS='&' read -ra commands <<<"$program"
for command in "${commands[@]}"; do
  read -ra words <<<"$command"
  "$@" "${words[@]}" >>"$output" &
  pids+=($!)
done
for pid in "${pids[@]}"; do
  wait "$pid" || { echo "an example ended with $?"; cat "$output"; exit 1; }
done
diff <(grep -v ' failed: ' "$output" | sort) <(echo "${expected// | /$'\n'}" | sort)
