// SPDX-License-Identifier: Apache-2.0
#include "libddp/comm/probe/helper_process.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/strip.h"
#include "absl/time/clock.h"
#include "libddp/base/env.h"

namespace ddp {
namespace {

constexpr char kHelperName[] = "ddp_probe";
constexpr char kIdTag[] = "id ";
// A helper says far less.
constexpr size_t kMostBytes = size_t{256} << 10, kLongestLine = 4096;
// How long a killed process may take to go: a driver can hold it.
constexpr absl::Duration kEndPatience = absl::Seconds(3);
// What the helper gets beyond its own limit to say that it has passed.
constexpr absl::Duration kLimitGrace = absl::Milliseconds(1500);

std::string FolderOf(const std::string& path) { return path.substr(0, path.rfind('/')); }

std::string ThisProgram() {
  std::string path(4096, '\0');
  const ssize_t n = readlink("/proc/self/exe", path.data(), path.size());
  path.resize(n > 0 ? static_cast<size_t>(n) : 0);
  return path;
}

// The shared library, or the program that libddp is linked into.
std::string ThisLibrary() {
  Dl_info info;
  if (dladdr(reinterpret_cast<void*>(&ThisProgram), &info) == 0 || info.dli_fname == nullptr) return "";
  std::unique_ptr<char, decltype(&free)> real(realpath(info.dli_fname, nullptr), free);
  return real == nullptr ? "" : real.get();
}

// The attributes and descriptors of the process to be.
class SpawnPlan {
 public:
  explicit SpawnPlan(int socket) {
    posix_spawn_file_actions_init(&actions_);
    posix_spawnattr_init(&attributes_);
    posix_spawn_file_actions_addopen(&actions_, STDIN_FILENO, "/dev/null", O_RDONLY, 0);
    // NCCL writes to standard output, which is the program's.
    posix_spawn_file_actions_adddup2(&actions_, STDERR_FILENO, STDOUT_FILENO);
    posix_spawn_file_actions_adddup2(&actions_, socket, kHelperSocket);
    posix_spawn_file_actions_addclosefrom_np(&actions_, kHelperSocket + 1);
    sigset_t none, all;
    sigemptyset(&none);
    sigfillset(&all);
    posix_spawnattr_setsigmask(&attributes_, &none);
    posix_spawnattr_setsigdefault(&attributes_, &all);
    posix_spawnattr_setflags(&attributes_, POSIX_SPAWN_SETSIGMASK | POSIX_SPAWN_SETSIGDEF);
  }
  ~SpawnPlan() {
    posix_spawn_file_actions_destroy(&actions_);
    posix_spawnattr_destroy(&attributes_);
  }
  SpawnPlan(const SpawnPlan&) = delete;
  SpawnPlan& operator=(const SpawnPlan&) = delete;

  // errno's value, or 0.
  int Spawn(pid_t* pid, std::vector<std::string> words, std::vector<std::string> environment) {
    return posix_spawn(pid, words[0].c_str(), &actions_, &attributes_, Pointers(words).data(),
                       Pointers(environment).data());
  }

 private:
  static std::vector<char*> Pointers(std::vector<std::string>& strings) {
    std::vector<char*> pointers;
    pointers.reserve(strings.size() + 1);
    for (std::string& s : strings) pointers.push_back(s.data());
    pointers.push_back(nullptr);
    return pointers;
  }
  posix_spawn_file_actions_t actions_;
  posix_spawnattr_t attributes_;
};

}  // namespace

absl::StatusOr<std::string> FindProbeHelper(absl::string_view given) {
  std::vector<std::string> places;
  if (!given.empty()) {
    places.emplace_back(given);
  } else if (const std::optional<std::string> variable = ReadEnv(Env::kProbe); variable.has_value()) {
    places.push_back(*variable);
  } else {
    for (const std::string& file : {ThisProgram(), ThisLibrary()}) {
      const std::string folder = FolderOf(file);
      if (folder.empty()) continue;
      places.push_back(absl::StrCat(folder, "/", kHelperName));
      places.push_back(absl::StrCat(FolderOf(folder), "/libexec/ddp/", kHelperName));
    }
    places.push_back(absl::StrCat(DDP_LIBEXEC_FOLDER, "/", kHelperName));
  }
  places.erase(std::unique(places.begin(), places.end()), places.end());
  for (const std::string& place : places) {
    if (access(place.c_str(), X_OK) == 0) return place;
  }
  return absl::NotFoundError(absl::StrCat("no program at ", absl::StrJoin(places, ", "), "; DDP_PROBE names another"));
}

std::vector<std::string> HelperEnvironment(absl::Span<const std::string> environment, bool without_p2p) {
  constexpr absl::string_view kOfLaunchers[] = {"OMPI_", "OPAL_", "PRTE_",  "PMIX_",     "PMI_",
                                                "PMI2_", "HYDI_", "HYDRA_", "MPI_LOCAL", "SLURM_"};
  std::vector<std::string> result;
  for (const std::string& variable : environment) {
    const bool of_launcher = std::any_of(std::begin(kOfLaunchers), std::end(kOfLaunchers),
                                         [&](absl::string_view prefix) { return absl::StartsWith(variable, prefix); });
    if (of_launcher || (without_p2p && absl::StartsWith(variable, "NCCL_P2P_DISABLE="))) continue;
    result.push_back(variable);
  }
  if (without_p2p) result.emplace_back("NCCL_P2P_DISABLE=1");
  return result;
}

absl::StatusOr<std::unique_ptr<HelperProcess>> HelperProcess::Start(const HelperCommand& command) {
  int sockets[2];
  if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, sockets) != 0) {
    return absl::ResourceExhaustedError(absl::StrCat("socketpair: ", std::strerror(errno)));
  }
  fcntl(sockets[0], F_SETFL, O_NONBLOCK);
  std::unique_ptr<HelperProcess> helper(new HelperProcess(absl::Now() + command.limit + kLimitGrace));
  helper->socket_ = sockets[0];
  const int error = SpawnPlan(sockets[1])
                        .Spawn(&helper->pid_,
                               {command.program, absl::StrCat("--rank=", command.rank),
                                absl::StrCat("--size=", command.size), absl::StrCat("--device=", command.device),
                                absl::StrCat("--limit_ms=", absl::ToInt64Milliseconds(command.limit)),
                                absl::StrCat("--timing=", command.timing ? 1 : 0), absl::StrCat("--parent=", getpid())},
                               command.environment);
  close(sockets[1]);
  if (error == 0) return helper;
  helper->pid_ = -1;
  return absl::NotFoundError(absl::StrCat(command.program, " cannot be started: ", std::strerror(error)));
}

HelperProcess::~HelperProcess() {
  if (socket_ >= 0) close(socket_);
  if (pid_ < 0 || Reap()) return;
  kill(pid_, SIGKILL);
  for (const absl::Time until = absl::Now() + kEndPatience; !Reap() && absl::Now() < until;) {
    absl::SleepFor(absl::Milliseconds(1));
  }
}

// Whether it has ended; never waits. The program may have taken notice of the end before, or ignore its children: then
// how it ended is not known.
bool HelperProcess::Reap() {
  if (ended_) return true;
  const pid_t got = waitpid(pid_, &status_, WNOHANG);
  if (got == 0 || (got < 0 && errno == EINTR)) return false;
  if (got < 0) status_ = 0;
  return ended_ = true;
}

const ProbeResult& HelperProcess::Poll() {
  if (result_.state != ProbeState::kRunning) return result_;
  const bool ended = Reap();  // before the last reading
  Read();
  if (result_.state == ProbeState::kRunning && (ended || closed_)) CheckEnd();
  if (result_.state == ProbeState::kRunning && absl::Now() >= deadline_) End(ProbeState::kHang, "");
  return result_;
}

void HelperProcess::Read() {
  char bytes[4096];
  while (!closed_) {
    const ssize_t n = recv(socket_, bytes, sizeof bytes, MSG_DONTWAIT);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return;
    if (n <= 0) {
      closed_ = true;
      return;
    }
    received_ += static_cast<size_t>(n);
    unread_.append(bytes, static_cast<size_t>(n));
    for (size_t end; result_.state == ProbeState::kRunning && (end = unread_.find('\n')) != std::string::npos;) {
      Take(unread_.substr(0, end));
      unread_.erase(0, end + 1);
    }
    if (result_.state != ProbeState::kRunning) return;
    if (unread_.size() > kLongestLine || received_ > kMostBytes) {
      return End(ProbeState::kGarbled, "it says more than a probe does");
    }
  }
}

void HelperProcess::Take(absl::string_view line) {
  if (const std::optional<nccl::UniqueId> id = DecodeId(line); id.has_value() && !id_.has_value()) {
    id_ = id;
    return;
  }
  const std::optional<ProbeResult> said = DecodeProbeResult(line);
  if (!said.has_value() || said->step < result_.step) {
    return End(ProbeState::kGarbled, "it does not say what a probe of this version of libddp says");
  }
  result_ = *said;
}

// It has ended, or closed its end, without a result.
void HelperProcess::CheckEnd() {
  for (const absl::Time until = absl::Now() + absl::Seconds(1); !Reap() && absl::Now() < until;) {
    absl::SleepFor(absl::Milliseconds(1));
  }
  if (ended_ && WIFSIGNALED(status_)) {
    const int signal = WTERMSIG(status_);
    const bool by_others = signal == SIGKILL || signal == SIGTERM || signal == SIGINT || signal == SIGHUP;
    return End(by_others ? ProbeState::kKilled : ProbeState::kCrash,
               absl::StrCat("signal ", signal, ", ", strsignal(signal)));
  }
  if (ended_ && WIFEXITED(status_) && WEXITSTATUS(status_) != 0) {
    return End(ProbeState::kGarbled, absl::StrCat("it ended with exit code ", WEXITSTATUS(status_), " and no result"));
  }
  End(ProbeState::kGarbled, ended_ ? "it ended without a result" : "it does not answer");
}

void HelperProcess::End(ProbeState how, absl::string_view words) {
  result_.Fail(how, words);
  if (pid_ >= 0 && !Reap()) kill(pid_, SIGKILL);
}

void HelperProcess::SendId(const nccl::UniqueId& id) {
  const std::string line = EncodeId(id) + "\n";
  // What does not arrive, the helper waits for until its limit; a socket has room for a line.
  (void)send(socket_, line.data(), line.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
}

bool DieWithParent(pid_t parent) {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  return getppid() == parent;
}

std::string EncodeId(const nccl::UniqueId& id) {
  return absl::StrCat(kIdTag, absl::BytesToHexString(absl::string_view(id.internal, sizeof id.internal)));
}

std::optional<nccl::UniqueId> DecodeId(absl::string_view line) {
  nccl::UniqueId id;
  if (!absl::ConsumePrefix(&line, kIdTag) || line.size() != 2 * sizeof id.internal) return std::nullopt;
  if (!std::all_of(line.begin(), line.end(), absl::ascii_isxdigit)) return std::nullopt;
  const std::string bytes = absl::HexStringToBytes(line);
  std::memcpy(id.internal, bytes.data(), sizeof id.internal);
  return id;
}

}  // namespace ddp
