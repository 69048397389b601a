# SPDX-License-Identifier: Apache-2.0
# Sourced by tests of programs that listen. Sets `slot` and `port`: nobody listens on `port`, on the next one, or on that of
# Slurm's job number `slot`. All are below those that the system gives to clients. Scripts that run at the same time get
# different ones, as each holds the lock of its slot until it and what it has started have ended.
# shellcheck shell=bash
listens() {
  (exec 3<>"/dev/tcp/127.0.0.1/$1") 2>/dev/null
}

take_slot() {
  local slots=${TMPDIR:-/tmp}/ddp_test_slots_$UID lock
  mkdir -p "$slots" || exit 1
  for ((slot = RANDOM % 500; ; slot = (slot + 1) % 500)); do
    port=$((10000 + 2 * slot))
    exec {lock}>"$slots/$slot" || exit 1
    flock -n "$lock" && ! listens $port && ! listens $((port + 1)) && ! listens $((20000 + 16 * slot)) && return
    exec {lock}>&-
  done
}
take_slot
