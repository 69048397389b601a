// SPDX-License-Identifier: Apache-2.0
// What kernels that use tensor cores are made of: copies into shared memory beside the computation, and products of
// small matrices, which the lanes of a warp hold together. PTX ISA 8, "Warp Level Matrix Multiply-Accumulate
// Instructions"; compute capability 8.0 or higher.
#ifndef EXAMPLES_NN_CUDA_TENSOR_CORE_CUH_
#define EXAMPLES_NN_CUDA_TENSOR_CORE_CUH_

#include <cstdint>
#include <type_traits>

#include "examples/nn/cuda_element.cuh"

namespace nn::cuda {

// Copies 16 bytes to shared memory; zeros, if not `inside`. The thread goes on.
__device__ inline void CopyAside(void* shared, const void* from, bool inside) {
  asm volatile(
      "cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(static_cast<unsigned>(__cvta_generic_to_shared(shared))),
      "l"(from), "r"(inside ? 16 : 0));
}
// Ends a group of this thread's copies; waits until at most `kLeft` groups, the last ones, are on their way.
__device__ inline void EndCopies() { asm volatile("cp.async.commit_group;"); }
template <int kLeft>
__device__ inline void WaitForCopies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kLeft));
}

// The numbers of the common dimension that one product takes: 32 bytes of them.
template <class T>
constexpr int kDepth = 32 / static_cast<int>(sizeof(T));

// Float32 numbers are rounded to TF32, ties away from 0.
template <class T>
__device__ uint32_t ForProduct(uint32_t bits) {
  if constexpr (std::is_same_v<T, float>) asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(bits) : "f"(__uint_as_float(bits)));
  return bits;
}

// Four matrices of eight rows of 16 bytes. Lane i says where row i % 8 of matrix i / 8 is. It gets, of each matrix, the
// 4 bytes i % 4 of row i / 4.
__device__ inline void LoadMatrices(uint32_t (&to)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(static_cast<unsigned>(__cvta_generic_to_shared(row))));
}
// The same of 16-bit numbers, each matrix transposed: numbers i / 4 of the rows i % 4 * 2 and the next one. Two
// matrices take the rows of lanes 0 to 15.
__device__ inline void LoadTransposed(uint32_t (&to)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(static_cast<unsigned>(__cvta_generic_to_shared(row))));
}
__device__ inline void LoadTransposed(uint32_t (&to)[2], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
               : "=r"(to[0]), "=r"(to[1])
               : "r"(static_cast<unsigned>(__cvta_generic_to_shared(row))));
}

// sum += a * b: 16 rows, 8 columns, kDepth<T> between. With row = lane / 4 and two = lane % 4 * 2, a lane has of `sum`
// (row, two), (row, two + 1), (row + 8, two), (row + 8, two + 1). In words of 4 bytes it has of `a` (row, word
// lane % 4), (row + 8, same), (row, word lane % 4 + 4), (row + 8, same); of the transposed `b` the same of column
// lane / 4.
template <class T>
__device__ void AddProduct(float (&sum)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  if constexpr (std::is_same_v<T, float>) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  } else if constexpr (std::is_same_v<T, __half>) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  } else {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  }
}

}  // namespace nn::cuda

#endif  // EXAMPLES_NN_CUDA_TENSOR_CORE_CUH_
