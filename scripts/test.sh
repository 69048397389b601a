#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Builds the project and runs its tests. See --help.
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=lib.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"

usage() {
  cat <<END
Usage: bash scripts/test.sh [--preset NAME] [--no-setup] [-DVARIABLE=VALUE...] [ctest flags]

Installs missing packages (apt-get), builds everything in build/NAME, and runs the test suite.

  --preset NAME     dev (default), release, cuda, asan or tsan
  --no-setup        installs nothing
  -DVARIABLE=VALUE  is passed to CMake, for example -DDDP_WERROR=ON or -DDDP_WITH_MPI=OFF
  ctest flags       are passed to ctest, for example -R bucket (tests with "bucket" in their name), -L unit (tests with
                    this label). Without -L, -LE or -R, tests labelled slow are left out: -L slow runs them
END
}

# Prints why tests were skipped, one line per reason. ctest writes this only to its log.
print_skipped() {
  [[ -f $1 ]] || return 0
  awk '/ Testing: / { test = $NF }
       /^(skipped|SKIPPED): / && !seen[test]++ { sub(/^[^:]*: /, ""); tests[$0] = tests[$0] " " test }
       END { for (why in tests) print "skipped: " why ":" tests[why] }' "$1" | sort
}

main() {
  local status=0 preset=dev setup=1 packages=("${ddp_packages[@]}" "${ddp_test_packages[@]}")
  local -a ctest_flags=() cmake_flags=() chosen=(-LE slow)
  local -a given=("$@")
  while (($#)); do
    case $1 in
      -h | --help)
        usage
        return
        ;;
      --preset)
        (($# > 1)) || die "--preset needs a name: dev, release, cuda, asan or tsan"
        preset=$2
        shift
        ;;
      --preset=*) preset=${1#*=} ;;
      --no-setup) setup=0 ;;
      -D?*=*) cmake_flags+=("$1") ;;
      -[LR]* | --label-* | --tests-regex*)
        chosen=()
        ctest_flags+=("$1")
        ;;
      *) ctest_flags+=("$1") ;;
    esac
    shift
  done

  case $preset in
    dev | release | cuda) packages+=(python3-matplotlib abigail-tools) ;; # draws the reports that unit.scaling checks; compares the binary interface
    asan | tsan)
      [[ $preset != asan ]] || packages+=(clang libclang-rt-dev lld)
      # The sanitizers of these compilers cannot place their shadow memory if the kernel randomises addresses widely
      # (vm.mmap_rnd_bits above 28). So tests, and the programs that the build runs to list them, run without it.
      if [[ -z ${DDP_TEST_FIXED_ADDRESSES-} ]] && setarch "$(uname -m)" -R true 2>/dev/null; then
        DDP_TEST_FIXED_ADDRESSES=1 exec setarch "$(uname -m)" -R bash "${BASH_SOURCE[0]}" "${given[@]}"
      fi
      ;;
    *) die "there is no preset \"$preset\": use dev, release, cuda, asan or tsan" ;;
  esac

  ((!setup)) || require_packages "${packages[@]}"
  configure "$preset" "${cmake_flags[@]}"
  build "$preset"
  allow_mpirun 1
  say "Testing $preset"
  cd "$repo"
  rm -f "build/$preset/Testing/Temporary/LastTest.log"
  # Slots, see cmake/DdpTesting.cmake.
  ctest --preset "$preset" --parallel $((2 * $(nproc) + 4)) "${chosen[@]}" "${ctest_flags[@]}" </dev/null || status=$?
  print_skipped "build/$preset/Testing/Temporary/LastTest.log"
  return "$status"
}

main "$@"
