// SPDX-License-Identifier: Apache-2.0
#include "tests/support/fake_board.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"

namespace ddp::testing {
namespace {

class BoardInMemory final : public FakeBoard {
 public:
  void Put(const std::string& key, const void* data, size_t bytes, int takers) override {
    const char* const begin = static_cast<const char*>(data);
    pieces_[key] = {std::make_shared<std::vector<char>>(begin, begin + bytes), takers};
  }
  void PutIfMissing(const std::string& key, const void* data, size_t bytes, int takers) override {
    if (pieces_.count(key) == 0) Put(key, data, bytes, takers);
  }
  std::optional<Piece> Find(const std::string& key) override {
    const auto found = pieces_.find(key);
    if (found == pieces_.end()) return std::nullopt;
    const std::shared_ptr<std::vector<char>>& bytes = found->second.first;
    return Piece{bytes->data(), bytes->size(), bytes};
  }
  void Take(const std::string& key) override {
    const auto found = pieces_.find(key);
    if (--found->second.second == 0) pieces_.erase(found);
  }
  bool between_processes() const override { return false; }

 private:
  std::map<std::string, std::pair<std::shared_ptr<std::vector<char>>, int>> pieces_;
};

// A file has the number of takers before its bytes. Two processes may put one piece at once: a rank what it has, and
// another, aborted, what it hands on in its place.
class BoardInFolder final : public FakeBoard {
 public:
  explicit BoardInFolder(std::string folder) : folder_(std::move(folder)) {}

  void Put(const std::string& key, const void* data, size_t bytes, int takers) override {
    if (std::rename(Write(key, data, bytes, takers).c_str(), PathOf(key).c_str()) != 0) std::abort();
  }
  void PutIfMissing(const std::string& key, const void* data, size_t bytes, int takers) override {
    if (access(PathOf(key).c_str(), F_OK) == 0) return;
    const std::string part = Write(key, data, bytes, takers);
    if (link(part.c_str(), PathOf(key).c_str()) != 0 && errno != EEXIST) std::abort();
    unlink(part.c_str());
  }
  std::optional<Piece> Find(const std::string& key) override {
    const int file = open(PathOf(key).c_str(), O_RDWR | O_CLOEXEC);
    if (file < 0) return std::nullopt;
    struct stat about;
    if (fstat(file, &about) != 0) std::abort();
    const size_t size = static_cast<size_t>(about.st_size);
    void* const memory = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, file, 0);
    close(file);
    if (memory == MAP_FAILED) std::abort();
    return Piece{static_cast<const char*>(memory) + sizeof(uint64_t), size - sizeof(uint64_t),
                 std::shared_ptr<void>(memory, [size](void* m) { munmap(m, size); })};
  }
  void Take(const std::string& key) override {
    const std::optional<Piece> piece = Find(key);
    if (!piece.has_value()) std::abort();
    const std::atomic_ref<uint64_t> takers(*static_cast<uint64_t*>(piece->owner.get()));
    if (takers.fetch_sub(1) == 1) unlink(PathOf(key).c_str());
  }
  bool between_processes() const override { return true; }

 private:
  std::string PathOf(const std::string& key) const { return absl::StrCat(folder_, "/", key); }
  // Returns the path of a file that this process alone knows.
  std::string Write(const std::string& key, const void* data, size_t bytes, int takers) const {
    std::string path = absl::StrCat(PathOf(key), ".part", getpid());
    std::FILE* const file = std::fopen(path.c_str(), "wb");
    if (file == nullptr) std::abort();
    const uint64_t head = static_cast<uint64_t>(takers);
    const bool written =
        std::fwrite(&head, sizeof head, 1, file) == 1 && (bytes == 0 || std::fwrite(data, 1, bytes, file) == bytes);
    if (std::fclose(file) != 0 || !written) std::abort();
    return path;
  }

  const std::string folder_;
};

}  // namespace

std::unique_ptr<FakeBoard> MakeBoardInMemory() { return std::make_unique<BoardInMemory>(); }
std::unique_ptr<FakeBoard> MakeBoardInFolder(const std::string& folder) {
  return std::make_unique<BoardInFolder>(folder);
}

}  // namespace ddp::testing
