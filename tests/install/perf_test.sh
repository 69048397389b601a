#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# ddp_perf: every collective, type and operation is right beside its bound and MPI; JSON; wrong flags.
#
#   perf_test.sh PROGRAM [MPIRUN...]     MPIRUN: the command up to the number of ranks; without it there is one rank
set -u
program=$1
shift
# shellcheck source-path=SCRIPTDIR source=../support/in_folder.sh
source "$(dirname "${BASH_SOURCE[0]}")/../support/in_folder.sh"

# refused FLAGS... TEXT: it ends with 2, or 1 where the number of ranks counts, and says TEXT.
refused() {
  local code=0 text=${*: -1}
  timeout 60 "$program" "${@:1:$#-1}" >out 2>err </dev/null || code=$?
  ((code == 1 || code == 2)) && grep -qF -- "$text" err && return
  fail "$* (exit code $code): $(head -3 err)"
}
refused -b 4x "-b='4x': give a size in bytes"
refused -b 1M -e 1K "is above -e=1024"
refused -b 1 -e 1e15 -i 1 "-b=1 to -e=1000000000000000 are more than 100000 sizes: give a larger -f or -i"
refused -n 1.9 "-n='1.9': give a whole number from 1 to 1000000000"
refused -R 0.5 "-R='0.5': give a whole number from 0 to 2"
refused -o median "give sum, avg, min, max, prod or all"
refused -d float8 "give float, double"
refused --collectives=all_reduce,reduce_all "give all_reduce, all_gather"
refused --placement=up "give out, in or both"
refused --device=tpu "give cpu or cuda"
refused -g 2 "-g of nccl-tests has no meaning here"
refused -G 1 "-G needs --device=cuda"
refused --device=cuda --fresh "leave them out with --device=cuda"
refused -r 1 "give a rank from 0 to 0"
refused --sizes=64 --json=/nowhere/x.json "/nowhere/x.json cannot be written"
refused -n "-n needs a value"
refused --sizes=1000G "or choose a smaller -e"

# ranks N ROWS FLAGS...: no result is wrong, and the JSON file has so many rows.
ranks() {
  local n=$1 rows=$2 launch=()
  shift 2
  ((n == 1)) || launch=("${mpirun[@]}" "$n")
  DDP_TIMEOUT=200 timeout 200 "${launch[@]}" "$program" "$@" -n 4 -w 1 --budget=0.001 --json=rows.json >out 2>err || fail "$n ranks, $*: $(tail -3 err)"
  grep -q '^# Out of bounds values : 0 OK' out || fail "$n ranks, $*: no footer: $(tail -3 out)"
  python3 - "$n" "$rows" <<'PYTHON' || fail "$n ranks, $*: rows.json"
import json, sys
with open("rows.json", encoding="utf-8") as file:
    result = json.load(file)
rows = result["rows"]
assert result["ranks"] == int(sys.argv[1]), result["ranks"]
assert len(rows) == int(sys.argv[2]), len(rows)
environment = result["environment"]
assert environment["cpu"]["cores"] > 0 and environment["build"]["version"] and environment["date"], environment
assert environment["launcher"] and environment["variables"]["DDP_TIMEOUT"] == "200", environment
for row in rows:
    assert row["wrong"] == 0 and row["time_us"] > 0 and row["bound_us"] > 0, row
    assert 0 < row["p50_us"] <= row["p99_us"], row
    if row["collective"] == "all_reduce":
        n = result["ranks"]
        assert abs(row["busbw"] - row["algbw"] * 2 * (n - 1) / n) < 1e-9, row
PYTHON
}
ranks 1 18 --collectives=all --sizes=1K # all but messages, which need two ranks
# In whole bytes and elements, each once.
ranks 1 $((2 * 4)) -b 4 -e 8 -f 1.1 -d int8
ranks 1 $((2 * 3)) -b 4 -e 12 -i 1
"$program" -n 4 -w 1 --budget=0.001 --sizes=1K --json=closed.json >&- 2>&- <&- || fail "without standard streams: exit code $?"
python3 -c 'import json; json.load(open("closed.json"))' || fail "the table is in the JSON file"

# An earlier file stays until all rows are measured, and its folder holds nothing else after an end before that.
mkdir kept
printf 'rows of before' >kept/rows.json
ln -s kept/rows.json link.json
rm out # that of the call before
"$program" -b 1K -e 64M -f 2 -n 1000 -w 1 --budget=1 --json=link.json >out 2>err &
for ((i = 0; i < 600; ++i)); do
  [[ -s out ]] && break
  sleep 0.1
done
kill $!
wait $! && fail "it was through before it was ended"
[[ $(cat kept/*) == "rows of before" ]] || fail "the rows of before are lost"
"$program" -n 4 -w 1 --budget=0.001 --sizes=1K --json=link.json >out 2>err || fail "--json=LINK: $(tail -3 err)"
[[ -L link.json && $(ls kept) == rows.json ]] || fail "a link or a second file was left: $(ls -l . kept)"
python3 -c 'import json; json.load(open("kept/rows.json"))' || fail "the rows replace those of before"
"$program" -n 4 -w 1 --budget=0.001 --sizes=1K --json=/dev/stderr >out 2>err || fail "--json=/dev/stderr: $(tail -3 err)"
grep -q '"rows"' err || fail "no rows on standard error"

mpirun=("$@")
if ((${#mpirun[@]} > 0)); then
  # 8 operations out of place and in place; broadcast; 2 messages; and a barrier
  ranks 2 $((8 * (2 * 8 + 1 + 2) + 1)) --collectives=all --sizes=1000 -d all
  ranks 2 $((2 * 2 * 5)) --collectives=all_reduce,reduce_scatter --sizes=1000 -d half -o all
  ranks 2 $((2 * 2)) -b 4K -e 8K -i 4K --fresh -c 2 --ordinary
  ranks 3 20 --collectives=all --sizes=4 -r 2 -m 3 --peer
fi
