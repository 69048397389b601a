#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The scripts on machines that are not like this one: other programs take the place of dpkg-query and mpirun.
#
#   scripts_test.sh SOURCE_DIR
set -euo pipefail
source_dir=$1
folder=$(mktemp -d)
trap 'rm -rf -- "$folder"' EXIT
# shellcheck source-path=SCRIPTDIR source=../../scripts/lib.sh
source "$source_dir/scripts/lib.sh"

failed=0
expect() {  # WHAT GOT WANTED
  [[ $2 == "$3" ]] || {
    printf '%s: got "%s", wanted "%s"\n' "$1" "$2" "$3"
    failed=1
  }
}

# installed PACKAGE...: what the machine has.
installed() {
  printf '#!/bin/sh\nprintf "installed %%s\\n" %s\n' "$*" >"$folder/dpkg-query"
  chmod +x "$folder/dpkg-query"
}
missing() { PATH=$folder:$PATH missing_packages "$@" | tr '\n' ' '; }

libraries=(cmake ninja-build pkg-config libabsl-dev libspdlog-dev libhwy-dev libhwloc-dev libasio-dev libssl-dev libdnnl-dev
  nlohmann-json3-dev zlib1g-dev libturbojpeg0-dev)
installed "${libraries[@]}" clang mpich libmpich-dev
expect "with clang and MPICH" "$(missing "${ddp_packages[@]}")" ""
installed "${libraries[@]}" g++ openmpi-bin libopenmpi-dev
expect "with g++ and Open MPI" "$(missing "${ddp_packages[@]}")" ""
installed "${libraries[@]}" g++ mpich openmpi-bin
expect "with half of each MPI" "$(missing "${ddp_packages[@]}")" "libopenmpi-dev "
installed cmake
expect "on a bare machine" "$(missing 'g++|clang' cmake 'openmpi-bin,libopenmpi-dev|mpich,libmpich-dev')" "g++ openmpi-bin libopenmpi-dev "

# mpirun_is VERSION: what `mpirun --version` says.
mpirun_is() {
  printf '#!/bin/sh\necho "%s"\n' "$1" >"$folder/mpirun"
  chmod +x "$folder/mpirun"
  allow_mpirun 1000 "$folder/mpirun"
}
mpirun_is "mpirun (Open MPI) 4.1.4"
expect "more ranks than cores with Open MPI" "${mpirun_flags[*]}" "--oversubscribe"
mpirun_is "HYDRA build details: Version: 4.0.2"
expect "more ranks than cores with MPICH" "${mpirun_flags[*]}" ""

# The demo neither asks for the packages of tests and benchmarks nor configures them.
for word in catch2 libbenchmark-dev; do
  expect "the demo's packages" "$(printf '%s\n' "${ddp_packages[@]}" | grep -c "$word" || true)" 0
done
expect "the demo's configuration" "$(grep -c -e '-DDDP_BUILD_TESTS=OFF -DDDP_BUILD_BENCH=OFF' "$source_dir/scripts/demo.sh")" 1
expect "the demo's packages" "$(grep -c ddp_test_packages "$source_dir/scripts/demo.sh" || true)" 0

# A folder that is no bundle, be it that of the scripts themselves, stays as it is.
cp -r "$source_dir/scripts" "$folder/scripts"
for kept in "$folder/scripts" "$folder"; do
  code=0
  text=$(bash "$folder/scripts/gpu_bundle.sh" --no-setup "$kept" 2>&1) || code=$?
  expect "a bundle in place of a folder" "$code $(grep -c 'exists and is not a bundle' <<<"$text")" "1 1"
  expect "the folder" "$(diff -r "$source_dir/scripts" "$folder/scripts" && echo same)" same
done

# A file that does not exist, and a flag that is none.
for argument in "$folder/no_such_file.cc" --no-such-flag; do
  code=0
  text=$(bash "$source_dir/scripts/lint.sh" --no-setup "$argument" 2>&1) || code=$?
  expect "lint.sh $argument" "$code ${text##*"$argument"}" "1 $([[ $argument == -* ]] && echo '; see --help')"
done
exit "$failed"
