#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# scripts/check_abi.sh fails for each kind of change of the binary interface.
#
#   abi_test.sh SOURCE_DIR SHARED STATIC CXX
set -euo pipefail
source_dir=$1 shared=$2 static=$3 cxx=$4
check=$source_dir/scripts/check_abi.sh
code=0
bash "$check" "$shared" || code=$?
((code == 0)) || exit "$code" # 77: skipped

folder=$(mktemp -d)
trap 'rm -rf -- "$folder"' EXIT

# refused TEXT ARGUMENT...: the check fails, and says TEXT.
refused() {
  local text=$1 code=0
  shift
  bash "$check" "$@" >"$folder/out" 2>&1 || code=$?
  if ((code != 1)) || ! grep -q -- "$text" "$folder/out" || ! grep -q "the binary interface has changed" "$folder/out"; then
    printf 'check_abi.sh %s: exit code %d, wanted 1 and "%s"\n' "$*" "$code" "$text"
    cat "$folder/out"
    exit 1
  fi
}

# The same library without one function for C++ and one for C.
sed 's/local:/local: _ZN3ddp17CreateMemoryStoreEv; ddp_context_rank;/' "$source_dir/libddp/exports.map" >"$folder/exports.map"
"$cxx" -shared -Wl,--version-script="$folder/exports.map" -Wl,--whole-archive "$static" -Wl,--no-whole-archive -o "$folder/libddp.so"
refused "removed: ddp::CreateMemoryStore()" "$folder/libddp.so"
grep -qx "removed: ddp_context_rank" "$folder/out"

# planted FILE FROM TO TEXT: a header is changed.
planted() {
  rm -rf -- "$folder/include"
  cp -r "$source_dir/include" "$folder/include"
  sed -i -E "s/$2/$3/" "$folder/include/ddp/$1"
  ! cmp -s "$source_dir/include/ddp/$1" "$folder/include/ddp/$1" || { echo "nothing planted in $1"; exit 1; }
  refused "$4" --headers="$folder/include" "$shared"
}
planted store.h '(virtual .* Set\()' '\1int planted, ' "Store::Set(int"
planted store.h 'virtual ~Store\(\) = default;' '&\n  virtual int Planted() { return 0; }' "Planted"
planted context.h '^struct ContextOptions \{' '&\n  int planted = 0;' "planted"
planted types.h 'enum class DType : uint8_t \{' '& kPlanted,' "kPlanted"
planted c/context.h 'ddp_context_rank\(' '&int planted, ' "TypeOf_ddp_context_rank"
planted c/types.h '^  DDP_SUM,' '  DDP_PLANTED, DDP_SUM,' "ValueOf_DDP_SUM"
planted c/types.h '^typedef struct ddp_buffer \{' '&\n  int planted;' "planted"
