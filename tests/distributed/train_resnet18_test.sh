#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# train_resnet18_test.sh PROGRAM [MPIRUN...]: with batch normalisation over all ranks, two ranks train what one does, to
# rounding; and the program compares itself with the loop without libddp.
set -euo pipefail

program=$1
shift
fail() {
  printf 'failed: %s\n%s\n' "$1" "$output"
  exit 1
}

# "sum squares" of the parameters, one line for each rank.
figures() { sed -n 's/.*sum \([^,]*\), squares \([^,]*\),.*/\1 \2/p' <<<"$output"; }

flags=(--batch=4 --image=64 --steps=2 --warmup=1 --sync_bn=1)
output=$("$program" "${flags[@]}")
grep -q 'rank 0 of 1: 11689512 parameters' <<<"$output" || fail "one rank does not train a ResNet-18"
one=$(figures)

output=$("$program" --batch=2 --steps=1 --warmup=0 --compare=1)
grep -q '1 ranks, median of 1 rounds: [0-9.]* times' <<<"$output" || fail "it does not compare"

if (($# > 0)); then
  output=$("$@" 2 "$program" "${flags[@]}" --channels_last=1 --release=1)
  mapfile -t two < <(figures)
  [[ ${#two[@]} == 2 && ${two[0]} == "${two[1]}" ]] || fail "the ranks' parameters differ"
  awk -v a="$one" -v b="${two[0]}" 'BEGIN {
    split(a, x); split(b, y)
    exit !((x[1] - y[1]) ^ 2 < 1 && (x[2] - y[2]) ^ 2 < (1e-4 * x[2]) ^ 2)
  }' || fail "two ranks train otherwise than one: ${two[0]}, not $one"
  if output=$("$@" 2 "$program" --batch=3 2>&1); then fail "an odd batch on two ranks is no error"; fi
  grep -q 'multiple of the number of ranks' <<<"$output" || fail "the error does not say why"
fi
