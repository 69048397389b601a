#!/usr/bin/env bash
# Says where the data sets of the examples are had, and checks what lies in a folder. See --help.
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=lib.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"

usage() {
  cat <<END
Usage: bash scripts/fetch_data.sh [FOLDER]

Without FOLDER: says where MNIST and CIFAR-10 are had. With it: checks the files there, which the trainers read with
--data=FOLDER. It downloads nothing by itself: both have terms of their own, which are yours to accept.

MNIST (handwritten digits, 28x28; for train_mlp and train_cnn --model=lenet), four files, plain or as they come in .gz:
  train-images-idx3-ubyte  train-labels-idx1-ubyte  t10k-images-idx3-ubyte  t10k-labels-idx1-ubyte
  from https://ossci-datasets.s3.amazonaws.com/mnist/, or the page of its authors, http://yann.lecun.com/exdb/mnist/:

    for name in train-images-idx3 train-labels-idx1 t10k-images-idx3 t10k-labels-idx1; do
      curl -fLO --output-dir FOLDER https://ossci-datasets.s3.amazonaws.com/mnist/\$name-ubyte.gz
    done

CIFAR-10 (photographs, 32x32 in colour; for train_cnn --model=resnet20), the "binary version (suitable for C programs)"
  from https://www.cs.toronto.edu/~kriz/cifar.html:

    curl -fL https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz | tar -xz -C FOLDER
END
}

# Of the uncompressed files.
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
    die "$folder holds files of neither MNIST nor CIFAR-10; run this without a folder to see where they are had"
  fi
}

# Not where a test sources this.
[[ ${BASH_SOURCE[0]} != "$0" ]] || main "$@"
