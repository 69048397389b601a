#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Runs the GPU tests and benchmarks on this machine. Part of the folder that gpu_bundle.sh makes. See --help.
set -uo pipefail
here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 DDP_LOG_LEVEL=${DDP_LOG_LEVEL-warn}

usage() {
  cat <<END
Usage: bash gpu_verify.sh [--part=NAME,...] [--out=FOLDER] [--peers=FOLDER] [--data=FOLDER] [--gpus=N]
         [--share=N]

Runs all steps that this machine's GPUs allow, part by part. If a step fails, the others still run. Prints a table.
Writes each step's output, the benchmarks' rows and summary.json to the output folder. Exits with 1 if a step failed.

Parts (each takes less than ten minutes, unless stated otherwise):

  doctor  ddp_doctor, alone and under mpirun on 1, 2 and 4 GPUs: ten seconds each, no error, and what auto chooses; and
          with an NCCL that hangs
  unit    tests without a GPU
  device  kernels, memory and streams on one GPU; also under compute-sanitizer, if it is installed
  nccl    the nccl backend on 1, 2 and 4 GPUs, with ranks as threads and under mpirun
  fault   ranks that are killed at each stage (2 GPUs); trainings that go on without NCCL (2 and 4 GPUs)
  staged  the hierarchical backend on GPUs: tests and killed ranks on 2 and 4 GPUs (two ranks share a single one), the
          choice of auto, and its speed in turn with NCCL's without P2P. Six minutes for each number of GPUs
  auto    train_mlp with --backend=auto where NCCL has a planted fault (2 and 4 GPUs): the backend that is chosen, what is
          said about the fault, and the result of the training
  ddp     DistributedDataParallel, the header for C and the example layers on 1, 2 and 4 GPUs
  torch   LibTorch's models on 1, 2 and 4 GPUs, with the LibTorch of python3's PyTorch: tests, a ResNet-18, and its speed
          beside the same loop without libddp
  train   train_mlp: losses on one GPU and on several compared with the CPU's; speed; with --data accuracy
  cnn     train_cnn: speed in TF32 and fp16; losses compared with PyTorch's, if it is installed; with --data accuracy in
          every precision. With --peers it takes five minutes for each number of GPUs
  graph   the trainers with --cuda-graph: the same losses and parameters as without, bit for bit, on 1 and 2 GPUs
  graphspeed
          the trainers with --cuda-graph and without in turn; with --peers also PyTorch's graphs. That takes 20 minutes
  bench   kernels, links, and collectives compared with raw NCCL; with --peers also the peers' programs, alternating

Options:

  --part=NAME,...  run only these parts (default: all)
  --out=FOLDER     the output folder (default: gpu-verify in the current folder)
  --peers=FOLDER   a folder with nccl_allreduce.cu (built with nvcc, if installed), torch_allreduce.py and torch_ddp.py
                   (run with torchrun)
  --data=FOLDER    a folder with MNIST's four IDX files, for train and cnn
  --gpus=N         use at most N GPUs
  --share=N        with one GPU: also run the tests with 2 to N ranks, which then share it. Needs NCCL 2.30 or newer (or
                   DDP_NCCL_LIBRARY). Speed is measured only with a GPU for each rank
END
}

out=gpu-verify
peers=""
data=""
parts=doctor,unit,device,nccl,fault,staged,auto,ddp,torch,train,cnn,graph,graphspeed,bench
gpus=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU ')
share=1
results=()
failed=0
# shellcheck source-path=SCRIPTDIR source=gpu_verify_training.sh
source "$here/gpu_verify_training.sh"

# step SECONDS NAME COMMAND...: runs the command, with output to NAME.log. A line "SKIPPED: " marks the step as skipped.
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

# ranks N: whether tests may have N ranks; tells them how many GPUs there must be. Ranks that share a GPU must be
# processes: threads of one process block each other there, see docs/gpu-verification.md.
ranks() {
  (($1 <= (share > 1 ? share : gpus))) || return 1
  export DDP_TEST_GPUS=$(($1 < gpus ? $1 : gpus)) DDP_TEST_RANKS=$1 DDP_TIMEOUT=60
}

has() { [[ ,$parts, == *,$1,* ]]; }
# The bundle is built with Open MPI, and another mpirun has other flags.
has_mpirun() { mpirun --version 2>/dev/null | grep -qE 'Open MPI|OpenRTE|Open Run-Time'; }

part_doctor() {
  local n
  export -f diagnosed diagnosed_hang && export here out gpus
  step 40 doctor bash -c "diagnosed --report '$out/doctor.json'"
  if ! has_mpirun; then
    skip doctor-mpirun "there is no mpirun of Open MPI"
    return
  fi
  for n in 1 2 4; do
    if ((n > gpus)); then
      skip "doctor-$n" "needs $n GPUs, there are $gpus"
      continue
    fi
    step 40 "doctor-$n" bash -c "diagnosed $n"
    ((n == 1)) || step 40 "doctor-$n-hang" bash -c "diagnosed_hang $n"
  done
}

# diagnosed RANKS, or diagnosed FLAG...: ddp_doctor finds no error within ten seconds, and auto would use NCCL.
diagnosed() {
  local begin=$SECONDS ranks=$gpus says
  local -a command=("$here/bin/ddp_doctor" "$@")
  if [[ $1 != --* ]]; then
    command=(mpirun -n "$1" --bind-to none "$here/bin/ddp_doctor")
    (($1 == 1)) || ranks=$1 # one rank looks at all GPUs
  fi
  says=$("${command[@]}") || {
    printf '%s\n' "$says"
    return 1
  }
  printf '%s\nin %d s\n' "$says" $((SECONDS - begin))
  ((SECONDS - begin <= 10)) && grep -q "auto chooses $( ((ranks > 1)) && echo nccl || echo local)" <<<"$says" &&
    { ((ranks == 1)) || grep -q "^ok: copies between .* arrive right" <<<"$says"; }
}

# diagnosed_hang RANKS: the same with an NCCL whose first all-reduce hangs: that is an error, in its time, with a way on.
# What counts is when the report comes: after an exit code that is not 0 mpirun takes another second or two.
diagnosed_hang() {
  local begin=$SECONDS said=99 line says='' behind=${DDP_NCCL_LIBRARY-libnccl.so.2}
  while IFS= read -r line; do
    says+=$line$'\n'
    [[ ! $line =~ ^[0-9]+\ errors?, ]] || said=$((SECONDS - begin))
  done < <(
    FAULTY_NCCL_BEHIND=$behind DDP_NCCL_LIBRARY=$here/bin/libfaulty_nccl.so FAULTY_NCCL=AllReduce:stuck \
      mpirun -n "$1" --bind-to none "$here/bin/ddp_doctor"
    echo "exit code $?"
  )
  printf '%sreport after %d s, end after %d s\n' "$says" "$said" $((SECONDS - begin))
  ((said <= 10)) && grep -qx "exit code 1" <<<"$says" && grep -q "all-reduce of 4 B hung" <<<"$says" &&
    grep -q "ddp_doctor --limit" <<<"$says" && grep -q "auto chooses hierarchical" <<<"$says"
}

part_unit() {
  step 60 unit-policy "$here/bin/nccl_policy_test"
  step 120 unit-group "$here/bin/nccl_group_test"
  step 120 unit-failure "$here/bin/nccl_failure_test"
  step 120 unit-start "$here/bin/nccl_start_test"
  step 60 unit-timeout "$here/bin/nccl_timeout_test"
}

part_device() {
  export DDP_TEST_GPUS=1
  step 200 device "$here/bin/gpu_device_test"
  if command -v compute-sanitizer >/dev/null; then
    step 280 device-memcheck compute-sanitizer --leak-check full --error-exitcode 9 "$here/bin/gpu_device_test" "~*wrong*" \
      "~memory of every kind*"
  else
    skip device-memcheck "compute-sanitizer is not installed"
  fi
}

part_nccl() {
  local n
  for n in 1 2 4; do
    if ! ranks "$n"; then
      skip "nccl-$n" "needs $n GPUs, there are $gpus"
      continue
    fi
    ((n > gpus)) || step 150 "nccl-$n-threads" "$here/bin/gpu_nccl_test"
    ((n > 2 || n > gpus)) || memcheck_nccl "$n"
    if has_mpirun; then
      step 150 "nccl-$n-mpirun" mpirun -n "$n" --bind-to none --oversubscribe --timeout 140 "$here/bin/gpu_nccl_test"
      step 150 "peers-$n" mpirun -n "$n" --bind-to none --oversubscribe --timeout 140 "$here/bin/gpu_peers_test"
      ((n == 1)) || DDP_PEER_COPIES=from=0 step 150 "nccl-$n-peers" mpirun -n "$n" --bind-to none --oversubscribe \
        --timeout 140 "$here/bin/gpu_nccl_test" "~[nccl]"
    else
      skip "nccl-$n-mpirun" "there is no mpirun of Open MPI"
    fi
  done
}

# Under compute-sanitizer the kernels of several ranks are so slow that only some cases are run.
memcheck_nccl() {
  local n=$1
  if command -v compute-sanitizer >/dev/null; then
    # NCCL makes some CUDA calls that fail, on purpose.
    step 200 "nccl-$n-memcheck" compute-sanitizer --report-api-errors no --error-exitcode 9 "$here/bin/gpu_nccl_test" \
      "a result that is not*,operations are ordered*,a group that is split*,data moves*"
  else
    skip "nccl-$n-memcheck" "compute-sanitizer is not installed"
  fi
}

part_fault() {
  ranks 2 || export DDP_TEST_GPUS=2
  step 400 fault "$here/bin/gpu_fault_test"
  DDP_PEER_COPIES=from=0 step 400 fault-peers "$here/bin/gpu_fault_test"
  local n
  for n in 2 4; do
    if ((n > gpus)); then
      skip "recover-$n" "needs $n GPUs, there are $gpus"
      continue
    fi
    export DDP_TEST_GPUS=$n DDP_TEST_RANKS=$n DDP_TIMEOUT=60
    step 120 "recover-$n-threads" "$here/bin/gpu_recover_test"
    has_mpirun || continue
    step 120 "recover-$n-mpirun" mpirun -n "$n" --bind-to none --timeout 110 "$here/bin/gpu_recover_test"
    export -f recovering_train && export here out
    step 150 "recover-train-$n" bash -c "recovering_train $n"
    step 150 "recover-train-$n-graph" bash -c "recovering_train $n --cuda-graph"
  done
}

# recovering_train RANKS FLAG...: a rank of train_mlp is stopped for longer than the time-out, so that NCCL's kernels
# hang; then all go on without NCCL.
recovering_train() {
  local n=$1 job pids i
  shift
  DDP_TIMEOUT=20 mpirun -n "$n" --bind-to none "$here/bin/train_mlp" --device=cuda --recover --deterministic \
    --epochs=1000000 --batch=32 "$@" >"$out/recovering.out" 2>&1 &
  job=$!
  for ((i = 0; i < 600; ++i)); do
    grep -q '^epoch' "$out/recovering.out" && break
    sleep 0.1
  done
  mapfile -t pids < <(pgrep -P $job)
  if ((${#pids[@]} != n)); then
    kill $job
    return 1
  fi
  kill -STOP "${pids[1]}"
  sleep 23
  kill -CONT "${pids[1]}"
  for ((i = 0; i < 300; ++i)); do
    (($(sed '1,/^recovered: /d' "$out/recovering.out" | grep -c '^epoch') > 3)) && break
    sleep 0.1
  done
  kill -TERM "${pids[0]}"
  wait $job
  cat "$out/recovering.out"
  grep -q "^recovered: backend hierarchical with all $n ranks" "$out/recovering.out" &&
    grep -q 'stopped by SIGTERM' "$out/recovering.out"
}

# Without NCCL. Processes may share a GPU here, whatever --share says, but then nothing is timed.
part_staged() {
  local n
  if ! has_mpirun; then
    skip staged "there is no mpirun of Open MPI"
    return
  fi
  for n in 2 4; do
    if ((n > 2 && n > gpus)); then
      skip "staged-$n" "needs $n GPUs, there are $gpus"
      continue
    fi
    export DDP_TEST_GPUS=$((n < gpus ? n : gpus)) DDP_TEST_RANKS=$n DDP_TIMEOUT=60 DDP_TEST_BACKEND=hierarchical
    ((n > gpus)) || step 150 "staged-$n-threads" "$here/bin/gpu_nccl_test" "~[nccl]"
    staged_test "$n" gpu_nccl_test "~[nccl]"
    staged_test "$n" gpu_ddp_test "~[nccl]"
    staged_test "$n" gpu_c_test
    # As on two hosts: what is captured needs the host.
    DDP_NODE_SIZE=$((n / 2)) staged_test "$n" gpu_nccl_test '~[nccl] ~"*graph*"'
    DDP_NODE_SIZE=$((n / 2)) staged_test "$n" gpu_ddp_test '~[nccl] ~"*captured*" ~"replays*"'
    # The host's processors add.
    DDP_STAGED_REDUCE=cpu staged_test "$n" gpu_nccl_test '~[nccl] ~"*graph*"'
    DDP_STAGED_REDUCE=cpu staged_test "$n" gpu_ddp_test '~[nccl] ~"*captured*" ~"replays*"'
    # Everything by the copy engines.
    export DDP_STAGED_LIMITS=copies=0,chunk=64K
    staged_test "$n" gpu_nccl_test "~[nccl]"
    staged_test "$n" gpu_ddp_test "~[nccl]"
    if ((n > 2)); then  # packets in two phases
      export DDP_STAGED_LIMITS=packets=1M,packets_once=0
      staged_test "$n" gpu_nccl_test "~[nccl]"
      staged_test "$n" gpu_ddp_test "~[nccl]"
    fi
    unset DDP_TEST_BACKEND DDP_STAGED_LIMITS
    ((n > gpus)) || staged_test "$n" gpu_probe_test
    ((n > gpus)) || staged_speed "$n"
  done
  DDP_TEST_BACKEND=hierarchical step 200 staged-fault "$here/bin/gpu_fault_test" "~*NCCL starts*"
}

# staged_test RANKS PROGRAM ARGUMENT...
staged_test() {
  local n=$1 program=$2
  shift 2
  step 150 "staged-$n-$program${DDP_STAGED_LIMITS:+-${DDP_STAGED_LIMITS%%=*}}${DDP_NODE_SIZE:+-nodes}${DDP_STAGED_REDUCE:+-host}" mpirun -n "$n" --bind-to none \
    --oversubscribe --timeout 140 "$here/bin/$program" "$@"
}

# The hierarchical backend and NCCL without P2P, in turn: all-reduces, and the steps of models.
staged_speed() {
  local n=$1 round backend model
  local -a speed=(--synthetic --warmup=20 --batch=128 --device=cuda --tf32)
  for round in 1 2 3; do
    DDP_STAGED_REDUCE=cpu step 60 "staged-perf-$n-host-$round" mpirun -n "$n" --bind-to none --oversubscribe \
      "$here/bin/ddp_perf" --device=cuda --backend=hierarchical -b 256K -e 256M -f 4 --json "$out/staged-perf-$n-host-$round.json"
    for backend in hierarchical nccl; do
      NCCL_P2P_DISABLE=1 step 60 "staged-perf-$n-$backend-$round" mpirun -n "$n" --bind-to none --oversubscribe \
        "$here/bin/ddp_perf" --device=cuda --backend="$backend" -b 1K -e 256M -f 4 -G 1 \
        --json "$out/staged-perf-$n-$backend-$round.json"
      NCCL_P2P_DISABLE=1 train 60 "staged-mlp-$n-$backend-$round" "$n" "${speed[@]}" --steps=2000 --backend="$backend"
      for model in lenet:1000 resnet20:500 resnet50:80; do
        NCCL_P2P_DISABLE=1 trainer train_cnn 60 "staged-${model%:*}-$n-$backend-$round" "$n" --model="${model%:*}" \
          "${speed[@]}" --steps="${model#*:}" --backend="$backend"
      done
    done
  done
}

# A library in NCCL's place hands its calls on to NCCL, and misbehaves as it is told.
part_auto() {
  local n fault
  for n in 2 4; do
    if ((n > gpus)); then
      skip "auto-$n" "needs $n GPUs, there are $gpus"
      continue
    fi
    for fault in reference $(bash "$here/auto_fault.sh" list); do
      FAULTY_NCCL_BEHIND=${DDP_NCCL_LIBRARY-libnccl.so.2} step 150 "auto-$n-$fault" bash "$here/auto_fault.sh" "$fault" "$n" \
        "$here/bin" "$out/auto-reference-$n.json"
    done
  done
}

part_ddp() {
  local n
  export DDP_TEST_GPUS=1
  step 250 nn "$here/bin/gpu_nn_test"
  for n in 1 2 4; do
    if ! ranks "$n"; then
      skip "ddp-$n" "needs $n GPUs, there are $gpus"
      continue
    fi
    ((n > gpus)) || step 60 "ddp-$n-threads" "$here/bin/gpu_ddp_test"
    has_mpirun || continue
    step 60 "ddp-$n-mpirun" mpirun -n "$n" --bind-to none --oversubscribe --timeout 55 "$here/bin/gpu_ddp_test"
    step 60 "c-$n" mpirun -n "$n" --bind-to none --oversubscribe --timeout 55 "$here/bin/gpu_c_test"
  done
  # Kernels for registered memory cannot be aborted before NCCL 2.29.2.
  export DDP_TEST_GPUS=2 DDP_TEST_RANKS=2
  step 40 ddp-fails env NCCL_WIN_ENABLE=0 "$here/bin/gpu_ddp_test" "[fails]"
}

part_torch() {
  local n libtorch
  if [[ ! -e $here/bin/train_resnet18 ]]; then
    skip torch "the bundle was made without LibTorch"
    return
  fi
  if ! libtorch=$(python3 -c 'import os, torch; print(os.path.join(os.path.dirname(torch.__file__), "lib"))' 2>/dev/null); then
    skip torch "python3 has no PyTorch"
    return
  fi
  local -x LD_LIBRARY_PATH=$libtorch${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
  for n in 1 2 4; do
    if ! ranks "$n"; then
      skip "torch-$n" "needs $n GPUs, there are $gpus"
      continue
    fi
    ((n > gpus)) || step 120 "torch-$n-threads" "$here/bin/gpu_torch_test"
    has_mpirun || continue
    step 120 "torch-$n-mpirun" mpirun -n "$n" --bind-to none --oversubscribe --timeout 110 "$here/bin/gpu_torch_test"
    resnet18 "torch-resnet18-$n" "$n" --image=64 --batch=32 --steps=20
    resnet18 "torch-resnet18-$n-sync-bn" "$n" --image=64 --batch=32 --steps=20 --sync_bn=1 --channels_last=1
    ((n <= gpus)) || continue
    resnet18 "torch-speed-$n" "$n" --image=224 --batch=$((128 * n)) --steps=20 --compare=15
    resnet18 "torch-speed-$n-release" "$n" --image=224 --batch=$((128 * n)) --steps=20 --compare=15 --release=1
    resnet18 "torch-speed-$n-channels-last" "$n" --image=224 --batch=$((128 * n)) --steps=20 --compare=15 --channels_last=1
  done
}

resnet18() {
  local name=$1 n=$2
  shift 2
  step 120 "$name" mpirun -n "$n" --bind-to none --oversubscribe "$here/bin/train_resnet18" --device=cuda "$@"
}

# Unpacks the programs, and adds the folders of cuBLAS and cuDNN to LD_LIBRARY_PATH if the loader does not find them.
unpack() {
  local library found
  [[ -d $here/bin ]] || tar -C "$here" -xJf "$here/files.tar.xz"
  for library in libcublasLt.so.1[23] libcudnn.so.9; do
    ldconfig -p 2>/dev/null | grep -q "${library%%[*}" && continue
    found=$(find /usr/local /opt /usr/lib -name "$library" 2>/dev/null | sort -V | tail -n 1)
    [[ -z $found ]] || export LD_LIBRARY_PATH=${found%/*}${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
  done
}

# Prints text as a JSON string.
quoted() {
  local text=${1//\\/\\\\}
  printf '"%s"' "${text//\"/\\\"}"
}

summary() {
  local row name result seconds why first=1
  {
    printf '{"commit": %s, "host": %s, "gpus": [' "$(quoted "$(cat "$here/libddp-commit")")" "$(quoted "$(uname -sr)")"
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
      --data=?*) data=${argument#*=} ;;
      --part=?*) parts=${argument#*=} ;;
      --gpus=[0-9]*) ((${argument#*=} >= gpus)) || gpus=${argument#*=} ;;
      --share=[1-9]*) share=${argument#*=} ;;
      *)
        echo "error: unknown argument $argument; see --help" >&2
        return 2
        ;;
    esac
  done
  mkdir -p -- "$out" && out=$(cd -- "$out" && pwd) || return 2
  unpack
  nvidia-smi --query-gpu=index,name,driver_version,memory.total --format=csv,noheader 2>/dev/null || echo "no GPU"
  ((gpus > 0)) && CUDA_VISIBLE_DEVICES=$(seq -s, 0 $((gpus - 1))) && export CUDA_VISIBLE_DEVICES
  if ((share > 1)); then
    ((gpus == 1)) || {
      echo "error: --share needs one GPU, there are $gpus; with more, add --gpus=1" >&2
      return 2
    }
    # Few blocks each, so that the ranks' kernels run at the same time.
    export NCCL_MULTI_RANK_GPU_ENABLE=1 NCCL_MAX_CTAS=${NCCL_MAX_CTAS-8}
  fi
  local part
  for part in doctor unit device nccl fault staged auto ddp torch train cnn graph graphspeed bench; do
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
