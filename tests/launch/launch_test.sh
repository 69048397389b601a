#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Starting under launchers, as users meet it.
#
#   launch_test.sh CASE LAUNCH_RANK TRAIN_MLP [MPIRUN...]
#
# MPIRUN is a command line that the number of ranks is added to; TRAIN_MLP may be empty. Ends with 77 where the case cannot be run.
set -u

case_name=$1
launch_rank=$2
train_mlp=$3
shift 3
mpirun=("$@")
support=$(cd "$(dirname "$0")/../support" && pwd) || exit 1
folder=$(mktemp -d) || exit 1
trap 'rm -rf "$folder"' EXIT
mkdir "$folder/run" "$folder/out" && chmod 700 "$folder/run" && cd "$folder/out" || exit 1
export XDG_RUNTIME_DIR=$folder/run DDP_TIMEOUT=60
unset DDP_STORE_SECRET DDP_STORE_PORT

fail() {
  echo "FAILED: $*"
  head -n 50 -- *
  exit 1
}

skip() {
  echo "skipped: $*"
  exit 77
}

# shellcheck source=tests/support/free_port.sh
. "$support/free_port.sh"

# as_torchrun RANK SIZE [VARIABLE=VALUE...]: one rank as torchrun starts it, in the background; its words go to the file RANK, or to JOB.RANK.
pids=()
as_torchrun() {
  local rank=$1 size=$2
  shift 2
  env RANK="$rank" WORLD_SIZE="$size" LOCAL_RANK="$rank" LOCAL_WORLD_SIZE="$size" MASTER_ADDR=127.0.0.1 MASTER_PORT="$port" \
    TORCHELASTIC_USE_AGENT_STORE=True TORCHELASTIC_RUN_ID=job TORCHELASTIC_RESTART_COUNT=0 "$@" "$launch_rank" ${worlds:+"$worlds"} >"${job-}$rank" 2>&1 &
  pids+=($!)
}

as_srun() {
  local rank=$1 size=$2
  shift 2
  env SLURM_PROCID="$rank" SLURM_NTASKS="$size" SLURM_LOCALID="$rank" SLURM_STEP_TASKS_PER_NODE="$size" SLURM_NODEID=0 SLURM_JOB_ID="$slot" \
    SLURM_STEP_ID=0 "$@" "$launch_rank" ${worlds:+"$worlds"} >"$rank" 2>&1 &
  pids+=($!)
}

# Waits for all ranks that were started, and sets `codes`.
finish() {
  codes=()
  local pid
  for pid in "${pids[@]}"; do
    wait "$pid"
    codes+=($?)
  done
  pids=()
  [[ -z $(ls -A "$XDG_RUNTIME_DIR") ]] || fail "left behind: $(ls -A "$XDG_RUNTIME_DIR")"
}

all_succeed() {
  finish
  [[ "${codes[*]}" =~ ^[0\ ]+$ ]] || fail "exit codes ${codes[*]}"
}

# says FILE TEXT...
says() {
  local file=$1 text
  shift
  for text in "$@"; do
    grep -qF -- "$text" "$file" || fail "$file does not say: $text"
  done
}

# The sum is said by each of SIZE ranks.
all_say() {
  local size=$1 launcher=$2 rank
  for ((rank = 0; rank < size; ++rank)); do
    says $rank "rank $rank of $size, local $rank of $size, by $launcher: sum $((size * (size + 1) / 2))"
  done
}

# For a program that fails: mpirun ends the other rank as soon as one has, and both are to speak. They do to the file `said`.
# shellcheck disable=SC2016 # the inner shell's
linger='"$0" "$@" >>said 2>&1; code=$?; echo >>ended; for ((i = 0; i < 1000 && $(wc -l <ended) < 2; ++i)); do sleep 0.1; done; exit $code'

case $case_name in
  torchrun_variables)
    for size in 1 2 4; do
      for ((rank = size; rank-- > 0;)); do as_torchrun $rank $size; done
      all_succeed
      all_say $size torchrun
    done
    # The same with a secret of one's own, and with a port of one's own.
    for rank in 0 1; do as_torchrun $rank 2 DDP_STORE_SECRET=known DDP_STORE_PORT=$((port + 1)) MASTER_PORT=1; done
    all_succeed
    all_say 2 torchrun
    ;;

  several_worlds)
    # Several Contexts in one process, and then one more.
    worlds=3
    for ((rank = 3; rank-- > 0;)); do as_torchrun $rank 3; done
    all_succeed
    all_say 3 torchrun
    for rank in 0 1; do as_srun $rank 2; done
    all_succeed
    all_say 2 srun
    ;;

  srun_variables)
    for size in 1 3; do
      for ((rank = 0; rank < size; ++rank)); do as_srun $rank $size; done
      all_succeed
      all_say $size srun
    done
    ;;

  batch_script)
    # As a batch script of Slurm has it, whose program no srun has started.
    env SLURM_JOB_ID="$slot" SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_NODEID=0 SLURM_NTASKS=2 SLURM_NPROCS=2 SLURM_NNODES=1 \
      SLURM_TASKS_PER_NODE=2 DDP_LOG_LEVEL=warn "$launch_rank" >out 2>&1 || fail "exit code $?"
    says out "rank 0 of 1, local 0 of 1, by none: sum 1" "srun has not started it"
    ;;

  srun_pmix)
    # As under srun --mpi=pmix: Slurm's variables, and a service for MPI to start by, which is mpirun's here. What Slurm says
    # are two nodes can meet by MPI alone.
    # shellcheck disable=SC2016 # the inner shell's
    step='unset "${!OMPI_COMM_WORLD_@}"
      export SLURM_PROCID=$PMIX_RANK SLURM_NODEID=$PMIX_RANK SLURM_LOCALID=0 SLURM_NTASKS=2 SLURM_STEP_ID=0 SLURM_STEP_TASKS_PER_NODE="1(x2)"
      exec "$0"'
    "${mpirun[@]}" 2 bash -c "$step" "$launch_rank" >out 2>&1 || fail "exit code $?"
    for rank in 0 1; do says out "rank $rank of 2, local 0 of 1, by srun: sum 3"; done
    ;;

  hosts)
    for rank in 0 1; do as_torchrun $rank 2 LOCAL_RANK=0 LOCAL_WORLD_SIZE=1; done
    finish
    for rank in 0 1; do says $rank "rank $rank: torchrun" "mpirun -n 2"; done
    ;;

  two_jobs)
    # One has the port and waits for its second rank when the other comes.
    job=one. as_torchrun 0 2
    for ((i = 0; i < 500; ++i)); do
      [[ -z $(ls -A "$XDG_RUNTIME_DIR") ]] || break
      sleep 0.02
    done
    first=("${pids[@]}") && pids=()
    for rank in 0 1; do job=two. as_torchrun $rank 2 TORCHELASTIC_RUN_ID=other; done
    for pid in "${pids[@]}"; do
      wait "$pid" && fail "the second job has started"
    done
    says two.0 "rank 0: " "port $((port + 1))" "in use" DDP_STORE_PORT
    says two.1 "rank 1: " "'torchrun job/0'" "'torchrun other/0'" DDP_STORE_PORT
    pids=("${first[@]}")
    job=one. as_torchrun 1 2
    all_succeed
    says one.1 "rank 1 of 2, local 1 of 2, by torchrun: sum 3"
    ;;

  secrets)
    # Two jobs at a time: one whose ranks have different secrets, and one whose rank 1 has none. Rank 0 waits for longer than
    # a busy machine takes to start rank 1, and all the time.
    export DDP_TIMEOUT=12
    job=differ. as_torchrun 0 2 DDP_STORE_SECRET=one DDP_LOG_LEVEL=warn
    job=differ. as_torchrun 1 2 DDP_STORE_SECRET=another
    job=none. as_torchrun 0 2 DDP_STORE_SECRET=one DDP_STORE_PORT="$port"
    job=none. as_torchrun 1 2 DDP_STORE_PORT="$port"
    finish
    [[ ${codes[*]} == "1 1 1 1" ]] || fail "exit codes ${codes[*]}"
    says differ.0 "refused a connection: it does not know the secret" DDP_STORE_SECRET DEADLINE_EXCEEDED "rank 1 of 2 did not come"
    says differ.1 PERMISSION_DENIED "rank 1: " "different secrets" DDP_STORE_SECRET
    says none.0 DEADLINE_EXCEEDED "rank 1 of 2 did not come"
    says none.1 "rank 1: " DDP_STORE_SECRET
    ;;

  children)
    # What a rank starts, and leaves behind, keeps neither rank 0 nor the port. Rank 0 says so when it has waited in vain.
    trap 'xargs -r kill <children 2>/dev/null; rm -rf "$folder"' EXIT
    for worlds in 'sleep 300 & echo $! >>children' ""; do
      for rank in 0 1; do as_torchrun $rank 2 DDP_LOG_LEVEL=warn; done
      all_succeed
      all_say 2 torchrun
      grep "left in time" 0 && fail "rank 0 has waited for a rank that has left"
    done
    xargs kill -0 <children && [[ $(wc -l <children) == 2 ]] && exit 0
    fail "the children were not there all the time"
    ;;

  no_store)
    export DDP_TIMEOUT=1
    as_torchrun 1 2
    finish
    says 1 DEADLINE_EXCEEDED "rank 1: " "127.0.0.1:$((port + 1))" "did not appear within 1s" "is the rank that serves it started"
    ;;

  mpi_worlds)
    # Two Contexts at a time; MPI, which the first one started, ends with the last one, and does not start again. Over nodes,
    # so that there are messages of MPI.
    DDP_NODE_SIZE=1 "${mpirun[@]}" 2 bash -c "$linger" "$launch_rank" 1 >out 2>&1 && fail "succeeded"
    [[ $(grep -c "MPI has ended with the last Context of this process.* MPI_Init_thread" said) == 2 ]] || fail "not said by both ranks"
    ;;

  contradiction)
    RANK=0 WORLD_SIZE=5 LOCAL_RANK=0 LOCAL_WORLD_SIZE=5 "${mpirun[@]}" 2 bash -c "$linger" "$launch_rank" >out 2>&1 && fail "succeeded"
    [[ $(grep -c "Open MPI's mpirun and torchrun contradict each other" said) == 2 ]] || fail "not said by both ranks"
    ;;

  mpich_launcher)
    command -v mpirun.mpich >/dev/null || skip "there is no mpirun.mpich"
    mpirun.mpich -n 2 bash -c "$linger" "$launch_rank" >out 2>&1 && fail "succeeded"
    [[ $(grep -c "MPI says rank 0 of 1 but mpirun says rank . of 2; start the program with the mpirun of the MPI that" said) == 2 ]] ||
      fail "not said by both ranks"
    ;;

  torchrun)
    if [[ -n ${DDP_TEST_TORCHRUN-} ]]; then
      torchrun=("$DDP_TEST_TORCHRUN")
    elif command -v torchrun >/dev/null; then
      torchrun=(torchrun)
    elif python3 -c 'import torch.distributed.run' 2>/dev/null; then
      torchrun=(python3 -m torch.distributed.run)
    else
      skip "PyTorch is not installed; set DDP_TEST_TORCHRUN to the path of its torchrun"
    fi
    torchrun+=("--master_port=$port")
    export PYTHONWARNINGS=ignore
    "${torchrun[@]}" --nproc_per_node=2 --no-python "$launch_rank" >out 2>&1 || fail "exit code $?"
    for rank in 0 1; do says out "rank $rank of 2, local $rank of 2, by torchrun: sum 3"; done
    [[ -z $(ls -A "$XDG_RUNTIME_DIR") ]] || fail "left behind: $(ls -A "$XDG_RUNTIME_DIR")"
    [[ -n $train_mlp && ${#mpirun[@]} -gt 0 ]] || exit 0
    # The parameters after training are those that mpirun gives, to the last bit.
    flags=("--hidden=128,64" --batch=32 --epochs=6 --deterministic)
    "${torchrun[@]}" --nproc_per_node=2 --no-python "$train_mlp" "${flags[@]}" --summary_json=torchrun.json >out 2>&1 || fail "exit code $?"
    says out "2 ranks started by torchrun"
    "${mpirun[@]}" 2 "$train_mlp" "${flags[@]}" --summary_json=mpirun.json >out 2>&1 || fail "exit code $?"
    says out "2 ranks started by mpirun"
    sha=$(grep parameters_sha256 mpirun.json) || fail "no digest"
    says torchrun.json "$sha"
    grep -qE '"test_accuracy": (1|0\.9[5-9])' torchrun.json || fail "accuracy"
    # Told to stop, torchrun passes that on; the ranks save, and go on from there as if nothing had been.
    flags=(--hidden=64 --deterministic)
    rm out
    "${torchrun[@]}" --nproc_per_node=2 --no-python "$train_mlp" "${flags[@]}" --steps=1000000 --save=checkpoint >out 2>&1 &
    for ((i = 0; i < 600; ++i)); do
      grep -qs "^epoch" out && break
      sleep 0.1
    done
    kill -TERM $!
    wait $! && fail "torchrun has not heard of it"
    step=$(sed -n 's/^train_mlp: stopped by SIGTERM after step \([0-9]*\); go on from there with --resume=checkpoint$/\1/p' out)
    [[ $step && -s checkpoint && ! -e checkpoint.tmp ]] || fail "nothing saved"
    "${torchrun[@]}" --nproc_per_node=2 --no-python "$train_mlp" "${flags[@]}" --steps=$((step + 5)) --resume=checkpoint \
      --summary_json=resumed.json >out 2>&1 || fail "exit code $?"
    "${mpirun[@]}" 2 "$train_mlp" "${flags[@]}" --steps=$((step + 5)) --summary_json=whole.json >out 2>&1 || fail "exit code $?"
    says resumed.json "$(grep parameters_sha256 whole.json)"
    ;;

  *)
    echo "no such case: $case_name"
    exit 1
    ;;
esac
