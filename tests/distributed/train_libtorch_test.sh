#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# train_libtorch_test.sh PROGRAM [MPIRUN...]: several ranks train the model that one does, to rounding, and train it well.
set -euo pipefail

program=$1
shift
fail() {
  printf 'failed: %s\n%s\n' "$1" "$output"
  exit 1
}

# The loss, sum and squares that the first rank prints.
figures() { sed -n '1s/.*loss \([^,]*\), parameters sum \([^,]*\), squares \([^,]*\),.*/\1 \2 \3/p' <<<"$output"; }

output=$("$program" 48 200)
one=$(figures)
[[ -n $one ]] || fail "one rank prints no figures"
awk -v loss="${one%% *}" 'BEGIN { exit !(loss < 0.2) }' || fail "200 steps leave a loss of ${one%% *}"

for ranks in 2 3 4; do
  (($# > 0)) || break
  output=$("$@" "$ranks" "$program" 48 200)
  [[ $(wc -l <<<"$output") == "$ranks" ]] || fail "not every one of $ranks ranks has spoken"
  # All ranks end with the same parameters: those of one rank with the whole batch.
  [[ $(sed 's/.*parameters//; s/, overlap.*//' <<<"$output" | sort -u | wc -l) == 1 ]] || fail "the ranks' parameters differ"
  awk -v a="$one" -v b="$(figures)" 'BEGIN {
    split(a, x); split(b, y)
    for (i = 2; i <= 3; ++i) if ((x[i] - y[i]) ^ 2 > (1e-4 * x[3]) ^ 2) exit 1
  }' || fail "$ranks ranks train otherwise than one: $(figures), not $one"
done

if (($# > 0)); then
  if output=$("$@" 2 "$program" 47 1 2>&1); then fail "an odd batch on two ranks is no error"; fi
  grep -q 'multiple of the number of ranks' <<<"$output" || fail "the error does not say why"
fi
