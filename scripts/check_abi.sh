#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Compares the binary interface with the one in abi/: the symbols that the shared library exports, and the layout and virtual functions of the
# public types. See --help.
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=lib.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"

usage() {
  cat <<END
Usage: bash scripts/check_abi.sh [--update] [--headers=FOLDER] [LIBRARY]

Compares what LIBRARY (default: build/dev/libddp.so) exports with abi/libddp.symbols, and the types of the public headers with
abi/libddp.abi. Exit code 1: they differ; 77: it cannot be checked here. CONTRIBUTING.md says which changes need another SOVERSION.

  --update          writes both files instead
  --headers=FOLDER  the public headers (default: include)
END
}

# Writes to FOLDER/types.abi what the headers declare: of a small library that has a function for each public type, and, as C's symbols do not
# tell, one for the type of each function for C and the value of each of C's constants.
describe_types() {
  local headers=$1 folder=$2 name names=() functions=() constants=()
  local -a public
  mapfile -t public < <(cd "$headers" && find ddp -name 'torch*' -prune -o -name '*.h' -print | LC_ALL=C sort) # LibTorch has its own
  {
    printf '#include "%s"\n' "${public[@]}"
    echo '#include <type_traits>'
    # shellcheck disable=SC2016 # of awk
    mapfile -t names < <(cd "$headers" && awk '
      /^namespace [a-z_:]+ \{/ { space[++depth] = $2 }
      /^}  \/\/ namespace/ { --depth }
      /^typedef struct .*\{/ { print $3 }
      /^(enum )?(class|struct) .*\{/ {
        sub(/^enum /, ""); sub(/DDP_EXPORT /, ""); sub(/ *[:{].*/, "", $2)
        name = ""
        for (i = 1; i <= depth; ++i) name = name space[i] "::"
        if (depth > 0) print name $2
      }' "${public[@]}" | LC_ALL=C sort -u)
    mapfile -t functions < <(sed -nE 's/^DDP_C_API [^(]*[ *](ddp_[a-z0-9_]+)\(.*/\1/p' "$headers"/ddp/c/*.h | LC_ALL=C sort)
    mapfile -t constants < <(awk '/^enum \{/ { inside = 1 } inside { sub(/\/\/.*/, ""); print } /};/ { inside = 0 }' "$headers"/ddp/c/*.h |
      grep -o 'DDP_[A-Z0-9_]*' | LC_ALL=C sort -u)
    ((${#names[@]} > 10 && ${#functions[@]} > 10 && ${#constants[@]} > 10)) || die "no public types found in $headers"
    printf 'void Use(const %s*) {}\n' "${names[@]}"
    for name in "${functions[@]}"; do printf 'void TypeOf_%s(decltype(%s)*) {}\n' "$name" "$name"; done
    for name in "${constants[@]}"; do printf 'void ValueOf_%s(std::integral_constant<int, %s>*) {}\n' "$name" "$name"; done
  } >"$folder/types.cc"
  g++ -std=c++20 -w -g -femit-class-debug-always -O0 -fPIC -shared -I"$headers" "$folder/types.cc" -o "$folder/types.so"
  abidw --headers-dir "$headers" --drop-private-types --drop-undefined-syms --no-corpus-path --no-comp-dir-path --no-show-locs \
    --no-elf-needed --no-parameter-names --type-id-style hash --out-file "$folder/types.abi" "$folder/types.so"
}

main() {
  local update=0 headers=$repo/include library=$repo/build/dev/libddp.so failed=0
  while (($#)); do
    case $1 in
      -h | --help)
        usage
        return
        ;;
      --update) update=1 ;;
      --headers=*) headers=${1#*=} ;;
      -*) die "unknown flag $1; see --help" ;;
      *) library=$1 ;;
    esac
    shift
  done
  # Names and layouts contain those of Abseil and of the standard library.
  if ! (source /etc/os-release && [[ $ID-$VERSION_ID-$(uname -m) == debian-12-x86_64 ]]); then
    echo "skipped: abi/ describes Debian 12 on x86_64"
    exit 77
  fi
  if ((update)) && ! command -v abidw >/dev/null; then die "abidw is missing: apt-get install abigail-tools"; fi
  [[ -f $library ]] || die "no such library: $library; build the target ddp_other_kind, or name one"
  scratch=$(mktemp -d)
  trap 'rm -rf -- "$scratch"' EXIT
  nm -D --defined-only "$library" | awk '{print $NF}' | LC_ALL=C sort >"$scratch/symbols"
  if ((update)); then
    describe_types "$headers" "$scratch"
    mkdir -p "$repo/abi"
    cp "$scratch/symbols" "$repo/abi/libddp.symbols"
    cp "$scratch/types.abi" "$repo/abi/libddp.abi"
    return
  fi
  diff -u "$repo/abi/libddp.symbols" "$scratch/symbols" | sed -n 's/^-\([^-]\)/removed: \1/p; s/^+\([^+]\)/added: \1/p' | c++filt >"$scratch/changes" || true
  cat "$scratch/changes"
  [[ ! -s $scratch/changes ]] || failed=1
  if command -v abidiff >/dev/null; then
    describe_types "$headers" "$scratch"
    # By default a virtual function with other parameters counts as harmless.
    abidiff --harmless --no-show-locs "$repo/abi/libddp.abi" "$scratch/types.abi" || failed=1
  elif ((!failed)); then
    echo "skipped: the exported symbols are those of abi/, but to compare the types, abidiff is missing (apt-get install abigail-tools)"
    exit 77
  fi
  ((!failed)) || die "the binary interface has changed; see CONTRIBUTING.md (Binary interface), then run scripts/check_abi.sh --update"
  echo "the binary interface is that of abi/"
}

main "$@"
