#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Installs the Debian packages in a view of this system, and builds and runs programs against them. See --help.
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=lib.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"

usage() {
  cat <<END
Usage: bash scripts/check_packages.sh [FOLDER_OF_PACKAGES]

Installs the packages that scripts/packages.sh has made (default: build/packages), builds README.md's program against them by CMake and
by pkg-config, with the shared and the static library, and docs/c.md's with gcc, runs these and the packages' own, and removes the packages.
Checks that the packages agree with include/ddp, and that what they depend on suffices.

Nothing of this is installed on this machine: it happens in a view of this system whose changes are kept in memory and go away with it.
That needs root and the right to mount. Exit code 77: it cannot be checked here.
END
}

# in_view FOLDER COMMAND...: runs a command in a view of this system, mounted in FOLDER/view, where FOLDER/check is /check. It sees no processes
# but its own, as packages that are removed may stop theirs.
in_view() {
  # shellcheck disable=SC2016 # for the other shell
  unshare --mount --pid --fork --kill-child bash -euc '
    mount -t tmpfs view "$0/view"
    cd "$0/view"
    mkdir changed work root
    mount -t overlay view -o lowerdir=/,upperdir=changed,workdir=work root
    mkdir root/check
    mount --bind "$0/check" root/check
    mount -t proc view root/proc
    mount --rbind /dev root/dev
    mount --rbind /sys root/sys
    exec chroot root env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root "$@"' "$@"
}

fail() {
  printf 'error: %s\n' "$*"
  exit 1
}

# Runs a command that has something to say only if it fails.
quiet() {
  local said
  said=$("$@" 2>&1) || fail "$*: $said"
}

# Builds and runs the programs in the present folder with the packages.
consume() {
  local kind build program libraries
  # A wrong folder here would go unnoticed where the compiler searches anyway.
  for kind in ddp ddp-static; do
    [[ -e $(pkg-config --variable=libdir "$kind")/libddp.so ]] || fail "the libdir of $kind.pc has no libddp.so"
    [[ -e $(pkg-config --variable=includedir "$kind")/ddp/ddp.h ]] || fail "the includedir of $kind.pc has no ddp/ddp.h"
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
    quiet cmake -G Ninja -S . -B "$build" -Dddp_USE_STATIC_LIBS="$kind"
    quiet cmake --build "$build"
  done
  for program in pkg-ddp pkg-c pkg-ddp-static pkg-ddp--static cmake-OFF/train cmake-ON/train; do
    libraries=$(ldd "$program")
    case $program in
      pkg-ddp | pkg-c | cmake-OFF/train) grep -q 'libddp\.so' <<<"$libraries" ;;
      *) ! grep -q 'libddp\.so' <<<"$libraries" ;;
    esac || fail "$program has the wrong kind of library"
    "./$program" | grep 'rank 0 of 1: 0\.000' || fail "$program does not run"
    echo "$program runs"
  done
}

# What happens in the view, in /check, which has the packages and the programs' sources.
check() {
  local package file left
  export DEBIAN_FRONTEND=noninteractive OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMPI_MCA_rmaps_base_oversubscribe=1
  # Of what libddp was built with, only what the packages depend on stays.
  quiet apt-mark auto '~i~n^lib.*-dev$'
  quiet apt-get -qq install -y --no-install-recommends ./*.deb
  quiet apt-get -qq autoremove -y -o APT::AutoRemove::RecommendsImportant=false -o APT::AutoRemove::SuggestsImportant=false

  for package in libddp*.deb; do
    package=${package%%_*}
    dpkg -L "$package" >"$package.files"
    for file in NOTICE copyright changelog.Debian.gz; do
      grep -qx "/usr/share/doc/$package/$file" "$package.files" || fail "$package has no $file"
    done
  done
  sed -n 's|^/usr/include/\(.*\.h\)$|\1|p' libddp-dev.files | sort | diff headers - || fail "libddp-dev has other headers than include/ddp"
  consume
  quiet dpkg --purge libddp-dev
  mpirun -n 2 ./pkg-ddp | grep -c '0\.500' | grep -qx 2 || fail "pkg-ddp does not run under mpirun"
  echo "mpirun -n 2 pkg-ddp runs without libddp-dev"
  for file in bin/ddp-scaling bin/ddp_doctor libexec/ddp/{ddp_perf,ddp_probe,train_cnn,train_mlp}; do
    quiet "/usr/$file" --help
  done
  grep -q /usr/libexec/ddp pkg-ddp-static || fail "libddp.a looks for ddp_probe elsewhere than in /usr/libexec/ddp"
  echo "the programs of libddp-tools run"

  quiet dpkg --purge libddp-tools "$(dpkg-deb -f libddp[0-9]*.deb Package)"
  left=$(grep -h ddp ./*.files | xargs ls -dF 2>/dev/null || true) # a folder stays that has something new in it
  [[ -z $left ]] || fail "this is left after the packages were removed: $left"
  echo "nothing is left after the packages were removed"
}

main() {
  local packages=$repo/build/packages version debs deb
  case ${1-} in
    -h | --help)
      usage
      return
      ;;
    -*) die "unknown flag $1; see --help" ;;
    ?*) packages=$1 ;;
  esac
  debs=("$packages"/libddp*.deb)
  ((${#debs[@]} == 3)) || die "not three packages in $packages; run scripts/packages.sh"
  version=$(sed -nE 's/^#define DDP_VERSION_(MAJOR|MINOR|PATCH) ([0-9]+)$/\2/p' "$repo/include/ddp/version.h" | paste -sd.)
  for deb in "${debs[@]}"; do
    [[ $(dpkg-deb -f "$deb" Version) == "$version-1" ]] || die "$deb is not of version $version"
  done
  deb=$packages/libddp${version%.*}_$version-1_$(dpkg --print-architecture).deb
  [[ -f $deb ]] || die "no package libddp${version%.*}"
  [[ $(dpkg-deb -c "$deb") == *" ./usr/lib/$(gcc -print-multiarch)/libddp.so.${version%.*} "* ]] ||
    die "$deb has its library elsewhere than Debian; configure with -DCMAKE_INSTALL_PREFIX=/usr"

  scratch=$(mktemp -d)
  trap 'rm -rf -- "$scratch"' EXIT
  mkdir "$scratch/view" "$scratch/check"
  if ! in_view "$scratch" true 2>"$scratch/reason"; then
    echo "skipped: no view of this system: $(head -n 1 "$scratch/reason")"
    exit 77
  fi
  # The first block of LANGUAGE in PAGE.
  block() { awk -v fence="\`\`\`$1" '$0 == fence { inside = 1; next } /^```$/ && inside { exit } inside' "$repo/$2"; }
  block cmake README.md >"$scratch/check/CMakeLists.txt"
  block cpp README.md >"$scratch/check/main.cc"
  block c docs/c.md >"$scratch/check/main.c"
  (cd "$repo/include" && find ddp -name '*.h' | LC_ALL=C sort) >"$scratch/check/headers"
  cp -- "${debs[@]}" "$scratch/check"
  chmod -R a+rX "$scratch"
  in_view "$scratch" bash -euo pipefail -c "$(declare -f fail quiet consume check)"'; cd /check; check'
  say "the packages work"
}

main "$@"
