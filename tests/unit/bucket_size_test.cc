// SPDX-License-Identifier: Apache-2.0
#include "libddp/reducer/bucket_size.h"

#include <vector>

#include "tests/support/catch.h"

namespace ddp {
namespace {

using testing::Approx;

TEST_CASE("the model of a link is found from exact samples") {
  std::vector<LinkSample> samples;
  for (const size_t bytes : {size_t{1000}, size_t{50'000}, size_t{4'000'000}}) {
    samples.push_back({bytes, 5000 + 0.25 * static_cast<double>(bytes)});
  }
  const LinkModel link = FitLink(samples);
  CHECK(link.latency_ns == Approx(5000).epsilon(1e-6));
  CHECK(link.ns_per_byte == Approx(0.25).epsilon(1e-6));
}

TEST_CASE("small sizes count as much as large ones") {
  // 10 % too slow at the largest: an absolute fit would bend the latency by as much.
  const LinkModel link = FitLink(std::vector<LinkSample>{{1000, 1100}, {10'000, 2000}, {1'000'000, 111'100}});
  CHECK(link.latency_ns == Approx(1000).epsilon(0.1));
}

TEST_CASE("neither latency nor cost of a byte is negative") {
  const LinkModel flat = FitLink(std::vector<LinkSample>{{1000, 3000}, {1'000'000, 2000}});
  CHECK(flat.ns_per_byte == 0);
  CHECK(flat.latency_ns > 2000);
  const LinkModel steep = FitLink(std::vector<LinkSample>{{1000, 1}, {1'000'000, 200'000}});
  CHECK(steep.latency_ns == 0);
  CHECK(steep.ns_per_byte > 0);
}

TEST_CASE("buckets grow with latency and total, shrink with the cost of a byte, within limits") {
  // sqrt(100e6 * 10'000 / 0.1) is 3.16e6.
  CHECK(BestBucketBytes({10'000, 0.1}, 100'000'000) == Approx(3.162e6).epsilon(1e-3));
  CHECK(BestBucketBytes({0, 0.1}, 100'000'000) == size_t{64} << 10);
  CHECK(BestBucketBytes({1e9, 0.1}, 100'000'000) == size_t{25} << 20);
  CHECK(BestBucketBytes({1000, 0}, 100'000'000) == size_t{25} << 20);
}

TEST_CASE("a latency is worth the bytes that pass in it") {
  CHECK(LatencyInBytes({10'000, 0.1}) == Approx(1e5));
  CHECK(LatencyInBytes({0, 0.1}) == 0);
  CHECK(LatencyInBytes({1e9, 0}) >= size_t{25} << 20);
  CHECK(LatencyInBytes({1e18, 1e-9}) == SIZE_MAX);
}

}  // namespace
}  // namespace ddp
