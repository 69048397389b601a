#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# scripts/fetch_data.sh says where data is had, takes what is whole, and refuses the rest with one line.
#
#   fetch_data_test.sh SCRIPT
#
# The files are made up; where a test needs other sums than those of the real ones, it sources the script and sets them.
set -u

script=$1
# shellcheck source-path=SCRIPTDIR source=../support/in_folder.sh
source "$(dirname "${BASH_SOURCE[0]}")/../support/in_folder.sh"

# takes WORDS COMMAND...: it succeeds, and says so.
takes() {
  local words=$1
  shift
  "$@" >out 2>err || fail "exit code $?: $*"
  [[ ! -s err ]] || fail "complains: $*"
  grep -qF -- "$words" out || fail "does not say '$words': $*"
}

# refuses WORDS COMMAND...: it ends with 1 and one line on standard error, which holds the words.
refuses() {
  local words=$1 code=0
  shift
  "$@" >out 2>err || code=$?
  ((code == 1)) || fail "exit code $code, not 1: $*"
  [[ ! -s out && $(wc -l <err) == 1 ]] || fail "says not one line: $*"
  grep -q '^error: ' err || fail "no error: $*"
  grep -qF -- "$words" err || fail "does not say '$words': $*"
}

fetch() { bash "$script" "$@"; }

# fetch, where the files in the folder made/ are MNIST's.
fetch_made_up() {
  # shellcheck disable=SC2016 # expanded by the inner shell
  bash -c 'source "$1" && for name in "${!mnist[@]}"; do sum=$(md5sum <made/$name) && mnist[$name]=${sum%% *}; done && main "${@:2}"' \
    - "$script" "$@"
}

names=(train-images-idx3-ubyte train-labels-idx1-ubyte t10k-images-idx3-ubyte t10k-labels-idx1-ubyte)

# --- where they are had
for flags in "" -h --help; do
  # shellcheck disable=SC2086 # none for none
  takes "Usage: bash scripts/fetch_data.sh [FOLDER]" fetch $flags
  for words in https://ossci-datasets.s3.amazonaws.com/mnist/ https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz "${names[@]}" --data=FOLDER; do
    grep -qF -- "$words" out || fail "the usage does not tell of $words"
  done
done

# --- nothing there
refuses "there is no folder $folder/none" fetch "$folder/none"
refuses "one folder at a time" fetch a b
mkdir empty
refuses "empty holds files of neither MNIST nor CIFAR-10; run this without a folder" fetch empty

# --- MNIST
mkdir made
for i in 0 1 2 3; do printf 'file %d of four\n' $i >"made/${names[i]}"; done
takes "made holds MNIST, complete: train_cnn --data=made" fetch_made_up made
cp -r made zipped && gzip zipped/*
takes "zipped holds MNIST, complete" fetch_made_up zipped
cp -r made mixed && gzip mixed/t10k*
takes "mixed holds MNIST, complete" fetch_made_up mixed
refuses "is not MNIST's, or damaged: download it again" fetch made # by the real sums
for name in "${names[@]}"; do
  rm -rf bad && cp -r made bad && rm "bad/$name"
  refuses "bad has no $name and no $name.gz" fetch_made_up bad
  printf 'file of another set\n' >"bad/$name"
  refuses "bad/$name is not MNIST's, or damaged: download it again" fetch_made_up bad
  rm -rf bad && cp -r zipped bad && truncate -s -4 "bad/$name.gz"
  refuses "bad/$name.gz is damaged: download it again" fetch_made_up bad
  rm -rf bad && cp -r zipped bad && cp "made/$name" "bad/$name.gz"
  refuses "bad/$name.gz is damaged: download it again" fetch_made_up bad
done

# --- CIFAR-10: 10,000 images of 3,073 bytes in each file, the first of which is the label
mkdir -p all/cifar-10-batches-bin
for name in data_batch_{1..5} test_batch; do truncate -s 30730000 "all/cifar-10-batches-bin/$name.bin"; done
takes "all/cifar-10-batches-bin holds CIFAR-10, complete: train_cnn --model=resnet20 --data=all/cifar-10-batches-bin" fetch all
cd all/cifar-10-batches-bin || exit 1
takes ". holds CIFAR-10, complete" fetch .
# label IMAGE VALUE: in octal, in the third file
label() { printf '%b' "\\0$2" | dd of=data_batch_3.bin bs=1 seek=$(($1 * 3073 + ${3-0})) conv=notrunc status=none; }
label 9999 11 && label 17 377 1
takes "complete" fetch . # label 9, and any pixel
label 9999 12 && label 0 377
refuses "./data_batch_3.bin has 2 labels above 9: it is damaged, or not CIFAR-10's; download it again" fetch .
label 9999 0 && label 0 0
for name in data_batch_1 data_batch_5 test_batch; do
  for size in 30729999 30730001 0; do
    truncate -s $size $name.bin
    refuses "./$name.bin has $size bytes where 30730000 are expected: download it again" fetch .
  done
  truncate -s 30730000 $name.bin
done
rm test_batch.bin
refuses ". has no test_batch.bin" fetch .
echo passed
