# SPDX-License-Identifier: Apache-2.0
# Sourced by tests of programs: a folder of their own to run in, gone in the end. What a program has said last is in its files
# out and err.
# shellcheck shell=bash
folder=$(mktemp -d) || exit 1
trap 'rm -rf "$folder"' EXIT
cd "$folder" || exit 1

fail() {
  echo "FAILED: $*"
  echo "--- standard output"; cat out
  echo "--- standard error"; cat err
  exit 1
}
