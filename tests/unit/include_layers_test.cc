// SPDX-License-Identifier: Apache-2.0
// Reads every #include of the tree and fails on one that the layers do not allow: a file includes public headers, its
// own layer and lower ones; public headers include nothing of CUDA, NCCL, MPI or the mathematics libraries; examples
// use public headers alone.
#include <algorithm>
#include <array>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <initializer_list>
#include <optional>
#include <regex>
#include <string>
#include <string_view>
#include <vector>

#include "tests/support/catch.h"
#include "tests/support/temporary_folder.h"

namespace {

namespace fs = std::filesystem;

// libddp's layers, the lowest first.
constexpr std::array<std::string_view, 8> kLayers = {"base",    "device", "launch",  "comm",
                                                     "reducer", "amp",    "observe", "c"};

// The rooms of libddp/comm, the lowest first. What lies in comm itself, the groups, is above them all.
constexpr std::array<std::string_view, 12> kRooms = {"base", "memory", "health", "host", "messages", "nodes",
                                                     "gpu",  "ring",   "peers",  "nccl", "staged",   "probe"};

// What begins the name of a header that no user may need to have.
constexpr std::array<std::string_view, 17> kForeign = {"cuda",   "cublas",  "cudnn",  "nccl",  "mpi", "dnnl",
                                                       "oneapi", "nvml",    "nvtx",   "hwloc", "hwy", "spdlog",
                                                       "asio",   "openssl", "torch/", "aten/", "c10/"};

bool StartsWith(std::string_view text, std::string_view begin) { return text.substr(0, begin.size()) == begin; }

// The headers of the component torch, whose users have LibTorch.
bool OfTorch(std::string_view header) {
  return StartsWith(header, "torch/") || StartsWith(header, "aten/") || StartsWith(header, "c10/");
}

// The layer of "libddp/<layer>/...", or nothing if there is no such layer.
std::optional<size_t> LayerOf(std::string_view path) {
  const std::string_view rest = path.substr(std::string_view("libddp/").size());
  const auto* const found = std::find(kLayers.begin(), kLayers.end(), rest.substr(0, rest.find('/')));
  if (found == kLayers.end()) return std::nullopt;
  return static_cast<size_t>(found - kLayers.begin());
}

// The room of "libddp/comm/<room>/..."; kRooms.size() for what lies in comm itself; nothing for another room.
std::optional<size_t> RoomOf(std::string_view path) {
  const std::string_view rest = path.substr(std::string_view("libddp/comm/").size());
  if (rest.find('/') == std::string_view::npos) return kRooms.size();
  const auto* const found = std::find(kRooms.begin(), kRooms.end(), rest.substr(0, rest.find('/')));
  if (found == kRooms.end()) return std::nullopt;
  return static_cast<size_t>(found - kRooms.begin());
}

// The same within libddp/comm.
std::string ObjectionInComm(std::string_view file, std::string_view header) {
  const std::optional<size_t> mine = RoomOf(file), theirs = RoomOf(header);
  if (!mine.has_value() || !theirs.has_value()) return "not in a known room of libddp/comm";
  if (*theirs > *mine) return "an upward include within libddp/comm";
  // What works on GPU memory stands beside what works on the host's.
  const auto in = [](size_t room, std::initializer_list<std::string_view> rooms) {
    return room < kRooms.size() && std::find(rooms.begin(), rooms.end(), kRooms[room]) != rooms.end();
  };
  if (in(*mine, {"gpu", "ring", "peers", "nccl", "staged", "probe"}) && in(*theirs, {"host", "messages", "nodes"})) {
    return "a GPU's backend includes the host's";
  }
  if (in(*mine, {"staged"}) && in(*theirs, {"nccl"})) return "a GPU's backend includes another one";
  return "";
}

// Why `file` (relative to the tree) may not include `header`; empty if it may.
std::string Objection(std::string_view file, std::string_view header) {
  const bool internal = StartsWith(header, "libddp/");
  if (StartsWith(file, "include/")) {
    if (internal || StartsWith(header, "examples/")) return "a public header includes an internal one";
    std::string lower(header);
    std::transform(lower.begin(), lower.end(), lower.begin(),
                   [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
    if (StartsWith(file, "include/ddp/torch") && OfTorch(lower)) return "";
    for (const std::string_view foreign : kForeign) {
      if (StartsWith(lower, foreign)) return "a public header includes one of a library that a user need not have";
    }
    return "";
  }
  if (StartsWith(file, "examples/")) return internal ? "an example includes an internal header" : "";
  if (StartsWith(header, "examples/") || StartsWith(header, "tests/") || StartsWith(header, "bench/")) {
    return "the library includes what is built on it";
  }
  if (!internal) return "";
  const std::optional<size_t> mine = LayerOf(file), theirs = LayerOf(header);
  if (!mine.has_value() || !theirs.has_value()) return "not in a known layer";
  if (*theirs > *mine) return "an upward include";
  return *mine == *theirs && kLayers[*mine] == "comm" ? ObjectionInComm(file, header) : "";
}

struct Findings {
  int files = 0;
  int includes = 0;
  std::vector<std::string> objections;
};

Findings ReadTree(const fs::path& root) {
  static const std::regex kInclude(R"(^\s*#\s*include\s*[<"]([^>"]+)[>"])");
  Findings findings;
  for (const char* folder : {"include", "libddp", "examples"}) {
    if (!fs::exists(root / folder)) continue;
    for (const fs::directory_entry& entry : fs::recursive_directory_iterator(root / folder)) {
      const std::string extension = entry.path().extension().string();
      if (extension != ".h" && extension != ".cc" && extension != ".cu" && extension != ".cuh") continue;
      const std::string file = fs::relative(entry.path(), root).generic_string();
      ++findings.files;
      std::ifstream in(entry.path());
      std::string line;
      for (int number = 1; std::getline(in, line); ++number) {
        std::smatch match;
        if (!std::regex_search(line, match, kInclude)) continue;
        ++findings.includes;
        const std::string objection = Objection(file, match[1].str());
        if (!objection.empty())
          findings.objections.push_back(file + ":" + std::to_string(number) + ": " + match[1].str() + ": " + objection);
      }
    }
  }
  return findings;
}

TEST_CASE("no include goes upward") {
  const Findings findings = ReadTree(DDP_SOURCE_DIR);
  CHECK(findings.files > 30);
  CHECK(findings.includes > 100);
  for (const std::string& objection : findings.objections) FAIL_CHECK(objection);
}

TEST_CASE("a bad include is found") {
  const ddp::testing::TemporaryFolder folder;
  const fs::path root = folder.path();
  const auto check = [&](const std::string& file, const std::string& line, bool bad) {
    folder.Write(file, "// A file.\n" + line + "\n");
    const Findings findings = ReadTree(root);
    INFO(file << ": " << line);
    CHECK(findings.includes == 1);
    CHECK(findings.objections.size() == (bad ? 1u : 0u));
    if (bad && !findings.objections.empty()) CHECK(StartsWith(findings.objections[0], file + ":2: "));
    fs::remove(root / file);
  };
  check("libddp/base/a.h", "#include \"libddp/comm/host/engine.h\"", true);
  check("libddp/comm/a.cc", "#  include \"libddp/reducer/verify.h\"", true);
  check("libddp/comm/a.cc", "#include \"libddp/nowhere/x.h\"", true);
  check("libddp/comm/a.cc", "#include \"examples/nn/model.h\"", true);
  check("include/ddp/a.h", "#include \"libddp/base/env.h\"", true);
  check("include/ddp/a.h", "#include <mpi.h>", true);
  check("include/ddp/a.h", "#include <cuda_runtime.h>", true);
  check("include/ddp/a.h", "#include <oneapi/dnnl/dnnl.hpp>", true);
  check("include/ddp/a.h", "#include <nccl.h>", true);
  check("include/ddp/a.h", "#include <torch/torch.h>", true);
  check("include/ddp/torch/a.h", "#include <c10/cuda/CUDAStream.h>", false);
  check("include/ddp/torch/a.h", "#include <cuda_runtime.h>", true);
  check("examples/a.cc", "#include \"libddp/base/env.h\"", true);
  check("libddp/comm/memory/a.cc", "#include \"libddp/comm/host/engine.h\"", true);
  check("libddp/comm/nccl/a.cc", "#include \"libddp/comm/host/engine.h\"", true);
  check("libddp/comm/host/a.cc", "#include \"libddp/comm/nccl/api.h\"", true);
  check("libddp/comm/staged/a.cc", "#include \"libddp/comm/nccl/api.h\"", true);
  check("libddp/comm/host/a.cc", "#include \"libddp/comm/context.h\"", true);
  check("libddp/comm/a.cc", "#include \"libddp/comm/attic/a.h\"", true);
  check("libddp/comm/a.cc", "#include \"libddp/comm/host/engine.h\"", false);
  check("libddp/comm/nccl/a.cc", "#include \"libddp/comm/health/peer_board.h\"", false);
  check("libddp/reducer/a.cc", "#include \"libddp/comm/host/engine.h\"", false);
  check("libddp/launch/a.cc", "#include <mpi.h>", false);
  check("libddp/base/a.cc", "#include \"ddp/types.h\"", false);
  check("examples/nn/a.cc", "#include \"ddp/ddp.h\"", false);
  check("include/ddp/a.h", "#include \"absl/status/status.h\"", false);
}

}  // namespace
