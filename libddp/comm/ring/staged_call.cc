// SPDX-License-Identifier: Apache-2.0
#include "libddp/comm/ring/staged_call.h"

#include <algorithm>

#include "libddp/device/buffer_ops.h"

namespace ddp {
namespace {

staged::Arithmetic ArithmeticOf(const CheckedCall& call) {
  const CpuReduce::Scales& scales = call.kernel.scales();
  return {.pre64 = scales.pre64,
          .post64 = scales.post64,
          .pre32 = scales.pre32,
          .post32 = scales.post32,
          .divisor = scales.divisor,
          .in_type = static_cast<uint8_t>(call.key.in),
          .out_type = static_cast<uint8_t>(call.key.out),
          .op = static_cast<uint8_t>(call.key.op),
          .nonfinite = call.reduce == nullptr ? nullptr : call.reduce->nonfinite};
}

}  // namespace

staged::Collective CollectiveOf(const CheckedCall& call) {
  staged::Collective c = {};
  c.in_size = static_cast<int>(SizeOf(call.key.in));
  c.out_size = static_cast<int>(SizeOf(call.key.out));
  c.count = call.count;
  c.arithmetic = ArithmeticOf(call);
  return c;
}

staged::Collective SumInPlace(const Buffer& array) {
  const size_t size = SizeOf(array.dtype);
  staged::Collective c = {};
  c.in_size = c.out_size = static_cast<int>(size);
  c.count = array.count;
  c.arithmetic.in_type = c.arithmetic.out_type = static_cast<uint8_t>(array.dtype);
  c.in = c.out = {{static_cast<char*>(array.data)}, {array.count * size}, 1};
  return c;
}

absl::Status CallSide::Fill(bool with_data, staged::RangeTable* table) {
  Buffers used = buffers_;
  if (std::count_if(used.begin(), used.end(), [](const Buffer& b) { return b.count > 0; }) > staged::kMaxRanges) {
    if (absl::Status s = whole_.AllocateFor(buffers_); !s.ok()) return s;
    used = whole_.buffers();
    if (with_data) {
      if (absl::Status s = CopyPieces(runtime_, buffers_, used, stream_); !s.ok()) return s;
    }
  }
  table->ranges = 0;
  uint64_t end = 0;
  for (const Buffer& b : used) {
    if (b.count == 0) continue;
    end += b.count * SizeOf(b.dtype);
    table->data[table->ranges] = static_cast<char*>(b.data);
    table->end[table->ranges++] = end;
  }
  return absl::OkStatus();
}

absl::Status CallSide::StoreResult() {
  const Buffer& made = whole_.buffers()[0];
  return made.data == nullptr ? absl::OkStatus() : CopyPieces(runtime_, whole_.buffers(), buffers_, stream_);
}

}  // namespace ddp
