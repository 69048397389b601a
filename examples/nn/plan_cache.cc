// SPDX-License-Identifier: Apache-2.0
#include "examples/nn/plan_cache.h"

#include <fcntl.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <system_error>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"

namespace nn {

PlanCache::PlanCache(std::string file) : file_(std::move(file)) {
  std::ifstream stream(file_);
  for (std::string line; !file_.empty() && std::getline(stream, line);) {
    const size_t tab = line.find('\t');
    size_t choice = 0;
    if (tab == std::string::npos || !absl::SimpleAtoi(line.substr(tab + 1), &choice)) continue;
    choices_.try_emplace(line.substr(0, tab), choice);
  }
}

std::optional<size_t> PlanCache::Find(absl::string_view key) const {
  const auto found = choices_.find(key);
  return found == choices_.end() ? std::nullopt : std::optional(found->second);
}

void PlanCache::Put(absl::string_view key, size_t choice) {
  if (!choices_.try_emplace(std::string(key), choice).second || file_.empty()) return;
  std::error_code ignored;
  std::filesystem::create_directories(std::filesystem::path(file_).parent_path(), ignored);
  const int fd = open(file_.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
  if (fd < 0) return;
  const std::string line = absl::StrCat(key, "\t", choice, "\n");
  [[maybe_unused]] const ssize_t written = write(fd, line.data(), line.size());  // in one piece
  close(fd);
}

std::string FileInCache(absl::string_view name) {
  const char* const cache = std::getenv("XDG_CACHE_HOME");
  if (cache != nullptr && *cache != '\0') return absl::StrCat(cache, "/ddp/", name);
  const char* const home = std::getenv("HOME");
  return home != nullptr && *home != '\0' ? absl::StrCat(home, "/.cache/ddp/", name) : "";
}

}  // namespace nn
