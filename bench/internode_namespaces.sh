#!/usr/bin/env bash
# internode_bench on two nodes of two ranks each, made of this machine: what goes between nodes goes through a cable between two
# network namespaces.
#
#   internode_namespaces.sh INTERNODE_BENCH [max_bytes]
#
# Needs the right to make namespaces. RATE=1gbit gives the cable a bandwidth (tc, package iproute2), DELAY=50us a latency.
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
