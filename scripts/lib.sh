# SPDX-License-Identifier: Apache-2.0
# Functions that the scripts share. Source this file; do not run it.
# shellcheck shell=bash

repo=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)

say() { printf '==> %s\n' "$*"; }
die() {
  printf 'error: %s\n' "$*" >&2
  exit 1
}

# The packages that are needed, as Debian 12 and Ubuntu 24.04 name them. "a|b,c": a, or b and c together.
# shellcheck disable=SC2034 # read by the scripts
ddp_packages=(
  'g++|clang' cmake ninja-build pkg-config
  libabsl-dev libspdlog-dev libhwy-dev libhwloc-dev libasio-dev libssl-dev # the library
  'openmpi-bin,libopenmpi-dev|mpich,libmpich-dev'
  libdnnl-dev nlohmann-json3-dev zlib1g-dev libturbojpeg0-dev # the examples
)
# shellcheck disable=SC2034
ddp_test_packages=(catch2 libbenchmark-dev) # tests and benchmarks
# shellcheck disable=SC2034
ddp_site_packages=(doxygen furo python3-breathe python3-myst-parser python3-sphinx) # the documentation site

# Prints the given packages that are not installed, one per line. If no alternative is complete, prints what the first lacks.
missing_packages() {
  local names=("${@//[|,]/ }") installed need choice package missing first
  # shellcheck disable=SC2068 # alternatives are several words
  installed=$(dpkg-query -W -f='${db:Status-Status} ${Package}\n' ${names[@]} 2>/dev/null | sed -n 's/^installed //p' || true)
  for need in "$@"; do
    first=
    for choice in ${need//|/ }; do
      missing=
      for package in ${choice//,/ }; do
        grep -qxF -- "$package" <<<"$installed" || missing+="$package"$'\n'
      done
      [[ -n $missing ]] || continue 2
      first=${first:-$missing}
    done
    printf '%s' "$first"
  done
}

# Installs the given packages that are missing. If that is not possible, says what to install and exits.
require_packages() {
  if ! command -v apt-get >/dev/null || ! command -v dpkg-query >/dev/null; then
    die "this system has no apt-get. Install the equivalents of these Debian packages, then run again with --no-setup: $*"
  fi
  local missing=() sudo=()
  mapfile -t missing < <(missing_packages "$@")
  ((${#missing[@]})) || return 0
  if ((EUID != 0)); then
    if ! command -v sudo >/dev/null || ! sudo -n true 2>/dev/null; then
      die "packages are missing, and installing them needs root or sudo without a password. Run this as root, then try again:
  apt-get update && apt-get install -y --no-install-recommends ${missing[*]}"
    fi
    sudo=(sudo)
  fi
  say "Installing ${missing[*]}"
  local apt=("${sudo[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -qq -o DPkg::Lock::Timeout=300)
  # Old package lists may name versions that the server no longer has. If they cannot be refreshed, they may still work.
  "${apt[@]}" update </dev/null || say "apt-get update failed; using the present package lists"
  "${apt[@]}" install -y --no-install-recommends "${missing[@]}" </dev/null >/dev/null ||
    die "apt-get could not install: ${missing[*]}"
}

# Prints how many compilers to run at once: one per processor, but each needs 2 GB of memory.
build_jobs() {
  local cpus memory_kb limit
  cpus=$(nproc)
  memory_kb=$(sed -n 's/^MemAvailable: *\([0-9]*\) kB/\1/p' /proc/meminfo)
  if limit=$(cat /sys/fs/cgroup/memory.max 2>/dev/null) && [[ $limit =~ ^[0-9]+$ ]] && ((limit / 1024 < memory_kb)); then
    memory_kb=$((limit / 1024))
  fi
  local by_memory=$((memory_kb / 2000000))
  ((by_memory < cpus)) && cpus=$by_memory
  echo $((cpus > 0 ? cpus : 1))
}

# configured PRESET: true if build/PRESET exists and belongs to this tree, which may have been moved or copied since.
configured() {
  local home
  home=$(sed -n 's/^CMAKE_HOME_DIRECTORY:INTERNAL=//p' "$repo/build/$1/CMakeCache.txt" 2>/dev/null || true)
  [[ -n $home && $home == "$repo" ]]
}

# configure PRESET [CMAKE_ARGUMENT...]: creates or updates build/PRESET.
configure() {
  local preset=$1
  shift
  # CMake refuses the build folder of a tree that was moved or copied.
  configured "$preset" || rm -rf -- "$repo/build/$preset"
  say "Configuring $preset"
  (cd "$repo" && cmake --preset "$preset" --log-level=WARNING "$@" >/dev/null)
}

# build PRESET [TARGET...]: builds the targets (default: all) in build/PRESET.
build() {
  local preset=$1 jobs targets=()
  shift
  jobs=$(build_jobs)
  (($# == 0)) || targets=(--target "$@")
  say "Building $preset, $jobs at a time"
  cmake --build "$repo/build/$preset" --parallel "$jobs" "${targets[@]}"
}

# Prints the mpirun of the MPI that PRESET was built with; nothing if it was built without MPI.
mpirun_of() {
  sed -n 's/^MPIEXEC_EXECUTABLE:[A-Z]*=//p' "$repo/build/$1/CMakeCache.txt" | grep -v NOTFOUND || true
}

# allow_mpirun RANKS [MPIRUN]: by default Open MPI refuses to run as root, and to start more ranks than there are cores. Sets
# the environment that allows the first, and, if MPIRUN is Open MPI's, the array mpirun_flags that allows the second.
allow_mpirun() {
  local ranks=$1 mpirun=${2-} cores
  mpirun_flags=()
  if ((EUID == 0)); then
    export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
  fi
  [[ -n $mpirun ]] && "$mpirun" --version 2>/dev/null | grep -qE 'Open MPI|OpenRTE|Open Run-Time' || return 0
  # Open MPI counts cores, nproc counts hardware threads.
  cores=$(lscpu -p=CORE,SOCKET 2>/dev/null | grep -v '^#' | sort -u | wc -l || true)
  if ((cores < 1 || cores > $(nproc))); then
    cores=$(nproc)
  fi
  if ((ranks > cores)); then
    # shellcheck disable=SC2034 # read by the caller
    mpirun_flags=(--oversubscribe)
  fi
}
