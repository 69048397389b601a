#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Trains with --backend=auto where NCCL has a planted fault: checks which backend is chosen, which cause and remedy are
# named, and that the training comes to the same.
#
#   auto_fault.sh FAULT RANKS PROGRAMS REFERENCE
#
# PROGRAMS is a folder with train_mlp, libfaulty_nccl.so and liblacking_nccl.so, and where the helper is not found by
# itself DDP_PROBE names it. FAULT "reference" trains over the hierarchical backend without asking NCCL, and writes the
# summary REFERENCE, with which those of the other faults are compared. "list" prints the faults. Where AUTO_SIMULATED is
# set, the GPUs are simulated (simulated_train_mlp): the parameters have to be the same to the bit.
set -u

readonly all_faults=(library_missing symbol_missing too_old init_error init_hang error_512k error_512k_p2p hang_first
  wrong_data one_rank slow step_100 step_100_hang step_100_recover step_100_hang_recover second_rung after_check helper_missing helper_missing_broken helper_killed
  helper_in_libexec)
if [[ ${1-} == list ]]; then
  echo "${all_faults[*]}"
  exit
fi
fault=$1 ranks=$2 programs=$3 reference=$4
support=$(cd "$(dirname "$0")" && pwd) || exit 1
[[ -e $support/free_port.sh ]] || support=$(cd "$support/../support" && pwd) || exit 1  # else beside this, in a bundle
folder=$(mktemp -d) || exit 1
trap 'rm -rf "$folder" "${nccl-}"' EXIT
cd "$folder" && mkdir run && chmod 700 run || exit 1

export XDG_RUNTIME_DIR=$folder/run DDP_PROBE_CACHE=off DDP_LOG_LEVEL=warn DDP_TIMEOUT=60
export DDP_NCCL_LIBRARY=$programs/libfaulty_nccl.so
unset DDP_BACKEND DDP_STORE_SECRET DDP_STORE_PORT FAULTY_NCCL NCCL_P2P_DISABLE
program=$programs/train_mlp
if [[ -n ${AUTO_SIMULATED-} ]]; then
  # What the ranks exchange is large, and a disk that is slow for a moment looks like a hang of NCCL.
  place=$folder
  (($(df --output=avail -k /dev/shm 2>/dev/null | tail -n 1) > 4 << 20)) && place=/dev/shm
  nccl=$(mktemp -d "$place/ddp-auto-fault.XXXXXX") || exit 1
  export SIMULATED_NCCL=$nccl DDP_PROBE=$programs/simulated_probe
  program=$programs/simulated_train_mlp
fi

# Which backend, by an extended regular expression, and what else rank 0 says. A good NCCL without P2P and the
# hierarchical backend compete.
backend=hierarchical
without_p2p="(nccl without P2P|hierarchical)"
[[ -z ${AUTO_SIMULATED-} ]] || without_p2p="nccl without P2P"
says=()
error=""  # of the training, on every rank; empty: it succeeds
recovers=()  # what is said of the recovery, with --recover; empty: there is none
case $fault in
  reference) export DDP_BACKEND=hierarchical ;;
  library_missing)
    export DDP_NCCL_LIBRARY=/no/such/libnccl.so
    says=("loading NCCL failed (NCCL cannot be loaded (" "DDP_NCCL_LIBRARY=/path/to/libnccl.so.2")
    ;;
  symbol_missing)
    export DDP_NCCL_LIBRARY=$programs/liblacking_nccl.so
    says=("loading NCCL failed (" "is no NCCL library: it lacks functions that NCCL 2.18 has" "set DDP_NCCL_LIBRARY to one")
    ;;
  too_old)
    export FAULTY_NCCL=GetVersion:old
    says=("loading NCCL failed (NCCL 2.17.3 is too old: libddp needs 2.18 or newer" "package libnccl2")
    ;;
  init_error)
    export FAULTY_NCCL=CommInitRankConfig:error
    says=("connecting the ranks failed (ncclCommInitRankConfig: unhandled cuda error" "has not been shown"
      "remedy: NCCL_DEBUG=")
    ;;
  init_hang)
    export FAULTY_NCCL=CommInitRankConfig:hang
    says=("connecting the ranks hung" "likely cause: ranks cannot reach each other by TCP, or one of the GPUs is stuck"
      "remedy: look at NCCL_SOCKET_IFNAME and the firewall")
    ;;
  error_512k)
    export FAULTY_NCCL=AllReduce:error:bytes=524288
    says=("all-reduce of 512 KiB failed (ncclAllReduce: unhandled cuda error"
      "likely cause: some versions of NCCL fail from 512 KiB on with some GPUs" "remedy: use a newer NCCL (DDP_NCCL_LIBRARY)")
    ;;
  error_512k_p2p)
    backend=$without_p2p
    export FAULTY_NCCL=AllReduce:error:bytes=524288:p2p
    says=("all-reduce of 512 KiB failed (ncclAllReduce: unhandled cuda error"
      "likely cause: the GPUs cannot use each other's memory: PCIe ACS or an IOMMU" "remedy: set NCCL_P2P_DISABLE=1")
    ;;
  hang_first)
    backend=$without_p2p
    # The hang takes a part of it; time has to be left for the next attempt on a busy machine.
    export FAULTY_NCCL=AllReduce:stuck:p2p DDP_TIMEOUT=240
    says=("all-reduce of 4 B hung" "likely cause: the GPUs cannot use each other's memory: PCIe ACS or an IOMMU"
      "remedy: set NCCL_P2P_DISABLE=1")
    ;;
  wrong_data)
    export FAULTY_NCCL=AllReduce:wrong:rank=1
    says=("on rank 1 all-reduce of 4 B moved wrong data (element 0 of 1 is 5a5a5a5a instead of"
      "likely cause: a GPU, its memory or its driver is faulty" "remedy: look for Xid errors in dmesg; update the driver")
    ;;
  one_rank)
    export FAULTY_NCCL=AllGather:error:rank=1:bytes=1048576
    says=("on rank 1 all-gather of 1 MiB failed (ncclAllGather: unhandled cuda error" "remedy: NCCL_DEBUG=")
    ;;
  slow)  # is warned of, and used
    backend=nccl
    export FAULTY_NCCL=AllReduce:slow:bytes=16777216
    says=("NCCL works, but its all-reduce of 16 MiB took 3" "look at the GPUs' PCIe width")
    ;;
  step_100 | step_100_*)  # of the training, after the three sums of the warm-up
    backend=nccl
    error="rank 1: ncclAllReduce failed: unhandled cuda error"
    recovers=("backend hierarchical with all $ranks ranks, since " "likely cause: a fault of a GPU, its link"
      "remedy: look for Xid errors in dmesg")
    # Sums on memory of Allocate could not be aborted before NCCL 2.29.2.
    export FAULTY_NCCL=AllReduce:error:rank=1:after=102:program NCCL_WIN_ENABLE=0
    if [[ $fault == step_100_hang* ]]; then
      error="timed out after 1m"
      recovers[1]="likely cause: a rank or its GPU is stuck" recovers[2]="raise DDP_TIMEOUT"
      export FAULTY_NCCL=${FAULTY_NCCL/error/stuck}
    fi
    if [[ $fault == *_recover ]]; then
      recovers+=("$error")
      error=""
    else
      recovers=()
    fi
    ;;
  second_rung)
    export FAULTY_NCCL="AllReduce:error:p2p:rank=0;AllGather:wrong:rank=1:no_p2p"
    says=("on rank 0 all-reduce of 4 B failed (ncclAllReduce: unhandled cuda error" "that P2P is the reason has not been shown"
      "and without P2P on rank 1 all-gather of 4 B moved wrong data (element "
      "remedy: NCCL_DEBUG=")
    ;;
  after_check)
    export FAULTY_NCCL=AllReduce:error:rank=1:program
    says=("making the group, after the check had passed, failed (rank 1:" "unhandled cuda error" "NCCL_DEBUG=WARN")
    ;;
  helper_missing)
    backend=nccl
    export DDP_PROBE=/no/such/ddp_probe
    says=("NCCL works (checked without ddp_probe, since rank 0 has none: no program at /no/such/ddp_probe; DDP_PROBE names another)")
    ;;
  helper_missing_broken)
    export DDP_PROBE=/no/such/ddp_probe FAULTY_NCCL=AllReduce:wrong:rank=1
    says=("on rank 1 all-reduce of 4 B moved wrong data" "likely cause: a GPU, its memory or its driver is faulty"
      "checked without ddp_probe, since rank 0 has none")
    ;;
  helper_killed)
    backend=nccl
    export FAULTY_NCCL=AllReduce:kill:rank=1:probe
    says=("NCCL works (checked without ddp_probe, since the helper of rank 1 failed: signal 9")
    ;;
  helper_in_libexec)  # no fault: as installed
    backend=nccl
    mkdir bin libexec libexec/ddp && cp "$program" bin/ && ln -s "${DDP_PROBE-$programs/ddp_probe}" libexec/ddp/ddp_probe || exit 1
    program=$folder/bin/${program##*/}
    unset DDP_PROBE
    says=("NCCL works")
    ;;
  *)
    echo "no fault is called $fault; there are: ${all_faults[*]}"
    exit 2
    ;;
esac

fail() {
  echo "FAILED: $*"
  head -n 40 out.* err.* summary 2>/dev/null
  exit 1
}

# shellcheck source=tests/support/free_port.sh
. "$support/free_port.sh"

# The ranks, as torchrun starts them: none ends another.
pids=()
for ((rank = 0; rank < ranks; ++rank)); do
  RANK=$rank WORLD_SIZE=$ranks LOCAL_RANK=$rank LOCAL_WORLD_SIZE=$ranks MASTER_ADDR=127.0.0.1 MASTER_PORT=$port \
    timeout --kill-after=5 200 "$program" --device=cuda --backend="${DDP_BACKEND-auto}" --hidden=32 --batch=16 --steps=120 --epochs=10 \
    --summary_json="$folder/summary" ${recovers:+--recover} >"out.$rank" 2>"err.$rank" </dev/null &
  pids+=($!)
done
codes=()
for pid in "${pids[@]}"; do
  wait "$pid"
  codes+=($?)
done

if [[ $fault == reference ]]; then
  [[ "${codes[*]}" =~ ^[0\ ]+$ ]] || fail "exit codes ${codes[*]}"
  cp summary "$reference"
  exit
fi
grep -qE "^backend $backend: " out.0 || fail "the backend is not $backend"
[[ $fault == helper_missing* || $fault == helper_killed ]] || ! grep -F "checked without ddp_probe" out.0 || fail "no helper was used"
for text in ${says[@]+"${says[@]}"}; do
  grep -E "^backend " out.0 | grep -qF -- "$text" || fail "does not say: $text"
  # Rank 0 warns of it as well, once; that there is no helper is no reason for that.
  [[ $backend == nccl && $fault != slow ]] || [[ $(grep -F -- "$text" err.* | grep -c "backend ") == 1 ]] || fail "is not logged once: $text"
done
for text in ${recovers[@]+"${recovers[@]}"}; do
  # From the last step that all ranks have made. A rank's host may be three steps ahead of its GPU (kStepsBehind).
  grep -E "^recovered: .*; goes on from step (9[7-9]|100)(;|$)" out.0 | grep -qF -- "$text" || fail "does not say, once recovered: $text"
  [[ $(grep -F -- "$text" err.* | grep -c "goes on: ") == 1 ]] || fail "is not logged once: $text"
done

if [[ -z $error ]]; then
  [[ "${codes[*]}" =~ ^[0\ ]+$ ]] || fail "exit codes ${codes[*]}"
  value() { sed -nE "s/^  \"$1\": \"?([^\",]*)\"?,?$/\1/p" "$2"; }
  for name in steps test_accuracy final_loss parameters_sha256; do
    mine=$(value $name summary) theirs=$(value $name "$reference")
    echo "$name: $mine, of the reference $theirs"
    [[ -n $mine && -n $theirs ]] || fail "a summary lacks $name"
    # The losses of the steps before a recovery are not counted.
    [[ $name != final_loss || -z ${recovers-} ]] || continue
    if [[ -z ${AUTO_SIMULATED-} ]]; then
      [[ $name != parameters_sha256 ]] || continue
      awk -v a="$mine" -v b="$theirs" 'BEGIN { exit !((a - b) ^ 2 <= 0.005 ^ 2) }' || fail "$name differs"
    else
      [[ $mine == "$theirs" ]] || fail "$name differs"
    fi
  done
else
  for ((rank = 0; rank < ranks; ++rank)); do
    ((codes[rank] == 1)) || fail "rank $rank ended with ${codes[rank]}"
    grep "^train_mlp: rank $rank: " "err.$rank" | grep -qF -- "$error" || fail "rank $rank does not say: $error"
  done
fi
exit 0
