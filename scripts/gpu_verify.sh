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
  ddp     DistributedDataParallel and the example layers on 1, 2 and 4 GPUs
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
diagnosed_hang() {
  local begin=$SECONDS code=0 says behind=${DDP_NCCL_LIBRARY-libnccl.so.2}
  says=$(FAULTY_NCCL_BEHIND=$behind DDP_NCCL_LIBRARY=$here/bin/libfaulty_nccl.so \
    FAULTY_NCCL=AllReduce:stuck mpirun -n "$1" --bind-to none "$here/bin/ddp_doctor") || code=$?
  printf '%s\nexit code %d, in %d s\n' "$says" $code $((SECONDS - begin))
  ((code == 1 && SECONDS - begin <= 12)) && grep -q "all-reduce of 4 B hung" <<<"$says" &&
    grep -q "ddp_doctor --limit" <<<"$says" && grep -q "auto chooses hierarchical" <<<"$says"
}

part_unit() {
  step 60 unit-policy "$here/bin/nccl_policy_test"
  step 120 unit-group "$here/bin/nccl_group_test"
  step 120 unit-failure "$here/bin/nccl_failure_test"
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
    # As on two hosts: what is captured needs the host.
    DDP_NODE_SIZE=$((n / 2)) staged_test "$n" gpu_nccl_test "~[nccl] ~*graph*"
    DDP_NODE_SIZE=$((n / 2)) staged_test "$n" gpu_ddp_test "~[nccl] ~*captured* ~replays*"
    # Everything by the copy engines.
    export DDP_STAGED_LIMITS=copies=0,chunk=64K
    staged_test "$n" gpu_nccl_test "~[nccl]"
    staged_test "$n" gpu_ddp_test "~[nccl]"
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
  step 150 "staged-$n-$program${DDP_STAGED_LIMITS:+-copies}${DDP_NODE_SIZE:+-nodes}" mpirun -n "$n" --bind-to none \
    --oversubscribe --timeout 140 "$here/bin/$program" "$@"
}

# The hierarchical backend and NCCL without P2P, in turn: all-reduces, and the steps of models.
staged_speed() {
  local n=$1 round backend model
  local -a speed=(--synthetic --warmup=20 --batch=128 --device=cuda --tf32)
  for round in 1 2 3; do
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
    ! has_mpirun ||
      step 60 "ddp-$n-mpirun" mpirun -n "$n" --bind-to none --oversubscribe --timeout 55 "$here/bin/gpu_ddp_test"
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

# train SECONDS NAME RANKS ARGUMENT...: writes NAME.json
train() { trainer train_mlp "$@"; }
trainer() {
  local program=$1 limit=$2 name=$3 n=$4
  shift 4
  step "$limit" "train-$name" mpirun -n "$n" --bind-to none --oversubscribe "$here/bin/$program" \
    --summary-json="$out/train-$name.json" "$@"
}

# peer_train NAME RANKS ARGUMENT...: times PyTorch's training step on the same kind of model
peer_train() {
  local name=$1 n=$2
  shift 2
  [[ -f $peers/torch_ddp.py ]] && command -v torchrun >/dev/null || return 0
  step 90 "peer-torch-ddp-$name" torchrun --nproc_per_node="$n" "$here/torch_large_mlp.py" "$peers" --device cuda \
    --batch 128 --steps 300 --warmup 60 "$@"
}

# with_memory NAME COMMAND...: runs the command, and notes the most memory that a GPU has in use meanwhile, in MiB.
with_memory() {
  local name=$1 watcher
  shift
  nvidia-smi --query-gpu=memory.used --format=csv,noheader,nounits --loop-ms=100 >"$out/memory-$name.txt" 2>/dev/null &
  watcher=$!
  "$@"
  kill "$watcher"
  wait "$watcher" 2>/dev/null
  printf '%-32s %s MiB\n' "peak memory, $name" "$(sort -n "$out/memory-$name.txt" | tail -n 1)" | tee "$out/memory-$name.log"
}

# same_losses A B TOLERANCE: compares the losses of the first steps of two runs, or only their final losses if the
# numbers of ranks differ
same_losses() {
  step 20 "train-losses-$1-$2" python3 -c '
import json, sys
a, b = (json.load(open(f)) for f in sys.argv[1:3])
one_rank = a["world_size"] == b["world_size"]
pairs = list(zip(a["first_step_losses"], b["first_step_losses"])) if one_rank else [(a["final_loss"], b["final_loss"])]
worst = max(abs(x - y) / max(1, abs(x)) for x, y in pairs)
print(len(pairs), "losses, largest difference", worst)
sys.exit(not pairs or worst > float(sys.argv[3]))' "$out/train-$1.json" "$out/train-$2.json" "$3"
}

part_train() {
  if ! has_mpirun || ! command -v python3 >/dev/null; then
    skip train "needs mpirun (Open MPI) and python3"
    return
  fi
  local n short=(--steps=40 --warmup=10)
  train 60 cpu 1 "${short[@]}" --batch=128
  train 60 gpu 1 "${short[@]}" --batch=128 --device=cuda
  same_losses cpu gpu 2e-4
  train 60 gpu-tf32 1 "${short[@]}" --batch=128 --device=cuda --tf32
  same_losses cpu gpu-tf32 2e-2
  train 60 gpu-adam 1 "${short[@]}" --batch=128 --device=cuda --optimizer=adam
  train 60 cpu-adam 1 "${short[@]}" --batch=128 --optimizer=adam
  same_losses cpu-adam gpu-adam 1e-3
  for n in 1 2 4; do
    if ((n > 1)) && ranks "$n"; then
      train 60 "gpu-$n" "$n" "${short[@]}" --batch=$((128 / n)) --device=cuda
      same_losses gpu "gpu-$n" 2e-4
    fi
    ((n <= gpus)) || continue
    train 60 "speed-$n" "$n" --synthetic --steps=3000 --warmup=500 --batch=128 --device=cuda --tf32
    peer_train "mlp-$n" "$n" --tf32
    train 60 "speed-$n-again" "$n" --synthetic --steps=3000 --warmup=500 --batch=128 --device=cuda --tf32
  done
  # 25 million parameters. The step time minus that with --reduce=none is the communication that backward does not hide.
  local large=(--synthetic --steps=800 --warmup=200 --batch=128 --device=cuda --tf32
    "--hidden=3136,3136,3136,1024")
  for n in 2 4; do
    ((n <= gpus)) || continue
    with_memory "large-$n" train 60 "large-$n" "$n" "${large[@]}"
    train 60 "large-$n-no-sync" "$n" "${large[@]}" --reduce=none
    [[ ! -f $peers/torch_ddp.py ]] || with_memory "peer-large-$n" peer_train "large-$n" "$n" --tf32 --model mlp25m
  done
  n=$((gpus < 4 ? gpus : 4))
  [[ -z $data ]] || train 200 mnist "$n" --data="$data" --batch=$((256 / n)) --epochs=6 \
    --device=cuda --tf32 --schedule=cosine
}

part_cnn() {
  if ! has_mpirun || ! command -v python3 >/dev/null; then
    skip cnn "needs mpirun (Open MPI) and python3"
    return
  fi
  local n model speed=(--synthetic --steps=1000 --warmup=200 --batch=128 --device=cuda)
  for n in 1 2 4; do
    ((n <= gpus)) || continue
    for model in lenet resnet20; do
      trainer train_cnn 60 "$model-tf32-$n" "$n" --model="$model" "${speed[@]}" --tf32
      peer_train "$model-tf32-$n" "$n" --model "$model" --tf32
      peer_train "$model-tf32-$n-last" "$n" --model "$model" --tf32 --channels-last
      trainer train_cnn 60 "$model-fp16-$n" "$n" --model="$model" "${speed[@]}" --amp=fp16
      peer_train "$model-fp16-$n" "$n" --model "$model" --amp fp16
      peer_train "$model-fp16-$n-last" "$n" --model "$model" --amp fp16 --channels-last
    done
    trainer train_cnn 120 "resnet50-fp16-$n" "$n" --model=resnet50 "${speed[@]}" --steps=200 --warmup=50 --amp=fp16
    peer_train "resnet50-fp16-$n" "$n" --model resnet50 --amp fp16 --channels-last
    train 60 "mlp-fp16-$n" "$n" "${speed[@]}" --amp=fp16
    peer_train "mlp-fp16-$n" "$n" --amp fp16
    [[ -z $data ]] || cnn_accuracy "$n"
  done
  # N ranks with B / N images that normalise together, and one with B that does not.
  local sync=(--model=resnet20 --steps=20 --warmup=5 --lr=0.02 --device=cuda)
  trainer train_cnn 60 sync-bn-whole 1 "${sync[@]}" --batch=32
  for n in 1 2 4; do
    ((n == 1)) || ranks "$n" || continue
    trainer train_cnn 60 "sync-bn-$n" "$n" "${sync[@]}" --batch=$((32 / n)) --sync-bn
    same_losses sync-bn-whole "sync-bn-$n" 1e-2
  done
  if python3 -c 'import torch' 2>/dev/null; then
    step 60 cnn-parity-mlp python3 "$here/torch_parity_test.py" mlp "$here/bin/train_mlp" --device=cuda
    step 60 cnn-parity-lenet python3 "$here/torch_parity_test.py" lenet "$here/bin/train_cnn" --device=cuda
    step 60 cnn-parity-resnet20 python3 "$here/torch_parity_test.py" resnet20 "$here/bin/train_cnn" --device=cuda
    step 120 cnn-parity-resnet50 python3 "$here/torch_parity_test.py" resnet50 "$here/bin/train_cnn" --device=cuda
  else
    skip cnn-parity "PyTorch is not installed"
  fi
}

cnn_accuracy() {
  local n=$1 precision train_flags=(--data="$data" --batch=$((128 / $1)) --epochs=5 --schedule=cosine --device=cuda)
  for precision in --tf32=false --tf32 --amp=fp16 --amp=bf16; do
    trainer train_cnn 90 "mnist-lenet-$(tr -d = <<<"${precision#--}")-$n" "$n" "${train_flags[@]}" "$precision"
  done
}

# graph_run NAME RANKS MODEL ARGUMENT...: trains mlp, or a convolutional network
graph_run() {
  local name=$1 n=$2 model=$3
  shift 3
  if [[ $model == mlp ]]; then
    train 90 "$name" "$n" --synthetic --device=cuda "$@"
  else
    trainer train_cnn 90 "$name" "$n" --model="$model" --synthetic --device=cuda "$@"
  fi
}

# graph_equals NAME RANKS MODEL ARGUMENT...: without and with --cuda-graph the same losses and parameters
graph_equals() {
  local name=$1
  shift
  graph_run "$name-eager" "$@" --deterministic
  graph_run "$name-graph" "$@" --deterministic --cuda-graph
  same_bits "$name-eager" "$name-graph"
}

# same_bits A B [FIRST]: compares two runs, the second of which replayed its steps, and begins with step FIRST
same_bits() {
  step 20 "train-bits-$2" python3 -c '
import json, sys
a, b = (json.load(open(f)) for f in sys.argv[1:3])
wrong = [k for k in ("parameters_sha256", "final_loss", "test_accuracy", "steps", "skipped_steps") if a[k] != b[k]]
want = a["first_step_losses"][int(sys.argv[3]):]
if not want or want != b["first_step_losses"][:len(want)]: wrong.append("losses")
if not b["cuda_graph"]: wrong.append("the second run has no graph")
print("differ:", wrong or "nothing", want, b["first_step_losses"])
sys.exit(bool(wrong))' "$out/train-$1.json" "$out/train-$2.json" "${3-0}"
}

part_graph() {
  if ! has_mpirun || ! command -v python3 >/dev/null; then
    skip graph "needs mpirun (Open MPI) and python3"
    return
  fi
  local n backend short=(--steps=40 --warmup=10 --batch=64)
  for n in 1 2; do
    if ((n > gpus)); then
      skip "graph-$n" "needs $n GPUs, there are $gpus"
      continue
    fi
    step 60 "capture-step-$n" mpirun -n "$n" --bind-to none --oversubscribe "$here/bin/capture_step"
    step 60 "cuda-streams-$n" mpirun -n "$n" --bind-to none --oversubscribe "$here/bin/03_cuda_streams"
    graph_equals "bits-mlp-$n" "$n" mlp "${short[@]}" --optimizer=adamw --weight-decay=0.01 --schedule=cosine
    graph_equals "bits-mlp-fp16-$n" "$n" mlp "${short[@]}" --amp=fp16 --accumulate=3 --clip-norm=0.5 --lr-warmup=10
    graph_equals "bits-lenet-$n" "$n" lenet "${short[@]}" --tf32
    graph_equals "bits-lenet-fp16-$n" "$n" lenet "${short[@]}" --amp=fp16 --schedule=cosine
    graph_equals "bits-resnet20-$n" "$n" resnet20 "${short[@]}"
    graph_equals "bits-resnet20-bf16-$n" "$n" resnet20 "${short[@]}" --amp=bf16 --accumulate=2
    graph_run "bits-part-$n" "$n" resnet20 --batch=64 --steps=15 --amp=fp16 --deterministic --cuda-graph --save="$out/part-$n.ckpt"
    graph_run "bits-rest-$n" "$n" resnet20 --batch=64 --steps=40 --amp=fp16 --deterministic --cuda-graph --resume="$out/part-$n.ckpt"
    graph_run "bits-whole-$n" "$n" resnet20 --batch=64 --steps=40 --amp=fp16 --deterministic
    same_bits "bits-whole-$n" "bits-rest-$n" 15
  done
  if ((gpus >= 2)); then
    for backend in nccl hierarchical; do
      graph_equals "bits-lenet-$backend" 2 lenet "${short[@]}" --backend="$backend"
      graph_equals "bits-mlp-$backend" 2 mlp "${short[@]}" --backend="$backend" --amp=fp16
    done
  fi
}

part_graphspeed() {
  if ! has_mpirun || ! command -v python3 >/dev/null; then
    skip graphspeed "needs mpirun (Open MPI) and python3"
    return
  fi
  local n
  for n in 1 2 4; do
    ((n > gpus)) || graph_speed "$n"
  done
}

# Ours without and with a graph in turn, and PyTorch's: it captures no step of its DistributedDataParallel.
graph_speed() {
  local n=$1 round model precision steps
  for round in 1 2; do
    for model in mlp lenet resnet20 resnet50; do
      for precision in --tf32 --amp=fp16; do
        [[ $model != resnet50 || $precision == --amp=fp16 ]] || continue
        steps=2000
        [[ $model != resnet20 ]] || steps=600
        [[ $model != resnet50 ]] || steps=120
        local name="graph-$model-${precision##*[-=]}-$n-$round"
        local ours=(--batch=128 --steps="$steps" --warmup=$((steps / 4)) "$precision")
        graph_run "$name-eager" "$n" "$model" "${ours[@]}"
        graph_run "$name" "$n" "$model" "${ours[@]}" --cuda-graph
        ((n == 1)) || continue
        local theirs=(--no-ddp --cuda-graph --model "$model" --channels-last)
        [[ $precision == --tf32 ]] && theirs+=(--tf32) || theirs+=(--amp fp16)
        [[ $model != mlp ]] || theirs=("${theirs[@]/--channels-last/}")
        # shellcheck disable=SC2068 # an empty word goes
        peer_train "$name" 1 ${theirs[@]}
        # shellcheck disable=SC2068
        peer_train "$name-compile" 1 ${theirs[@]} --compile
      done
    done
  done
  graph_table "$n"
}

# Milliseconds a step, the median of each run.
graph_table() {
  step 20 "graph-table-$1" python3 -c '
import glob, json, re, sys
rows = {}
for path in sorted(glob.glob(sys.argv[1] + "/train-graph-*-" + sys.argv[2] + "-[0-9]*.json")):
    model, precision, _, _, eager = re.search(r"train-graph-(\w+)-(\w+)-(\d)-(\d)(-eager)?\.json", path).groups()
    run = json.load(open(path))
    rows.setdefault((model, precision), {}).setdefault("eager" if eager else "graph", []).append(run)
print(f"{sys.argv[2]} GPU(s), us a step (every run): without a graph | with | samples/s without | with")
for key, runs in rows.items():
    us = lambda kind: " ".join("%.1f" % (1e3 * run["step_ms"]["median"]) for run in runs.get(kind, []))
    rate = lambda kind: " ".join("%.0f" % run["samples_per_second"] for run in runs.get(kind, []))
    print(*key, "|", us("eager"), "|", us("graph"), "|", rate("eager"), "|", rate("graph"))' "$out" "$1"
  cat "$out/graph-table-$1.log"
}

part_bench() {
  local n
  step 120 bench-device "$here/bin/device_bench" --json "$out/bench-device.json"
  step 30 bench-amp-host "$here/bin/unscale_bench" host cuda
  export DDP_BACKEND=nccl # for one rank auto would choose local
  step 120 bench-p2p "$here/bin/p2p_bench" --json "$out/bench-p2p.json"
  for n in 1 2 4; do
    if ((n > gpus)) || ! has_mpirun; then
      skip "bench-nccl-$n" "needs $n GPUs and mpirun (Open MPI); there are $gpus"
      continue
    fi
    ((n == 1)) || exposed "$n"
    step 150 "bench-nccl-$n-allocated" mpirun -n "$n" --bind-to none --oversubscribe "$here/bin/ddp_perf" --device cuda \
      --peer -G 1 --placement in --json "$out/bench-nccl-$n-allocated.json"
    peer_bench "$n"
    step 100 "bench-nccl-$n-plain" mpirun -n "$n" --bind-to none --oversubscribe "$here/bin/ddp_perf" --device cuda \
      --peer -G 1 --placement in --ordinary --json "$out/bench-nccl-$n-plain.json"
    step 150 "bench-nccl-$n-others" mpirun -n "$n" --bind-to none --oversubscribe "$here/bin/ddp_perf" --device cuda --peer -f 16 \
      --collectives all_gather,reduce_scatter,broadcast,all_to_all --json "$out/bench-nccl-$n-others.json"
  done
}

# What of the communication the backward pass does not hide, beside one reduction after it.
exposed() {
  local n=$1 bench=(mpirun -n "$1" --bind-to none --oversubscribe "$here/bin/exposed_bench" --device=cuda --target=0.35)
  step 60 "bench-exposed-$n-mlp" "${bench[@]}" --hidden=3136,3136,3136,1024 --batch=128 --precision=tf32 --steps=50 \
    --json="$out/bench-exposed-$n-mlp.json"
  step 60 "bench-exposed-$n-resnet20" "${bench[@]}" --model=resnet20 --batch=128 --precision=fp16 --bucket_mb=0 \
    --json="$out/bench-exposed-$n-resnet20.json"
  step 60 "bench-exposed-$n-resnet50-32" "${bench[@]}" --model=resnet50 --batch=32 --precision=fp16 \
    --json="$out/bench-exposed-$n-resnet50-32.json"
  step 60 "bench-exposed-$n-resnet50-128" "${bench[@]}" --model=resnet50 --batch=128 --precision=fp16 \
    --json="$out/bench-exposed-$n-resnet50-128.json"
}

# Runs the peers' programs between ours.
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
