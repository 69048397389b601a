// SPDX-License-Identifier: Apache-2.0
// Copies between GPUs, each looked at byte by byte.
#ifndef TOOLS_DOCTOR_COPIES_H_
#define TOOLS_DOCTOR_COPIES_H_

#include <string>
#include <vector>

#include "absl/time/time.h"

namespace doctor {

struct CopyFault {
  enum class Kind { kWrong, kError, kHang } kind = Kind::kError;
  int from = 0, to = 0;  // GPUs, as this process numbers them; equal: of this GPU's own memory, to the host and back
  bool direct = false;   // P2P, which the driver offers for this pair; else through host memory
  std::string what;      // "element 3 of 1048576 is 0 instead of 5"
};

struct CopyReport {
  int gpus = 0, pairs = 0, direct_pairs = 0;  // that were tried, in both directions
  std::vector<CopyFault> faults;
  absl::Duration limit;
};

// Copies a pattern to each GPU that this process sees and back, and from each GPU to each other one: by P2P where the
// driver offers it. Takes `limit` at most: what hangs is left behind, with its thread, and is the last fault. Nothing
// is copied without the driver's library `cuda`.
CopyReport TryCopies(const std::string& cuda, absl::Duration limit);

}  // namespace doctor

#endif  // TOOLS_DOCTOR_COPIES_H_
