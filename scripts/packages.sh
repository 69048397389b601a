#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Makes the Debian packages libddp0.1, libddp-dev and libddp-tools in build/packages. See --help.
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=lib.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"

usage() {
  cat <<END
Usage: bash scripts/packages.sh [--no-setup] [CMAKE_ARGUMENT...]

Builds libddp from clean, optimised, and packs it: build/packages/*.deb. Without CUDA; -DDDP_WITH_CUDA=ON asks for it.
The same sources make the same packages, byte for byte, with the same compiler and packages.

  --no-setup  installs nothing
END
}

main() {
  local setup=1
  case ${1-} in
    -h | --help)
      usage
      return
      ;;
    --no-setup)
      setup=0
      shift
      ;;
  esac
  ((!setup)) || require_packages "${ddp_packages[@]}" libbenchmark-dev dpkg-dev file
  # The time in the packages is that of the last commit.
  SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-$(git -C "$repo" log -1 --format=%ct 2>/dev/null || stat -c %Y "$repo/CHANGELOG.md")}
  export SOURCE_DATE_EPOCH
  umask 022
  rm -rf -- "$repo/build/packages"
  configure release -B "$repo/build/packages" -DCMAKE_INSTALL_PREFIX=/usr -DCMAKE_SKIP_INSTALL_RPATH=ON -DCMAKE_SKIP_INSTALL_ALL_DEPENDENCY=ON -DDDP_BUILD_TESTS=OFF -DDDP_BOTH_KINDS=ON \
    -DDDP_WITH_CUDA=OFF -DDDP_WITH_NVTX=OFF -DDDP_WITH_LIBTORCH=OFF "-DCMAKE_CXX_FLAGS=-ffile-prefix-map=$repo=." \
    -DCMAKE_SHARED_LINKER_FLAGS=-Wl,-z,relro,-z,now "-DCMAKE_EXE_LINKER_FLAGS=-Wl,-z,relro,-z,now" "$@"
  build packages ddp ddp_other_kind ddp_probe ddp_doctor ddp_perf train_mlp train_cnn
  (cd "$repo/build/packages" && cpack -G DEB >/dev/null)
  say "Made:"
  ls -- "$repo"/build/packages/*.deb
}

main "$@"
