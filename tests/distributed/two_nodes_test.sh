#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Training over two nodes, with ranks of one mpirun on both.
#
#   two_nodes_test.sh CASE TRAIN_MLP MPIRUN
#
# Ends with 77, and the reason, where nodes cannot be made on this machine.
set -u
# shellcheck source-path=SCRIPTDIR source=../support/two_nodes.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/../support/two_nodes.sh"

case_name=$1
train_mlp=$2
mpirun=$3
job=

fail() {
  echo "FAILED: $*"
  for file in out err err.*; do [[ -f $file ]] && { echo "--- $file"; tail -n 40 "$file"; }; done
  exit 1
}
cleanup() {
  if [[ -n $job ]]; then kill "$job" 2>/dev/null; wait "$job" 2>/dev/null; fi
  remove_two_nodes
}
make_two_nodes "$mpirun"
trap cleanup EXIT

# value KEY FILE: of a summary.
value() { sed -n "s/.*\"$1\": \"\{0,1\}\([^\",}]*\).*/\1/p" "$2"; }

# A rank tells its errors in a file: what a rank says on standard error goes through the cable too.
cat >rank <<RANK
#!/usr/bin/env bash
exec "$train_mlp" "\$@" 2>"$folder/err.\$OMPI_COMM_WORLD_RANK"
RANK
chmod +x rank

case $case_name in
  same_bits)
    # Four batches of 64 leave six steps an epoch: it takes 150 steps to reach the accuracy asked for below, on any layout.
    # shellcheck disable=SC2054  # the comma is train_mlp's
    flags=(--epochs=25 --hidden=128,64 --deterministic --warmup=0)
    on "$node_a" env DDP_LOG_LEVEL=info "${over_nodes[@]}" ./rank "${flags[@]}" --summary-json=two_hosts >out 2>err || fail "two hosts"
    for r in 0 1 2 3; do
      host=a
      ((r >= 2)) && host=b
      grep -q "4 ranks on 2 nodes, this is rank $((r % 2)) of node $((r / 2)) (host node-$host)" "err.$r" || fail "the nodes of rank $r"
    done
    one_host=("$mpirun" -n 4 --oversubscribe --bind-to none --timeout 100)
    DDP_NODE_SIZE=2 "${one_host[@]}" "$train_mlp" "${flags[@]}" --summary-json=one_host >out 2>err || fail "two nodes of one host"
    "${one_host[@]}" "$train_mlp" "${flags[@]}" --summary-json=one_node >out 2>err || fail "one node"
    [[ -n $(value parameters_sha256 two_hosts) ]] || fail "no digest"
    [[ $(value parameters_sha256 two_hosts) == "$(value parameters_sha256 one_host)" ]] ||
      fail "other bits: $(cat two_hosts one_host)"
    for run in two_hosts one_node; do
      awk "BEGIN { exit !($(value test_accuracy $run) >= 0.93) }" || fail "accuracy of $run: $(value test_accuracy $run)"
    done
    ;;

  dropped_link)
    export DDP_TIMEOUT=4
    on "$node_a" "${over_nodes[@]}" ./rank --epochs=100000 --hidden=64 >out 2>err &
    job=$!
    for ((i = 0; i < 300; ++i)); do
      grep -q "epoch *3" out && break
      kill -0 "$job" 2>/dev/null || fail "the run ended"
      sleep 0.1
    done
    grep -q "epoch *3" out || fail "the run did not begin"
    ip -n "$node_a" link set ddp0 down || fail "cannot cut the cable"
    # Each rank names the other node, by itself: no word gets through.
    for r in 0 1 2 3; do
      other="node 1 (host node-b, rank 2, 3)"
      ((r >= 2)) && other="node 0 (host node-a, rank 0, 1)"
      for ((i = 0; i < 300; ++i)); do
        [[ -s err.$r ]] && break
        sleep 0.1
      done
      grep -qi "timed out after" "err.$r" || fail "rank $r does not tell of the time-out"
      grep -qF "$other" "err.$r" || fail "rank $r does not name $other"
    done
    ip -n "$node_a" link set ddp0 up
    ;;

  *)
    echo "no such case: $case_name"
    exit 1
    ;;
esac
left=$(find /dev/shm -name 'vader_segment.node-[ab].*' -newer hosts)
[[ -z $left ]] || fail "left behind: $left"
