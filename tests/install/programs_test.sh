#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Every program says what it does for --help, and what is wrong with its command line; and notices that its output is lost.
#
#   programs_test.sh PROGRAM...
set -u
folder=$(mktemp -d)
trap 'rm -rf -- "$folder"' EXIT
cd "$folder" || exit 1
failed=0

# check PROGRAM FLAG CODE STREAM: it ends with CODE, and STREAM tells how it is used.
check() {
  local code=0
  timeout 60 "$1" "$2" >out 2>err </dev/null || code=$?
  ((code == $3)) && grep -qiE -e "usage|--[a-z-]+|mpirun|^  ${1##*/}" "$4" && return
  printf '%s %s: exit code %d instead of %d, on %s:\n%s\n' "$1" "$2" "$code" "$3" "$4" "$(head -5 "$4")"
  failed=1
}

(($# > 0)) || exit 1
for program; do
  check "$program" --help 0 out
  # The licence of the digits that the trainers contain asks for it.
  if [[ ${program##*/} =~ ^train_(mlp|cnn|libtorch)$ ]] && ! grep -q 'CC BY 4.0' out; then
    printf '%s --help does not say where its images come from\n' "$program"
    failed=1
  fi
  check "$program" --no-such-flag 2 err
  code=0
  timeout 60 "$program" --help >/dev/full 2>err </dev/null || code=$?
  if ((code != 1)) || ! grep -q "^${program##*/}: cannot write to standard output" err; then
    printf '%s --help on a full disk: exit code %d, %s\n' "$program" "$code" "$(head -3 err)"
    failed=1
  fi
done
exit "$failed"
