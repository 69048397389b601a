// SPDX-License-Identifier: Apache-2.0
// The helper program, ddp_probe, as its parent sees it: what hangs or crashes in NCCL or CUDA does so there.
#ifndef LIBDDP_COMM_PROBE_HELPER_PROCESS_H_
#define LIBDDP_COMM_PROBE_HELPER_PROCESS_H_

#include <sys/types.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "libddp/comm/nccl/api.h"
#include "libddp/comm/probe/probe_result.h"

namespace ddp {

// Where the helper is: `given` (an option), else DDP_PROBE, else beside the program, in libexec/ddp of the program's or
// the library's prefix, or where libddp was installed. NotFound names all places that were looked at.
absl::StatusOr<std::string> FindProbeHelper(absl::string_view given);

// `environment` ("NAME=value") as the helper gets it: without what launchers set, since a child of mpirun that looks
// like a rank may be taken for one, and with NCCL_P2P_DISABLE=1 if it is to do without P2P.
std::vector<std::string> HelperEnvironment(absl::Span<const std::string> environment, bool without_p2p);

struct HelperCommand {
  std::string program;
  std::vector<std::string> environment;
  int rank = 0;
  int size = 1;
  int device = 0;
  absl::Duration limit = absl::Seconds(30);
  bool timing = false;
};

// A running helper. Its standard output goes to this process's standard error; of the descriptors it gets those of the
// standard streams and a socket. Used by one thread, the one that started it: it dies with that thread. Nothing here
// blocks, but for a few seconds at most in the destructor.
class HelperProcess {
 public:
  // Fails if the program cannot be started at all.
  static absl::StatusOr<std::unique_ptr<HelperProcess>> Start(const HelperCommand& command);
  // Ends it.
  ~HelperProcess();
  HelperProcess(const HelperProcess&) = delete;
  HelperProcess& operator=(const HelperProcess&) = delete;

  // Takes notice of what the helper has said and of its end. The result is final once it is not kRunning any more: a
  // helper that has passed waits for its end, since peers may still read its GPU's memory.
  const ProbeResult& Poll();

  // NCCL's id, once rank 0's helper has said it.
  const std::optional<nccl::UniqueId>& id() const { return id_; }
  void SendId(const nccl::UniqueId& id);

  pid_t pid() const { return pid_; }

 private:
  explicit HelperProcess(absl::Time deadline) : deadline_(deadline) {}
  void Read();
  void Take(absl::string_view line);
  void CheckEnd();
  void End(ProbeState how, absl::string_view words);
  bool Reap();

  const absl::Time deadline_;
  int socket_ = -1;
  pid_t pid_ = -1;
  bool ended_ = false, closed_ = false;
  int status_ = 0;  // of its end
  std::string unread_;
  size_t received_ = 0;
  ProbeResult result_;
  std::optional<nccl::UniqueId> id_;
};

// --- the helper's own side ------------------------------------------------------------------------------------------

// The socket to the parent.
inline constexpr int kHelperSocket = 3;

// Has the kernel end this process when the thread that started it ends. False if process `parent` has ended already.
bool DieWithParent(pid_t parent);

std::string EncodeId(const nccl::UniqueId& id);
std::optional<nccl::UniqueId> DecodeId(absl::string_view line);

}  // namespace ddp

#endif  // LIBDDP_COMM_PROBE_HELPER_PROCESS_H_
