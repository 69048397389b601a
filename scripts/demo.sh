#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Trains a small network on handwritten digits with two ranks. See --help.
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=lib.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"

usage() {
  cat <<END
Usage: bash scripts/demo.sh [-n RANKS] [--no-setup] [train_mlp flags]

Installs missing packages (apt-get), builds examples/train_mlp, and trains it with 2 ranks for 10 epochs on the
handwritten digits that are part of the project. A new build folder is made for the GPUs of this machine, or without
CUDA where there are none.

  -n RANKS         the number of ranks (default: 2)
  --no-setup       installs nothing
  train_mlp flags  are passed to train_mlp instead of --epochs=10; build/release/bin/train_mlp --help lists them
END
}

main() {
  local ranks=2 setup=1
  local -a arguments=()
  while (($#)); do
    case $1 in
      -h | --help)
        usage
        return
        ;;
      -n)
        [[ ${2-} =~ ^[1-9][0-9]*$ ]] || die "-n needs the number of ranks, for example: bash scripts/demo.sh -n 2"
        ranks=$2
        shift
        ;;
      --no-setup) setup=0 ;;
      *) arguments+=("$1") ;;
    esac
    shift
  done

  ((!setup)) || require_packages "${ddp_packages[@]}"
  # A new build folder gets no tests and benchmarks, which need more packages.
  if ! configured release; then
    local -a flags=(-DDDP_BUILD_TESTS=OFF -DDDP_BUILD_BENCH=OFF)
    # Kernels for every kind of GPU take minutes to compile: here only for those that are in this machine.
    if compgen -G '/dev/nvidia[0-9]*' >/dev/null; then
      flags+=(-DCMAKE_CUDA_ARCHITECTURES=native)
    else
      flags+=(-DDDP_WITH_CUDA=OFF)
    fi
    configure release "${flags[@]}"
  fi
  build release train_mlp

  local mpirun
  mpirun=$(mpirun_of release)
  [[ -n $mpirun ]] || die "this build has no MPI: install openmpi-bin and libopenmpi-dev (or mpich and libmpich-dev), and remove build/release"
  allow_mpirun "$ranks" "$mpirun"
  ((${#arguments[@]})) || arguments=(--epochs=10)
  say "Training with $ranks ranks"
  exec "$mpirun" -n "$ranks" "${mpirun_flags[@]}" "$repo/build/release/bin/train_mlp" "${arguments[@]}" </dev/null
}

main "$@"
