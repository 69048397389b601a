# SPDX-License-Identifier: Apache-2.0
# Two nodes on one machine: two network namespaces with host names of their own and a cable between them. Whatever processes of
# different nodes say to each other goes through the cable. To be sourced; needs root, or whoever may make namespaces.
# shellcheck shell=bash

# make_two_nodes MPIRUN: enters a folder of its own, which goes with the nodes when the shell exits, and sets
#   node_a, node_b  names of the namespaces
#   over_nodes      the begin of a command line, to be run `on "$node_a"`: two ranks on each node
# or ends with 77 and the reason.
make_two_nodes() {
  local mpirun=$1 space side n=1
  folder=$(mktemp -d) || exit 1
  node_a=ddp-$$-a node_b=ddp-$$-b
  trap remove_two_nodes EXIT
  cd "$folder" || exit 1
  # What Open MPI would leave behind of processes that are killed, in /dev/shm and elsewhere, goes with the folder.
  export OMPI_MCA_btl_vader_backing_directory=$folder OMPI_MCA_orte_tmpdir_base=$folder

  command -v ip >why 2>&1 || skip "there is no ip (package iproute2)"
  ip netns add "$node_a" 2>why || skip "no right to make a network namespace: $(cat why)"
  ip netns add "$node_b" 2>why || skip "no right to make a network namespace: $(cat why)"
  unshare --uts true 2>why || skip "no right to make a namespace for a host name: $(cat why)"
  ip link add "ddpa$$" netns "$node_a" type veth peer name "ddpb$$" netns "$node_b" 2>why || skip "no right to make a cable: $(cat why)"
  for space in "$node_a" "$node_b"; do
    side=${space##*-}
    if ! { ip -n "$space" link set "ddp$side$$" name ddp0 && ip -n "$space" addr add "10.213.77.$n/24" dev ddp0 &&
      ip -n "$space" link set ddp0 up && ip -n "$space" link set lo up; }; then
      echo "cannot set up $space"
      exit 1
    fi
    ((++n))
  done

  # What mpirun calls instead of ssh: HOST COMMAND...
  cat >agent <<AGENT
#!/usr/bin/env bash
shift
exec ip netns exec $node_b unshare --uts bash -c "hostname node-b; \$*"
AGENT
  chmod +x agent
  printf '10.213.77.1 slots=2\n10.213.77.2 slots=2\n' >hosts
  # shellcheck disable=SC2034,SC2054  # for who sources this; the commas are mpirun's
  over_nodes=("$mpirun" --hostfile hosts -n 4 --map-by slot --bind-to none --timeout 100 --mca plm_rsh_agent "$folder/agent"
    --mca plm_rsh_no_tree_spawn 1 --mca oob_tcp_if_include ddp0 --mca btl tcp,vader,self --mca btl_tcp_if_include ddp0
    --mca btl_vader_single_copy_mechanism none --mca btl_vader_backing_directory "$folder" --mca orte_tmpdir_base "$folder"
    --wdir "$folder")
}

skip() {
  echo "skipped: $*"
  exit 77
}

# on NODE COMMAND...: as a host of its own
on() {
  local space=$1
  shift
  # shellcheck disable=SC2016  # for the inner shell
  ip netns exec "$space" unshare --uts bash -c 'hostname "node-$0" && exec "$@"' "${space##*-}" "$@"
}

# Nothing may stay in a namespace: its processes, which are all ours, end with it.
remove_two_nodes() {
  local space
  for space in "$node_a" "$node_b"; do
    ip netns pids "$space" 2>/dev/null | xargs -r kill -KILL 2>/dev/null
    ip netns del "$space" 2>/dev/null
  done
  rm -rf "$folder"
}
