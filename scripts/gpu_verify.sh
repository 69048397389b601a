#!/usr/bin/env bash
# Checks and times the GPU parts on this machine. Lies in the folder that gpu_bundle.sh makes. See --help.
set -uo pipefail
here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 DDP_LOG_LEVEL=${DDP_LOG_LEVEL-warn}

usage() {
  cat <<END
Usage: bash gpu_verify.sh [--part=NAME,...] [--out=FOLDER] [--peers=FOLDER] [--gpus=N]

Runs everything that this machine's GPUs allow, part by part, each of which takes less than ten minutes. A step that
fails does not stop the others. Prints a table; writes each step's output, the benchmarks' rows and summary.json to
FOLDER (default: gpu-verify in the current folder). Exits with 1 if a step failed.

  unit    what needs no GPU
  device  kernels, memory and streams on one GPU, also under compute-sanitizer where it is installed
  nccl    the nccl backend on 1, 2 and 4 GPUs, ranks as threads and under mpirun
  fault   ranks that are killed at each stage (2 GPUs)
  bench   kernels, links, and collectives beside raw NCCL; with --peers also the peers' programs, in turn with ours

  --peers=FOLDER  nccl_allreduce.cu (built with nvcc where that is installed) and torch_allreduce.py (torchrun)
  --gpus=N        use so many at most
END
}

out=gpu-verify
peers=""
parts=unit,device,nccl,fault,bench
gpus=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU ')
results=()
failed=0

# step SECONDS NAME COMMAND...: its output goes to a file of that name; what a test prints about skipping counts.
step() {
  local limit=$1 name=$2 begin=$SECONDS code=0 result=passed
  shift 2
  timeout --kill-after=10 "$limit" "$@" >"$out/$name.log" 2>&1 </dev/null || code=$?
  if ((code == 124 || code == 137)); then
    result="timed out"
  elif ((code != 0)); then
    result=FAILED
  elif grep -q '^SKIPPED: ' "$out/$name.log"; then
    result=skipped
  fi
  [[ $result == passed || $result == skipped ]] || failed=1
  results+=("$name|$result|$((SECONDS - begin))|$(grep -m1 '^SKIPPED: ' "$out/$name.log" || true)")
  printf '%-32s %-10s %4d s\n' "$name" "$result" $((SECONDS - begin))
}

skip() {
  results+=("$1|skipped|0|$2")
  printf '%-32s %-10s %s\n' "$1" skipped "$2"
}

has() { [[ ,$parts, == *,$1,* ]]; }

part_unit() {
  step 60 unit-policy "$here/bin/nccl_policy_test"
  step 120 unit-group "$here/bin/nccl_group_test"
  step 120 unit-failure "$here/bin/nccl_failure_test"
}

part_device() {
  export DDP_TEST_GPUS=1
  step 200 device "$here/bin/gpu_device_test"
  if command -v compute-sanitizer >/dev/null; then
    step 280 device-memcheck compute-sanitizer --leak-check full --error-exitcode 9 "$here/bin/gpu_device_test" "~*wrong*" \
      "~memory of every kind*"
  else
    skip device-memcheck "there is no compute-sanitizer"
  fi
}

part_nccl() {
  local n
  for n in 1 2 4; do
    export DDP_TEST_GPUS=$n DDP_TEST_RANKS=$n DDP_TIMEOUT=60
    if ((n > gpus)); then
      skip "nccl-$n" "needs $n GPUs, there are $gpus"
      continue
    fi
    step 150 "nccl-$n-threads" "$here/bin/gpu_nccl_test"
    ((n > 2)) || memcheck_nccl "$n"
    if command -v mpirun >/dev/null; then
      step 150 "nccl-$n-mpirun" mpirun -n "$n" --bind-to none --oversubscribe --timeout 140 "$here/bin/gpu_nccl_test"
    else
      skip "nccl-$n-mpirun" "there is no mpirun"
    fi
  done
}

# Under compute-sanitizer the kernels of several ranks take so long that not all cases are run.
memcheck_nccl() {
  local n=$1
  if command -v compute-sanitizer >/dev/null; then
    # NCCL tries calls of CUDA that fail, on purpose.
    step 200 "nccl-$n-memcheck" compute-sanitizer --report-api-errors no --error-exitcode 9 "$here/bin/gpu_nccl_test" \
      "a result that is not*,operations are ordered*,a group that is split*,data moves*"
  else
    skip "nccl-$n-memcheck" "there is no compute-sanitizer"
  fi
}

part_fault() {
  export DDP_TEST_GPUS=2
  step 400 fault "$here/bin/gpu_fault_test"
}

part_bench() {
  local n
  step 120 bench-device "$here/bin/device_bench" --json "$out/bench-device.json"
  export DDP_BACKEND=nccl # one rank would not need it
  step 120 bench-p2p "$here/bin/p2p_bench" --json "$out/bench-p2p.json"
  for n in 1 2 4; do
    if ((n > gpus)) || ! command -v mpirun >/dev/null; then
      skip "bench-nccl-$n" "needs $n GPUs and mpirun; there are $gpus"
      continue
    fi
    step 100 "bench-nccl-$n-allocated" mpirun -n "$n" --bind-to none --oversubscribe "$here/bin/nccl_bench" -R -G --raw \
      --json "$out/bench-nccl-$n-allocated.json"
    peer_bench "$n"
    step 60 "bench-nccl-$n-plain" mpirun -n "$n" --bind-to none --oversubscribe "$here/bin/nccl_bench" -G --raw \
      --json "$out/bench-nccl-$n-plain.json"
    step 80 "bench-nccl-$n-others" mpirun -n "$n" --bind-to none --oversubscribe "$here/bin/nccl_bench" -R --raw -f 16 \
      -o all_gather,reduce_scatter,broadcast,all_to_all --json "$out/bench-nccl-$n-others.json"
  done
}

# The peers' programs, between ours.
peer_bench() {
  local n=$1
  [[ -n $peers ]] || return 0
  if [[ -f $peers/nccl_allreduce.cu ]] && command -v nvcc >/dev/null && command -v mpicxx >/dev/null; then
    local include lib
    include=$(mpicxx --showme:incdirs | tr ' ' '\n' | sed 's/^/-I/')
    lib=$(mpicxx --showme:libdirs | tr ' ' '\n' | sed 's/^/-L/')
    # shellcheck disable=SC2086 # several words each
    [[ -x $out/nccl_allreduce ]] || nvcc -O2 -std=c++17 -arch=native -o "$out/nccl_allreduce" "$peers/nccl_allreduce.cu" \
      $include $lib -lmpi -lnccl >"$out/peer-build.log" 2>&1
    [[ ! -x $out/nccl_allreduce ]] || step 90 "peer-nccl-$n" mpirun -n "$n" --bind-to none --oversubscribe "$out/nccl_allreduce"
  else
    skip "peer-nccl-$n" "needs nccl_allreduce.cu, nvcc and mpicxx"
  fi
  if [[ -f $peers/torch_allreduce.py ]] && command -v torchrun >/dev/null; then
    step 90 "peer-torch-$n" torchrun --nproc_per_node="$n" "$peers/torch_allreduce.py"
  else
    skip "peer-torch-$n" "needs torch_allreduce.py and torchrun"
  fi
}

# Text as a JSON string.
quoted() {
  local text=${1//\\/\\\\}
  printf '"%s"' "${text//\"/\\\"}"
}

summary() {
  local row name result seconds why first=1
  {
    printf '{"commit": %s, "host": %s, "gpus": [' "$(quoted "$(cat "$here/commit")")" "$(quoted "$(uname -sr)")"
    nvidia-smi --query-gpu=name,driver_version --format=csv,noheader 2>/dev/null | while IFS= read -r row; do
      ((first)) || printf ', '
      first=0
      quoted "$row"
    done
    printf '], "steps": ['
    first=1
    for row in "${results[@]}"; do
      IFS='|' read -r name result seconds why <<<"$row"
      ((first)) || printf ',\n  '
      first=0
      printf '{"name": %s, "result": %s, "seconds": %s, "why": %s}' "$(quoted "$name")" "$(quoted "$result")" "$seconds" \
        "$(quoted "$why")"
    done
    printf ']}\n'
  } >"$out/summary.json"
}

main() {
  local argument
  for argument in "$@"; do
    case $argument in
      -h | --help)
        usage
        return
        ;;
      --out=?*) out=${argument#*=} ;;
      --peers=?*) peers=${argument#*=} ;;
      --part=?*) parts=${argument#*=} ;;
      --gpus=[0-9]*) ((${argument#*=} >= gpus)) || gpus=${argument#*=} ;;
      *)
        echo "error: $argument is no flag; see --help" >&2
        return 2
        ;;
    esac
  done
  mkdir -p -- "$out" && out=$(cd -- "$out" && pwd) || return 2
  nvidia-smi --query-gpu=index,name,driver_version,memory.total --format=csv,noheader 2>/dev/null || echo "no GPU"
  ((gpus > 0)) && CUDA_VISIBLE_DEVICES=$(seq -s, 0 $((gpus - 1))) && export CUDA_VISIBLE_DEVICES
  local part
  for part in unit device nccl fault bench; do
    ! has "$part" || "part_$part"
  done
  summary
  printf '%s\n' "${results[@]}" | awk -F'|' '$2 != "passed" && $2 != "skipped" { print $1 }' | while read -r name; do
    printf '\n==> %s\n' "$name"
    tail -n 15 "$out/$name.log"
  done
  return "$failed"
}

main "$@"
