// How often the progress thread looks.
#include "libddp/comm/progress_thread.h"

#include <vector>

#include "tests/support/catch.h"

namespace ddp {
namespace {

using Found = ProgressThread::Found;
using Interval = ProgressThread::Interval;

// The waits after looks that found this, from a wait of `ms` on.
std::vector<int> Waits(int ms, const std::vector<Found>& looks) {
  std::vector<int> waits;
  Interval last(ms);
  for (const Found found : looks) {
    last = ProgressThread::NextLook(last, found);
    waits.push_back(static_cast<int>(last.count()));
  }
  return waits;
}

TEST_CASE("looks that are needed come each millisecond, others less often") {
  CHECK(Waits(1, {Found::kWork, Found::kWork, Found::kWork}) == std::vector<int>{1, 1, 1});
  CHECK(Waits(8, {Found::kWork}) == std::vector<int>{1});
  CHECK(Waits(1, std::vector<Found>(5, Found::kNothing)) == std::vector<int>{2, 4, 8, 8, 8});
  CHECK(Waits(1, std::vector<Found>(4, Found::kPending)) == std::vector<int>{2, 4, 4, 4});
}

TEST_CASE("what is found pending after a long wait is looked at again soon") {
  CHECK(Waits(8, {Found::kPending, Found::kPending, Found::kWork}) == std::vector<int>{1, 2, 1});
}

}  // namespace
}  // namespace ddp
