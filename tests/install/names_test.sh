#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The documentation site refuses a public name without a comment, of C++ and of C.
#
#   names_test.sh SOURCE_DIR
set -euo pipefail
source_dir=$1
for program in doxygen python3; do
  command -v "$program" >/dev/null || { echo "skipped: install $program"; exit 77; }
done
folder=$(mktemp -d)
trap 'rm -rf -- "$folder"' EXIT
mkdir -p "$folder/docs"
cp -r "$source_dir/docs/site" "$folder/docs/site"
cp -r "$source_dir/scripts" "$folder/scripts"

# planted HEADER AFTER LINE NAME: the line stands in the header after one that matches AFTER; the check says the name.
planted() {
  local code=0
  rm -rf -- "$folder/include"
  cp -r "$source_dir/include" "$folder/include"
  sed -i -E "/$2/a $3" "$folder/include/ddp/$1"
  ! cmp -s "$source_dir/include/ddp/$1" "$folder/include/ddp/$1" || { echo "nothing planted in $1"; exit 1; }
  bash "$folder/scripts/site.sh" --no-setup --names >"$folder/out" 2>&1 || code=$?
  if ((code != 1)) || ! grep -q "$4" "$folder/out"; then
    printf '"%s" in %s: exit code %d, wanted 1 and "%s"\n' "$3" "$1" "$code" "$4"
    cat "$folder/out"
    exit 1
  fi
}
cp -r "$source_dir/include" "$folder/include"
bash "$folder/scripts/site.sh" --no-setup --names
planted store.h '^DDP_EXPORT .*CreateMemoryStore' 'DDP_EXPORT int Planted();' "Planted"
planted version.h '^#define DDP_VERSION_PATCH' '#define DDP_PLANTED 1' "DDP_PLANTED"
planted c/context.h '^DDP_C_API .*ddp_context_rank' 'DDP_C_API int ddp_planted(void);' "ddp_planted"
planted c/group.h '^\/\/ -------.* groups$' '\nDDP_C_API int ddp_planted(void);' "ddp_planted"
planted c/types.h '^typedef struct ddp_store ' 'typedef struct ddp_planted ddp_planted;' "ddp_planted"
planted c/types.h '^  DDP_SUM,' '  DDP_PLANTED,' "DDP_PLANTED"
planted c/model.h '^typedef struct ddp_model_options' '  int32_t planted;' "planted"
planted c/amp.h '^#define DDP_C_AMP_H_' '#define DDP_PLANTED 1' "DDP_PLANTED"
planted ddp_c.h '^#define DDP_DDP_C_H_' 'int ddp_planted(void);' "ddp_planted"
