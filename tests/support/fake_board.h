// SPDX-License-Identifier: Apache-2.0
// Where the ranks of a simulated NCCL leave what they have for each other: in memory if they are threads, in the files
// of a folder if they are processes.
#ifndef TESTS_SUPPORT_FAKE_BOARD_H_
#define TESTS_SUPPORT_FAKE_BOARD_H_

#include <cstddef>
#include <memory>
#include <optional>
#include <string>

namespace ddp::testing {

class FakeBoard {
 public:
  struct Piece {
    const char* data = nullptr;
    size_t bytes = 0;
    std::shared_ptr<void> owner;
  };

  virtual ~FakeBoard() = default;
  // Leaves a copy, in the place of what the key may have. It goes when it has been taken `takers` times.
  virtual void Put(const std::string& key, const void* data, size_t bytes, int takers) = 0;
  // The same, unless the key has a piece.
  virtual void PutIfMissing(const std::string& key, const void* data, size_t bytes, int takers) = 0;
  virtual std::optional<Piece> Find(const std::string& key) = 0;
  // Once by each taker, after it has found it. What it has found stays as it is.
  virtual void Take(const std::string& key) = 0;
  // Whether ranks are processes: what they put there wakes nobody.
  virtual bool between_processes() const = 0;
};

// Calls are to be made by one thread at a time.
std::unique_ptr<FakeBoard> MakeBoardInMemory();
// Whatever is not taken stays in the folder.
std::unique_ptr<FakeBoard> MakeBoardInFolder(const std::string& folder);

}  // namespace ddp::testing

#endif  // TESTS_SUPPORT_FAKE_BOARD_H_
