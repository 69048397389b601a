// What ranks agree on in words of any length that an error may have.
#ifndef LIBDDP_COMM_BASE_AGREEMENT_H_
#define LIBDDP_COMM_BASE_AGREEMENT_H_

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "ddp/process_group.h"

namespace ddp {

inline constexpr size_t kExchangeBytes = 1016;

// Everybody's text, by rank. Longer ones are cut to kExchangeBytes. Collective.
absl::StatusOr<std::vector<std::string>> ExchangeTexts(ProcessGroup& group, absl::string_view mine);

// OK if all ranks say OK; else the first error, by rank, as that rank worded it, on every rank. Collective.
absl::Status AgreeOn(ProcessGroup& group, const absl::Status& mine);

}  // namespace ddp

#endif  // LIBDDP_COMM_BASE_AGREEMENT_H_
