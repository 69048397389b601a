// SPDX-License-Identifier: Apache-2.0
// Shared implementation of the operations in onednn_image.h. Only the files that implement these include it.
#ifndef EXAMPLES_NN_ONEDNN_SESSION_H_
#define EXAMPLES_NN_ONEDNN_SESSION_H_

#include <cstddef>
#include <cstring>
#include <dnnl.hpp>
#include <initializer_list>
#include <unordered_map>
#include <utility>

#include "examples/nn/check.h"
#include "examples/nn/onednn_image.h"
#include "hwy/aligned_allocator.h"

namespace nn::onednn {

using dnnl::memory;
using dnnl::prop_kind;

using FloatArray = hwy::AlignedFreeUniquePtr<float[]>;

constexpr auto kFloat = memory::data_type::f32;

inline memory::desc Images(int rows, const ImageShape& s, memory::format_tag tag, memory::data_type type = kFloat) {
  return memory::desc({rows, s.channels, s.height, s.width}, type, tag);
}

inline memory::desc Vector(int count) { return memory::desc({count}, memory::data_type::f32, memory::format_tag::a); }

inline dnnl::primitive_attr UserScratchpad() {
  dnnl::primitive_attr attributes;
  attributes.set_scratchpad_mode(dnnl::scratchpad_mode::user);
  return attributes;
}

struct Session::Impl {
  dnnl::engine engine{dnnl::engine::kind::cpu, 0};
  dnnl::stream stream{engine};
  memory::format_tag native = memory::format_tag::nchw;
  int block = 1;  // 0: all channels
  // Memory that is too small is replaced. Scratchpads come last.
  FloatArray memory_of[3];
  size_t floats_of[3] = {};

  float* AtLeast(int which, size_t floats) {
    if (floats_of[which] < floats) {
      memory_of[which].reset();
      memory_of[which] = hwy::AllocateAligned<float>(floats);
      NN_CHECK(memory_of[which] != nullptr);
      floats_of[which] = floats;
    }
    return memory_of[which].get();
  }

  memory::desc Describe(int rows, const ImageShape& shape, Layout layout, memory::data_type type = kFloat) const {
    return Images(rows, shape, layout == Layout::kPlain ? memory::format_tag::nchw : native, type);
  }
};

constexpr int kScratchpad = 2;

// A oneDNN primitive with its operands, whose addresses change between calls.
class Operation {
 public:
  Operation() = default;
  template <class Description>
  Operation(dnnl::primitive primitive, const Description& description, Session::Impl& session)
      : primitive_(std::move(primitive)),
        session_(&session),
        scratchpad_bytes_(description.scratchpad_desc().get_size()) {
    Operand(DNNL_ARG_SCRATCHPAD, description.scratchpad_desc());
  }

  void Operand(int key, const memory::desc& desc) {
    arguments_.insert_or_assign(key, memory(desc, session_->engine, DNNL_MEMORY_NONE));
  }

  // For an operation that reads of its scratchpad what it has not written.
  void ClearScratchpad() { clear_scratchpad_ = true; }

  // oneDNN's handles are not const, though an operation only reads its sources.
  void Set(int key, const float* data) { arguments_.at(key).set_data_handle(const_cast<float*>(data)); }

  void Run(std::initializer_list<std::pair<int, const float*>> operands = {}) {
    for (const auto& [key, data] : operands) Set(key, data);
    float* const scratchpad = session_->AtLeast(kScratchpad, scratchpad_bytes_ / sizeof(float) + 1);
    if (clear_scratchpad_) std::memset(scratchpad, 0, scratchpad_bytes_);
    Set(DNNL_ARG_SCRATCHPAD, scratchpad);
    primitive_.execute(session_->stream, arguments_);
  }

 private:
  dnnl::primitive primitive_;
  Session::Impl* session_ = nullptr;
  size_t scratchpad_bytes_ = 0;
  bool clear_scratchpad_ = false;
  std::unordered_map<int, memory> arguments_;
};

inline Operation MakeReorder(Session::Impl& session, const memory::desc& from, const memory::desc& to,
                             bool accumulate) {
  dnnl::primitive_attr attributes = UserScratchpad();
  if (accumulate) {
    dnnl::post_ops ops;
    ops.append_sum(1.0f);
    attributes.set_post_ops(ops);
  }
  const dnnl::reorder::primitive_desc description(session.engine, from, session.engine, to, attributes);
  Operation reorder(dnnl::reorder(description), description, session);
  reorder.Operand(DNNL_ARG_FROM, from);
  reorder.Operand(DNNL_ARG_TO, to);
  return reorder;
}

inline void RunReorder(Operation& reorder, const float* from, float* to) {
  reorder.Run({{DNNL_ARG_FROM, from}, {DNNL_ARG_TO, to}});
}

inline FloatArray FloatsFor(const memory::desc& desc) {
  FloatArray floats = hwy::AllocateAligned<float>(desc.get_size() / sizeof(float) + 1);
  NN_CHECK(floats != nullptr);
  return floats;
}

}  // namespace nn::onednn

#endif  // EXAMPLES_NN_ONEDNN_SESSION_H_
