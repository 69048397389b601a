#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# internode_bench: figures of a wire and what follows from them are above 0, or there are none and an error; no nodes are
# an error, too.
#
#   internode_test.sh PROGRAM MPIRUN...     MPIRUN: the command up to the number of ranks
set -u
program=$1
shift
# shellcheck source-path=SCRIPTDIR source=../support/in_folder.sh
source "$(dirname "${BASH_SOURCE[0]}")/../support/in_folder.sh"

# An empty variable is as none: one host is one node.
DDP_NODE_SIZE='' timeout 60 "$@" 2 "$program" 1024 >out 2>err </dev/null && fail "one node is enough"
grep -q "^internode_bench: needs two nodes or more" err || fail "no word about nodes"

if DDP_NODE_SIZE=1 timeout 100 "$@" 2 "$program" 4096 >out 2>err </dev/null; then
  grep -qE '^2 nodes of 1 ranks; wire, .* latency [0-9.]+ us, [0-9.]+ GB/s per rank$' out || fail "no wire"
  (($(grep -cE '^ +(1024|4096)( +[0-9.]+){5}$' out) == 2)) || fail "no lines of positive figures"
else
  grep -q "^internode_bench: 1 MiB took no longer than 8 bytes" err || fail "no reason"
fi
