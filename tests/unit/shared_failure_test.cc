#include "libddp/comm/shared_failure.h"

#include <chrono>
#include <string>
#include <thread>
#include <vector>

#include "ddp/process_group.h"
#include "tests/support/catch.h"

namespace ddp {
namespace {

TEST_CASE("the first cause of a failure is everybody's") {
  SharedFailure failure{};
  CHECK_FALSE(failure.happened());
  CHECK(failure.cause().ok());
  const absl::Status first = WithFailedRanks(absl::DataLossError("cannot read batch 17"), {1, 2});
  CHECK(failure.Record(first, 1) == first);
  CHECK(failure.happened());
  CHECK(failure.cause() == first);
  CHECK(failure.Record(absl::InternalError("later"), 0) == first);
  CHECK(FailedRanks(failure.cause()) == std::vector<int>{1, 2});
}

TEST_CASE("a rank that loses its processor while it says why it failed is waited for") {
  SharedFailure failure{};
  REQUIRE(failure.Claim(3));
  CHECK_FALSE(failure.Claim(1));
  CHECK(failure.happened());
  CHECK(failure.cause().ok());
  std::thread writer([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    failure.Write(absl::DataLossError("cannot read batch 17"));
  });
  CHECK(failure.Record(absl::AbortedError("the group has failed"), 0) == absl::DataLossError("cannot read batch 17"));
  writer.join();
}

TEST_CASE("a rank that died while it said why it failed holds nobody up, and is named") {
  SharedFailure failure{};
  REQUIRE(failure.Claim(3));
  const absl::Status told = failure.Record(absl::AbortedError("the group has failed"), 0);
  CHECK(told.code() == absl::StatusCode::kAborted);
  CHECK(told.message() ==
        "rank 3 failed first, and died or was stopped before it had said why; here: the group has failed");
  CHECK(FailedRanks(told) == std::vector<int>{3});
}

TEST_CASE("an error too long for its place is cut off, its ranks at a comma") {
  std::vector<int> ranks(100, 12);
  PackedError packed;
  packed.Pack(WithFailedRanks(absl::InternalError(std::string(2000, 'x')), ranks));
  const absl::Status read = packed.Unpack();
  CHECK(read.code() == absl::StatusCode::kInternal);
  CHECK(read.message() == std::string(sizeof packed.message - 1, 'x'));
  ranks.resize(45);  // "12," 45 times takes 135 characters
  CHECK(FailedRanks(read) == ranks);
}

}  // namespace
}  // namespace ddp
