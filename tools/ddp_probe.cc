// SPDX-License-Identifier: Apache-2.0
// Tries NCCL out in a process of its own, for one rank of a program that uses libddp, which starts it and reads the
// result from a socket.
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstdio>
#include <map>
#include <string>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "libddp/comm/probe/helper_process.h"
#include "libddp/comm/probe/probe.h"

namespace ddp {
namespace {

constexpr char kUsage[] =
    "Usage: ddp_probe --rank=R --size=N --device=D --limit_ms=T --timing=0|1 --parent=PID\n\n"
    "Checks whether NCCL works between the GPUs of a job: moves data whose result is known, and measures how long "
    "that\n"
    "takes. libddp starts one for each rank, with a socket as descriptor 3, so that the job survives what hangs or\n"
    "crashes. To check a machine yourself, run ddp_doctor.\n";

bool Say(const std::string& line) {
  const std::string text = line + "\n";
  return send(kHelperSocket, text.data(), text.size(), MSG_NOSIGNAL) == static_cast<ssize_t>(text.size());
}

// The next line of the parent's; empty at its end.
std::string Hear() {
  std::string line;
  for (char c; recv(kHelperSocket, &c, 1, 0) == 1;) {
    if (c == '\n') return line;
    line += c;
  }
  return "";
}

absl::Status ExchangeId(int rank, nccl::UniqueId* id) {
  if (rank == 0) return Say(EncodeId(*id)) ? absl::OkStatus() : absl::UnavailableError("the parent has gone");
  const std::optional<nccl::UniqueId> heard = DecodeId(Hear());
  if (!heard.has_value()) return absl::UnavailableError("the parent did not pass NCCL's id on");
  *id = *heard;
  return absl::OkStatus();
}

int Main(int argc, char** argv) {
  std::map<std::string, int64_t> flags = {{"--rank", 0},     {"--size", 1},   {"--device", 0},
                                          {"--limit_ms", 0}, {"--timing", 0}, {"--parent", 0}};
  for (int i = 1; i < argc; ++i) {
    if (std::string(argv[i]) == "--help") {
      std::fputs(kUsage, stdout);
      return 0;
    }
    const std::pair<std::string, std::string> flag = absl::StrSplit(argv[i], absl::MaxSplits('=', 1));
    if (flags.count(flag.first) == 0 || !absl::SimpleAtoi(flag.second, &flags[flag.first])) {
      std::fprintf(stderr, "ddp_probe: %s is no flag, or lacks its number\n%s", argv[i], kUsage);
      return 2;
    }
  }
  if (!DieWithParent(static_cast<pid_t>(flags["--parent"]))) {
    std::fprintf(stderr, "ddp_probe is started by libddp, and its parent has gone\n%s", kUsage);
    return 2;
  }
  ProbeOptions options;
  options.rank = static_cast<int>(flags["--rank"]);
  options.size = static_cast<int>(flags["--size"]);
  options.device = {Device::Kind::kCuda, static_cast<int16_t>(flags["--device"])};
  options.limit = absl::Milliseconds(flags["--limit_ms"]);
  options.timing = flags["--timing"] != 0;
  options.exchange_id = [rank = options.rank](nccl::UniqueId* id) { return ExchangeId(rank, id); };
  options.progress = [](const ProbeResult& result) { Say(EncodeProbeResult(result)); };
  const ProbeRun run = RunProbe(Devices(), nccl::Load(), options);
  Say(EncodeProbeResult(run.result));
  while (!Hear().empty()) {
  }
  // Threads may hang, and peers have what they need: the system cleans up.
  _exit(0);
}

}  // namespace
}  // namespace ddp

int main(int argc, char** argv) { return ddp::Main(argc, argv); }
