#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Runs internode_bench on two simulated nodes of two ranks each. Each node is a network namespace of this machine; a
# virtual cable connects them.
#
#   internode_namespaces.sh INTERNODE_BENCH [max_bytes]
#
# INTERNODE_BENCH is the program. Creating namespaces needs the right to do so (usually root).
# RATE=1gbit limits the bandwidth of the cable (with tc, package iproute2), DELAY=50us adds latency.
set -eu
# shellcheck source-path=SCRIPTDIR source=../tests/support/two_nodes.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/../tests/support/two_nodes.sh"

bench=$(realpath "$1")
shift
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
make_two_nodes mpirun
if [[ -n ${RATE-} || -n ${DELAY-} ]]; then
  for node in "$node_a" "$node_b"; do
    ip netns exec "$node" tc qdisc add dev ddp0 root netem ${DELAY:+delay "$DELAY"} ${RATE:+rate "$RATE"}
  done
fi
on "$node_a" "${over_nodes[@]}" "$bench" "$@"
