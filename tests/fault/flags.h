// SPDX-License-Identifier: Apache-2.0
// What the ranks of the fault tests have in common.
#ifndef TESTS_FAULT_FLAGS_H_
#define TESTS_FAULT_FLAGS_H_

#include <signal.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "ddp/ddp.h"

namespace ddp::testing {

// --name=value
class Flags {
 public:
  Flags(int argc, char** argv) {
    for (int i = 1; i < argc; ++i) {
      const std::string word = argv[i];
      const size_t equals = word.find('=');
      if (word.rfind("--", 0) != 0 || equals == std::string::npos)
        throw std::runtime_error("not --name=value: " + word);
      values_[word.substr(2, equals - 2)] = word.substr(equals + 1);
    }
  }
  std::string Text(const std::string& name, const std::string& otherwise = "") const {
    const auto found = values_.find(name);
    return found == values_.end() ? otherwise : found->second;
  }
  int Number(const std::string& name, int otherwise = 0) const {
    return std::atoi(Text(name, absl::StrCat(otherwise)).c_str());
  }

 private:
  std::map<std::string, std::string> values_;
};

inline void EndBy(const std::string& how) {
  if (how == "kill") raise(SIGKILL);
  if (how == "segv") raise(SIGSEGV);
  if (how == "stop") raise(SIGSTOP);
  if (how == "exit") _exit(0);
}

// A crash leaves no file behind.
inline void DumpNoCore() {
  const rlimit no_core = {0, 0};
  setrlimit(RLIMIT_CORE, &no_core);
}

// "code: message", in one line, or "done" and what follows it. Somebody may be waiting for it.
inline void Report(const absl::Status& status, const std::string& done = "") {
  std::printf("%s\n", status.ok()
                          ? absl::StrCat("done", done).c_str()
                          : absl::StrCat(absl::StatusCodeToString(status.code()), ": ", status.message()).c_str());
  std::fflush(stdout);
}

inline absl::StatusOr<std::unique_ptr<Context>> Join(const Flags& flags, std::shared_ptr<Store> store) {
  ContextOptions options;
  options.rank = flags.Number("rank");
  options.world_size = flags.Number("size");
  options.store = std::move(store);
  return Context::Create(options);
}

// Of this group alone, to --timeout if that is given, and once all are there: a busy machine takes its time to start
// them.
inline absl::Status ShortenTimeout(const Flags& flags, ProcessGroup& world) {
  const int seconds = flags.Number("timeout");
  if (seconds == 0) return absl::OkStatus();
  if (absl::Status s = world.Barrier().Wait(); !s.ok()) return s;
  return world.SetTimeout(absl::Seconds(seconds));
}

// A file, or what rank 0 serves at --port.
inline absl::StatusOr<std::shared_ptr<Store>> OpenStore(const Flags& flags) {
  if (const int port = flags.Number("port"); port != 0) {
    TcpStoreOptions options;
    options.port = port;
    options.serve = flags.Number("rank") == 0;
    options.run_id = "fault";
    return CreateTcpStore(options);
  }
  return CreateFileStore({flags.Text("store"), "fault", flags.Number("openers", flags.Number("size"))});
}

}  // namespace ddp::testing

#endif  // TESTS_FAULT_FLAGS_H_
