#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Measures libddp and its peers on this machine and prints the tables of docs/performance/.
set -euo pipefail
# shellcheck source=scripts/lib.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/../scripts/lib.sh"

usage() {
  cat <<'EOF'
Usage: bash bench/compare_peers.sh PEERS_FOLDER [options]

Builds libddp in build/release, and in build/peers the programs of PEERS_FOLDER (the theoretical bound, and those of
Open MPI, MPICH and Gloo that are installed). Runs all programs alternately, for several rounds, and prints tables of
medians and ratios. Run nothing else on the machine meanwhile.

EOF
  python3 "$repo/bench/compare_peers.py" --help | sed -n '/^option/,$p'
}

case ${1-} in
  -h | --help | '')
    usage
    [[ -n ${1-} ]] && exit 0
    die "no PEERS_FOLDER is given"
    ;;
esac
peers=$1
shift
[[ -f $peers/CMakeLists.txt && -f $peers/run.sh ]] || die "$peers has no CMakeLists.txt and run.sh; give the folder of the peers' programs"
peers=$(cd -- "$peers" && pwd)

configure release
build release ddp_perf train_mlp
say "Building the peers"
cmake -S "$peers" -B "$repo/build/peers" -DCMAKE_BUILD_TYPE=Release >/dev/null
cmake --build "$repo/build/peers" --parallel "$(build_jobs)" >/dev/null

mpirun=$(mpirun_of release)
[[ -n $mpirun ]] || die "this build has no MPI: install openmpi-bin and libopenmpi-dev, and remove build/release"
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 PYTHONDONTWRITEBYTECODE=1
exec python3 "$repo/bench/compare_peers.py" --peers="$peers" --peers-build="$repo/build/peers" --bin="$repo/build/release/bin" \
  --mpirun="$mpirun" "$@"
