#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The programs train_mlp and train_cnn as their users meet them.
#
#   train_mlp_test.sh CASE PROGRAM [MPIRUN...]
#
# PROGRAM is train_cnn for the cases that begin with cnn_, else train_mlp. MPIRUN is a command line that the number of ranks is
# added to; without it, only the cases help, one_rank, cnn_help, cnn_one_rank and cnn_learns can be run.
set -u

case_name=$1
train_mlp=$2
program=$(basename "$train_mlp")
shift 2
mpirun=("$@")
# Else Open MPI 5 may complain on standard error that it cannot tell which network interface leads to the same host.
export OMPI_MCA_btl_tcp_if_include=lo
# shellcheck source-path=SCRIPTDIR source=../support/in_folder.sh
source "$(dirname "${BASH_SOURCE[0]}")/../support/in_folder.sh"

# run RANKS FLAG...: sets `code`, and leaves what the program wrote in the files out and err. With "apart" for RANKS, only the
# second of two ranks gets the flags.
run() {
  local ranks=$1
  shift
  if [[ $ranks == 1 ]]; then
    "$train_mlp" "$@" >out 2>err
  elif [[ $ranks == apart ]]; then
    # Not by "mpirun -n 1 PROGRAM : -n 1 PROGRAM FLAG...", which makes Open MPI 5.0's mpirun crash when a program fails.
    # shellcheck disable=SC2016 # the inner shell's
    "${mpirun[@]}" 2 bash -c '[[ $OMPI_COMM_WORLD_RANK == 1 ]] || set --; exec "$0" "$@"' "$train_mlp" "$@" >out 2>err
  else
    "${mpirun[@]}" "$ranks" "$train_mlp" "$@" >out 2>err
  fi
  code=$?
}

succeeds() {
  run "$@"
  ((code == 0)) || fail "exit code $code of: $*"
}

# fails TEXT RANKS FLAG...: the program ends with an error, which is one line, said once, with TEXT in it; nothing else is left behind.
fails() {
  local text=$1
  shift
  local before
  before=$(ls -A)
  run "$@"
  ((code != 0)) || fail "succeeded: $*"
  [[ $(grep -c "^$program: " err) == 1 ]] || fail "not one line of error: $*"
  grep "^$program: " err | grep -qF -- "$text" || fail "no '$text' from: $*"
  [[ $(ls -A) == "$before" ]] || fail "left files behind: $*: $(ls -A)"
}

# start RANKS FLAG...: the same in the background, and waits until an epoch is done. Sets `job`, and `rank_pids`.
start() {
  rm -f out
  { run "$@"; exit $code; } &
  job=$!
  for ((i = 0; i < 600; ++i)); do
    grep -q "^epoch" out 2>/dev/null && break
    kill -0 $job || break
    sleep 0.05
  done
  mapfile -t rank_pids < <(pgrep -P $job)
  if (($1 > 1)); then mapfile -t rank_pids < <(pgrep -P "${rank_pids[0]:-0}"); fi
  ((${#rank_pids[@]} == $1)) || fail "not running: $*"
}

# gone PID...: waits until these ranks have ended. One that gets no processor outlives mpirun, which kills its ranks and goes.
gone() {
  local pid
  for pid; do
    for ((i = 0; i < 1200; ++i)); do
      kill -0 "$pid" 2>/dev/null || continue 2
      sleep 0.05
    done
    fail "process $pid does not end"
  done
}

# number KEY FILE: the value of a key of a summary.
number() { sed -n "s/.*\"$1\": \"\{0,1\}\([^\",}]*\).*/\1/p" "$2"; }

# holds EXPRESSION: an arithmetic comparison of decimal numbers.
holds() { awk "BEGIN { exit !($1) }" || fail "not true: $1"; }

# learns_in_16_bits FLAG...: one rank comes as far in bfloat16, by other bits, where the processor can; an error says where not.
learns_in_16_bits() {
  if grep -q avx512bw /proc/cpuinfo; then
    succeeds 1 "$@" --amp=bf16 --summary-json=short
    holds "$(number test_accuracy short) >= 0.95"
    succeeds 1 "$@" --summary-json=float
    [[ $(number parameters_sha256 short) != $(number parameters_sha256 float) ]] || fail "--amp=bf16 changes nothing"
  fi
  DNNL_MAX_CPU_ISA=AVX2 fails "--amp=bf16 needs a processor with AVX-512" 1 --amp=bf16
  fails "--amp=fp16 is for GPUs: on the CPU it may be off, bf16; or give --device=cuda too" 1 --amp=fp16
  fails "--amp=int8 is not known: it may be off, fp16, bf16" 1 --amp=int8
}

touch out err
case $case_name in
  help)
    succeeds 1 --help
    for flag in hidden data epochs steps batch drop_last optimizer lr momentum weight_decay seed threads backend no_ddp reduce \
      deterministic save save_every resume warmup summary_json monitor; do
      grep -q "^  --$flag=" out || fail "--$flag is not in --help"
    done
    grep -q "mpirun -n 2 train_mlp" out || fail "--help gives no example"
    ;;

  one_rank)
    succeeds 1 --epochs=6 --hidden=128,64 --summary-json=summary --threads=2 --monitor
    holds "$(number test_accuracy summary) >= 0.95 && $(number test_accuracy summary) <= 1"
    holds "$(number samples_per_second summary) > 0 && $(number exposed_comm_ms summary) >= 0"
    holds "$(number min summary) <= $(number median summary) && $(number median summary) <= $(number max summary)"
    holds "$(number overlap summary) >= 0 && $(number overlap summary) <= 1 && $(number peak_rss_mb summary) > 1"
    holds "$(number world_size summary) == 1 && $(number threads summary) == 2 && $(number steps summary) == 138"
    [[ $(number backend summary) == local ]] || fail "backend"
    [[ $(number parameters_sha256 summary) =~ ^[0-9a-f]{64}$ ]] || fail "parameters_sha256"
    holds "$(number flops_per_sample summary) == 2 * (2 * 64 * 128 + 3 * (128 * 64 + 64 * 10))"
    share="$(number flops_per_second summary) / $(number product_flops_per_second summary)"  # above 1 where others slow the products
    holds "$share > 0 && ($(number share_of_products summary) / ($share) - 1) ^ 2 < 1e-12"
    # A figure that was measured, or one sentence.
    if grep -q '"joules_per_sample"' summary; then
      grep -q ' J a sample, .* W (processors only' out || fail "no energy"
    else
      (($(grep -c '^energy is not measured: ' out) == 1)) || fail "no word about energy"
      (($(grep -c '^--monitor has nothing to show: ' out) == 1)) || fail "no word about --monitor"
    fi
    # What had the process before, a launcher in Python, say, is no memory of this program's.
    (
      large=$(head -c 300000000 /dev/zero | tr '\0' x)
      ((${#large} == 300000000)) && exec "$train_mlp" --steps=3 --hidden=128,64 --threads=2 --summary-json=after >out 2>err
    ) || fail "exit code $? after another program"
    holds "$(number peak_rss_mb after) < $(number peak_rss_mb summary) + 150"
    succeeds 1 --steps=30 --no-ddp --warmup 5 --summary_json=/dev/stdout
    grep -q '"measured_steps": 25' out || fail "--warmup or --summary_json=/dev/stdout"
    learns_in_16_bits --epochs=6 --hidden=128,64
    # What the figures depend on is in every result and checkpoint; nothing secret is.
    export DDP_STORE_SECRET=xyzzy
    succeeds 1 --environment
    grep -q '^{"date":.*"model".*"onednn":.*"launcher":"none"' out || fail "--environment"
    succeeds 1 --steps=1 --hidden=8 --save=checkpoint --summary-json=summary
    grep -q '"environment": {' summary || fail "no environment in the summary"
    grep -qa '"environment":{' checkpoint || fail "no environment in the checkpoint"
    ! grep -qa xyzzy out summary checkpoint || fail "a secret"
    # One rank alone compresses nothing: no seed differs.
    if command -v python3 >/dev/null; then
      python3 -B "$(dirname "${BASH_SOURCE[0]}")/../../bench/compression_accuracy.py" --bin="$(dirname "$train_mlp")" --ranks=1 \
        --seeds=2 --data=digits --modes=int8 -- --steps=40 --hidden=16 >out 2>err || fail "compression_accuracy.py"
      grep -qF "% | +0.000 | +0.000 to +0.000 |" out || fail "one rank compresses, or compression_accuracy.py compares nothing"
    fi
    ;;

  ranks)
    flags=("--hidden=128,64" --batch=32 --deterministic)
    succeeds 2 "${flags[@]}" --epochs=6 --summary_json=first
    [[ ! -s err ]] || fail "something on standard error"
    grep -q "2 ranks started by mpirun, 1 thread each, backend hierarchical; cores: rank 0 on .*; rank 1 on " out || fail "who and where"
    grep -q "^overlap: " out || fail "no overlap summary"
    [[ $(grep -c $'\r' out) == 0 ]] || fail "a progress bar in a file"
    holds "$(number test_accuracy first) >= 0.95 && $(number world_size first) == 2"
    holds "$(number overlap first) >= 0 && $(number overlap first) <= 1"
    holds "0 < $(number mean_exposed_ms first) && $(number mean_exposed_ms first) <= $(number mean_communication_ms first)"
    # The same command, the same bits; another seed, other bits.
    succeeds 2 "${flags[@]}" --epochs=6 --summary_json=second
    [[ $(number parameters_sha256 first) == $(number parameters_sha256 second) ]] || fail "runs differ"
    succeeds 2 "${flags[@]}" --steps=1 --seed=2 --summary_json=second
    [[ $(number parameters_sha256 first) != $(number parameters_sha256 second) ]] || fail "--seed changes nothing"
    DDP_LOG_LEVEL=warn succeeds 2 "${flags[@]}" --steps=30 --reduce=none --summary_json=second
    [[ ! -s err ]] || fail "a warning about what was asked for"
    holds "$(number overlap second) == 0 && $(number mean_communication_ms second) == 0"
    # Compressed gradients: each way has bits of its own, the same on both ranks, and learns as much.
    seen=$(number parameters_sha256 first)
    for mode in fp16 bf16 int8 fp8; do
      succeeds 2 "${flags[@]}" --epochs=6 --compress=$mode --summary_json=second
      holds "$(number test_accuracy second) >= 0.95"
      [[ $seen != *$(number parameters_sha256 second)* ]] || fail "--compress=$mode does what another way does"
      seen+=$(number parameters_sha256 second)
    done
    ;;

  nodes)
    # Nodes of two ranks: other bits, as good a model.
    flags=("--hidden=128,64" --batch=16 --epochs=6 --deterministic)
    succeeds 4 "${flags[@]}" --summary_json=plain
    DDP_NODE_SIZE=2 succeeds 4 "${flags[@]}" --summary_json=nodes
    for name in plain nodes; do holds "$(number test_accuracy $name) >= 0.95 && $(number world_size $name) == 4"; done
    [[ $(number parameters_sha256 plain) != $(number parameters_sha256 nodes) ]] || fail "DDP_NODE_SIZE changes nothing"
    # Of two nodes of one rank the sum is that of two ranks, to the last bit.
    succeeds 2 "${flags[@]}" --summary_json=plain
    DDP_NODE_SIZE=1 succeeds 2 "${flags[@]}" --summary_json=nodes
    [[ $(number parameters_sha256 plain) == $(number parameters_sha256 nodes) ]] || fail "two nodes of one rank differ from two ranks"
    ;;

  resume)
    flags=(--hidden=64 --batch=32)
    succeeds 2 "${flags[@]}" --epochs=3 --summary_json=whole
    succeeds 2 "${flags[@]}" --steps=31 --save=checkpoint
    succeeds 2 "${flags[@]}" --epochs=3 --resume=checkpoint --summary_json=resumed
    [[ $(number parameters_sha256 whole) == $(number parameters_sha256 resumed) ]] || fail "not the same parameters"
    succeeds 1 "${flags[@]}" --batch=64 --epochs=3 --resume=checkpoint --summary_json=resumed
    holds "$(number steps resumed) == 69 && $(number test_accuracy resumed) > 0.9"
    # An epoch's loss is the mean over its samples, on however many ranks each part of it was trained.
    succeeds 2 "${flags[@]}" --steps=40 --summary_json=whole
    for ranks in 1 4; do
      succeeds $ranks "${flags[@]}" --batch=$((64 / ranks)) --steps=40 --resume=checkpoint --summary_json=resumed
      holds "($(number final_loss resumed) / $(number final_loss whole) - 1) ^ 2 < 1e-6"
    done
    # Nothing left to do: the checkpoint's model is evaluated.
    succeeds 2 "${flags[@]}" --steps=31 --resume=checkpoint --summary_json=resumed
    [[ $(number final_loss resumed) == null ]] || fail "a loss without a step"
    grep -q "^test accuracy [89].* %, loss not measured after 31 steps$" out || fail "does not say that it has no loss"
    [[ -e checkpoint && ! -e checkpoint.tmp ]] || fail "files: $(ls -A)"

    # The learning rate is a part of it; another one is taken only if it is given.
    succeeds 2 "${flags[@]}" --steps=31 --lr=0.02 --save=slow
    succeeds 2 "${flags[@]}" --steps=40 --resume=slow
    grep -q "learning rate 0.02" out || fail "the checkpoint's learning rate"
    succeeds 2 "${flags[@]}" --steps=40 --lr=0.01 --resume=slow
    grep -q "learning rate 0.01" out || fail "a learning rate of its own"
    rm slow
    fails "saved with --weight_decay=0, this run has --weight_decay=0.1" 2 "${flags[@]}" --weight-decay=0.1 --resume=checkpoint
    fails "saved with --drop_last=0, this run has --drop_last=1" 2 "${flags[@]}" --drop-last --resume=checkpoint
    fails "1.weight [64, 64] where 1.weight [32, 64] is expected" 2 --hidden=32 --batch=32 --resume=checkpoint
    fails "--optimizer=sgd, this run has --optimizer=adam" 2 "${flags[@]}" --optimizer=adam --resume=checkpoint
    cp checkpoint short && truncate -s -1000 short
    # 1408 of 1437 images are 88 batches of 16, and all that there are of 64.
    succeeds 1 --hidden=16 --batch=16 --drop-last --epochs=3 --steps=88 --save=last
    succeeds 2 --hidden=16 --batch=32 --drop-last --epochs=2 --resume=last --summary_json=resumed
    holds "$(number steps resumed) == 88 + 22"
    fails "truncated or damaged" 2 "${flags[@]}" --resume=short
    fails "not a checkpoint" 2 "${flags[@]}" --resume="$train_mlp"
    fails "No such file" 2 "${flags[@]}" --resume=missing
    # A save that fails (here: a full disk) leaves the checkpoint as it was.
    sum=$(sha256sum <checkpoint)
    (ulimit -f 8 && trap '' XFSZ &&
      fails "File too large" 1 "${flags[@]}" --batch=64 --epochs=3 --resume=checkpoint --save=checkpoint) || exit 1
    [[ $(sha256sum <checkpoint) == "$sum" ]] || fail "the checkpoint has changed"
    ;;

  stop)
    # A signal to any one rank stops all of them after the same step, which is saved; from there training goes on as if nothing had been.
    for ranks in 1 2; do
      for signal in USR1 TERM; do
        rm -f checkpoint
        start $ranks --hidden=64 --deterministic --steps=1000000 --save=checkpoint
        # Meanwhile it has the file for itself, also by another name.
        ln -s checkpoint link
        for name in checkpoint link; do
          "$train_mlp" --hidden=64 --steps=1 --save=$name >second.out 2>second.err && fail "two trainings save to one file"
          grep -q "^train_mlp: cannot write $name: another process writes it, and holds checkpoint.lock; wait for its end, or give" second.err ||
            fail "does not say who writes $name: $(cat second.err)"
        done
        rm link second.*
        kill -$signal "${rank_pids[-1]}"
        wait $job
        [[ $? == 75 ]] || fail "exit code"
        [[ $(grep -c '^train_mlp: ' err) == 1 ]] || fail "not one line that says that it was stopped"
        step=$(sed -n "s/^train_mlp: stopped by SIG$signal after step \([0-9]*\); go on from there with --resume=checkpoint$/\1/p" err)
        [[ $step ]] || fail "does not say after which step SIG$signal stopped it"
        [[ $(ls -A) == $'checkpoint\nerr\nout' ]] || fail "left files behind: $(ls -A)"
      done
      succeeds $ranks --hidden=64 --deterministic --steps=$((step + 5)) --resume=checkpoint --summary_json=resumed
      holds "$(number steps resumed) == $step + 5"
      succeeds $ranks --hidden=64 --deterministic --steps=$((step + 5)) --summary_json=whole
      [[ $(number parameters_sha256 whole) == $(number parameters_sha256 resumed) ]] || fail "not the same parameters"
      rm whole resumed
    done
    # mpirun, told to stop, stops its ranks; it does not always pass on what they then say. It kills a rank that needs more than a
    # second for that: what this rank leaves behind is the next training's.
    rm -f checkpoint
    start 2 --hidden=64 --steps=1000000 --save=checkpoint
    pkill -TERM -P $job
    wait $job
    gone "${rank_pids[@]}"
    succeeds 2 --hidden=64 --steps=1 --resume=checkpoint --save=checkpoint
    [[ $(ls -A) == $'checkpoint\nerr\nout' ]] || fail "left files behind: $(ls -A)"
    # Without --save there is nothing to go on from.
    start 1 --hidden=64 --steps=1000000
    kill -TERM "${rank_pids[0]}"
    wait $job
    [[ $? == 75 ]] || fail "exit code without --save"
    grep -q "; nothing is saved without --save$" err || fail "does not say that nothing is saved"
    ;;

  recover)
    # A rank is stopped for longer than the time-out. When it is awake again all go on, to the same parameters.
    flags=(--hidden=64 --deterministic)
    DDP_TIMEOUT=6 start 2 "${flags[@]}" --recover --steps=1000000 --save=checkpoint
    kill -STOP "${rank_pids[1]}"
    for ((i = 0; i < 600; ++i)); do
      grep -q "timed out after" err && break
      sleep 0.05
    done
    kill -CONT "${rank_pids[1]}"
    for ((i = 0; i < 400; ++i)); do
      [[ $(sed '1,/^recovered: /d' out | grep -c '^epoch') -gt 1 ]] && break
      kill -0 $job || break
      sleep 0.05
    done
    kill -TERM "${rank_pids[0]}"
    wait $job
    [[ $? == 75 ]] || fail "exit code"
    [[ $(grep -c '^recovered: backend hierarchical with all 2 ranks, since .* timed out .*; goes on from step [0-9]*$' out) == 1 ]] ||
      fail "does not say that it has recovered"
    step=$(sed -n "s/^train_mlp: stopped by SIGTERM after step \([0-9]*\); .*/\1/p" err)
    [[ $step ]] || fail "does not say after which step it was stopped"
    succeeds 2 "${flags[@]}" --steps=$((step + 5)) --resume=checkpoint --summary_json=resumed
    succeeds 2 "${flags[@]}" --steps=$((step + 5)) --summary_json=whole
    [[ $(number parameters_sha256 whole) == $(number parameters_sha256 resumed) ]] || fail "not the same parameters"
    ;;

  killed)
    # Killed again and again, at any moment, saving after every step: the training goes on with the same bits.
    flags=(--hidden=64 --batch=32 --deterministic)
    resume=()
    for pause in 0 0.11 0.02 0.07 0.15 0.04; do
      start 2 "${flags[@]}" --epochs=1000000 "${resume[@]}" --save=checkpoint --save-every=1
      sleep $pause
      kill -KILL "${rank_pids[RANDOM % 2]}"
      wait $job
      gone "${rank_pids[@]}"  # the file is locked until then
      resume=(--resume=checkpoint)
    done
    succeeds 2 "${flags[@]}" --steps=1 --resume=checkpoint
    step=$(sed -n "s/.*resumed from checkpoint at step \([0-9]*\) of .*/\1/p" out)
    ((step > 100)) || fail "saved nothing after step $step"
    succeeds 2 "${flags[@]}" --steps=$((step + 30)) --resume=checkpoint --summary_json=resumed
    succeeds 2 "${flags[@]}" --steps=$((step + 30)) --summary_json=whole
    holds "$(number steps resumed) == $step + 30"
    [[ $(number parameters_sha256 whole) == $(number parameters_sha256 resumed) ]] || fail "not the same parameters"
    [[ $(ls -A) == $'checkpoint\nerr\nout\nresumed\nwhole' ]] || fail "left files behind: $(ls -A)"
    ;;

  errors)
    fails "unknown flag --epoch;" 1 --epoch=3
    fails "--batch=many is not a whole number" 1 --batch=many
    fails "--batch=0 is out of range" 1 --batch=0
    fails "--lr=nan is out of range" 1 --lr=nan
    fails "--optimizer=lion is not known" 1 --optimizer=lion
    fails "give --save=FILE too" 1 --save-every=5
    fails "--schedule=linear is not known: it may be constant, cosine, step" 1 --schedule=linear
    fails "--accumulate=0 is out of range" 1 --accumulate=0
    fails "--label_smoothing=1.5 is out of range" 1 --label-smoothing=1.5
    fails "--data has no value: write --data=FOLDER" 1 --data=
    fails "--synthetic takes no --data" 1 --synthetic --data=/nowhere
    fails "--hidden=64,x cannot be understood" 1 --hidden=64,x
    fails "--epochs has no value" 1 --epochs
    fails "\"digits\" is not a flag" 1 digits
    fails "--device=tpu is not known: it may be cpu, cuda" 1 --device=tpu
    fails "--tf32 is for GPUs: give --device=cuda too" 1 --tf32
    fails "--backend=nccl is for GPUs: give --device=cuda too" 1 --backend=nccl
    CUDA_VISIBLE_DEVICES="" fails "CUDA" 1 --device=cuda --amp=fp16
    fails "give a smaller --batch" 1 --batch=1500 --drop-last
    # On several ranks one of them speaks for all.
    fails "unknown flag --epoch;" 2 --epoch=3
    fails "in the folder /nowhere: give --data" 2 --data=/nowhere
    fails "cannot write --summary_json=/nowhere/s" 2 --summary_json=/nowhere/s
    fails "cannot write --summary_json=." 2 --summary_json=.
    fails "cannot create /nowhere/c.lock" 2 --save=/nowhere/c
    fails "cannot write the timeline to /nowhere/t" 1 --trace=/nowhere/t
    fails "--trace=/dev/full exists and is not a regular file" 2 --trace=/dev/full
    # Each output has a file of its own, however it is spelled.
    fails "--save=a and --export_weights=a name the same file" 2 --save=a --export-weights=a
    fails "--save=./a and --summary_json=a name the same file" 1 --save=./a --summary-json=a
    fails "--export_weights=a and --trace=$PWD/a name the same file" 1 --export-weights=a --trace="$PWD/a"
    mkdir folder && ln -s folder/c link
    fails "--save=link and --summary_json=folder//c name the same file" 1 --save=link --summary-json=folder//c
    rm -r folder link
    for flag in --help --environment; do
      "$train_mlp" $flag >/dev/full 2>err && fail "$flag succeeds on a full disk"
      grep -q "^train_mlp: cannot write to standard output" err || fail "$flag does not say that it cannot be written"
    done
    fails "the training loss is not finite in step" 2 --lr=1000000 --hidden=256,256
    mkdir mnist
    for name in train-images-idx3 train-labels-idx1 t10k-images-idx3 t10k-labels-idx1; do echo hello >mnist/$name-ubyte; done
    fails "train-images-idx3-ubyte: it is not an IDX file" 2 --data=mnist
    fails "--no_ddp is for one rank" 2 --no-ddp
    fails "--reduce=ring is not known: it may be overlap, end, each, gather, none" 1 --reduce=ring
    fails "--bucket_mb does not go with --reduce=end" 1 --reduce=end --bucket-mb=1
    fails "--recover does not go with --reduce=none" 1 --reduce=none --recover
    fails "--recover does not go with a gradient scaler" 1 --device=cuda --amp=fp16 --recover
    fails "--compress=int4 is not known: it may be off, fp16, bf16, int8, fp8" 1 --compress=int4
    fails "--compress does not go with --reduce=gather, which does not reduce in buckets" 1 --compress=int8 --reduce=gather
    fails "--compress does not go with --no_ddp" 1 --compress=int8 --no-ddp
    fails "--save does not go with --reduce=none" 1 --reduce=none --save=c
    # Ranks that are not alike.
    fails "rank 1: no train-images-idx3-ubyte" apart --data=/nowhere
    fails "rank 1 has --batch=32, rank 0 has --batch=64; give all ranks the same flags" apart --batch=32
    fails "rank 1 has --compress=fp8, rank 0 has --compress=off; give all ranks the same flags" apart --compress=fp8
    fails "rank 1 has --momentum=0.9000001, rank 0 has --momentum=0.9; give all ranks the same flags" apart --momentum=0.9000001
    fails "rank 1: unknown flag --epoch" apart --epoch=3
    ;;

  cnn_help)
    succeeds 1 --help
    for flag in model sync_bn amp data synthetic augment accumulate bucket_mb schedule init_weights export_weights save resume; do
      grep -q "^  --$flag=" out || fail "--$flag is not in --help"
    done
    fails "--model=alexnet is not known: it may be lenet, resnet20, resnet50" 1 --model=alexnet
    fails "unknown flag --hidden" 1 --hidden=3
    ;;

  cnn_one_rank)
    succeeds 1 --epochs=5 --augment --label-smoothing=0.05 --summary-json=summary
    holds "$(number test_accuracy summary) >= 0.95"
    learns_in_16_bits --epochs=5
    succeeds 1 --synthetic --steps=3 --batch=8
    grep -q "32768 training and 512 test images of 28x28$" out || fail "synthetic images for lenet"
    succeeds 1 --model=resnet20 --synthetic --steps=3 --batch=8 --no-ddp --clip-norm=1
    grep -q "test images of 32x32 in 3 channels$" out || fail "synthetic images for resnet20"
    succeeds 1 --model=resnet50 --synthetic --steps=2 --batch=2 --lr=0.001
    grep -q "8192 training and 32 test images of 224x224 in 3 channels$" out || fail "synthetic images for resnet50"
    grep -q " 25557032 parameters;" out || fail "parameters of resnet50"
    ;;

  # Minutes where oneDNN has no fast kernels for layers of a few pixels.
  cnn_learns)
    succeeds 1 --model=resnet20 --epochs=4 --schedule=cosine --lr-warmup=20 --lr=0.1 --weight-decay=0.0005 --summary-json=summary
    holds "$(number test_accuracy summary) >= 0.9"
    ;;

  cnn_ranks)
    # Any grouping of the same global batch trains alike; with batch norm in batches of the same size, to the bit.
    succeeds 1 --batch=64 --steps=20 --summary_json=one
    succeeds 2 --batch=16 --accumulate=2 --steps=20 --summary_json=two
    holds "$(number final_loss one) - $(number final_loss two) < 1e-3 && $(number final_loss two) - $(number final_loss one) < 1e-3"
    # Batches that are normalised together are one batch.
    succeeds 1 --model=resnet20 --batch=32 --steps=4 --lr=0.02 --summary_json=one
    succeeds 2 --model=resnet20 --batch=16 --steps=4 --lr=0.02 --sync-bn --summary_json=two
    holds "$(number final_loss one) - $(number final_loss two) < 1e-3 && $(number final_loss two) - $(number final_loss one) < 1e-3"
    flags=(--model=resnet20 --batch=8 --deterministic --augment)
    succeeds 2 "${flags[@]}" --steps=8 --export-weights=weights --summary_json=whole
    succeeds 2 "${flags[@]}" --steps=8 --summary_json=again --bucket-mb=0.1
    [[ $(number parameters_sha256 whole) == $(number parameters_sha256 again) ]] || fail "runs differ"
    # Running statistics are a part of the checkpoint.
    succeeds 2 "${flags[@]}" --steps=3 --save=checkpoint
    succeeds 2 "${flags[@]}" --steps=8 --resume=checkpoint --summary_json=resumed
    for key in parameters_sha256 test_accuracy; do
      [[ $(number $key whole) == $(number $key resumed) ]] || fail "$key after resuming"
    done
    # So they are of exported weights: evaluated again, by any number of ranks, they answer as before.
    succeeds 1 "${flags[@]}" --steps=1 --lr=0 --init-weights=weights --export-weights=same --summary_json=loaded
    [[ $(number parameters_sha256 whole) == $(number parameters_sha256 loaded) ]] || fail "--init-weights"
    ;;

  cnn_errors)
    succeeds 1 --steps=2 --save=lenet.ckpt --export-weights=lenet.weights
    fails "it was saved from another model: it holds 0.weight [32, 1, 3, 3] where 0.weight [16, 1, 3, 3] is expected" 2 \
      --model=resnet20 --batch=32 --resume=lenet.ckpt
    fails "its 0.weight is [32, 1, 3, 3] where [16, 1, 3, 3] is expected; give the weights of this --model" 2 \
      --model=resnet20 --init-weights=lenet.weights
    fails "cannot begin with --init_weights=/nowhere/w: cannot open" 2 --init-weights=/nowhere/w
    head -c 5000 lenet.weights >short
    fails "cannot begin with --init_weights=short: it is truncated or damaged" 2 --init-weights=short
    fails "it is no safetensors file" 1 --init-weights=lenet.ckpt
    fails "--init_weights does not go with --resume" 1 --init-weights=lenet.weights --resume=lenet.ckpt
    fails "cannot create /nowhere/w.lock" 2 --export-weights=/nowhere/w
    fails "--recover does not go with --sync_bn" 1 --model=resnet20 --sync-bn --recover
    fails "the training loss is not finite in step" 2 --lr=1000000
    fails "--sync_bn: --model=lenet has no batch normalisation" 2 --sync-bn
    # CIFAR-10: six files of four images here.
    mkdir cifar
    for name in data_batch_{1,2,3,4,5} test_batch; do head -c $((4 * 3073)) /dev/zero >"cifar/$name.bin"; done
    succeeds 2 --model=resnet20 --data=cifar --batch=4 --steps=2
    grep -q "20 training and 4 test images of 32x32 in 3 channels" out || fail "CIFAR-10"
    truncate -s -1 cifar/data_batch_2.bin
    fails "cifar/data_batch_2.bin: it is truncated, or no binary file of CIFAR-10" 2 --model=resnet20 --data=cifar
    head -c $((3 * 3073)) /dev/zero >cifar/data_batch_2.bin
    fails "data_batch_1.bin has 4 images, data_batch_2.bin has 3" 2 --model=resnet20 --data=cifar
    head -c $((4 * 3073)) /dev/zero | tr '\0' '\377' >cifar/data_batch_2.bin
    fails "image 0 has the label 255" 2 --model=resnet20 --data=cifar
    rm cifar/data_batch_2.bin
    fails "no data_batch_2.bin in the folder cifar" 2 --model=resnet20 --data=cifar
    # Ranks that are not alike.
    fails "rank 1 has resnet20, rank 0 has lenet; give all ranks the same flags" apart --model=resnet20
    ;;

  *)
    echo "no such case: $case_name"
    exit 1
    ;;
esac
