// SPDX-License-Identifier: Apache-2.0
// The element types of activations.
#ifndef EXAMPLES_NN_ELEMENT_H_
#define EXAMPLES_NN_ELEMENT_H_

#include <cstddef>

namespace nn {

enum class Element { kFloat32, kFloat16, kBFloat16 };

// Returns the name of `element` in another library, given the three names.
template <class T>
constexpr T NameOf(Element element, T float32, T float16, T bfloat16) {
  return element == Element::kFloat32 ? float32 : element == Element::kFloat16 ? float16 : bfloat16;
}

constexpr size_t SizeOf(Element element) { return element == Element::kFloat32 ? 4 : 2; }

}  // namespace nn

#endif  // EXAMPLES_NN_ELEMENT_H_
