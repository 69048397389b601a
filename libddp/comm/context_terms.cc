// SPDX-License-Identifier: Apache-2.0
#include "libddp/comm/context_terms.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "libddp/base/failed_ranks.h"

namespace ddp {
namespace {

constexpr absl::string_view kOnGpu = "a GPU", kOnCpu = "the CPU";

absl::string_view NameOf(Device::Kind kind) { return kind == Device::Kind::kCuda ? kOnGpu : kOnCpu; }

// The message comes last: it may have any characters.
std::string Pack(const ContextTerms& terms) {
  return absl::StrCat(terms.backend, "\n", NameOf(terms.device), "\n", terms.host, "\n",
                      terms.settings.ok() ? "ok" : "not", "\n", terms.settings.message());
}

absl::StatusOr<ContextTerms> Unpack(absl::string_view packed) {
  const std::vector<absl::string_view> fields = absl::StrSplit(packed, absl::MaxSplits('\n', 4));
  if (fields.size() != 5 || (fields[1] != kOnGpu && fields[1] != kOnCpu)) {
    return absl::InternalError(
        "a peer names its terms in a way this version does not understand; do all ranks run the same program?");
  }
  ContextTerms terms;
  terms.backend = std::string(fields[0]);
  terms.device = fields[1] == kOnGpu ? Device::Kind::kCuda : Device::Kind::kCpu;
  terms.host = std::string(fields[2]);
  if (fields[3] != "ok") terms.settings = absl::FailedPreconditionError(fields[4]);
  return terms;
}

// Whether these ranks can work together.
absl::Status Check(const std::vector<ContextTerms>& all) {
  const ContextTerms& first = all[0];
  for (size_t r = 0; r < all.size(); ++r) {
    const ContextTerms& one = all[r];
    const int rank = static_cast<int>(r);
    const auto differ = [&](const auto&... parts) {
      return WithFailedRanks(absl::FailedPreconditionError(absl::StrCat("rank 0 has chosen ", parts...)), {0, rank});
    };
    if (!one.settings.ok()) {
      return WithFailedRanks(
          absl::FailedPreconditionError(absl::StrCat("the Context cannot begin: ", one.settings.message())), {rank});
    }
    if (one.device != first.device) {
      return differ(NameOf(first.device), " and rank ", r, " ", NameOf(one.device),
                    "; give all ranks a ContextOptions::device of the same kind");
    }
    if (one.backend != first.backend) {
      return differ("the backend ", first.backend, " and rank ", r, " ", one.backend, "; all ranks need the same");
    }
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::vector<ContextTerms>> AgreeOnTerms(Rendezvous& rendezvous, const ContextTerms& mine,
                                                       absl::Time deadline) {
  const absl::StatusOr<std::vector<std::string>> packed =
      rendezvous.AllGather(Pack(mine), "start of the Context", deadline);
  if (!mine.settings.ok()) return mine.settings;
  if (!packed.ok()) return packed.status();
  std::vector<ContextTerms> all;
  for (const std::string& text : *packed) {
    absl::StatusOr<ContextTerms> one = Unpack(text);
    if (!one.ok()) return one.status();
    all.push_back(*std::move(one));
  }
  const absl::Status fit = Check(all);
  if (fit.ok()) return all;
  return WithRanksOf(fit, absl::Status(fit.code(), absl::StrCat("rank ", rendezvous.rank(), ": ", fit.message())));
}

}  // namespace ddp
