#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Shows where to download the data sets of the examples, and checks the files in a folder. See --help.
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=lib.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"

usage() {
  cat <<END
Usage: bash scripts/fetch_data.sh [FOLDER]

Without FOLDER, shows where to download MNIST and CIFAR-10. With FOLDER, checks the files in it; the trainers read them
with --data=FOLDER. The script downloads nothing: each data set has its own terms, which you accept by downloading it.

MNIST: handwritten digits, 28x28, for train_mlp and train_cnn --model=lenet. Four files, with or without .gz:
  train-images-idx3-ubyte  train-labels-idx1-ubyte  t10k-images-idx3-ubyte  t10k-labels-idx1-ubyte
  from https://ossci-datasets.s3.amazonaws.com/mnist/, or from its authors, http://yann.lecun.com/exdb/mnist/:

    for name in train-images-idx3 train-labels-idx1 t10k-images-idx3 t10k-labels-idx1; do
      curl -fLO --output-dir FOLDER https://ossci-datasets.s3.amazonaws.com/mnist/\$name-ubyte.gz
    done

CIFAR-10: colour photographs, 32x32, for train_cnn --model=resnet20. The "binary version (suitable for C programs)"
  from https://www.cs.toronto.edu/~kriz/cifar.html:

    curl -fL https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz | tar -xz -C FOLDER
END
}

# MD5 sums of the uncompressed files.
declare -A mnist=(
  [train-images-idx3-ubyte]=6bbc9ace898e44ae57da46a324031adb
  [train-labels-idx1-ubyte]=a25bea736e30d166cdddb491f175f624
  [t10k-images-idx3-ubyte]=2646ac647ad5339dbf082846283269ea
  [t10k-labels-idx1-ubyte]=27ae3e4e09519cfbb04c329615203637
)
cifar_bytes=30730000 # 10,000 images of 3,073

check_mnist() {
  local folder=$1 name path sum
  for name in "${!mnist[@]}"; do
    path=$folder/$name
    if [[ -f $path ]]; then
      sum=$(md5sum <"$path")
    elif [[ -f $path.gz ]]; then
      path+=.gz
      sum=$(gzip -dc "$path" 2>/dev/null | md5sum) || die "$path is damaged: download it again"
    else
      die "$folder has no $name and no $name.gz"
    fi
    [[ ${sum%% *} == "${mnist[$name]}" ]] || die "$path is not MNIST's, or damaged: download it again"
  done
  say "$folder holds MNIST, complete: train_cnn --data=$folder"
}

check_cifar() {
  local folder=$1 name path size wrong
  for name in data_batch_{1,2,3,4,5}.bin test_batch.bin; do
    path=$folder/$name
    [[ -f $path ]] || die "$folder has no $name"
    size=$(stat -c %s "$path")
    ((size == cifar_bytes)) || die "$path has $size bytes where $cifar_bytes are expected: download it again"
    # The first byte of each image is its label. (od and awk would take 6 s a file.)
    # shellcheck disable=SC2016 # the variables are perl's
    wrong=$(perl -ne 'BEGIN { $/ = \3073 } ++$wrong if ord > 9; END { print $wrong + 0 }' "$path")
    ((wrong == 0)) || die "$path has $wrong labels above 9: it is damaged, or not CIFAR-10's; download it again"
  done
  say "$folder holds CIFAR-10, complete: train_cnn --model=resnet20 --data=$folder"
}

main() {
  (($# > 0)) || { usage && return; }
  (($# == 1)) || die "one folder at a time, not: $*"
  case $1 in
    -h | --help)
      usage
      return
      ;;
  esac
  local folder=$1
  [[ -d $folder ]] || die "there is no folder $folder"
  if [[ -f $folder/cifar-10-batches-bin/data_batch_1.bin ]]; then
    check_cifar "$folder/cifar-10-batches-bin"
  elif [[ -f $folder/data_batch_1.bin ]]; then
    check_cifar "$folder"
  elif compgen -G "$folder/*-ubyte*" >/dev/null; then
    check_mnist "$folder"
  else
    die "$folder holds files of neither MNIST nor CIFAR-10; run this without a folder to see where to download them"
  fi
}

# A test sources this file; then main does not run.
[[ ${BASH_SOURCE[0]} != "$0" ]] || main "$@"
