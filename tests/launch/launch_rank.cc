// One rank of a launch test: says who it is and what the sum over all ranks of (rank + 1) is, or why it could not
// start.
#include <cstdio>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "ddp/ddp.h"

namespace {

absl::StatusOr<std::string> Run() {
  absl::StatusOr<std::unique_ptr<ddp::Context>> context = ddp::Context::Create();
  if (!context.ok()) return context.status();
  float value = static_cast<float>((*context)->rank() + 1);
  const ddp::Buffer buffer = {&value, 1, ddp::DType::kFloat32, {}};
  absl::StatusOr<ddp::Work> work = (*context)->world().AllReduce({buffer}, {buffer});
  const absl::Status status = work.ok() ? work->Wait() : work.status();
  if (!status.ok()) return status;
  return absl::StrCat("rank ", (*context)->rank(), " of ", (*context)->world_size(), ", local ",
                      (*context)->local_rank(), " of ", (*context)->local_world_size(), ", by ", (*context)->launcher(),
                      ": sum ", value);
}

}  // namespace

int main() {
  const absl::StatusOr<std::string> said = Run();
  // In one piece, as the lines of several ranks come together.
  const std::string line = absl::StrCat(said.ok() ? *said : said.status().ToString(), "\n");
  std::fwrite(line.data(), 1, line.size(), stdout);
  return said.ok() ? 0 : 1;
}
