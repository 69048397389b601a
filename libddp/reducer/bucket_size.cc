// SPDX-License-Identifier: Apache-2.0
#include "libddp/reducer/bucket_size.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <iterator>
#include <vector>

#include "libddp/base/spin.h"
#include "libddp/comm/base/exchange.h"

namespace ddp {
namespace {

constexpr size_t kSizes[] = {size_t{16} << 10, size_t{128} << 10, size_t{1} << 20, size_t{4} << 20};
constexpr int kRepetitions = 7;

}  // namespace

// With weights 1 / ns^2 the squared errors become relative; then the usual two equations in two unknowns.
LinkModel FitLink(absl::Span<const LinkSample> samples) {
  double w = 0, ws = 0, wss = 0, wt = 0, wst = 0;
  for (const LinkSample& sample : samples) {
    const double s = static_cast<double>(sample.bytes), t = std::max(sample.ns, 1.0), weight = 1 / (t * t);
    w += weight;
    ws += weight * s;
    wss += weight * s * s;
    wt += weight * t;
    wst += weight * s * t;
  }
  const double slope = (w * wst - ws * wt) / (w * wss - ws * ws);
  if (slope <= 0) return {wt / w, 0};
  const double latency = (wt - slope * ws) / w;
  return latency > 0 ? LinkModel{latency, slope} : LinkModel{0, wst / wss};
}

size_t BestBucketBytes(const LinkModel& link, size_t total_bytes) {
  constexpr double kLeast = 64 << 10, kMost = 25 << 20;
  if (link.ns_per_byte <= 0) return static_cast<size_t>(kMost);
  const double best = std::sqrt(static_cast<double>(total_bytes) * link.latency_ns / link.ns_per_byte);
  return static_cast<size_t>(std::clamp(best, kLeast, kMost));
}

size_t LatencyInBytes(const LinkModel& link) {
  const double bytes = link.latency_ns / std::max(link.ns_per_byte, 1e-9);
  return bytes < 1e18 ? static_cast<size_t>(bytes) : SIZE_MAX;
}

absl::StatusOr<LinkModel> MeasureLink(ProcessGroup& group, Device device) {
  absl::StatusOr<Allocation> memory = group.Allocate(*std::max_element(std::begin(kSizes), std::end(kSizes)), device);
  if (!memory.ok()) return memory.status();
  std::vector<LinkSample> samples;
  for (const size_t bytes : kSizes) {
    const Buffer buffer = memory->View(DType::kFloat32, 0, bytes / sizeof(float));
    double best = 0;
    for (int k = 0; k <= kRepetitions; ++k) {
      const int64_t begin = NowNs();
      if (absl::Status s = group.AllReduce(buffer, buffer, {}, kNoStream).Wait(); !s.ok()) return s;
      const double ns = static_cast<double>(NowNs() - begin);
      if (k > 0) best = k == 1 ? ns : std::min(best, ns);  // the first one warms up
    }
    samples.push_back({bytes, best});
  }
  LinkModel link = FitLink(samples);
  if (absl::Status s = BroadcastValues(group, absl::MakeSpan(&link, 1), 0); !s.ok()) return s;
  return link;
}

}  // namespace ddp
