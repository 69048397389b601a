// SPDX-License-Identifier: Apache-2.0
// What a reduction in block-scaled 8 bits has to give, counted out on the host.
#ifndef TESTS_SUPPORT_BLOCK_REFERENCE_H_
#define TESTS_SUPPORT_BLOCK_REFERENCE_H_

#include <cstddef>
#include <functional>
#include <vector>

#include "ddp/types.h"
#include "libddp/device/cpu_blocks.h"
#include "tests/support/numbers.h"

namespace ddp::testing {

struct BlockSum {
  blocks::Format format = blocks::Format::kInt8;
  DType dtype = DType::kFloat32;
  size_t count = 0;
  float prescale = 1, postscale = 1;
};

// The bytes of the result. value(rank, i): what each of `ranks` contributes.
inline std::vector<char> ReduceInBlocks(const BlockSum& sum, int ranks,
                                        const std::function<double(int, size_t)>& value) {
  const size_t bytes = blocks::GroupsOf(sum.count) * blocks::kGroupBytes, size = SizeOf(sum.dtype);
  std::vector<char> all(static_cast<size_t>(ranks) * bytes), array(sum.count * size);
  blocks::Pass pass{.format = sum.format, .dtype = static_cast<uint8_t>(sum.dtype), .count = sum.count};
  for (int r = 0; r < ranks; ++r) {
    for (size_t i = 0; i < sum.count; ++i) SetElement(sum.dtype, array.data(), i, value(r, i));
    pass.in = array.data();
    pass.out = all.data() + static_cast<size_t>(r) * bytes;
    pass.scale = sum.prescale;
    CpuRunBlocks(pass);
  }
  pass.step = blocks::Pass::Step::kReduce;
  pass.in = pass.out = all.data();
  pass.ins = ranks;
  pass.stride = bytes;
  pass.scale = sum.postscale;
  CpuRunBlocks(pass);
  pass.step = blocks::Pass::Step::kDequantize;
  pass.out = array.data();
  CpuRunBlocks(pass);
  return array;
}

}  // namespace ddp::testing

#endif  // TESTS_SUPPORT_BLOCK_REFERENCE_H_
