// SPDX-License-Identifier: Apache-2.0
// Reads whole files with checks, and writes them so that a file is never visible half written.
#ifndef EXAMPLES_DATA_FILE_H_
#define EXAMPLES_DATA_FILE_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"

namespace examples {

// Returns the contents of a regular file. Errors name the path: NotFound, PermissionDenied, InvalidArgument (not a
// regular file).
absl::StatusOr<std::vector<uint8_t>> ReadFile(const std::string& path);

// The file that `path` names, if symbolic links are followed as far as they lead. It need not exist.
std::string FollowLinks(std::string path);

// A file that this process replaces as a whole, once or several times, and that no other may write meanwhile. Its
// contents are written as `path`.tmp and synced; Commit renames that and syncs the folder. Until then the old file does
// not change, even if this process dies. From Create on, `path`.lock is locked. A lock ends with its process, so that
// what a killed process has left, both files, is nobody's: the next AtomicFile takes it over. The destructor removes
// both. If `path` is a symbolic link, all this happens beside the file that it leads to.
//
// A process that is stopped keeps its lock. Others of its `run`, which lives on without it, take the file over; when it
// goes on, it cannot replace the file any more.
//
//   auto file = AtomicFile::Create(path);
//   if (absl::Status s = (*file)->Begin(); !s.ok()) return s;
//   if (absl::Status s = (*file)->Write(data, size); !s.ok()) return s;
//   return (*file)->Commit();
class AtomicFile {
 public:
  // Errors name the path: NotFound (the folder), PermissionDenied, InvalidArgument (`path` exists and is not a regular
  // file), FailedPrecondition (another process, or another AtomicFile, has it, is not of the same `run`, if that is not
  // 0, and does not let go within `patience`).
  static absl::StatusOr<std::unique_ptr<AtomicFile>> Create(const std::string& path,
                                                            absl::Duration patience = absl::ZeroDuration(),
                                                            uint64_t run = 0);

  virtual ~AtomicFile() = default;

  // Begins with an empty file. What has not been committed is dropped.
  virtual absl::Status Begin() = 0;
  virtual absl::Status Write(const void* data, size_t size) = 0;
  virtual absl::Status Commit() = 0;

  virtual const std::string& path() const = 0;  // with links followed
};

// Removes what a killed process that wrote `path` has left, but not if a process is writing it.
void RemoveUnfinished(const std::string& path);

}  // namespace examples

#endif  // EXAMPLES_DATA_FILE_H_
