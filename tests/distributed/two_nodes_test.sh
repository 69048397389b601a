#!/usr/bin/env bash
# Two nodes on one machine: two network namespaces with host names of their own and a cable between them, with ranks of one mpirun in
# both. Whatever the ranks of different nodes say to each other goes through the cable.
#
#   two_nodes_test.sh CASE TRAIN_MLP MPIRUN
#
# Ends with 77, and the reason, where namespaces cannot be made.
set -u

case_name=$1
train_mlp=$2
mpirun=$3
folder=$(mktemp -d) || exit 1
a=ddp-$$-a b=ddp-$$-b job=

cleanup() {
  if [[ -n $job ]]; then kill "$job" 2>/dev/null; wait "$job" 2>/dev/null; fi
  # Nothing may stay in a namespace: its processes, which are all ours, end with it.
  for space in "$a" "$b"; do
    ip netns pids "$space" 2>/dev/null | xargs -r kill -KILL 2>/dev/null
    ip netns del "$space" 2>/dev/null
  done
  rm -rf "$folder"
}
trap cleanup EXIT
cd "$folder" || exit 1

skip() {
  echo "skipped: $*"
  exit 77
}
fail() {
  echo "FAILED: $*"
  for file in out err err.*; do [[ -f $file ]] && { echo "--- $file"; tail -n 40 "$file"; }; done
  exit 1
}

command -v ip >why 2>&1 || skip "there is no ip (package iproute2)"
ip netns add "$a" 2>why || skip "no right to make a network namespace: $(cat why)"
ip netns add "$b" 2>why || skip "no right to make a network namespace: $(cat why)"
unshare --uts true 2>why || skip "no right to make a namespace for a host name: $(cat why)"
ip link add "ddpa$$" netns "$a" type veth peer name "ddpb$$" netns "$b" 2>why || skip "no right to make a cable: $(cat why)"
n=1
for space in "$a" "$b"; do
  side=${space##*-}
  if ! { ip -n "$space" link set "ddp$side$$" name ddp0 && ip -n "$space" addr add "10.213.77.$n/24" dev ddp0 &&
    ip -n "$space" link set ddp0 up && ip -n "$space" link set lo up; }; then
    fail "cannot set up $space"
  fi
  ((++n))
done

# on SPACE COMMAND...: as a host of its own
on() {
  local space=$1
  shift
  # shellcheck disable=SC2016  # for the inner shell
  ip netns exec "$space" unshare --uts bash -c 'hostname "node-$0" && exec "$@"' "${space##*-}" "$@"
}

# What mpirun calls instead of ssh: HOST COMMAND...
cat >agent <<AGENT
#!/usr/bin/env bash
shift
exec ip netns exec $b unshare --uts bash -c "hostname node-b; \$*"
AGENT
chmod +x agent
printf '10.213.77.1 slots=2\n10.213.77.2 slots=2\n' >hosts
# shellcheck disable=SC2054  # the commas are mpirun's
over_nodes=("$mpirun" --hostfile hosts -n 4 --map-by slot --bind-to none --timeout 100 --mca plm_rsh_agent "$folder/agent"
  --mca plm_rsh_no_tree_spawn 1 --mca oob_tcp_if_include ddp0 --mca btl tcp,vader,self --mca btl_tcp_if_include ddp0
  --mca btl_vader_single_copy_mechanism none --wdir "$folder")

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
    # shellcheck disable=SC2054  # the comma is train_mlp's
    flags=(--epochs=25 --hidden=128,64 --deterministic --warmup=0)
    on "$a" env DDP_LOG_LEVEL=info "${over_nodes[@]}" ./rank "${flags[@]}" --summary-json=two_hosts >out 2>err || fail "two hosts"
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
    on "$a" "${over_nodes[@]}" ./rank --epochs=100000 --hidden=64 >out 2>err &
    job=$!
    for ((i = 0; i < 300; ++i)); do
      grep -q "epoch *3" out && break
      kill -0 "$job" 2>/dev/null || fail "the run ended"
      sleep 0.1
    done
    grep -q "epoch *3" out || fail "the run did not begin"
    ip -n "$a" link set ddp0 down || fail "cannot cut the cable"
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
    ip -n "$a" link set ddp0 up
    ;;

  *)
    echo "no such case: $case_name"
    exit 1
    ;;
esac
