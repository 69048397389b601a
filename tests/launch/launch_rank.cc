// SPDX-License-Identifier: Apache-2.0
// One rank of a launch test: says who it is and what the sum over all ranks of (rank + 1) is, or why it could not
// start.
#include <cstdio>
#include <cstdlib>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "ddp/ddp.h"

namespace {

// Worlds of one process: one after the other, then two at a time.
absl::Status MakeSeveral(int count) {
  const auto sum = [](ddp::Context& context) -> absl::Status {
    int64_t value = context.rank();
    const ddp::Buffer buffer = {&value, 1, ddp::DType::kInt64, {}};
    ddp::Work work = context.world().AllReduce(buffer, buffer);
    if (absl::Status s = work.Wait(); !s.ok()) return s;
    const int64_t size = context.world_size();
    return value == size * (size - 1) / 2 ? absl::OkStatus() : absl::InternalError(absl::StrCat("the sum is ", value));
  };
  for (int i = 0; i < count; ++i) {
    absl::StatusOr<std::unique_ptr<ddp::Context>> first = ddp::Context::Create();
    if (!first.ok()) return first.status();
    if (absl::Status s = sum(**first); !s.ok()) return s;
    if (i + 1 < count) continue;
    absl::StatusOr<std::unique_ptr<ddp::Context>> second = ddp::Context::Create();
    if (!second.ok()) return second.status();
    first->reset();
    if (absl::Status s = sum(**second); !s.ok()) return s;
    if ((*second)->launcher() == "mpirun") continue;  // there is no store for other groups
    auto group = (*second)->NewGroup({1, 0}, absl::Now() + absl::Seconds(30));
    if ((*second)->rank() < 2 && !group.ok()) return group.status();
  }
  return absl::OkStatus();
}

// `command`, unless empty, is run by a shell before this rank leaves.
absl::StatusOr<std::string> Run(const std::string& command) {
  absl::StatusOr<std::unique_ptr<ddp::Context>> context = ddp::Context::Create();
  if (!context.ok()) return context.status();
  float value = static_cast<float>((*context)->rank() + 1);
  const ddp::Buffer buffer = {&value, 1, ddp::DType::kFloat32, {}};
  ddp::Work work = (*context)->world().AllReduce(buffer, buffer);
  const absl::Status status = work.Wait();
  if (!status.ok()) return status;
  if (!command.empty() && std::system(command.c_str()) != 0) return absl::InternalError("the command has failed");
  return absl::StrCat("rank ", (*context)->rank(), " of ", (*context)->world_size(), ", local ",
                      (*context)->local_rank(), " of ", (*context)->local_world_size(), ", by ", (*context)->launcher(),
                      ": sum ", value);
}

}  // namespace

int main(int argc, char** argv) {
  int worlds = 0;
  std::string command = argc > 1 ? argv[1] : "";
  if (absl::SimpleAtoi(command, &worlds)) {
    command.clear();
    if (const absl::Status s = MakeSeveral(worlds); !s.ok()) {
      std::printf("%s\n", s.ToString().c_str());
      return 1;
    }
  }
  const absl::StatusOr<std::string> said = Run(command);
  // In one piece, as the lines of several ranks come together.
  const std::string line = absl::StrCat(said.ok() ? *said : said.status().ToString(), "\n");
  std::fwrite(line.data(), 1, line.size(), stdout);
  return said.ok() ? 0 : 1;
}
