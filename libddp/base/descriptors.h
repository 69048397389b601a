// SPDX-License-Identifier: Apache-2.0
// What a process says that may open no more files.
#ifndef LIBDDP_BASE_DESCRIPTORS_H_
#define LIBDDP_BASE_DESCRIPTORS_H_

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace ddp {

// ResourceExhausted with the remedy, if `error` of that system call is EMFILE or ENFILE; else OK.
absl::Status OutOfDescriptors(absl::string_view call, int error);

}  // namespace ddp

#endif  // LIBDDP_BASE_DESCRIPTORS_H_
