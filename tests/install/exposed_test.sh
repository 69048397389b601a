#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# exposed_bench: every way to reduce has its blocks, the verdict follows from the interval, wrong flags are refused.
#
#   exposed_test.sh PROGRAM [MPIRUN...]     MPIRUN: the command up to the number of ranks; without it there is one rank
set -u
program=$1
shift
# shellcheck source-path=SCRIPTDIR source=../support/in_folder.sh
source "$(dirname "${BASH_SOURCE[0]}")/../support/in_folder.sh"

# refused FLAG TEXT: it ends with 2 and says TEXT.
refused() {
  local code=0
  timeout 60 "$program" "$1" >out 2>err </dev/null || code=$?
  ((code == 2)) && grep -qF -- "$2" err && return
  fail "$1 (exit code $code): $(head -3 err)"
}
refused --modes=none,twice "--modes=none,twice: give two or more of"
refused --modes=none "give two or more of"
refused --modes=none,end,none "--modes=none,end,none: give each of them once"
refused --rounds=4 "give a number from 5 to 1048576"
refused --threads=100000 "give a number from 1 to 1024"
refused --batch=100000000 "give a number from 1 to 1048576"
refused --steps=2000000 "give a number from 1 to 1048576"
refused --bucket_mb=-1 "give a number from 0 to 1048576"
refused --bucket_mb=1e300 "give a number from 0 to 1048576"
refused --hidden=3,x "give numbers from 1 to 65536"
refused --hidden=3,65537 "give numbers from 1 to 65536"
refused --model=vgg "give one of mlp"
refused --precision=fp16 "give one of fp32"
refused --json "unexpected argument"

# measured FLAGS...: it writes out and result.json, in which each way has as many blocks as there are rounds.
measured() {
  local count=$1
  shift
  local -a start=()
  ((count == 1)) || start=("${mpirun[@]}" "$count")
  rm -f result.json
  timeout 120 "${start[@]}" "$program" --hidden=16 --batch=4 --steps=2 --rounds=5 --json=result.json "$@" >out 2>err </dev/null ||
    fail "$count ranks, $* (exit code $?): $(tail -3 err)"
  command -v python3 >/dev/null || return 0
  python3 - "$count" "$@" <<'PYTHON' || fail "$count ranks, $*: $(cat out)"
import json, re, statistics, sys
result, text = json.load(open("result.json")), open("out").read()
modes = next(flag for flag in sys.argv if flag.startswith("--modes="))[8:].split(",")
assert result["ranks"] == int(sys.argv[1]) and list(result["ms"]) == modes, result
assert all(len(ms) == 5 and min(ms) > 0 for ms in result["ms"].values()), result
assert {"cpu", "build", "launcher"} <= set(result["environment"]) and "onednn" in result["environment"]["libraries"], result
first = result["ms"][modes[0]]
for mode in modes[1:]:
    value, low, high = result["beyond_ms"][mode]
    assert abs(value - statistics.median(a - b for a, b in zip(result["ms"][mode], first))) < 1e-9 and low <= value <= high, mode
if len(modes) == 3:  # judged by the interval's far end
    met = "part" in result and result["part"][2] <= 0.5
    assert result["target"] == 0.5 and result["met"] == met, result
    assert ("NOT MET" not in text) == met and ("part" in result) == (result["beyond_ms"][modes[2]][1] > 0), text
PYTHON
}
# apart TEXT COMMAND...: as two ranks it ends with 1, and one rank says TEXT.
apart() {
  local code=0 text=$1
  shift
  timeout 120 "${mpirun[@]}" 2 "$@" >out 2>err </dev/null || code=$?
  ((code == 1)) && [[ $(grep '^exposed_bench: ' err) == "exposed_bench: $text"* ]] && return
  fail "$* on 2 ranks (exit code $code): $(tail -3 err)"
}
measured 1 --modes=no_ddp,overlap
mpirun=("$@")
if ((${#mpirun[@]} > 0)); then
  measured 2 --modes=none,overlap,end --target=0.5
  measured 2 --modes=none,each,gather --target=0.5 --bucket_mb=0
  measured 3 --modes=overlap,end
  # Ranks that would not measure the same, which one of them says.
  # shellcheck disable=SC2016 # the inner shell's
  different='[[ ${OMPI_COMM_WORLD_RANK-${PMI_RANK-}} == 1 ]] && set -- --modes=none,end; exec "$0" --steps=2 --rounds=5 "$@"'
  apart "rank 1 has --modes=none,end, rank 0 has --modes=none,overlap,end; give all ranks the same flags" bash -c "$different" "$program"
  apart "--modes=no_ddp,overlap: no_ddp is for one rank; with several, none reduces nothing" "$program" --modes=no_ddp,overlap
fi
