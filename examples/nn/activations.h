// Memory for activations.
#ifndef EXAMPLES_NN_ACTIVATIONS_H_
#define EXAMPLES_NN_ACTIVATIONS_H_

#include <cstddef>
#include <cstdlib>
#include <memory>

namespace nn {

// Uninitialised floats, aligned for every vector width, in huge pages where the system gives them and there is enough
// to fill one.
class ActivationBuffer {
 public:
  ActivationBuffer() = default;
  explicit ActivationBuffer(size_t count);

  float* data() const { return data_.get(); }

 private:
  struct Free {
    void operator()(float* p) const { std::free(p); }
  };
  std::unique_ptr<float, Free> data_;
};

}  // namespace nn

#endif  // EXAMPLES_NN_ACTIVATIONS_H_
