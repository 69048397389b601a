// SPDX-License-Identifier: Apache-2.0
#include "libddp/comm/health/shared_failure.h"

#include <chrono>
#include <cstring>
#include <numeric>
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

// Unless it comes by none for so long that it is taken for dead: then once more.
TEST_CASE("a rank that loses its processor while it says why it failed is waited for") {
  absl::Status told;
  for (int tries = 0; tries < 20 && !absl::IsDataLoss(told); ++tries) {
    SharedFailure failure{};
    REQUIRE(failure.Claim(3));
    CHECK_FALSE(failure.Claim(1));
    CHECK(failure.happened());
    CHECK(failure.cause().ok());
    std::thread writer([&] {
      std::this_thread::sleep_for(std::chrono::milliseconds(100));
      failure.Write(absl::DataLossError("cannot read batch 17"));
    });
    told = failure.Record(absl::AbortedError("the group has failed"), 0);
    writer.join();
  }
  CHECK(told == absl::DataLossError("cannot read batch 17"));
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

TEST_CASE("an error keeps all its ranks in every group, and of its message what there is room for") {
  for (const int count : {1, 46, 1000, kMaxRanks}) {
    std::vector<int> ranks(static_cast<size_t>(count));
    std::iota(ranks.begin(), ranks.end(), kMaxRanks - count);
    const absl::Status error = WithFailedRanks(absl::InternalError(std::string(2000, 'x')), ranks);
    SharedFailure failure{};
    REQUIRE(FailedRanks(failure.Record(error, 0)) == ranks);
    const absl::Status read = failure.Record(absl::AbortedError("later"), 1);
    CHECK(read.code() == absl::StatusCode::kInternal);
    CHECK(read.message() == std::string(sizeof(PackedError::message) - 1, 'x'));
    CHECK(FailedRanks(read) == ranks);
  }
}

TEST_CASE("on its way to another rank an error takes the room that its group needs") {
  for (const int size : {1, 64, 65, 1000, kMaxRanks}) {
    const std::vector<int> ranks = {0, size - 1};
    PackedError sent, received;
    sent.Pack(WithFailedRanks(absl::InternalError("x"), ranks));
    std::memcpy(&received, &sent, PackedError::Bytes(size));
    CHECK(FailedRanks(received.Unpack()) == (size == 1 ? std::vector<int>{0} : ranks));
  }
  CHECK(PackedError::Bytes(64) < 1024);
  CHECK(PackedError::Bytes(kMaxRanks) <= sizeof(PackedError));
}

}  // namespace
}  // namespace ddp
