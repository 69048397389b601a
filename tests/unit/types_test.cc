// SPDX-License-Identifier: Apache-2.0
#include "ddp/types.h"

#include <set>
#include <string>

#include "tests/support/catch.h"

namespace ddp {
namespace {

TEST_CASE("sizes and names of the element types") {
  const struct {
    DType dtype;
    size_t size;
    const char* name;
    bool floating;
  } rows[] = {{DType::kFloat64, 8, "float64", true}, {DType::kFloat32, 4, "float32", true},
              {DType::kFloat16, 2, "float16", true}, {DType::kBFloat16, 2, "bfloat16", true},
              {DType::kInt64, 8, "int64", false},    {DType::kInt32, 4, "int32", false},
              {DType::kInt8, 1, "int8", false},      {DType::kUInt8, 1, "uint8", false}};
  for (const auto& row : rows) {
    CHECK(SizeOf(row.dtype) == row.size);
    CHECK(Name(row.dtype) == row.name);
    CHECK(IsFloatingPoint(row.dtype) == row.floating);
  }
}

TEST_CASE("names of the operations") {
  CHECK(Name(ReduceOp::kSum) == "sum");
  CHECK(Name(ReduceOp::kAvg) == "avg");
  CHECK(Name(ReduceOp::kMin) == "min");
  CHECK(Name(ReduceOp::kMax) == "max");
  CHECK(Name(ReduceOp::kProduct) == "prod");
}

TEST_CASE("devices compare by kind and index") {
  CHECK(Device{} == Device{Device::Kind::kCpu, 0});
  CHECK_FALSE(Device{} == Device{Device::Kind::kCuda, 0});
  CHECK_FALSE(Device{Device::Kind::kCuda, 0} == Device{Device::Kind::kCuda, 1});
}

}  // namespace
}  // namespace ddp
