// SPDX-License-Identifier: Apache-2.0
#include "examples/nn/onednn.h"

#include <dnnl.hpp>
#include <unordered_map>
#include <vector>

#include "absl/strings/str_cat.h"
#include "examples/nn/check.h"

// The OpenMP runtime that oneDNN's packages use, whatever compiler we are built with.
extern "C" void omp_set_num_threads(int);

namespace nn::onednn {
namespace {

using dnnl::memory;

memory::desc Matrix(int rows, int columns, Order order, Factors type = Factors::kFloat32) {
  return memory::desc({rows, columns}, type == Factors::kBFloat16 ? memory::data_type::bf16 : memory::data_type::f32,
                      order == Order::kByRows ? memory::format_tag::ab : memory::format_tag::ba);
}

dnnl::primitive_attr Attributes(const Epilogue& epilogue) {
  dnnl::post_ops ops;
  if (epilogue.accumulate) ops.append_sum(1.0f);
  dnnl::primitive_attr attributes;
  attributes.set_post_ops(ops);
  // Left to the library, a product could only be run by the thread that planned it.
  attributes.set_scratchpad_mode(dnnl::scratchpad_mode::user);
  return attributes;
}

dnnl::matmul::primitive_desc Describe(const memory::desc& a, const memory::desc& b, const memory::desc& bias,
                                      const memory::desc& c, const dnnl::primitive_attr& attributes,
                                      const dnnl::engine& engine) {
#if DNNL_VERSION_MAJOR >= 3
  return dnnl::matmul::primitive_desc(engine, a, b, bias, c, attributes);
#else
  return dnnl::matmul::primitive_desc(dnnl::matmul::desc(a, b, bias, c), attributes, engine);
#endif
}

}  // namespace

struct MatMul::Plan {
  dnnl::engine engine{dnnl::engine::kind::cpu, 0};
  dnnl::stream stream{engine};
  memory a, b, bias, c;  // point at the operands of the current Run
  dnnl::matmul matmul;
  std::unordered_map<int, memory> arguments;
};

MatMul::MatMul(const Shape& shape, Order a, Order b, const Epilogue& epilogue, Factors factors)
    : plan_(std::make_unique<Plan>()) {
  NN_CHECK(shape.m > 0 && shape.n > 0 && shape.k > 0);
  Plan& plan = *plan_;
  const memory::desc a_desc = Matrix(shape.m, shape.k, a, factors);
  const memory::desc b_desc = Matrix(shape.k, shape.n, b, factors);
  const memory::desc c_desc = Matrix(shape.m, shape.n, Order::kByRows);
  const memory::desc bias_desc = epilogue.bias ? Matrix(1, shape.n, Order::kByRows) : memory::desc();
  const dnnl::matmul::primitive_desc description =
      Describe(a_desc, b_desc, bias_desc, c_desc, Attributes(epilogue), plan.engine);
  plan.matmul = dnnl::matmul(description);
  plan.arguments.emplace(DNNL_ARG_SCRATCHPAD, memory(description.scratchpad_desc(), plan.engine));

  const auto operand = [&plan](int key, const memory::desc& desc) {
    memory result(desc, plan.engine, DNNL_MEMORY_NONE);
    plan.arguments.emplace(key, result);
    return result;
  };
  plan.a = operand(DNNL_ARG_SRC, a_desc);
  plan.b = operand(DNNL_ARG_WEIGHTS, b_desc);
  plan.c = operand(DNNL_ARG_DST, c_desc);
  if (epilogue.bias) plan.bias = operand(DNNL_ARG_BIAS, bias_desc);
}

MatMul::~MatMul() = default;

void MatMul::Run(const void* a, const void* b, const float* bias, float* c) {
  // oneDNN's handles are not const, though a product only reads its sources.
  plan_->a.set_data_handle(const_cast<void*>(a));
  plan_->b.set_data_handle(const_cast<void*>(b));
  if (plan_->bias) {
    NN_CHECK(bias != nullptr);
    plan_->bias.set_data_handle(const_cast<float*>(bias));
  }
  plan_->c.set_data_handle(c);
  plan_->matmul.execute(plan_->stream, plan_->arguments);
}

struct Rounded::Plan {
  dnnl::engine engine{dnnl::engine::kind::cpu, 0};
  dnnl::stream stream{engine};
  memory from, to;
  dnnl::reorder reorder;
};

Rounded::Rounded(int rows, int columns) : plan_(std::make_unique<Plan>()) {
  Plan& plan = *plan_;
  plan.from = memory(Matrix(rows, columns, Order::kByRows), plan.engine, DNNL_MEMORY_NONE);
  plan.to = memory(Matrix(rows, columns, Order::kByRows, Factors::kBFloat16), plan.engine);
  plan.reorder = dnnl::reorder(plan.from, plan.to);
}

Rounded::~Rounded() = default;

void Rounded::Round(const float* matrix) {
  plan_->from.set_data_handle(const_cast<float*>(matrix));
  plan_->reorder.execute(plan_->stream, plan_->from, plan_->to);
}

const void* Rounded::data() const { return plan_->to.get_data_handle(); }

void Multiply(const Shape& shape, const float* a, const float* b, float* c) {
  const dnnl_status_t status =
      dnnl_sgemm('N', 'N', shape.m, shape.n, shape.k, 1.0f, a, shape.k, b, shape.n, 0.0f, c, shape.n);
  NN_CHECK(status == dnnl_success);
}

void WarmUp() {
  constexpr int kSide = 64;
  const std::vector<float> ones(kSide * kSide, 1.0f);
  std::vector<float> product(kSide * kSide);
  Multiply({.m = kSide, .n = kSide, .k = kSide}, ones.data(), ones.data(), product.data());
}

std::string Version() {
  const dnnl_version_t* const version = dnnl_version();
  return absl::StrCat(version->major, ".", version->minor, ".", version->patch);
}

void SetThreads(int threads) {
  NN_CHECK(threads > 0);
  omp_set_num_threads(threads);
}

}  // namespace nn::onednn
