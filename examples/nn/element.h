// The types that activations may have.
#ifndef EXAMPLES_NN_ELEMENT_H_
#define EXAMPLES_NN_ELEMENT_H_

#include <cstddef>

namespace nn {

enum class Element { kFloat32, kFloat16, kBFloat16 };

constexpr size_t SizeOf(Element element) { return element == Element::kFloat32 ? 4 : 2; }

}  // namespace nn

#endif  // EXAMPLES_NN_ELEMENT_H_
