# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash disable=SC2154
# The parts of gpu_verify.sh that train, and that measure speed; it sources this file. What is not defined here, it has.

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
