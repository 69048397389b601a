#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Installs the Debian packages, and builds and runs programs against them. See --help.
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=lib.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"

usage() {
  cat <<END
Usage: bash scripts/check_packages.sh [--chroot=FOLDER | --unpack] [FOLDER_OF_PACKAGES]

Installs the packages that scripts/packages.sh has made (default: build/packages), then builds README.md's program against them by CMake
and by pkg-config, with the shared and the static library, and docs/c.md's with gcc, and runs them. Checks that the packages agree with
ddp/version.h. Exit code 77: it cannot be checked here.

  --chroot=FOLDER  a fresh Debian 12, made in FOLDER by mmdebstrap, as root; it and the packages' dependencies come from the network
                   (default: a temporary folder)
  --unpack         only unpacks them to a temporary folder, and takes the dependencies of this machine
END
}

# consume ROOT: builds and runs the program with the packages below ROOT. Written to be run in a chroot, too, where ROOT is empty.
consume() {
  local root=$1 libdir build kind libraries
  if [[ -n $root ]]; then
    libdir=$root/usr/lib/$(gcc -print-multiarch)
    export PKG_CONFIG_PATH=$libdir/pkgconfig LD_LIBRARY_PATH=$libdir
  fi
  for kind in ddp ddp-static; do
    # shellcheck disable=SC2046 # several words
    g++ main.cc $(pkg-config --cflags --libs "$kind") -o "pkg-$kind"
  done
  # shellcheck disable=SC2046
  gcc -std=c99 main.c $(pkg-config --cflags-only-I --libs ddp) -o pkg-c
  # With --static, the same package says what its static library needs.
  # shellcheck disable=SC2046
  g++ main.cc $(pkg-config --static --cflags --libs ddp | sed 's/-lddp /-l:libddp.a /') -o pkg-ddp--static
  for kind in OFF ON; do
    build=cmake-$kind
    cmake -S . -B "$build" -DCMAKE_PREFIX_PATH="$root/usr" -Dddp_USE_STATIC_LIBS="$kind" >/dev/null
    cmake --build "$build" >/dev/null
  done
  for program in pkg-ddp pkg-c pkg-ddp-static pkg-ddp--static cmake-OFF/train cmake-ON/train; do
    libraries=$(ldd "$program")
    case $program in
      pkg-ddp | pkg-c | cmake-OFF/train) grep -q 'libddp\.so' <<<"$libraries" ;;
      *) ! grep -q 'libddp\.so' <<<"$libraries" ;;
    esac || { echo "error: $program has the wrong kind of library"; return 1; }
    "./$program" | grep 'rank 0 of 1: 0\.000' || { echo "error: $program does not run"; return 1; }
    echo "$program runs"
  done
  mpirun -n 2 --oversubscribe ./pkg-ddp | grep -c '0\.500' | grep -qx 2 || { echo "error: pkg-ddp does not run under mpirun"; return 1; }
  echo "mpirun -n 2 pkg-ddp runs"
}

# Installs the packages of /check, tries them and removes them again.
in_fresh_system() {
  export DEBIAN_FRONTEND=noninteractive OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
  apt-get -qq install -y --no-install-recommends /check/*.deb g++ cmake make pkg-config openmpi-bin >/dev/null
  cd /check
  consume ''
  ddp_doctor --no-probe >doctor.txt || true # it may find fault with this machine
  grep . doctor.txt | head -n 3
  dpkg --purge libddp-tools libddp-dev "$(dpkg-deb -f /check/libddp[0-9]*.deb Package)" >/dev/null
  if find /usr -name 'libddp*' -o -path /usr/include/ddp | grep .; then
    echo "error: this is left after the packages were removed"
    return 1
  fi
}

main() {
  local way=chroot root='' packages=$repo/build/packages version debs deb
  while (($#)); do
    case $1 in
      -h | --help)
        usage
        return
        ;;
      --chroot=*) root=${1#*=} ;;
      --unpack) way=unpack ;;
      -*) die "unknown flag $1; see --help" ;;
      *) packages=$1 ;;
    esac
    shift
  done
  debs=("$packages"/libddp*.deb)
  ((${#debs[@]} == 3)) || die "not three packages in $packages; run scripts/packages.sh"
  version=$(sed -nE 's/^#define DDP_VERSION_(MAJOR|MINOR|PATCH) ([0-9]+)$/\2/p' "$repo/include/ddp/version.h" | paste -sd.)
  for deb in "${debs[@]}"; do
    [[ $(dpkg-deb -f "$deb" Version) == "$version-1" ]] || die "$deb is not of version $version"
  done
  [[ -f $packages/libddp${version%.*}_$version-1_$(dpkg --print-architecture).deb ]] || die "no package libddp${version%.*}"

  scratch=$(mktemp -d)
  trap 'rm -rf -- "$scratch"' EXIT
  [[ -n $root ]] || root=$scratch/root
  mkdir -p "$root" "$scratch/consumer"
  # The first block of LANGUAGE in PAGE.
  block() { awk -v fence="\`\`\`$1" '$0 == fence { inside = 1; next } /^```$/ && inside { exit } inside' "$repo/$2"; }
  block cmake README.md >"$scratch/consumer/CMakeLists.txt"
  block cpp README.md >"$scratch/consumer/main.cc"
  block c docs/c.md >"$scratch/consumer/main.c"
  if [[ $way == unpack ]]; then
    for deb in "${debs[@]}"; do dpkg-deb -x "$deb" "$root"; done
    cd "$scratch/consumer"
    consume "$root"
  else
    if ! command -v mmdebstrap >/dev/null; then
      echo "skipped: mmdebstrap is missing (apt-get install mmdebstrap), or give --unpack"
      exit 77
    fi
    if ((EUID != 0)); then
      echo "skipped: a fresh Debian needs root, or give --unpack"
      exit 77
    fi
    # Everything runs while mmdebstrap has the network, /proc and /dev ready there.
    printf '%s\n' "$(declare -f consume in_fresh_system)" 'set -euo pipefail; in_fresh_system' >"$scratch/consumer/check.sh"
    cp -- "${debs[@]}" "$scratch/consumer"
    chmod -R a+rX "$scratch"
    # shellcheck disable=SC2016 # of the hooks
    mmdebstrap --quiet --variant=apt --customize-hook="cp -r '$scratch/consumer' \"\$1/check\"" \
      --customize-hook='chroot "$1" bash /check/check.sh' bookworm "$root"
  fi
  say "the packages work"
}

main "$@"
