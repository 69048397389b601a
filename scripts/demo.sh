#!/usr/bin/env bash
# Trains a small network on handwritten digits with two ranks. See --help.
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=lib.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"

usage() {
  cat <<END
Usage: bash scripts/demo.sh [-n RANKS] [--no-setup] [train_mlp flags]

Installs what is missing (apt-get), builds examples/train_mlp, and trains it with RANKS ranks (2) on the digits that
come with the project, for 10 epochs. Flags it does not know replace that and are handed to train_mlp;
build/release/bin/train_mlp --help lists them.

  --no-setup  installs nothing
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
  configure release
  build release train_mlp

  local mpirun
  mpirun=$(mpirun_of release)
  [[ -n $mpirun ]] || die "this build has no MPI: install openmpi-bin and libopenmpi-dev, and remove build/release"
  allow_mpirun "$ranks"
  ((${#arguments[@]})) || arguments=(--epochs=10)
  say "Training with $ranks ranks"
  exec "$mpirun" -n "$ranks" "${mpirun_flags[@]}" "$repo/build/release/bin/train_mlp" "${arguments[@]}" </dev/null
}

main "$@"
