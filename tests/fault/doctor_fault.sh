#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# ddp_doctor between two simulated GPUs, which are healthy or have a planted fault: what it says, its exit code, and that
# it keeps to its time.
#
#   doctor_fault.sh DOCTOR PROGRAMS FAKE_CUDA [MPIRUN ... -n]
#
# PROGRAMS is a folder with simulated_probe and libfaulty_nccl.so; FAKE_CUDA takes the place of CUDA's driver.
set -u
doctor=$1 programs=$2 cuda=$3
shift 3
folder=$(mktemp -d) || exit 1
trap 'rm -rf "$folder"' EXIT
cd "$folder" && mkdir run nccl lib cache && chmod 700 run cache && ln -s "$cuda" lib/libcuda.so.1 || exit 1

export LD_LIBRARY_PATH=$folder/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH} XDG_RUNTIME_DIR=$folder/run
export SIMULATED_NCCL=$folder/nccl DDP_PROBE=$programs/simulated_probe DDP_NCCL_LIBRARY=$programs/libfaulty_nccl.so
export DDP_PROBE_CACHE=$folder/cache DDP_LOG_LEVEL=error FAKE_CUDA_GPUS=2 FAKE_CUDA_P2P=1
unset DDP_BACKEND DDP_FRESH_PROBE DDP_STORE_SECRET DDP_STORE_PORT FAULTY_NCCL NCCL_P2P_DISABLE

# try NAME SECONDS [VARIABLE=VALUE...] COMMAND... -- TEXT...: sets `wrong` if it does not end in this time, or does not say
# each text.
try() {
  local name=$1 most=$2 begin=$SECONDS code=0 text
  local -a command=()
  shift 2
  while [[ $1 != -- ]]; do
    command+=("$1")
    shift
  done
  shift
  env "${command[@]}" >out 2>err </dev/null || code=$?
  printf '%s: exit code %d, %d s\n' "$name" "$code" $((SECONDS - begin))
  wrong=""
  ((SECONDS - begin <= most)) || wrong="$name took longer than $most s"
  for text in "$@"; do
    grep -qE -- "$text" out || wrong="$name does not say: $text"
  done
}
check() {
  try "$@"
  [[ -z $wrong ]] || fail "$wrong"
}
# cut_off LIMITS NAME ...: as check, where the time is to be over at a certain point, for which LIMIT is short. On a
# busy machine it may be over before: then once more, with the next limit.
cut_off() {
  local limits=$1 name=$2 limit
  shift 2
  for limit in $limits; do
    try "$name" $((limit + 15)) "${@//LIMIT/$limit}"
    [[ -n $wrong ]] || return 0
  done
  fail "$wrong"
}
fail() {
  printf 'FAILED: %s\n' "$1"
  cat out err
  exit 1
}

long=(--limit 120)
check healthy 100 "$doctor" "${long[@]}" -- '^ok: NCCL works$' \
  '^ok: auto chooses nccl: NCCL works; nothing is remembered of these GPUs' \
  '^ok: copies between 2 GPUs arrive right: 2 of 2 directions by P2P'
check "wrong copy" 100 FAKE_CUDA_COPY=wrong:1:0 "$doctor" "${long[@]}" -- \
  '^error: a copy from GPU 1 to GPU 0, by P2P, arrives wrong: element .*likely cause: PCIe ACS' 'remedy: .*NCCL_P2P_DISABLE=1' \
  '^ok: NCCL works$'
check "wrong sum" 100 FAULTY_NCCL=AllReduce:wrong DDP_BACKEND=nccl "$doctor" "${long[@]}" -- \
  '^error: DDP_BACKEND=nccl makes programs use what does not work here; auto would choose hierarchical: NCCL does not' \
  '^error: NCCL does not work.*moved wrong data'
check "P2P fails" 100 FAULTY_NCCL=AllReduce:error:p2p "$doctor" "${long[@]}" -- \
  '^warning: NCCL works without P2P' '^ok: auto chooses (nccl without P2P|hierarchical): NCCL works without P2P'
# The time is for everything, and what it did not suffice for is named. The programs take a while to start on a busy machine.
cut_off "10 20" "hang of NCCL" FAULTY_NCCL=AllReduce:stuck "$doctor" --limit LIMIT -- \
  '^error: NCCL does not work.*all-reduce of 4 B hung \(it had .* only\)' 'remedy: give it more: ddp_doctor --limit 60' \
  'auto chooses hierarchical|the time was over'
cut_off "10 20" "hang of a copy" FAKE_CUDA_COPY=hang:0:1 "$doctor" --limit LIMIT -- \
  '^error: a copy from GPU 0 to GPU 1, by P2P, did not end in ' 'remedy: .*ddp_doctor --limit 60'
cut_off "2 8" "hang of the driver" FAKE_CUDA_INIT=hang "$doctor" --limit LIMIT -- \
  "^error: the time was over \\(LIMITs\\) when ddp_doctor was at the start of the GPUs' driver" \
  'remedy: give it more: ddp_doctor --limit 60'
if (($#)); then
  check "two ranks" 100 "$@" 2 "$doctor" "${long[@]}" -- '^ok: NCCL works$' '^ok: auto chooses nccl: NCCL works' \
    '^ok: copies between 2 GPUs arrive right'
fi
exit 0
