// SPDX-License-Identifier: Apache-2.0
// The matrix products of the CPU layers. Together with onednn_image.h this is the only interface to oneDNN. It hides
// the differences between oneDNN's versions 2 and 3.
#ifndef EXAMPLES_NN_ONEDNN_H_
#define EXAMPLES_NN_ONEDNN_H_

#include <memory>
#include <string>

namespace nn::onednn {

// c is [m, n], a is [m, k], b is [k, n].
struct Shape {
  int m;
  int n;
  int k;
};

// The memory layout of a matrix. An [m, k] matrix by columns has the same memory as its transpose, [k, m] by rows.
enum class Order { kByRows, kByColumns };

// The type of a product's factors.
enum class Factors {
  kFloat32,
  kBFloat16,  // needs HasBfloat16(), see onednn_image.h; sums are still float32
};

// Operations on a product before it is stored: bias [n] is added to every row, and with `accumulate` the old contents
// of c. There is no ReLU, because oneDNN's turns NaN into 0.
struct Epilogue {
  bool bias = false;
  bool accumulate = false;
};

// Computes c = epilogue(a b) in float32, with c by rows. Planned once for a shape and the calling thread's number of
// threads.
class MatMul {
 public:
  MatMul(const Shape& shape, Order a, Order b, const Epilogue& epilogue, Factors factors = Factors::kFloat32);
  ~MatMul();

  // a and b are floats, or 16-bit numbers. `bias` may be null if the epilogue has none. c must not overlap the others.
  void Run(const void* a, const void* b, const float* bias, float* c);

 private:
  struct Plan;
  std::unique_ptr<Plan> plan_;
};

// A copy of a float matrix, rounded to bfloat16. Planned like MatMul.
class Rounded {
 public:
  Rounded(int rows, int columns);
  ~Rounded();

  void Round(const float* matrix);  // by rows
  const void* data() const;

 private:
  struct Plan;
  std::unique_ptr<Plan> plan_;
};

// Computes c = a b, all by rows. Up to a tenth faster than MatMul if m is small. The first call in a process compiles
// for 30 to 45 ms; see WarmUp.
void Multiply(const Shape& shape, const float* a, const float* b, float* c);

// Compiles the code for Multiply in advance.
void WarmUp();

// The version of the library that is used, such as "3.7.2".
std::string Version();

// Sets the number of threads for products that the calling thread plans and runs from now on.
void SetThreads(int threads);

}  // namespace nn::onednn

#endif  // EXAMPLES_NN_ONEDNN_H_
