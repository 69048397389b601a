// The matrix products of the CPU layers. The only file of the project (with its .cc) that knows oneDNN, and hides what
// differs between its versions 2 and 3.
#ifndef EXAMPLES_NN_ONEDNN_H_
#define EXAMPLES_NN_ONEDNN_H_

#include <memory>

namespace nn::onednn {

// c is [m, n], a is [m, k], b is [k, n].
struct Shape {
  int m;
  int n;
  int k;
};

// How a matrix lies in memory. [m, k] by columns is the memory of a [k, m] by rows: its transpose.
enum class Order { kByRows, kByColumns };

// What a product multiplies.
enum class Factors {
  kFloat32,
  kBFloat16,  // needs HasBfloat16(), see onednn_image.h; the sums are float32 all the same
};

// What is done to a product before it is stored: first bias [n] is added to every row and, with `accumulate`, what c
// held; then max(0, .) is taken.
struct Epilogue {
  bool bias = false;
  bool accumulate = false;
  bool relu = false;
};

// c = epilogue(a b) in float32, c by rows, planned once for a shape and for the calling thread's number of threads.
class MatMul {
 public:
  MatMul(const Shape& shape, Order a, Order b, const Epilogue& epilogue, Factors factors = Factors::kFloat32);
  ~MatMul();

  // a and b are floats, or of 16 bits. `bias` may be null where the epilogue has none. c overlaps none of the others.
  void Run(const void* a, const void* b, const float* bias, float* c);

 private:
  struct Plan;
  std::unique_ptr<Plan> plan_;
};

// A matrix of floats rounded to bfloat16, in memory of its own. Planned as MatMul is.
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

// c = a b, all by rows: up to a tenth faster than MatMul when m is small. The first call in a process compiles for 30
// to 45 ms: see WarmUp.
void Multiply(const Shape& shape, const float* a, const float* b, float* c);

// Compiles what Multiply needs.
void WarmUp();

// For products planned and run by the calling thread from now on.
void SetThreads(int threads);

}  // namespace nn::onednn

#endif  // EXAMPLES_NN_ONEDNN_H_
